"""What differs between the prompt that was generated and the prompt that is asked for (README, "Method").

The boundaries need the kind of difference, the regions the source's words for what changes, and the attention gains the
target's new words. `LexicalDiffer` finds all three by word lists and alignment, without a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

from .alignment import Alignment, align
from .errors import NoOffsets
from .phrases import Reading, Role, read

Spans = tuple[tuple[int, int], ...]


class Kind(StrEnum):
    """What differs; the boundaries may hold a table for each."""

    attribute = "attribute"  # how an object looks: colour, size, texture, material
    object = "object"  # which objects there are, and how many
    background = "background"  # where and when: place, backdrop, weather, light
    motion = "motion"  # what moves how, and how things lie to each other
    camera = "camera"  # how the picture is taken
    style = "style"  # how the picture is made
    several = "several"  # more than one of these, or most of the prompt


class Scope(StrEnum):
    """Where the video must change."""

    object = "object"  # in the region of the source's phrase
    background = "background"  # outside that region
    everything = "everything"


SCOPES: Mapping[Kind, Scope] = MappingProxyType(
    {
        Kind.attribute: Scope.object,
        Kind.object: Scope.object,
        Kind.background: Scope.background,
        Kind.motion: Scope.everything,
        Kind.camera: Scope.everything,
        Kind.style: Scope.everything,
        Kind.several: Scope.everything,
    }
)


@dataclass(frozen=True)
class Difference:
    """The difference of two prompts.

    Spans are (start, end) in characters, on word boundaries, in the order of the text. `source_spans` are the noun
    phrases (without article) of the source's objects that the difference is about, one span each: those that change;
    for the kind background those that stay, since the region to compute is their complement; for motion what moves.
    There are none where the source holds no such object (something was added), and none for camera and style.
    `source_phrase` is their text, joined by ", ".

    `target_spans` are the target's words that the source lacks, one span each; none where words were only left out.
    `target_phrase` is the text of what holds them, or of what lost a word, joined in the same way. `parts` sorts these
    words by the kinds that the difference consists of: one, or for `several` each of them; none where it is several
    because nearly everything differs, or changed places.

    Where nothing differs (the same prompt, or the same said in other words) the kind is `attribute`, the mildest, and
    there are no spans: no region to compute, nothing to amplify, and no reason to reuse less.
    """

    kind: Kind
    scope: Scope
    source_phrase: str
    target_phrase: str
    source_spans: Spans
    target_spans: Spans
    parts: tuple[tuple[Kind, Spans], ...] = ()


class Differ(Protocol):
    """Tells how the target differs from the source. Both are cleaned as the model's tokenizer gets them."""

    def compare(self, source: str, target: str) -> Difference:
        """Any two texts have a difference."""
        ...


@dataclass(frozen=True)
class LexicalSettings:
    """What calibration may change.

    Where more than the share `most` of the terms of both prompts together differs, and at least `few` terms, the kind
    is several. `synonyms` mean the same beyond what the lexicon holds: in the world of one model a disc is a ball.
    """

    scopes: Mapping[Kind, Scope] = field(default_factory=lambda: SCOPES)
    most: float = 0.7
    few: int = 4
    synonyms: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a kind without scope and for shares outside 0..1."""
        missing = [kind for kind in Kind if kind not in self.scopes]
        if missing:
            raise ValueError(f"no scope is given for {', '.join(missing)}")
        if not 0 < self.most <= 1 or self.few < 1:
            raise ValueError(f"most must be in 0..1 and few at least 1, not {self.most} and {self.few}")


class LexicalDiffer:
    """Compares by words: pure, without a model, well under a millisecond.

    Both prompts are read as noun phrases and terms (`phrases.py`); phrases are paired by their heads, and what finds no
    partner of the same meaning differs (`alignment.py`). So articles, punctuation, the order of the clauses, forms of a
    word and synonyms make no difference, but which object an attribute belongs to does.
    """

    def __init__(self, settings: LexicalSettings | None = None) -> None:
        self._settings = settings or LexicalSettings()
        self._synonyms = {word: group[0] for group in self._settings.synonyms for word in group}
        # One source serves many targets.
        self._read = lru_cache(maxsize=1024)(self._reading)

    def compare(self, source: str, target: str) -> Difference:
        """The difference, found by words alone."""
        found = align(self._read(source), self._read(target))
        kinds = self._kinds(found)
        if kinds is None:
            return Difference(Kind.attribute, self._settings.scopes[Kind.attribute], "", "", (), ())
        kind = Kind(kinds[0].value) if len(kinds) == 1 else Kind.several
        spans = tuple(sorted(found.source.phrase_span(i) for i in _concerned(found, kind)))
        target_spans = found.target_spans()
        return Difference(
            kind,
            self._settings.scopes[kind],
            _text(source, spans),
            _text(target, target_spans),
            spans,
            tuple(found.new_words()),
            tuple((Kind(role.value), tuple(found.new_words(role))) for role in kinds),
        )

    def _reading(self, text: str) -> Reading:
        reading, known = read(text), self._synonyms
        phrases = tuple(p._replace(head=known[p.head]) if p.head in known else p for p in reading.phrases)
        terms = tuple(t._replace(key=known[t.key]) if t.key in known else t for t in reading.terms)
        return Reading(text, reading.spans, reading.words, phrases, terms)

    def _kinds(self, found: Alignment) -> list[Role] | None:
        """What the difference consists of, nothing if that can't be told apart; None where nothing differs."""
        roles = found.roles()
        if found.reordered:
            return []
        if not roles:
            return None
        differing = len(found.only_source) + len(found.only_target)
        terms = len(found.source.terms) + len(found.target.terms)
        if differing >= self._settings.few and differing > self._settings.most * terms:
            return []
        return sorted(roles)


def _concerned(found: Alignment, kind: Kind) -> set[int]:
    """The source's phrases that the difference is about."""
    if kind in (Kind.camera, Kind.style):
        return set()
    if kind is Kind.background:
        return found.objects()
    changed = found.changed_objects()
    if kind is Kind.motion and not changed:
        # Nothing stands before the verb: what is named first moves.
        return set(sorted(found.objects())[:1])
    return changed


def _text(prompt: str, spans: Sequence[tuple[int, int]]) -> str:
    return ", ".join(prompt[start:end] for start, end in spans)


def token_indices(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]] | None) -> tuple[int, ...]:
    """The tokenizer's tokens that hold any character of the spans, ascending.

    `offsets` are (start, end) in characters of the same text, one for each token that the model gets; special tokens
    have (0, 0) and hold nothing, and tokens that were cut off aren't there. Raises NoOffsets where there are spans but
    no offsets.
    """
    if not spans:
        return ()
    if not offsets:
        raise NoOffsets("the tokenizer gives no character offsets", hint="use a fast tokenizer")
    return tuple(
        index
        for index, (start, end) in enumerate(offsets)
        if start < end and any(start < last and first < end for first, last in spans)
    )
