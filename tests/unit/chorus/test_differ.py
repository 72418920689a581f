"""The lexical differ: kinds on hand-written, built-in and catalogue prompts, spans for any text, and tokens of spans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chorus_batch.chorus.differ import (
    SCOPES,
    Difference,
    Kind,
    LexicalDiffer,
    LexicalSettings,
    Scope,
    token_indices,
)
from chorus_batch.chorus.errors import NoOffsets
from chorus_batch.chorus.tiny.captions import SHAPE_WORDS, caption
from chorus_batch.chorus.tiny.pairs import draw_pairs
from chorus_batch.chorus.tiny.text import minilm_folder
from chorus_batch.chorus.tiny.world import Scene
from chorus_batch.jobs.cards.card import load_card

DIFFER = LexicalDiffer(LexicalSettings(synonyms=load_card("builtin").synonyms))
WORLD_KINDS = {
    "colour": Kind.attribute,
    "texture": Kind.attribute,
    "shape": Kind.object,
    "motion": Kind.motion,
    "background": Kind.background,
}


def words(prompt: str, found: Difference) -> list[str]:
    return [prompt[start:end] for start, end in found.target_spans]


# source, target, kind, source phrase, new words
EXAMPLES = [
    ("a spotted dog runs", "a black dog runs", "attribute", "spotted dog", "black"),
    ("a dog runs", "a black dog runs", "attribute", "dog", "black"),
    ("a small, red car", "a small, blue car", "attribute", "small, red car", "blue"),
    ("a black and white cat sleeps", "a black and brown cat sleeps", "attribute", "black and white cat", "brown"),
    ("a leaf turns from red to green", "a leaf turns from green to red", "attribute", "leaf", "green red"),
    ("the car is red", "the car is green", "attribute", "car", "green"),
    ("a navy blue mug", "a sky blue mug", "attribute", "navy blue mug", "sky"),
    ("a green bench and a red car", "a red bench and a green car", "attribute", "green bench, red car", "red green"),
    ("a lion drinks water", "a dog drinks water", "object", "lion", "dog"),
    ("a wine bottle", "a perfume bottle", "object", "wine bottle", "perfume"),
    ("a red ball rolls", "a wooden cart rolls", "object", "red ball", "wooden cart"),
    ("a dog and a cat", "a dog", "object", "cat", ""),
    ("a dog", "a dog wearing a hat", "object", "", "hat"),
    ("one dog runs", "two dogs run", "object", "one dog", "two dogs"),
    ("a man with a hat", "a man without a hat", "object", "hat", "without"),
    ("a cast iron pan", "a red cast iron pan", "attribute", "cast iron pan", "red"),
    ("a dog runs in a park", "a dog runs in a snowy forest", "background", "dog", "snowy forest"),
    ("a mug on a table", "a mug on black glass", "background", "mug", "black glass"),
    ("a panda eats in Paris", "a panda eats in Oslo", "background", "panda", "Oslo"),
    ("a boat at dawn", "a boat at night", "background", "boat", "night"),
    ("a boat, with a tower in the background", "a boat, with a palm in the background", "background", "boat", "palm"),
    ("a circle, moving left, on black", "a circle, moving left, on pink", "background", "circle", "pink"),
    ("a woman walks along a street", "a woman dances along a street", "motion", "woman", "dances"),
    ("a bird flying", "a bird is flying backwards", "motion", "bird", "backwards"),
    ("a town from day to night", "a town from night to day", "motion", "town", "from to"),
    ("a ball moves up", "a ball falls", "motion", "ball", "falls"),
    ("a cat on a box", "a cat under a box", "motion", "box", "under"),
    ("a dog runs, zoom in", "a dog runs, zoom out", "camera", "", "out"),
    ("a dog in a hat, pan left", "a dog in a hat, zoom in", "camera", "", "zoom in"),
    ("a mug, top-down shot", "a mug, slow turntable spin", "camera", "", "slow turntable spin"),
    ("the camera follows a dog", "the camera circles a dog", "camera", "", "circles"),
    ("a panda, oil painting", "a panda, pixel art", "style", "", "pixel art"),
    ("a panda in cyberpunk style", "a panda in Van Gogh style", "style", "", "Van Gogh"),
    ("a cat in the style of Monet", "a cat in the style of Hokusai", "style", "", "Hokusai"),
    ("the mona lisa", "the Mona Lisa in the style of Warhol", "style", "", "style Warhol"),
    ("a red ball rolls", "a blue cube rolls", "several", "red ball", "blue cube"),
    ("a dog runs in a park", "a cat sleeps in a park", "several", "dog", "cat sleeps"),
    ("a cat chases a dog", "a dog chases a cat", "several", "", ""),
    ("a cat runs, a dog sleeps", "a cat sleeps, a dog runs", "several", "", ""),
]


@pytest.mark.parametrize(("source", "target", "kind", "phrase", "new"), EXAMPLES)
def test_examples(source: str, target: str, kind: str, phrase: str, new: str) -> None:
    found = DIFFER.compare(source, target)
    assert (found.kind, found.source_phrase, words(target, found)) == (kind, phrase, new.split())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (
            "a red circle moves left over a black background",
            "over a black background, a red disc is moving to the left",
        ),
        ("A man walks on the beach.", "the man is walking on the beach"),
        ("a small plain ring rests on gray", "There is a little hoop staying still, grey background!"),
        ("a video of a dog that gets bigger", "we see a dog expanding"),
        ("...", ""),
    ],
)
def test_other_words_for_the_same_are_no_difference(source: str, target: str) -> None:
    assert DIFFER.compare(source, target) == Difference(Kind.attribute, Scope.object, "", "", (), ())


def test_attribute_stays_with_its_object() -> None:
    """The words are the same in both, but what is red isn't."""
    source, target = "a red circle on a blue background", "a blue circle on a red background"
    found = DIFFER.compare(source, target)
    assert found.kind is Kind.several
    assert words(target, found) == ["blue", "red"]


def test_background_names_every_object_that_stays() -> None:
    found = DIFFER.compare(
        "a red circle next to a small green square grows on a black background",
        "a red circle next to a small green square grows on a pink background",
    )
    assert found.source_phrase == "red circle, small green square"
    assert found.target_phrase == "pink background"


# --- The built-in world ----------------------------------------------------------------------------------------------


def names(phrase: str, scene: Scene) -> bool:
    """Whether one of the phrases is of the scene's main object."""
    return any(scene.colour in p and any(w in p for w in SHAPE_WORDS[scene.shape]) for p in phrase.split(", "))


def changed_words(attribute: str, scene: Scene) -> set[str]:
    """What a caption may call the changed attribute, "plain" not counted, which may be left out."""
    value = getattr(scene, attribute)
    return {
        "colour": {value},
        "background": {value},
        "texture": {"striped": {"striped", "stripy"}, "spotted": {"spotted", "dotted"}}.get(value, set()),
        "shape": set(SHAPE_WORDS.get(value, ())),
    }.get(attribute, set())


@pytest.mark.parametrize("attribute", WORLD_KINDS)
def test_one_attribute_in_the_same_template(attribute: str) -> None:
    pairs = draw_pairs(attribute, 200, seed=3)
    found = [DIFFER.compare(p.source.caption, p.target.caption) for p in pairs]
    right = [
        f.kind is WORLD_KINDS[attribute] and names(f.source_phrase, p.source.scene)
        for f, p in zip(found, pairs, strict=True)
    ]
    assert np.mean(right) >= 0.98
    if attribute != "motion":
        new = [set(words(p.target.caption, f)) for f, p in zip(found, pairs, strict=True)]
        said = [changed_words(attribute, p.target.scene) for p in pairs]
        exact = [n <= s | {"plain", "solid"} and bool(n & s) == bool(s) for n, s in zip(new, said, strict=True)]
        assert np.mean(exact) >= 0.98


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("attribute", WORLD_KINDS)
def test_one_attribute_in_different_templates(attribute: str, held_out: bool) -> None:
    rng = np.random.default_rng(4)
    right = []
    for pair in draw_pairs(attribute, 200, seed=4):
        # Both say the size or neither does: else two things differ.
        says = float(rng.random() < 0.5)
        source, target = (
            caption(end.scene, rng, say_size=says, held_out=held_out) for end in (pair.source, pair.target)
        )
        found = DIFFER.compare(source, target)
        right.append(found.kind is WORLD_KINDS[attribute] and names(found.source_phrase, pair.source.scene))
    assert np.mean(right) >= 0.9


def test_the_same_scene_in_different_templates() -> None:
    rng = np.random.default_rng(5)
    alike = []
    for pair in draw_pairs("colour", 200, seed=5):
        found = DIFFER.compare(*(caption(pair.source.scene, rng, say_size=1) for _ in range(2)))
        alike.append(found.source_spans == found.target_spans == ())
    assert np.mean(alike) >= 0.9


def test_two_attributes_are_several() -> None:
    rng = np.random.default_rng(6)
    kinds = []
    for one, other in zip(draw_pairs("motion", 100, seed=6), draw_pairs("background", 100, seed=6), strict=True):
        a, b = one.source.scene, other.target.scene
        if a.motion == b.motion or a.background == b.background:
            continue
        wording = int(rng.integers(2**31))
        prompts = (caption(s, np.random.default_rng(wording), say_size=0) for s in (a, b))
        kinds.append(DIFFER.compare(*prompts).kind)
    assert len(kinds) > 50
    assert set(kinds) == {Kind.several}


# --- A catalogue -----------------------------------------------------------------------------------------------------

SLOTS = (
    (Kind.attribute, ("matte black", "forest green", "navy blue", "burgundy", "rose gold", "sky blue")),
    (Kind.object, ("ceramic coffee mug", "denim jacket", "cast iron pan", "running shoe", "wine bottle", "toy robot")),
    (Kind.camera, ("top-down shot with a gentle rotation", "slow 360 degree turntable spin", "macro close-up gliding")),
    (
        Kind.background,
        (
            "on a white seamless studio background",
            "on a mossy rock in a misty forest",
            "on a marble table with soft morning light",
            "on black glass with neon rim light",
        ),
    ),
)


def catalogue_pairs() -> Iterator[tuple[Kind, str, str]]:
    """Two entries that differ in one slot."""
    rng = random.Random(1)
    for slot, (kind, options) in enumerate(SLOTS):
        for one, other in itertools.permutations(options, 2):
            entry = [rng.choice(choices) for _, choices in SLOTS]
            texts = []
            for choice in (one, other):
                entry[slot] = choice
                texts.append("Product video of a {} {}, {}, {}, 4K, photorealistic.".format(*entry))
            yield kind, texts[0], texts[1]


def test_one_slot_of_a_catalogue() -> None:
    wrong = [(k, a, b) for k, a, b in catalogue_pairs() if DIFFER.compare(a, b).kind is not k]
    assert wrong == []


# --- Any text --------------------------------------------------------------------------------------------------------

VOCABULARY = """
a the an dog cat red blue spotted small circle ball runs moving left up down in on under with of and park forest wood to
background black black, sky, camera zooms zoom in close-up of anime style two dogs is not slowly woman's plain. , it out
video that wearing behind next fading light, painting
"""
sentences = st.lists(st.sampled_from(VOCABULARY.split()), max_size=14).map(" ".join)
texts = sentences | st.text(max_size=40)


def check_spans(text: str, spans: tuple[tuple[int, int], ...]) -> None:
    reached = 0
    for start, end in spans:
        assert reached <= start < end <= len(text)
        # No word is cut.
        assert not (start and text[start - 1].isalnum() and text[start].isalnum())
        assert not (end < len(text) and text[end - 1].isalnum() and text[end].isalnum())
        reached = end


@given(texts, texts)
def test_spans_lie_in_the_prompt_and_cut_no_word(source: str, target: str) -> None:
    found = DIFFER.compare(source, target)
    check_spans(source, found.source_spans)
    check_spans(target, found.target_spans)
    assert found.source_phrase == ", ".join(source[a:b] for a, b in found.source_spans)
    assert found.scope is SCOPES[found.kind]


@given(texts, texts)
def test_the_way_back_is_of_the_same_kind(source: str, target: str) -> None:
    assert DIFFER.compare(source, target).kind is DIFFER.compare(target, source).kind


@given(texts)
def test_nothing_differs_from_itself(text: str) -> None:
    assert DIFFER.compare(text, text) == Difference(Kind.attribute, Scope.object, "", "", (), ())


@given(texts, texts)
def test_the_same_each_time(source: str, target: str) -> None:
    fresh = LexicalDiffer(LexicalSettings(synonyms=load_card("builtin").synonyms))
    assert fresh.compare(source, target) == DIFFER.compare(source, target)


# --- Settings --------------------------------------------------------------------------------------------------------


def test_scopes_and_synonyms_are_parameters() -> None:
    careful = LexicalDiffer(LexicalSettings(scopes={**SCOPES, Kind.object: Scope.everything}))
    found = careful.compare("a ball rolls", "a disc rolls")
    assert (found.kind, found.scope) == (Kind.object, Scope.everything)
    assert DIFFER.compare("a ball rolls", "a disc rolls").target_spans == ()


def test_most_of_the_prompt_is_several() -> None:
    pair = ("a cup, a spoon and a plate", "a book, a pen and a lamp")
    assert DIFFER.compare(*pair).kind is Kind.several
    assert LexicalDiffer(LexicalSettings(most=1)).compare(*pair).kind is Kind.object


@pytest.mark.parametrize("settings", [{"scopes": {Kind.object: Scope.object}}, {"most": 0}, {"most": 1.5}, {"few": 0}])
def test_settings_are_checked(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"most|scope"):
        LexicalSettings(**settings)  # type: ignore[arg-type]


# --- Tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def test_new_words_are_found_among_the_tokens(tokenizer: Tokenizer) -> None:
    target = "on a black background, a chequered hoop shrinks"
    found = DIFFER.compare("on a black background, a ring shrinks", target)
    encoded = tokenizer.encode(target)
    tokens = [encoded.tokens[i] for i in token_indices(found.target_spans, encoded.offsets)]
    assert len(tokens) > 1  # the word is none of the vocabulary's
    assert "".join(t.removeprefix("##") for t in tokens) == "chequered"


def test_special_and_cut_tokens_never_match(tokenizer: Tokenizer) -> None:
    text = "a red circle"
    whole = ((0, len(text)),)
    encoded = tokenizer.encode(text)
    assert encoded.tokens[0] == "[CLS]"
    assert token_indices(whole, encoded.offsets) == (1, 2, 3)
    assert token_indices(whole, encoded.offsets[:3]) == (1, 2)


def test_a_token_counts_where_it_holds_any_of_the_span() -> None:
    # Tokens that hold the space before them, as sentencepiece makes them.
    offsets = [(0, 1), (1, 5), (5, 9), (0, 0)]
    assert token_indices(((2, 5),), offsets) == (1,)
    assert token_indices(((2, 6),), offsets) == (1, 2)
    assert token_indices(((2, 5), (6, 9)), offsets) == (1, 2)
    assert token_indices((), offsets) == ()


@pytest.mark.parametrize("offsets", [None, []])
def test_a_tokenizer_without_offsets_is_refused(offsets: list[tuple[int, int]] | None) -> None:
    with pytest.raises(NoOffsets) as caught:
        token_indices(((0, 1),), offsets)
    assert caught.value.code == "no_offsets"
    assert "fast tokenizer" in caught.value.hint
