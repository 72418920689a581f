"""Adding models: what is checked, what is written, what is remembered, and how each wrong folder is named."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.chorus import fingerprint
from chorus_batch.jobs import doctor, hub, registry, weights
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.checksums import Checksums, combine
from chorus_batch.jobs.errors import Conflict, DependencyDown, SettingsError, UsageError, WeightsRejected
from chorus_batch.jobs.ingest.tokens import TokenCounter
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings

TRANSFORMER = Path("transformer") / "diffusion_pytorch_model.safetensors"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


@pytest.fixture
def folder(wan_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(wan_folder, tmp_path / "copy"))


def test_a_card_holds_what_jobs_need(settings: Settings, folder: Path) -> None:
    added = registry.add(settings, Asked("tiny", str(folder)))
    assert added == load_card("tiny", settings.models_folder)
    defaults = added.defaults
    assert (defaults.model, defaults.steps, defaults.guidance_scale, defaults.shift) == ("tiny", 50, 5.0, 5.0)
    assert (defaults.width, defaults.height, defaults.frames, defaults.fps) == (832, 480, 81, 16)
    assert (defaults.scheduler, added.schedulers) == ("unipc", ("unipc", "dpm++", "euler"))
    assert (added.dtype, added.size_multiple, added.max_prompt_tokens) == ("bfloat16", 16, 512)
    assert (added.synonyms, added.tau) == ((), 0.65)
    assert added.boundaries[4] == ((0.75, 1, 2), (0.92, 2, 3))
    assert added.boundaries[50][0] == (0.65, 5, 10)
    assert added.weights is not None
    assert added.weights.files["transformer/diffusion_pytorch_model.safetensors"] == fingerprint.file_checksum(
        folder / TRANSFORMER
    )
    # The producer counts tokens without the model's folder.
    shutil.rmtree(folder)
    assert TokenCounter(added.tokenizer).over([("fox " * 600).strip(), "a red fox"], 512) == {0: 601}


def test_a_distilled_card_runs_lightx2vs_steps(settings: Settings, folder: Path) -> None:
    card = registry.add(settings, Asked("tiny", str(folder), dtype="float32", distilled=True))
    defaults = card.defaults
    assert (defaults.steps, defaults.guidance_scale, defaults.shift, defaults.scheduler) == (4, 1.0, 5.0, "euler")
    assert (card.schedulers, card.dtype) == (("euler",), "float32")


def test_the_folders_own_shift_is_the_default(settings: Settings, folder: Path) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flow_shift": 3.0}))
    assert registry.add(settings, Asked("tiny", str(folder))).defaults.shift == 3.0


def test_everything_that_changes_the_video_changes_the_fingerprint(settings: Settings, folder: Path) -> None:
    lora = shutil.copy(folder / "vae" / "diffusion_pytorch_model.safetensors", folder.parent / "lora.safetensors")
    checkpoint = shutil.copy(folder / TRANSFORMER, folder.parent / "checkpoint.safetensors")
    prints = {}

    def add(name: str, **asked: Any) -> None:
        prints[name] = registry.add(settings, Asked(name, str(folder), **asked)).fingerprint

    add("plain")
    add("lora", lora=lora)
    add("stronger", lora=lora, lora_strength=1.5)
    add("checkpoint", checkpoint=checkpoint)
    for part in ("transformer/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        path = folder / part
        before = path.read_text()
        path.write_text(before + "\n")
        add(part.replace("/", "-"))
        path.write_text(before)
    assert len(set(prints.values())) == len(prints)
    # What isn't read changes nothing, and the checkpoint takes the place of the folder's transformer.
    (folder / "README.md").write_text("hello")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    add("again")
    (folder / TRANSFORMER).unlink()
    add("without", checkpoint=checkpoint)
    assert (prints["again"], prints["without"]) == (prints["plain"], prints["checkpoint"])


def test_worker_and_card_sum_up_alike(settings: Settings, folder: Path) -> None:
    """The engine's own function over the same files gives the card's fingerprint."""
    card = registry.add(settings, Asked("tiny", str(folder)))
    parts = (*weights.PARTS, "tokenizer")
    names = {
        f"{part}/{name}": value for part in parts for name, value in fingerprint.file_checksums(folder / part).items()
    }
    assert fingerprint.combine(names) == card.fingerprint == combine(names)


def test_files_are_read_once(settings: Settings, folder: Path) -> None:
    told: list[tuple[int, int]] = []
    registry.add(settings, Asked("tiny", str(folder)), lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in weights.files_of(weights.Located(folder, None, None)).values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    # Other bytes behind an unchanged size and time aren't noticed: so nothing was read.
    path = folder / TRANSFORMER
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    memory = registry.memory(settings)
    assert registry.check(load_card("tiny", settings.models_folder), memory.of(_files(folder)))
    # Another time of change is.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(WeightsRejected, match=r"not those.*: transformer/diffusion_pytorch_model.safetensors"):
        registry.check(load_card("tiny", settings.models_folder), memory.of(_files(folder)))


def _files(folder: Path) -> dict[str, Path]:
    return weights.files_of(weights.Located(folder, None, None))


def test_verify_reads_anew(settings: Settings, folder: Path) -> None:
    card = registry.add(settings, Asked("tiny", str(folder)))
    assert registry.verify(settings, "tiny") == card
    path = folder / TRANSFORMER
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(
        WeightsRejected, match=r"not those.*: transformer/diffusion_pytorch_model.safetensors$"
    ) as wrong:
        registry.verify(settings, "tiny")
    assert "model verify tiny" in wrong.value.hint
    with pytest.raises(SettingsError, match="comes with the program"):
        registry.verify(settings, "builtin")


def test_what_cannot_be_remembered_is_read_each_time(folder: Path) -> None:
    (folder / "a file").write_text("")
    found = Checksums(folder / "a file" / "memory.json").of(_files(folder))
    assert found == Checksums(folder / "memory.json").of(_files(folder))
    assert (folder / "memory.json").is_file()
    (folder / "memory.json").write_text("[1")
    assert Checksums(folder / "memory.json").of(_files(folder)) == found


def test_weights_may_lie_elsewhere_on_another_host(settings: Settings, folder: Path, tmp_path: Path) -> None:
    lora = shutil.copy(folder / TRANSFORMER, tmp_path / "lora.safetensors")
    card = registry.add(settings, Asked("tiny", str(folder), lora=lora))
    assert card.weights is not None
    elsewhere = tmp_path / "mnt"
    shutil.copytree(settings.models_folder, elsewhere)
    folder.rename(elsewhere / "copy")
    Path(lora).rename(elsewhere / "lora.safetensors")
    other = Settings(data_dir=tmp_path / "other", models_dir=str(elsewhere))
    assert registry.verify(other, "tiny").fingerprint == card.fingerprint
    with pytest.raises(WeightsRejected, match="there is no folder"):
        registry.verify(settings, "tiny")


def test_the_doctor_says_whether_this_host_can_run_the_model(settings: Settings, folder: Path) -> None:
    registry.add(settings, Asked("tiny", str(folder)))
    chosen = replace(settings, model="tiny")
    assert doctor._model(chosen).ok
    (folder / TRANSFORMER).unlink()
    found = doctor._model(chosen)
    assert (found.ok, found.hint) == (None, weights.FETCH)
    assert "tiny can't be run on this host" in found.detail


def test_a_name_is_taken_once(settings: Settings, folder: Path) -> None:
    registry.add(settings, Asked("tiny", str(folder)))
    with pytest.raises(Conflict, match="already"):
        registry.add(settings, Asked("tiny", str(folder)))
    assert registry.add(settings, Asked("tiny", str(folder), dtype="float32", replace=True)).dtype == "float32"
    with pytest.raises(Conflict, match="own"):
        registry.add(settings, Asked("builtin", str(folder), replace=True))
    for name in ("", "../x", "a/b", ".x", "a b"):
        with pytest.raises(UsageError, match="can't be a model's name"):
            registry.add(settings, Asked(name, str(folder)))


def _index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "part-1.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no folder"),
        (lambda f: (f / "model_index.json").unlink(), "it has no model_index.json"),
        (lambda f: (f / "model_index.json").write_text("{"), "can't be read"),
        (lambda f: (f / "model_index.json").write_text("[]"), "holds no JSON object"),
        (lambda f: _index(f, _class_name="WanImageToVideoPipeline"), "pipeline is of class WanImageToVideoPipeline"),
        (lambda f: _index(f, transformer=["diffusers", "WanVACETransformer3DModel"]), "class WanVACETransformer3DModel"),
        (lambda f: _index(f, text_encoder=["transformers", "T5EncoderModel"]), "class T5EncoderModel"),
        (lambda f: _index(f, vae=[None, None]), "the vae is of class None"),
        (lambda f: _index(f, transformer_2=["diffusers", "WanTransformer3DModel"]), "Wan2.2"),
        (lambda f: _index(f, expand_timesteps=True), "Wan2.2"),
        (_missing_shard, "lacks 1 of 2 weight files: part-2.safetensors"),
        (lambda f: (f / TRANSFORMER).unlink(), "no .safetensors file in"),
        (lambda f: (f / "vae" / "config.json").unlink(), "vae/config.json is missing"),
        (lambda f: (f / "tokenizer" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda f: (f / TRANSFORMER).write_bytes((f / TRANSFORMER).read_bytes()[:-1]), "is cut short"),
        (lambda f: (f / TRANSFORMER).write_bytes(b"pickled"), "is no .safetensors file"),
        (lambda f: (f / TRANSFORMER).write_bytes(b"\x02\0\0\0\0\0\0\0[]"), "is no .safetensors file"),
        (lambda f: (f / TRANSFORMER).write_bytes(b"\xff" * 99), "is no .safetensors file"),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_named_and_leaves_no_card(
    settings: Settings, folder: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(folder)
    with pytest.raises(WeightsRejected, match=message) as refused:
        registry.add(settings, Asked("tiny", str(folder)))
    assert (refused.value.code, refused.value.exit_code) == ("weights", 3)
    assert refused.value.hint
    assert not settings.models_folder.exists()


def test_lora_and_checkpoint_must_be_there(settings: Settings, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked, message in (
        ({"lora": "none.safetensors"}, "none.safetensors isn't there"),
        ({"checkpoint": "none.safetensors"}, "none.safetensors isn't there"),
        ({"checkpoint": str(tmp_path / "empty")}, "no .safetensors file in"),
        ({"lora": str(folder / "model_index.json")}, "is no .safetensors file"),
    ):
        with pytest.raises(WeightsRejected, match=message):
            registry.add(settings, Asked("tiny", str(folder), **asked))  # type: ignore[arg-type]


# --- The hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Say where the hub is asked for and where this host keeps what it has."""
    from huggingface_hub import constants

    def at(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    return at


@pytest.fixture
def missing() -> Iterator[str]:
    """The address of a hub that has no model at all."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's name
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Nothing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_that_cannot_be_reached_is_named(settings: Settings, hub_at: Callable[[str], None]) -> None:
    hub_at("http://127.0.0.1:9")
    with pytest.raises(DependencyDown, match="there is no folder someone/wan, and the hub can't be reached") as refused:
        registry.add(settings, Asked("tiny", "someone/wan"))
    assert (refused.value.code, refused.value.exit_code) == ("hub_unreachable", 6)
    assert "give its folder" in refused.value.hint


def test_a_model_that_the_hub_lacks_is_named(settings: Settings, hub_at: Callable[[str], None], missing: str) -> None:
    hub_at(missing)
    with pytest.raises(WeightsRejected, match="the hub has no such model"):
        registry.add(settings, Asked("tiny", "someone/wan"))


def test_a_hubs_model_is_taken_from_this_hosts_copy(
    settings: Settings, wan_folder: Path, tmp_path: Path, hub_at: Callable[[str], None]
) -> None:
    hub_at("http://127.0.0.1:9")
    commit = "c" * 40
    kept = tmp_path / "hub" / "models--someone--wan"
    shutil.copytree(wan_folder, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    card = registry.add(settings, Asked("tiny", "someone/wan"))
    assert card.weights is not None
    assert (card.weights.folder, card.weights.revision) == ("someone/wan", commit)
    # A worker takes that very revision, whatever is newest, and fetches nothing.
    (kept / "refs" / "main").write_text("d" * 40)
    assert weights.locate(card.weights, settings.models_folder).folder == kept / "snapshots" / commit
    shutil.rmtree(kept)
    with pytest.raises(WeightsRejected, match=r"isn't on this host") as refused:
        weights.locate(card.weights, settings.models_folder)
    assert refused.value.hint == f"run: hf download someone/wan --revision {commit}"


def test_what_can_be_a_hubs_name() -> None:
    assert hub.is_id("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    for name in ("/models/wan", "./models/wan", "models", "a/b/c", "../wan", "a b/c"):
        assert not hub.is_id(name)
