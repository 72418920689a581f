"""Training of the built-in model, on a transformer small enough for a test."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from chorus_batch.chorus.tiny import train
from chorus_batch.chorus.tiny.checkpoint import load_transformer
from chorus_batch.chorus.tiny.codec import LinearCodec
from chorus_batch.chorus.tiny.decoder import DetailDecoder, SharpCodec
from chorus_batch.chorus.tiny.distill import Distillation, Distiller
from chorus_batch.chorus.tiny.evaluate import Generator, Sampling, draw_questions, interval
from chorus_batch.chorus.tiny.features import BatchEncoder
from chorus_batch.chorus.tiny.flow import draw_shifts, draw_sigmas, guided, sample, sigma_grid
from chorus_batch.chorus.tiny.learner import is_matrix
from chorus_batch.chorus.tiny.match import Matcher, Matching
from chorus_batch.chorus.tiny.muon import Muon, orthogonalized, split_parameters
from chorus_batch.chorus.tiny.options import parse
from chorus_batch.chorus.tiny.pairs import KINDS, Outcome, deepest, draw_pairs, reuse, shares
from chorus_batch.chorus.tiny.processes import Processes
from chorus_batch.chorus.tiny.train import Trainer, Training, coarse, object_weights
from chorus_batch.chorus.tiny.train_decoder import DecoderTraining, draw_videos, measure_psnr, train_decoder
from chorus_batch.chorus.tiny.window import corners, cut
from chorus_batch.chorus.tiny.world import is_held_out

WEIGHTS = Path(__file__).parents[3] / "chorus" / "tiny" / "weights"
Run = TypeVar("Run", bound=Training)


@pytest.fixture(scope="module")
def codec() -> SharpCodec:
    """The shipped linear codec."""
    return SharpCodec(LinearCodec(WEIGHTS / "codec.safetensors", "cpu"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    config = json.loads((WEIGHTS / "transformer" / "config.json").read_text("utf-8"))
    config |= {"num_layers": 1, "num_attention_heads": 1, "ffn_dim": 32}
    folder = tmp_path_factory.mktemp("small")
    WanTransformer3DModel.from_config(config).save_pretrained(folder)
    return folder


def _training(kind: type[Run], small: Path, out: Path, **changes: Any) -> Run:
    options: dict[str, Any] = {"out": str(out), "initial": str(small), "codec": str(WEIGHTS / "codec.safetensors")}
    return kind(**options | {"batch": 2, "steps": 4} | changes)


@pytest.mark.parametrize(("trainer", "kind"), [(Trainer, Training), (Matcher, Matching)])
def test_a_resumed_run_equals_an_unbroken_one(
    small: Path, tmp_path: Path, trainer: type[Any], kind: type[Training]
) -> None:
    trainer(_training(kind, small, tmp_path / "whole", decay=0), Processes()).run()
    for steps in (2, 4):
        trainer(_training(kind, small, tmp_path / "parts", decay=0, steps=steps), Processes()).run()
    whole, parts = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 4
    pairs = [(whole[part], parts[part]) for part in ("model", "average")]
    if trainer is Matcher:
        pairs.append((whole["critic"]["model"], parts["critic"]["model"]))
    assert all(torch.equal(one[k], other[k]) for one, other in pairs for k in one)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch: its fused RMS norm doesn't mix types, the other one does
@pytest.mark.parametrize(("trainer", "kind"), [(Trainer, Training), (Distiller, Distillation), (Matcher, Matching)])
def test_only_matrix_products_are_in_bfloat16(
    small: Path, tmp_path: Path, trainer: type[Any], kind: type[Training]
) -> None:
    full, half = (trainer(_training(kind, small, tmp_path, bfloat16=b), Processes()) for b in (False, True))
    losses = [run.backward(2, 64, (0, 0, 0)) for run in (full, half)]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    for one, other in zip(full.learner.model.parameters(), half.learner.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert other.dtype == other.grad.dtype == torch.float32
        assert float((one.grad - other.grad).norm()) < 0.1 * float(one.grad.norm()) + 1e-6
    half.update()
    assert all(p.dtype == torch.float32 for p in half.average.parameters())


def test_every_other_batch_may_see_windows_only(small: Path, tmp_path: Path) -> None:
    trainer = Trainer(_training(Training, small, tmp_path, canvas=64, windows=True, shift=7.0, steps=4), Processes())
    seen: list[tuple[int, ...]] = []
    trainer.learner.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(tuple(given["hidden_states"].shape)), with_kwargs=True
    )
    trainer.run()
    assert [shape[-2:] for shape in seen] == [(16, 16), (8, 8), (16, 16), (12, 12)]


def test_a_window_is_around_an_object_and_cuts_no_token() -> None:
    cover = torch.zeros(200, 1, 3, 32, 32)
    cover[:, :, 1, 20:23, 30:32] = 1
    where = corners(cover, 16, torch.Generator().manual_seed(4))
    assert set(map(tuple, where.tolist())) == {(12, 16), (14, 16)}  # pushed back into the video on the right
    assert torch.equal(cut(cover, where, 16)[0], cover[0, :, :, int(where[0, 0]) : int(where[0, 0]) + 16, 16:])


def test_a_window_without_an_object_is_anywhere() -> None:
    where = corners(torch.zeros(400, 1, 3, 32, 32), 16, torch.Generator().manual_seed(4))
    assert set(where.flatten().tolist()) == set(range(0, 17, 2))


def test_the_coarse_loss_sees_what_a_square_shares_and_nothing_finer() -> None:
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    fine, middle = ((((rows // side + columns // side) % 2) * 2 - 1.0).expand(2, 3, 1, 16, 16) for side in (1, 4))
    assert coarse(fine) == 0
    assert coarse(middle) == 1  # of the squares of 4, while those of 8 hold as much of each
    assert coarse(torch.full((2, 3, 1, 16, 16), -1.0)) == 2


def test_the_coarse_loss_is_added(small: Path, tmp_path: Path) -> None:
    fine, both = (
        Trainer(_training(Training, small, tmp_path, coarse_weight=w), Processes()).backward(2, 64, (0, 0, 0))
        for w in (0.0, 4.0)
    )
    assert both > fine


def test_objects_weigh_more_only_as_far_as_noise_leaves_them_visible(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cover = torch.zeros(1, 1, 2, 5, 5)
    cover[:, :, 0, 2, 2] = 0.5
    weights = object_weights(cover, torch.full((1, 1, 1, 1, 1), 0.5), 9.0)[0, 0]
    assert weights[0, 1:4, 1:4].tolist() == [[2.0] * 3] * 3  # 1 + 8 * 0.5 * 0.5^2, and the pixels around it
    assert float(weights.sum()) == 2 * 25 + 9  # no others, and none of another frame

    def loss(sigma: float, weight: float) -> float:
        monkeypatch.setattr(train, "draw_sigmas", lambda shifts, generator: torch.full((len(shifts),), sigma))
        training = _training(Training, small, tmp_path, object_weight=weight)
        return Trainer(training, Processes()).backward(2, 64, (0, 0, 0))

    assert loss(1.0, 9.0) == pytest.approx(loss(1.0, 1.0), rel=1e-6)
    assert abs(loss(0.3, 9.0) / loss(0.3, 1.0) - 1) > 0.01


def test_a_run_leaves_weights_that_load_and_a_log(small: Path, tmp_path: Path) -> None:
    training = _training(Training, small, tmp_path, log_every=2, evaluate_every=4, evaluate_count=2, evaluate_steps=1)
    Trainer(training, Processes()).run()
    before, after = load_transformer(small), load_transformer(tmp_path)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert 0 <= lines[-1]["score_all"] <= 1
    assert (tmp_path / "sheet-000004.png").exists()


def test_the_options_are_the_fields(small: Path) -> None:
    words = ["--out", "o", "--initial", str(small), "--codec", "c", "--student-steps", "2", "--compile"]
    parsed = parse(Distillation, "", words)
    assert (parsed.student_steps, parsed.compile, parsed.shift) == (2, True, 5.0)


def test_torchrun_takes_no_option_for_its_own() -> None:
    """It reads a shortened option anywhere before the script's end: `--star` was one of its `--start-method`."""
    from torch.distributed.run import get_args_parser

    its_own = {option for action in get_args_parser()._actions for option in action.option_strings}
    mine = {"--" + field.name.replace("_", "-") for field in fields(Matching)}
    assert "--start-method" in its_own and "--stars" in mine
    assert not [(name, other) for name in mine for other in its_own if other.startswith(name)]


def test_every_parameter_has_one_optimizer(small: Path) -> None:
    model = load_transformer(small)
    matrices, others = split_parameters(model, is_matrix)
    assert len(matrices) == 10
    assert {id(p) for p in [*matrices, *others]} == {id(p) for p in model.parameters()}


def test_muon_moves_by_orthogonal_steps() -> None:
    matrices = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(matrices, steps=6))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_finds_the_minimum() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    goal, optimizer = torch.eye(4), Muon([weight], lr=0.02)
    for _ in range(80):
        (weight - goal).square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert float((weight.detach() - goal).abs().max()) < 0.2


class _Towards:
    """The exact velocity for data that is one point: `point`, or what the text tells."""

    def __init__(self, point: float | None = None) -> None:
        self.point = point

    def __call__(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool,
    ) -> tuple[torch.Tensor]:
        told = encoder_hidden_states.mean(dim=(1, 2)).view(-1, 1, 1, 1, 1)
        point = told if self.point is None else self.point
        return ((hidden_states - point) / (timestep.view(-1, 1, 1, 1, 1) / 1000),)


def test_the_sampler_reaches_the_data() -> None:
    text = torch.tensor([1.0, -2.0]).view(2, 1, 1).expand(2, 4, 3)
    noise = torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    out = sample(_Towards(), noise, text, torch.zeros(1, 4, 3), steps=5, guidance=1.0)
    assert torch.allclose(out, torch.tensor([1.0, -2.0]).view(2, 1, 1, 1, 1).expand_as(out), atol=1e-4)


def test_guidance_goes_beyond_the_conditional() -> None:
    x, text, empty = torch.zeros(1, 16, 1, 2, 2), torch.ones(1, 4, 3), torch.zeros(1, 4, 3)
    v = guided(_Towards(), x, torch.ones(1), text, empty, 3.0)
    assert torch.allclose(v, torch.full_like(v, -3.0))


def test_the_sigmas_are_the_shifted_ones() -> None:
    expected = torch.tensor([1.0, 15 / 16, 5 / 6, 5 / 8, 0.0])
    assert torch.allclose(sigma_grid(4, 5.0), expected)


def test_each_videos_shift_is_its_own() -> None:
    shifts = draw_shifts(4000, 2.0, 8.0, torch.Generator().manual_seed(0))
    assert 2.0 <= shifts.min() < 2.01 and 7.96 < shifts.max() <= 8.0
    assert abs(float((shifts < 4.0).float().mean()) - 0.5) < 0.03  # even in the logarithm
    assert draw_shifts(2, 3.0, 3.0, torch.Generator()).tolist() == [3.0, 3.0]
    # More noise for larger shifts: the median of u is 1/2, so that of sigma is s / (1 + s).
    for shift in (1.0, 7.0):
        sigmas = draw_sigmas(torch.full((4001,), shift), torch.Generator().manual_seed(1))
        assert abs(float(sigmas.median()) - shift / (1 + shift)) < 0.02


def test_the_distilled_step_is_where_the_teacher_arrives(small: Path, tmp_path: Path) -> None:
    distiller = Distiller(_training(Distillation, small, tmp_path, substeps=3), Processes())
    distiller.teacher = _Towards()
    x, text = torch.randn(1, 16, 1, 2, 2), torch.ones(1, 4, 3)
    distiller.empty = text
    arrived = distiller.arrive(x, torch.tensor(0.9), torch.tensor(0.3), text)
    # On the straight way from x at 0.9 to the point 1 at 0.
    assert torch.allclose(arrived, 1 + (x - 1) * 0.3 / 0.9, atol=1e-5)


def test_distillation_brings_the_student_to_the_guided_teacher(small: Path, tmp_path: Path) -> None:
    options = {"batch": 2, "canvas": 64, "substeps": 1, "guidance": 4.0, "student_steps": 2, "warmup": 1, "decay": 0}
    distiller = Distiller(_training(Distillation, small, tmp_path, steps=40, **options), Processes())
    with torch.no_grad():  # a teacher that heeds the text
        for parameter in distiller.teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    losses = [distiller.train_step() for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_video_moves_to_where_the_teacher_finds_it_likelier_than_the_critic(small: Path, tmp_path: Path) -> None:
    matcher = Matcher(_training(Matching, small, tmp_path), Processes())
    matcher.teacher, matcher.empty = _Towards(), torch.full((1, 4, 3), 1.0)
    matcher.critic.forward = _Towards(-1.0)
    video = torch.full((2, 16, 1, 2, 2), 0.5)
    moved = matcher.likelier(video, torch.full((2, 4, 3), 1.0), torch.Generator().manual_seed(0))
    # From -1 towards 1, in units of how far it is from 1.
    assert torch.allclose(moved, video + 2 / 0.5, atol=1e-3)


def test_matching_starts_at_the_student_and_brings_it_to_what_the_teacher_knows(small: Path, tmp_path: Path) -> None:
    Trainer(_training(Training, small, tmp_path / "other", steps=1), Processes()).run()
    options = {"student": str(tmp_path / "other"), "canvas": 32, "batch": 4, "warmup": 1, "decay": 0}
    options |= {"muon_lr": 0.02, "adam_lr": 0.01, "critic_muon_lr": 0.04, "critic_adam_lr": 0.01}
    matcher = Matcher(_training(Matching, small, tmp_path, steps=100, **options), Processes())
    start = load_transformer(tmp_path / "other")
    for learner, first in ((matcher.learner, start), (matcher.critic, load_transformer(small))):
        assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), first.parameters(), strict=True))

    def distance() -> float:
        x, text, _ = matcher.draw(4, 32, (9, 9, 9))
        video = sample(matcher.learner.model, x, text, matcher.empty, steps=4, guidance=1.0, shift=5.0)
        return float((video - 1).abs().mean())

    matcher.teacher = _Towards(1.0)
    before = distance()
    for _ in range(60):
        matcher.train_step()
    assert distance() < 0.6 * before


def test_the_detail_decoder_starts_as_the_linear_codec(codec: SharpCodec) -> None:
    videos = draw_videos(2, 64, (0,))
    latents = codec.encode(videos)
    assert torch.equal(SharpCodec(codec.linear, DetailDecoder()).decode(latents), codec.decode(latents))


def test_the_detail_decoder_is_causal() -> None:
    decoder = DetailDecoder(width=8, blocks=1)
    torch.nn.init.normal_(decoder.group.leave.weight)
    latents = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    changed = latents.clone()
    changed[:, :, 2] += 1
    before, after = decoder(latents), decoder(changed)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.equal(before[:, :, 5:], after[:, :, 5:])


def test_training_the_decoder_sharpens_and_resumes(codec: SharpCodec, tmp_path: Path) -> None:
    training = DecoderTraining(tmp_path, WEIGHTS / "codec.safetensors", steps=20, batch=4)
    decoder = train_decoder(training)
    assert measure_psnr(SharpCodec(codec.linear, decoder), 8, 64, 3) > measure_psnr(codec, 8, 64, 3)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 20
    assert (tmp_path / "decoder.safetensors").stat().st_size < 2**20
    again = train_decoder(training)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_batched_text_features_are_the_single_ones() -> None:
    encoder = BatchEncoder()
    texts = ["", "a red ball bounces", "a blue ring", "word " * 60]
    both = encoder.encode_all(texts)
    for row, text in enumerate(texts):
        assert torch.allclose(both[row : row + 1], encoder.encode(text), atol=1e-5)


def test_held_out_questions_ask_what_training_never_drew() -> None:
    assert all(is_held_out(q.scene.colour, q.scene.shape) for q in draw_questions("combinations", 30, 0))
    assert not any(is_held_out(q.scene.colour, q.scene.shape) for q in draw_questions("world", 30, 0))
    assert all("backdrop" in q.caption or "in front of it" in q.caption for q in draw_questions("templates", 30, 0))


def test_the_interval_is_wilsons() -> None:
    low, high = interval(0.9, 100)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_differ_in_one_attribute_and_its_words(kind: str) -> None:
    for pair in draw_pairs(kind, 20, 0):
        source, target = pair.source, pair.target
        assert [n for n in vars(source.scene) if getattr(source.scene, n) != getattr(target.scene, n)] == [kind]
        # An article, and the words for the attribute: "rises" against "bounces up and down", none against "striped".
        changed = set(source.caption.split()) ^ set(target.caption.split())
        assert 0 < len(changed - {"a", "an"}) <= 8


def test_reusing_no_step_is_plain_generation(small: Path, codec: SharpCodec) -> None:
    generator = Generator(load_transformer(small), codec, BatchEncoder())
    sampling = Sampling(canvas=64, steps=2, guidance=1.0, seed=5)
    pairs = draw_pairs("colour", 2, 0)
    outcomes = reuse(generator, pairs, sampling, [0, 2])
    plain = generator.evaluate([p.target for p in pairs], sampling).shares()
    assert shares(outcomes[0])["changed"] == plain["colour"]
    assert shares(outcomes[0])["all"] == plain["all"]
    assert set(outcomes) == {0, 2}


def test_the_deepest_reuse_is_the_last_before_the_loss() -> None:
    fine, wrong = Outcome(changed=True, kept=True), Outcome(changed=False, kept=True)
    outcomes = {0: [fine] * 10, 4: [fine] * 9 + [wrong], 8: [fine] * 8 + [wrong] * 2, 12: [fine] * 10}
    assert [deepest(outcomes, tolerance) for tolerance in (0.0, 0.1, 0.2)] == [0, 4, 12]
    assert shares(outcomes[8]) == {"changed": 0.8, "kept": 1.0, "all": 0.8}
