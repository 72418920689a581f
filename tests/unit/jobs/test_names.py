"""Names of result files."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.results.names import check_template, output_names, safe_name, slug


def row(**changes: Any) -> dict[str, Any]:
    return {"id": "a1", "row": 7, "seed": 42, "prompt": "A red fox, at dawn!", "output_name": None} | changes


def name(template: str = "{id}", **changes: Any) -> str:
    return next(iter(output_names([row(**changes)], template)))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{id}", "a1.mp4"),
        ("{row:05}", "00007.mp4"),
        ("{row:3d}", "7.mp4"),
        ("{id}-{slug}", "a1-a-red-fox-at-dawn.mp4"),
        ("clip {row} of {seed}", "clip 7 of 42.mp4"),
        ("{{{id}}}", "{a1}.mp4"),
    ],
)
def test_a_template_is_filled(template: str, expected: str) -> None:
    assert name(template) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{prompt}", "unknown field {prompt}"),
        ("{id.__class__}", "unknown field"),
        ("{0}", "unknown field"),
        ("{}", "unknown field"),
        ("{id!r}", "format {id}"),
        ("{row:999999999}", "format {row}"),
        ("{row:{seed}}", "format {row}"),
        ("{id:>9}", "format {id}"),
        ("{id", "can't be read"),
        ("../{id}", "path separator"),
        ("a\\{id}", "path separator"),
        ("video", "no field"),
        ("", "no field"),
    ],
)
def test_an_unusable_template_is_explained(template: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("{", r"\{").replace("}", r"\}")) as caught:
        check_template(template)
    assert caught.value.hint


def test_a_row_may_name_its_own_file() -> None:
    assert name(output_name="mine") == "mine.mp4"
    assert name(output_name="mine.mp4") == "mine.mp4"
    assert name(output_name="Mine.MP4") == "Mine.mp4"
    assert name(output_name=".mp4") == "a1.mp4"
    assert name(output_name="../../etc/passwd") == "_._etc_passwd.mp4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b\\c", "a_b_c"),
        ("..", "_"),
        ("a..b", "a.b"),
        (".hidden", "hidden"),
        ("-rf", "_rf"),
        ("con", "_con"),
        ("COM1.old", "_COM1.old"),
        ("console", "console"),
        ("a\x00b\nc", "a_b_c"),
        ("trailing. ", "trailing"),
        ("\u202egnp.exe", "gnp.exe"),  # right-to-left override
        ("e\u0301", "\u00e9"),
        ("", "_"),
    ],
)
def test_a_dangerous_name_is_made_safe(text: str, expected: str) -> None:
    assert safe_name(text) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red fox, at dawn!", "a-red-fox-at-dawn"),
        ("Füchse & Bären", "füchse-bären"),
        ("赤い狐", "赤い狐"),
        ("हिन्दी में", "हिन्दी-में"),
        ("🦊🦊", "prompt"),
        ("word " * 100, "-".join(["word"] * 16)),
        ("x" * 300, "x" * 80),
        ("é" * 300, "é" * 40),
    ],
)
def test_a_slug_keeps_the_words(prompt: str, expected: str) -> None:
    assert slug(prompt) == expected


def test_equal_names_are_told_apart() -> None:
    ids = ["a", "A", "a-2", "a", "\u00e9", "e\u0301"]
    assert list(output_names([row(id=i) for i in ids], "{id}")) == [
        "a.mp4",
        "A-2.mp4",
        "a-2-2.mp4",
        "a-3.mp4",
        "\u00e9.mp4",
        "\u00e9-2.mp4",
    ]


def test_a_million_equal_names_stay_fast() -> None:
    names = list(output_names((row() for _ in range(20_000)), "{id}"))
    assert len(set(names)) == 20_000
    assert names[-1] == "a1-20000.mp4"


@given(st.lists(st.text(st.characters(exclude_categories=[]), max_size=300), min_size=1, max_size=8))
def test_no_text_makes_an_unsafe_name(ids: list[str]) -> None:
    names = list(output_names([row(id=i, prompt=i) for i in ids], "{id}"))
    assert len({n.casefold() for n in names}) == len(ids)
    for made in names:
        assert len(made.encode()) <= 255
        assert not set(made) & {"/", "\\", "\0", *map(chr, range(32))}
        assert ".." not in made
        assert made[0] not in ".-"


@given(st.sampled_from(string.ascii_letters + "é狐🦊"), st.integers(240, 260))
def test_long_names_are_cut_and_still_told_apart(letter: str, length: int) -> None:
    names = list(output_names([row(id=letter * length)] * 3, "{id}"))
    assert len(set(names)) == 3
    assert all(len(made.encode()) <= 255 and made.endswith(".mp4") for made in names)
