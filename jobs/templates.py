"""Boilerplate in a list of prompts: catalogues, where every prompt is one of a few sentences with slots filled in.

There the boilerplate decides the similarity: two prompts that differ in the person shown are as near to each other as
two that differ in the light. What reuse is worth depends on *which slot* differs; that is found here, by words alone.
Prompts that begin alike are a group; the words that nearly all of a group hold, in one order, are its boilerplate, and
what stands between them are its slots.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.nearest import IdArray, IntArray

BEGINNING = 2  # words by which prompts are grouped
FEW = 20  # prompts of a group below which nothing is called a template
NEARLY_ALL = 0.9  # of a group's prompts hold a word of its boilerplate
MATCHED = 0.7  # of a group's prompts must fit the template
BOILERPLATE = 0.4  # of a prompt's words, in the mean
SAMPLED = 2_000  # prompts of a group that are read to find its words
ASKED = 8  # pairs that are asked for a slot's kind
AGREED = 0.75  # of their answers must be the same

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

    `kind`: codes of the slots' kinds [templates, slots], -1 where a slot's kind isn't known.
    """

    template: IdArray
    filling: IdArray
    kind: NDArray[np.int8]

    def __getitem__(self, rows: IntArray) -> Slots:
        """Of these rows, in their order."""
        return Slots(self.template[rows], self.filling[rows], self.kind)

    def kinds(self, one: IdArray, other: IdArray) -> NDArray[np.int8]:
        """The kind of difference of each pair of rows: that of the only slot that differs; -1 for all other pairs."""
        found = np.full(len(one), -1, np.int8)
        both = np.flatnonzero((self.template[one] >= 0) & (self.template[one] == self.template[other]))
        differs = self.filling[one[both]] != self.filling[other[both]]
        single = differs.sum(axis=1) == 1
        found[both[single]] = self.kind[self.template[one[both[single]]], differs[single].argmax(axis=1)]
        return found


def find(prompts: Sequence[str], known: Sequence[str], ask: Kinds) -> tuple[tuple[Template, ...], Slots | None]:
    """The templates of a list of distinct prompts, and each prompt's slots; None if there are no templates.

    `ask` tells the kinds of difference of pairs of prompts; `known`: the kinds that count, by code.
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
    template = np.full(len(prompts), -1, np.int32)
    filling = np.full((len(prompts), width), -1, np.int32)
    kind = np.full((len(found), width), -1, np.int8)
    pairs: list[tuple[int, int, list[tuple[str, str]]]] = []
    codes: dict[str, int] = {}
    for place, (pattern, indices, fillings) in enumerate(found):
        template[indices] = place
        values = [[codes.setdefault(word.strip().casefold(), len(codes)) for word in words] for words in fillings]
        filling[indices, : pattern.groups] = values
        for slot in range(pattern.groups):
            pairs.append((place, slot, _differing([prompts[i] for i in indices], values, slot)))
    answers = iter(ask([pair for _, _, asked in pairs for pair in asked]))
    names: dict[tuple[int, int], str | None] = {}
    for place, slot, asked in pairs:
        told = Counter([next(answers) for _ in asked])
        name, count = told.most_common(1)[0] if told else (None, 0)
        names[place, slot] = name if count >= AGREED * len(asked) else None
        if names[place, slot] in known:
            kind[place, slot] = list(known).index(str(name))
    described = tuple(
        Template("".join(_plain(pattern)), len(indices), tuple(names[place, slot] for slot in range(pattern.groups)))
        for place, (pattern, indices, _) in enumerate(found)
    )
    return described, Slots(template, filling, kind)


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
