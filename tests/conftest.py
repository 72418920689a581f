"""Real servers for the tests that need them, started once, in a folder of their own, and a tiny Wan with random weights.

torch and diffusers are imported inside: most tests do without.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from chorus_batch.jobs.cards.card import CARDS
from chorus_batch.jobs.cli import main
from chorus_batch.jobs.database import connect, upgrade
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.settings import Settings


@pytest.fixture(scope="session")
def small_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's card with 64x64 pixels by default: videos in a fifth of the time."""
    card = json.loads((CARDS / "builtin.json").read_text("utf-8"))
    card["defaults"] |= {"width": 64, "height": 64}
    path = tmp_path_factory.mktemp("cards") / "builtin.json"
    path.write_text(json.dumps(card), "utf-8")
    return path


@pytest.fixture(autouse=True, scope="session")
def _own_settings(small_card: Path) -> Iterator[None]:
    """A developer's own CHORUS_* variables must not change what the tests see; batches are of small videos."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("CHORUS_"):
                patch.delenv(name)
        patch.setenv("CHORUS_MODEL", str(small_card))
        yield


@pytest.fixture(scope="session")
def servers(small_card: Path) -> Iterator[Settings]:
    """Settings of the local profile with live addresses."""
    # Not tmp_path: as root the servers run as another user, who may not enter pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="chorus-test-", dir="/tmp"))
    folder.chmod(0o711)
    settings = Settings(data_dir=folder, model=str(small_card))
    try:
        yield local.ensure(settings)
    finally:
        local.down(settings)
        shutil.rmtree(folder)


@pytest.fixture
def database_url(servers: Settings) -> Iterator[str]:
    """The URL of a fresh, empty database."""
    with _new_database(servers, "template0") as url:
        yield url


@contextmanager
def _new_database(servers: Settings, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    copy = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(copy)
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def _migrated_template(servers: Settings) -> str:
    """The name of a database at the newest schema, to be copied: migrating takes a second, copying a tenth."""
    name = "test_template"
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    engine = connect(make_url(servers.database_url).set(database=name).render_as_string(hide_password=False))
    upgrade(engine)
    engine.dispose()
    return name


@pytest.fixture
def migrated_url(servers: Settings, _migrated_template: str) -> Iterator[str]:
    """The URL of a fresh database at the newest schema."""
    with _new_database(servers, _migrated_template) as url:
        yield url


@pytest.fixture
def store_settings(servers: Settings) -> Settings:
    """Settings whose bucket no other test uses; it doesn't exist yet."""
    return replace(servers, s3_bucket=f"test-{secrets.token_hex(6)}")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a command in this process: what it prints on stdout, or on stderr where another `code` than 0 is expected."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert (caught.value.code or 0) == code, err
        return out if code == 0 else err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def random_transformer() -> Any:
    """Of Wan's class, with random weights of every kind: two blocks, 28k parameters."""
    import torch
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()


@pytest.fixture(scope="session")
def wan_folder(random_transformer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny Wan with random weights as diffusers' pipeline saves it, its text encoder and tokenizer included."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.set_num_threads(1)  # as Engine.load does: on matrices this small two threads wait for each other
    torch.manual_seed(1)
    words = [
        *("▁" + word for word in ["a", "the", "red", "circle", "moves", "left", "over", "gray", "background", "fox"]),
        *map(chr, range(33, 127)),
        "▁",
    ]
    pieces = [(word, 0.0) for word in ("<pad>", "</s>", "<unk>")] + [(w, -float(i + 1)) for i, w in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("wan") / "tiny-wan"
    WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0)
        ),
        vae=AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
        transformer=random_transformer,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def grounded_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny GroundingDINO with its processor and a tiny SAM 2 for video, random weights, as transformers saves them."""
    import torch
    from transformers import (
        BertTokenizerFast,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoProcessor,
        Sam2VideoConfig,
        Sam2VideoModel,
        Sam2VisionConfig,
    )
    from transformers.models.grounding_dino.image_processing_pil_grounding_dino import GroundingDinoImageProcessorPil

    torch.set_num_threads(1)
    torch.manual_seed(3)
    dino, sam2 = (tmp_path_factory.mktemp("grounded") / name for name in ("dino", "sam2"))
    swin = {"image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2}
    bert = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    finder = GroundingDinoConfig(
        backbone_config={"model_type": "swin", "out_indices": [2, 3, 4], **swin},
        text_config={"model_type": "bert", "vocab_size": 32, "max_position_embeddings": 64, **bert},
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=2,
        max_text_len=32,
    )
    GroundingDinoForObjectDetection(finder).save_pretrained(dino)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "spotted", "dog", "ball", "red", "circle"]
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    picture = GroundingDinoImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 96})
    GroundingDinoProcessor(picture, tokenizer).save_pretrained(dino)
    # Wider than what SAM 2 remembers of a frame (64): else its pointers aren't split, and don't fit to it.
    width, side = 128, 64
    hiera = {
        "hidden_size": 8,
        "image_size": [side, side],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 1, 2, 2],
        "window_size_per_stage": [4, 4, 2, 2],
        "global_attention_blocks": [3],
    }
    follower = Sam2VideoConfig(
        vision_config=Sam2VisionConfig(
            backbone_config={"model_type": "sam2_hiera_det_model", **hiera},
            backbone_channel_list=[64, 32, 16, 8],
            backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
            fpn_hidden_size=width,
        ),
        prompt_encoder_config={"hidden_size": width, "image_size": side},
        mask_decoder_config={"hidden_size": width, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 64},
        image_size=side,
        memory_attention_hidden_size=width,
        memory_attention_num_layers=1,
        memory_attention_feed_forward_hidden_size=32,
        memory_attention_rope_feat_sizes=[4, 4],
        memory_encoder_hidden_size=width,
        mask_downsampler_embed_dim=width,
        memory_fuser_embed_dim=width,
        memory_fuser_intermediate_dim=32,
    )
    Sam2VideoModel(follower).save_pretrained(sam2)
    return dino, sam2
