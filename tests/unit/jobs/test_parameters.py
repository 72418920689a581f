"""Prompts are cleaned exactly as diffusers cleans them; keys separate what must not be reused, and nothing more."""

import ast
import html
import importlib.util
import re
from dataclasses import fields, replace
from pathlib import Path

import ftfy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.ingest.rows import Row
from chorus_batch.jobs.models import Policy
from chorus_batch.jobs.parameters import POLICIES, clean_prompt, domain_key
from chorus_batch.jobs.requested import Requested, prompt_key

CARD = load_card("builtin")


@pytest.fixture(scope="module")
def prompt_clean():
    """`prompt_clean` out of the installed diffusers, without importing diffusers (which imports torch)."""
    folder = Path(importlib.util.find_spec("diffusers").origin).parent
    tree = ast.parse((folder / "pipelines/wan/pipeline_wan.py").read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and "clean" in node.name]
    scope = {"ftfy": ftfy, "html": html, "re": re, "is_ftfy_available": lambda: True}
    exec(compile(ast.Module(wanted, []), "pipeline_wan.py", "exec"), scope)
    return scope["prompt_clean"]


# Characters around every border of the fast path, in any order.
NEAR = st.text(
    "ab Z09.,;:'\"&<>#x\t\n\r\v\f\x1b\x1c\x7f\x85\xa0\xad\u200b\ufeff\xe9\xc3\xa9\xe2\u20ac\u2122\u201c\u201d\u2018\u2019"
    "\u2013\u2026\xdf\xff\xf1\u65e5\u672c\u8a9e\u3002\u3001\uff71\ud55c\uae00\ufb01\uff21\u3000e\u0301",
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(NEAR | st.text(max_size=40))
@example("a caf\u00e9 \u2014 \u201cr\u00eaverie\u201d, it\u2019s  dusk")
@example("&amp;amp;lt;b&amp;gt;")
@example("â€œquotedâ€\x9d")
@example("東京の夜、雨。")
def test_clean_prompt_is_diffusers_prompt_clean(prompt_clean, text):
    assert clean_prompt(text) == prompt_clean(text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["é", "à", "\u2019", "\u201c", "\u201d", "\u2014", "…", "Ã", "Â", "ü", "ß", " ", "a", "Z", "1", ".", "°"]
        ),
        max_size=12,
    )
)
def test_clean_prompt_where_mojibake_is_near(prompt_clean, parts):
    assert clean_prompt("".join(parts)) == prompt_clean("".join(parts))


def test_every_parameter_but_the_frame_rate_is_in_the_domain():
    other = {
        "width": 64, "height": 64, "frames": 13, "steps": 21, "guidance_scale": 2.75, "shift": 3.0,
        "scheduler": "unipc", "negative_prompt": "blurry", "policy": "nirvana", "step_cache": "teacache",
    }  # fmt: skip
    assert {*other, "model", "fps"} == {field.name for field in fields(CARD.defaults)}
    key = domain_key(CARD.defaults, CARD, "minilm-v1-384")
    keys = {domain_key(replace(CARD.defaults, **{name: value}), CARD, "minilm-v1-384") for name, value in other.items()}
    assert len(keys | {key}) == len(other) + 1
    assert domain_key(replace(CARD.defaults, fps=24), CARD, "minilm-v1-384") == key


def test_the_model_and_the_embedder_are_in_the_domain():
    key = domain_key(CARD.defaults, CARD, "minilm-v1-384")
    assert len(key) == 64
    assert domain_key(CARD.defaults, CARD, "clip-l-768") != key
    assert domain_key(CARD.defaults, replace(CARD, fingerprint="f" * 64), "minilm-v1-384") != key
    assert domain_key(CARD.defaults, replace(CARD, dtype="bfloat16"), "minilm-v1-384") != key
    with pytest.raises(ValueError, match="builtin"):
        domain_key(replace(CARD.defaults, model="other"), CARD, "minilm-v1-384")


def test_keys_dont_depend_on_how_a_number_or_an_accent_is_written():
    whole, real = replace(CARD.defaults, guidance_scale=5), replace(CARD.defaults, guidance_scale=5.0)
    assert domain_key(whole, CARD, "e") == domain_key(real, CARD, "e")
    assert prompt_key("cafe\u0301") == prompt_key("caf\u00e9")


def test_requests_differ_by_domain_prompt_seed_and_frame_rate():
    plain = CARD.defaults
    rows = [
        (plain, "a cat", 1),
        (replace(plain, steps=4), "a cat", 1),
        (plain, "a dog", 1),
        (plain, "a cat", 2),
        (replace(plain, fps=16), "a cat", 1),
        (plain, "a cat", 1),
    ]
    requested = Requested()
    for parameters, prompt, seed in rows:
        requested.add(Row(1, 1, None, prompt, prompt, parameters, seed, 0, "auto", None, {}))
    assert requested.request.tolist() == [0, 1, 2, 3, 4, 0]
    assert requested.domain.tolist() == [0, 1, 0, 0, 0, 0]  # the frame rate doesn't touch the latents


def test_every_policy_has_a_domain_of_its_own():
    keys = {domain_key(replace(CARD.defaults, policy=policy), CARD, "e") for policy in POLICIES}
    assert len(keys) == 3
    assert [policy.value for policy in Policy] == list(POLICIES)  # what ingest accepts is what the schema knows


def test_a_step_cache_needs_steps_to_skip():
    assert replace(CARD.defaults, steps=10, step_cache="pab").steps == 10
    with pytest.raises(ValueError, match="step_cache is 'pab' with 9 steps"):
        replace(CARD.defaults, steps=9, step_cache="pab")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frames", 10),
        ("width", 0),
        ("steps", 0),
        ("guidance_scale", float("nan")),
        ("shift", float("inf")),
        ("policy", "all"),
        ("step_cache", "deepcache"),
    ],
)
def test_impossible_parameters_are_refused_at_birth(field, value):
    with pytest.raises(ValueError, match=field):
        replace(CARD.defaults, **{field: value})
