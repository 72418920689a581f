"""Boilerplate in a list of prompts: catalogues, where every prompt is one of a few sentences with slots filled in.

There the boilerplate decides the similarity: two prompts that differ in the person shown are as near to each other as
two that differ in the light. What reuse is worth depends on *which slots* differ; that is found here, by words alone.
Prompts that begin alike are a group; the words that nearly all of a group hold, in one order, are its boilerplate, and
what stands between them are its slots. Where the kind of a slot isn't known, a pair must be nearer to each other than
boilerplate alone makes two prompts of the template.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import FloatArray
from chorus_batch.jobs.nearest import IdArray, IntArray, Places

BEGINNING = 2  # words by which prompts are grouped
FEW = 20  # prompts of a group below which nothing is called a template
NEARLY_ALL = 0.9  # of a group's prompts hold a word of its boilerplate
MATCHED = 0.7  # of a group's prompts must fit the template
BOILERPLATE = 0.4  # of a prompt's words, in the mean
SAMPLED = 2_000  # prompts of a group that are read to find its words, and pairs that are compared
ASKED = 8  # pairs that are asked for a slot's kind
AGREED = 0.75  # of their answers must be the same
SEVERAL = "several"  # the differ's name of a difference of more than one kind

Kinds = Callable[[Sequence[tuple[str, str]]], Sequence[str | None]]

_WORD = re.compile(r"[\w'-]+|[^\w\s]")


@dataclass(frozen=True)
class Template:
    """Boilerplate with slots, `{}`; `prompts`: how many fit it; `kinds`: of each slot's difference, None: unknown."""

    text: str
    prompts: int
    kinds: tuple[str | None, ...]

    def __str__(self) -> str:
        parts = self.text.split("{}")
        slots = [f"{{{kind or '?'}}}" for kind in self.kinds]
        return "".join(part + slot for part, slot in zip(parts, [*slots, ""], strict=True))


@dataclass(frozen=True)
class Slots:
    """For each prompt its template (-1: none) and what fills its slots, as codes [n, slots] (-1: no such slot).

    `kind`: the kind of difference in each template's slots [templates, slots], as a bit, 0 where it isn't known.
    `several`: the bit that is added where slots of different kinds differ at once. `alike`: the similarity
    [templates] of prompts that share nothing but the template; 0 until it is measured.
    """

    template: IdArray
    filling: IdArray
    kind: NDArray[np.uint16]
    several: int
    alike: FloatArray

    def __getitem__(self, rows: IntArray) -> Slots:
        """Of these rows, in their order."""
        return replace(self, template=self.template[rows], filling=self.filling[rows])

    def __add__(self, other: Slots) -> Slots:
        """These rows, and then those of the same templates."""
        template = np.concatenate([self.template, other.template])
        return replace(self, template=template, filling=np.concatenate([self.filling, other.filling]))

    def kinds(self, one: Places, other: Places) -> NDArray[np.uint16]:
        """The kinds of difference of each pair of rows, as bits; 0 where that of a slot that differs isn't known."""
        found = np.zeros(len(one), np.uint16)
        both = self._together(one, other)
        first, second = one[both], other[both]
        differs = self.filling[first] != self.filling[second]
        bits = np.where(differs, self.kind[self.template[first]], np.uint16(0))
        masks = np.bitwise_or.reduce(bits, axis=1)
        masks |= np.where(masks & (masks - np.uint16(1)), np.uint16(self.several), np.uint16(0))
        found[both] = np.where((differs & (bits == 0)).any(axis=1), np.uint16(0), masks)
        return found

    def least(self, one: Places, other: Places) -> FloatArray:
        """The similarity that pairs of unknown kind need: more than boilerplate gives; 0 without a common template."""
        found = np.zeros(len(one), np.float32)
        both = self._together(one, other)
        found[both] = self.alike[self.template[one[both]]]
        return found

    def calibrated(self, vectors: FloatArray) -> Slots:
        """With `alike` measured on the first rows' unit vectors [n, d]: a median of pairs that differ in every slot."""
        alike = np.zeros(len(self.kind), np.float32)
        rng = np.random.default_rng(0)
        for code in range(len(alike)):
            rows = np.flatnonzero(self.template[: len(vectors)] == code)
            one, other = rng.choice(rows, (2, SAMPLED))
            differs = (self.filling[one] != self.filling[other]) | (self.filling[one] < 0)
            apart = np.flatnonzero(differs.all(axis=1))
            if len(apart):
                near = np.einsum("nd,nd->n", vectors[one[apart]], vectors[other[apart]])
                alike[code] = np.median(near)
        return replace(self, alike=alike)

    def _together(self, one: Places, other: Places) -> IntArray:
        """The pairs of one template."""
        return np.flatnonzero((self.template[one] >= 0) & (self.template[one] == self.template[other]))


def find(
    prompts: Sequence[str], known: Sequence[str], ask: Kinds, others: Sequence[str] = ()
) -> tuple[tuple[Template, ...], Slots | None]:
    """The templates of a list of distinct prompts, and each prompt's slots; None if there are no templates.

    `ask` tells the kinds of difference of pairs of prompts. `known`: the kinds that have bits of their own, bit i for
    kind i; all others share the next bit. `others` are fitted into the templates as well; their slots follow.
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        groups[" ".join(prompt.split(maxsplit=BEGINNING)[:BEGINNING])].append(index)
    found: list[tuple[re.Pattern[str], list[int], list[tuple[str, ...]]]] = []
    for group in groups.values():
        if len(group) >= FEW:
            pattern = _pattern([prompts[index] for index in group[:: 1 + len(group) // SAMPLED]])
            matches = (
                [(i, match.groups()) for i in group if (match := pattern.fullmatch(prompts[i]))] if pattern else []
            )
            if pattern and len(matches) >= MATCHED * len(group):
                found.append((pattern, [i for i, _ in matches], [words for _, words in matches]))
    if not found:
        return (), None
    width = max(pattern.groups for pattern, _, _ in found)
    template = np.full(len(prompts) + len(others), -1, np.int32)
    filling = np.full((len(template), width), -1, np.int32)
    pairs: list[tuple[int, int, list[tuple[str, str]]]] = []
    codes: dict[str, int] = {}
    for place, (pattern, indices, fillings) in enumerate(found):
        values = [_coded(words, codes) for words in fillings]
        template[indices], filling[indices, : pattern.groups] = place, values
        for slot in range(pattern.groups):
            pairs.append((place, slot, _differing([prompts[i] for i in indices], values, slot)))
    for index, prompt in enumerate(others, len(prompts)):
        for place, (pattern, _, _) in enumerate(found):
            if match := pattern.fullmatch(prompt):
                template[index], filling[index, : pattern.groups] = place, _coded(match.groups(), codes)
                break
    answers = iter(ask([pair for _, _, asked in pairs for pair in asked]))
    names: list[list[str | None]] = [[] for _ in found]
    for place, _, asked in pairs:
        told = Counter([next(answers) for _ in asked])
        name, count = told.most_common(1)[0] if told else (None, 0)
        names[place].append(name if count >= AGREED * len(asked) else None)
    kind = np.zeros((len(found), width), np.uint16)
    for place, each in enumerate(names):
        kind[place, : len(each)] = [0 if name is None else 1 << _bit(name, known) for name in each]
    described = tuple(
        Template("".join(_plain(pattern)), len(indices), tuple(each))
        for (pattern, indices, _), each in zip(found, names, strict=True)
    )
    several = 1 << _bit(SEVERAL, known)
    return described, Slots(template, filling, kind, several, np.zeros(len(found), np.float32))


def _bit(kind: str, known: Sequence[str]) -> int:
    return list(known).index(kind) if kind in known else len(known)


def _coded(words: Sequence[str], codes: dict[str, int]) -> list[int]:
    return [codes.setdefault(word.strip().casefold(), len(codes)) for word in words]


def _pattern(prompts: Sequence[str]) -> re.Pattern[str] | None:
    """What all these prompts have in common, as literal text with a group for each slot; None if that is too little."""
    words = [[match.group() for match in _WORD.finditer(prompt)] for prompt in prompts]
    # A word that some prompts hold once more than others stands in a slot too: it can't tell where one ends.
    held = Counter(pair for each in words for pair in Counter(each).items())
    common = {word for (word, _), count in held.items() if count >= NEARLY_ALL * len(prompts)}
    # The order of the boilerplate: the commonest sequence of its words.
    kept = Counter(tuple(word for word in each if word in common) for each in words)
    anchors, _ = kept.most_common(1)[0]
    letters = [anchor for anchor in anchors if anchor[0].isalnum()]
    mean = sum(map(len, words)) / len(words)
    if len(letters) < 4 or len(anchors) < BOILERPLATE * mean:
        return None
    # Between two anchors there is a slot where some prompt has something there.
    gaps = [False] * (len(anchors) + 1)
    for each in words:
        if tuple(word for word in each if word in common) != anchors:
            continue
        place = 0
        for word in each:
            if word in common:
                place += 1
            else:
                gaps[place] = True
    if not any(gaps):
        return None
    parts = [r"\s*(.*?)\s*" if gaps[0] else r"\s*"]
    for anchor, gap in zip(anchors, gaps[1:], strict=True):
        parts += [re.escape(anchor), r"\s*(.*?)\s*" if gap else r"\s*"]
    return re.compile("".join(parts), re.DOTALL)


def _plain(pattern: re.Pattern[str]) -> str:
    text = pattern.pattern.replace(r"\s*(.*?)\s*", " {} ").replace(r"\s*", " ")
    text = re.sub(r"\\(.)", r"\1", text)
    return re.sub(r"\s+([,.;:!?])", r"\1", re.sub(r"\s+", " ", text)).strip()


def _differing(prompts: Sequence[str], values: Sequence[Sequence[int]], slot: int) -> list[tuple[str, str]]:
    """Up to ASKED pairs of prompts that differ in this slot alone."""
    first: dict[tuple[int, ...], int] = {}
    found: list[tuple[str, str]] = []
    for index, value in enumerate(values):
        rest = (*value[:slot], *value[slot + 1 :])
        other = first.setdefault(rest, index)
        if values[other][slot] != value[slot]:
            found.append((prompts[other], prompts[index]))
            if len(found) == ASKED:
                break
    return found
