"""A prompt read as noun phrases and terms: what is in it, how it looks, where it is, how it moves, how it is filmed.

By word lists and word order only, without a model. What is read wrongly is read wrongly in the same way in a similar
prompt, so most errors cancel out in a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, TypeVar

from . import lexicon
from .parts import NOMINAL, Unit, take_apart

T = TypeVar("T")


class Role(StrEnum):
    """What a term says."""

    ATTRIBUTE = "attribute"
    OBJECT = "object"
    BACKGROUND = "background"
    MOTION = "motion"
    CAMERA = "camera"
    STYLE = "style"


class Phrase(NamedTuple):
    """A noun phrase: the words first..last, without article.

    `head` is the key of its head, "background" for "on black" as well. `relation` is the key of the preposition before
    it, "" for none. `described` are the keys of its attributes.
    """

    first: int
    last: int
    head: str
    background: bool
    relation: str
    relation_words: tuple[int, ...]
    sentence: int
    described: frozenset[str] = frozenset()


class Term(NamedTuple):
    """One thing said: `words` are indices into the reading's words, `phrase` into its phrases.

    `sort` is what a word is to its phrase: "head", "count", "noun" (the first of "wine bottle"), "motion" (of "a
    running dog") or the sort of an attribute: colour, size, texture, material, look. It is "" for what stands apart; a
    motion that does has what moves as its phrase, where that could be told.
    """

    role: Role
    key: str
    words: tuple[int, ...]
    phrase: int | None = None
    sort: str = ""
    plural: bool = False
    neutral: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt taken apart; `spans` are the character spans of its words."""

    text: str
    spans: tuple[tuple[int, int], ...]
    words: tuple[str, ...]
    phrases: tuple[Phrase, ...]
    terms: tuple[Term, ...]

    def phrase_span(self, index: int) -> tuple[int, int]:
        """The characters of a noun phrase, without article."""
        phrase = self.phrases[index]
        return self.spans[phrase.first][0], self.spans[phrase.last][1]


@lru_cache(maxsize=1024)
def read(text: str) -> Reading:
    """Reads a prompt."""
    return _Reader(text).reading()


class _Tie(NamedTuple):
    """How a phrase is tied to what stands before: the key of the preposition, whether no article follows it, and the
    phrase that it is tied to, where they touch."""

    relation: str
    bare: bool
    linked: Phrase | None


class _Reader:
    """Walks over the units once and collects phrases and terms."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans, self._words, self._units = take_apart(text)
        self._phrases: list[Phrase] = []
        self._terms: list[Term] = []
        self._preposition: Unit | None = None

    def reading(self) -> Reading:
        index = 0
        while index < len(self._units):
            index = self._step(index)
        described: list[set[str]] = [set() for _ in self._phrases]
        for term in self._terms:
            if term.phrase is not None and term.sort not in ("", "head"):
                described[term.phrase].add(term.key)
        phrases = tuple(p._replace(described=frozenset(d)) for p, d in zip(self._phrases, described, strict=True))
        return Reading(self._text, self._spans, self._words, phrases, tuple(self._join_motions()))

    def _step(self, index: int) -> int:
        unit = self._units[index]
        if unit.breaks:
            self._preposition = None
        if unit.part in NOMINAL:
            end = self._chunk_end(index)
            self._chunk(index, end)
            return end
        match unit.part:
            case "prep":
                self._preposition = unit
            case "pron" | "rel":
                self._preposition = None
            case "verb":
                self._preposition = None
                self._say(Role.MOTION, unit, lexicon.verb_key(unit.text), phrase=self._subject(unit))
            case "camera":
                self._preposition = None
                self._say(Role.CAMERA, unit, lexicon.word_key(unit.text))
        return index + 1

    def _say(
        self, role: Role, unit: Unit, key: str, *, phrase: int | None = None, sort: str = "", plural: bool = False
    ) -> None:
        words = (unit.first,) if unit.first == unit.last else tuple(range(unit.first, unit.last + 1))
        neutral = unit.text in lexicon.NEUTRAL and sort not in ("", "head")
        self._terms.append(Term(role, unit.key or key, words, phrase, sort, plural, neutral))

    def _chunk_end(self, start: int) -> int:
        """Where the noun phrase ends that starts here."""
        units, end = self._units, start + 1
        last_noun = end if units[start].part == "noun" else 0
        opened = start > 0 and units[start - 1].part == "det"
        while end < len(units):
            unit = units[end]
            if unit.part == "conj" and not last_noun and not unit.breaks and units[end - 1].part == "adj":
                # "a black and white cat"
                if end + 1 < len(units) and units[end + 1].part == "adj" and not units[end + 1].breaks:
                    end += 2
                    continue
                break
            # "a small, red car"
            comma = unit.breaks and opened and not last_noun and unit.part == "adj" and units[end - 1].part == "adj"
            if (unit.breaks and not comma) or unit.part not in NOMINAL:
                break
            end += 1
            if unit.part == "noun":
                last_noun = end
        # What follows the last noun describes it: "a dog happy".
        return last_noun or end

    def _chunk(self, start: int, end: int) -> None:
        units = [unit for unit in self._units[start:end] if unit.part != "conj"]
        before = self._units[start - 1] if start > 0 and not self._units[start].breaks else None
        preposition, self._preposition = self._preposition, None
        for unit in units:
            if unit.part == "style":
                self._say(Role.STYLE, unit, lexicon.word_key(unit.text))
        units = [unit for unit in units if unit.part != "style"]
        if not units:
            return
        head = next((unit for unit in reversed(units) if unit.part == "noun"), None)
        described = before.part != "det" if before else start > 0
        if head is None and not _surface(preposition, before):
            if described and self._phrases:
                # "turns from red to green" isn't "turns from green to red".
                way = preposition.text if preposition and preposition.text in ("from", "to", "into") else ""
                self._describe(units, len(self._phrases) - 1, way)
                return
            head = units[-1]
        self._phrase(start, units, head, preposition, before)

    def _phrase(
        self, start: int, units: list[Unit], head: Unit | None, preposition: Unit | None, before: Unit | None
    ) -> None:
        linked = self._linked(start, preposition) if before else None
        relation = (preposition.key or preposition.text) if preposition else ""
        if linked and preposition is None:
            # "in the fields and meadows"
            relation = linked.relation
        if head is not None and self._tells_where(units, head, relation):
            self._move_back()
            return
        background = head is None or self._is_background(units, head, _Tie(relation, before is preposition, linked))
        key, plural = lexicon.noun_key(head.text) if head else ("background", False)
        words = tuple(range(preposition.first, preposition.last + 1)) if preposition else ()
        last = (head or units[-1]).last
        self._phrases.append(Phrase(units[0].first, last, key, background, relation, words, units[0].sentence))
        index = len(self._phrases) - 1
        role = Role.BACKGROUND if background else Role.OBJECT
        if head is not None:
            self._say(role, head, key, phrase=index, sort="head", plural=plural)
        else:
            self._terms.append(Term(role, key, (), index, "head"))
        self._describe([unit for unit in units if unit is not head], index)

    def _describe(self, units: Sequence[Unit], phrase: int, way: str = "") -> None:
        ground = self._phrases[phrase].background
        for unit, following in _with_next(units):
            role, key, sort = _description(unit, following)
            self._say(Role.BACKGROUND if ground else role, unit, f"{way} {key}".lstrip(), phrase=phrase, sort=sort)

    def _linked(self, start: int, preposition: Unit | None) -> Phrase | None:
        """The phrase before, if nothing but the preposition or a conjunction, and articles, stands between."""
        if not self._phrases:
            return None
        joints: list[Unit] = []
        for unit in reversed(self._units[:start]):
            if unit.last <= self._phrases[-1].last or len(joints) > 1:
                break
            if unit.part not in ("det", "filler"):
                joints.append(unit)
        linked = len(joints) == 1 and (joints[0] is preposition or joints[0].part == "conj")
        return self._phrases[-1] if linked else None

    def _is_background(self, units: list[Unit], head: Unit, tie: _Tie) -> bool:
        place = _is_place(head.text)
        if head.text in lexicon.BACKDROPS:
            background = True
        elif tie.relation in ("of", "with"):
            # "in a field of flowers", "in a field with flowers"; but "in a field with a dog"
            background = tie.linked is not None and tie.linked.background and (place or tie.relation == "of")
        elif not tie.relation:
            background = place and self._stands_alone(units, head)
        elif head.capital and tie.relation in ("in", "at", "through", "across", "around", "over", "near"):
            background = True
        elif tie.relation == "on" and tie.bare and lexicon.ATTRIBUTES.get(head.text) == "material":
            # "on black glass"
            background = True
        else:
            background = place and tie.relation in lexicon.PLACE_PREPOSITIONS
        return background

    def _stands_alone(self, units: list[Unit], head: Unit) -> bool:
        """Whether the phrase is all there is between two commas, and something stands before: "a dog, forest"."""
        first = next(unit for unit in self._units if unit.sentence == head.sentence)
        own = [unit for unit in self._units if unit.segment == head.segment and unit.part not in ("det", "filler")]
        return head.segment > first.segment and len(own) == len(units)

    def _tells_where(self, units: list[Unit], head: Unit, relation: str) -> bool:
        """Whether it is the end of the like of "with a tower in the background"."""
        far = head.text in lexicon.BACKDROPS or head.text in ("distance", "foreground")
        return far and len(units) == 1 and relation == "in" and bool(self._phrases)

    def _move_back(self) -> None:
        """What was named last stands in the background."""
        index = len(self._phrases) - 1
        phrase = self._phrases[index]
        if phrase.relation != "with":
            return
        self._phrases[index] = phrase._replace(background=True)
        for i, term in enumerate(self._terms):
            if term.phrase == index:
                self._terms[i] = term._replace(role=Role.BACKGROUND)

    def _subject(self, verb: Unit) -> int | None:
        """The phrase that most likely moves: the last before the verb that no preposition ties to another."""
        here = [
            i
            for i, p in enumerate(self._phrases)
            if not p.background and p.sentence == verb.sentence and p.last < verb.first
        ]
        for allowed in (("",), ("", "with", "of")):
            free = [i for i in here if self._phrases[i].relation in allowed]
            if free:
                return free[-1]
        return here[-1] if here else None

    def _join_motions(self) -> Iterator[Term]:
        """A verb and its direction become one term where they are one motion: "moves up" is "rises"."""
        terms = sorted(self._terms, key=lambda term: term.words)
        skip = False
        for term, following in _with_next(terms):
            if skip:
                skip = False
                continue
            pair = (term.key, following.key) if following else ("", "")
            joined = lexicon.MOTION_PAIRS.get(pair)
            if joined and following and term.role is following.role is Role.MOTION:
                yield Term(Role.MOTION, joined, term.words + following.words, term.phrase)
                skip = True
            else:
                yield term


def _with_next(items: Sequence[T]) -> Iterator[tuple[T, T | None]]:
    for i, item in enumerate(items):
        yield item, items[i + 1] if i + 1 < len(items) else None


def _description(unit: Unit, following: Unit | None) -> tuple[Role, str, str]:
    """(role, key, sort) of a word that stands before its noun."""
    if unit.part == "premod":
        return Role.MOTION, lexicon.verb_key(unit.text), "motion"
    if unit.part == "num":
        return Role.OBJECT, lexicon.word_key(unit.text), "count"
    if unit.part == "adj":
        return Role.ATTRIBUTE, lexicon.word_key(unit.text), lexicon.ATTRIBUTES.get(unit.text, "look")
    key = lexicon.noun_key(unit.text)[0]
    if following is not None and lexicon.ATTRIBUTES.get(following.text) == "colour":
        # "sky blue"
        return Role.ATTRIBUTE, key, "colour"
    if lexicon.sounds_like_adjective(unit.text):
        return Role.ATTRIBUTE, key, "look"
    # "wine bottle" and "perfume bottle" are two things.
    return Role.OBJECT, key, "noun"


def _surface(preposition: Unit | None, before: Unit | None) -> bool:
    """Whether an adjective alone is a background: "on black"."""
    key = (preposition.key or preposition.text) if preposition else ""
    return key in lexicon.SURFACE_PREPOSITIONS and before is preposition


def _is_place(word: str) -> bool:
    return (
        word in lexicon.PLACES
        or lexicon.noun_key(word)[0] in lexicon.PLACES
        or word.rsplit("-", 1)[-1] in lexicon.PLACES
    )
