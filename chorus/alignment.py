"""Two readings side by side: which phrases are the same thing, which took another's place, what finds no partner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from . import lexicon
from .phrases import Phrase, Reading, Role, Term

# Attributes of an object that another object could have as well: of two of one sort, one took the other's place.
_EXCLUSIVE = frozenset(("colour", "size", "texture"))
# Parts of words that say nothing alone.
_EMPTY = frozenset(("det", "aux", "conj"))
Matches = dict[int, int]
Name = Callable[[Term], Hashable]


@dataclass(frozen=True)
class Alignment:
    """What the two say alike and what only one of them says.

    `same` pairs phrases (source to target) of one head, `replaced` those where another head took the place.
    `only_source` and `only_target` are the terms without partner, in the order of the text. `reordered`: who does what
    to whom isn't the same, whatever the words.
    """

    source: Reading
    target: Reading
    same: Mapping[int, int]
    replaced: Mapping[int, int]
    only_source: tuple[Term, ...]
    only_target: tuple[Term, ...]
    reordered: bool

    def roles(self) -> set[Role]:
        """What the differing terms say.

        An object that took another's place, or was added, brings attributes of its own: they count only where they
        contradict the other's ("a red ball", "a blue box"; not "a red ball", "a wooden box").
        """
        sides = (
            (self.only_source, self.only_target, set(self.same), self.replaced),
            (self.only_target, self.only_source, set(self.same.values()), _inverted(self.replaced)),
        )
        return {
            term.role
            for terms, others, same, replaced in sides
            for term in terms
            if _counts(term, others, same, replaced)
        }

    def changed_objects(self) -> set[int]:
        """The source's object phrases in which something differs, or in whose partner something does."""
        back = _inverted({**self.same, **self.replaced})
        own = {term.phrase for term in self.only_source}
        partners = {back.get(term.phrase) for term in self.only_target if term.phrase is not None}
        return {i for i in own | partners if i is not None and not self.source.phrases[i].background}

    def objects(self) -> set[int]:
        """All object phrases of the source."""
        return {i for i, phrase in enumerate(self.source.phrases) if not phrase.background}

    def target_spans(self) -> list[tuple[int, int]]:
        """The characters of the target's phrases, motions and so on that hold something new, else of those that lost a
        word."""
        spans = {_span(self.target, term) for term in self.only_target}
        if not spans:
            pairs = {**self.same, **self.replaced}
            lost = {pairs.get(t.phrase) for t in self.only_source if t.phrase is not None}
            spans = {self.target.phrase_span(i) for i in lost if i is not None}
        return _merged(self.target.text, sorted(spans))

    def new_words(self, role: Role | None = None) -> list[tuple[int, int]]:
        """The characters of the target's words that the source lacks, or of those that say one thing."""
        # "in" of a place isn't the "in" of "zoom in".
        known = {lexicon.verb_key(word) for word in self.source.words if lexicon.part(word) != "prep"}
        terms = (term for term in self.only_target if role in (None, term.role))
        indices = {i for term in terms for i in _new(term, self.target.words, known)}
        return [self.target.spans[i] for i in sorted(indices)]


def align(source: Reading, target: Reading) -> Alignment:
    """Aligns two readings; swapping them swaps the result."""
    same = _match(source, target, _same_head(source, target))
    taken = set(same.values())
    free = [i for i in range(len(source.phrases)) if i not in same]
    replaced = _match(
        source,
        target,
        [
            (i, j)
            for j, phrase in enumerate(target.phrases)
            if j not in taken
            for i in free
            if source.phrases[i].background is phrase.background
        ],
    )
    left, right = list(source.terms), list(target.terms)
    moved = _strike_all(left, right, same, {**same, **replaced})
    for i, j in same.items():
        if _relations_differ(source.phrases[i], target.phrases[j]):
            left.append(_relation(source, i))
            right.append(_relation(target, j))
    pairs = {**same, **replaced}
    return Alignment(
        source,
        target,
        same,
        replaced,
        _without_neutral(left, right, pairs),
        _without_neutral(right, left, _inverted(pairs)),
        moved or _crossed(source, target, pairs),
    )


# --- Phrases ---------------------------------------------------------------------------------------------------------


def _same_head(source: Reading, target: Reading) -> list[tuple[int, int]]:
    by_head: dict[str, list[int]] = defaultdict(list)
    for j, phrase in enumerate(target.phrases):
        by_head[phrase.head].append(j)
    return [(i, j) for i, phrase in enumerate(source.phrases) for j in by_head.get(phrase.head, ())]


def _match(source: Reading, target: Reading, candidates: Iterable[tuple[int, int]]) -> Matches:
    """The likeliest pairs first; of equals those of the same place."""

    def rank(pair: tuple[int, int]) -> tuple[int, int, int]:
        one, other = source.phrases[pair[0]], target.phrases[pair[1]]
        likeness = (
            8 * (one.background is other.background)
            + 2 * len(one.described & other.described)
            + (one.relation == other.relation)
        )
        return -likeness, abs(pair[0] - pair[1]), pair[0] + pair[1]

    matches: Matches = {}
    taken: set[int] = set()
    for i, j in sorted(candidates, key=rank):
        if i not in matches and j not in taken:
            matches[i] = j
            taken.add(j)
    return matches


def _relations_differ(one: Phrase, other: Phrase) -> bool:
    if "background" in (one.head, other.head):
        # "over", "on", "against" and "in front of" a background are one.
        return False
    first, second = (lexicon.RELATIONS.get(phrase.relation, "") for phrase in (one, other))
    if one.background and other.background:
        first, second = ("at" if r in ("on", "in", "beside", "front", "with") else r for r in (first, second))
    return bool(first and second) and first != second


def _relation(reading: Reading, index: int) -> Term:
    phrase = reading.phrases[index]
    sort = lexicon.RELATIONS[phrase.relation]
    role = Role.OBJECT if sort in ("with", "without") else Role.MOTION
    return Term(role, sort, phrase.relation_words, index, "relation")


def _crossed(source: Reading, target: Reading, pairs: Matches) -> bool:
    """Whether two objects changed places: "a cat chases a dog", "a dog chases a cat"."""
    places = []
    for i, j in sorted(pairs.items()):
        one, other = source.phrases[i], target.phrases[j]
        # What keeps its preposition may be named earlier or later.
        tied = one.relation != "" and one.relation == other.relation
        if not (one.background or other.background or tied):
            places.append(j)
    return places != sorted(places)


# --- Terms -----------------------------------------------------------------------------------------------------------


def _strike_all(left: list[Term], right: list[Term], same: Matches, pairs: Matches) -> bool:
    """Takes out of both lists what both say; whether a motion went over to another object."""

    # What is red in one must be red in the other.
    def bound(term: Term) -> Hashable:
        if not term.sort or term.phrase not in pairs:
            return None
        return pairs[term.phrase], term.key, term.plural

    _strike(left, right, bound, lambda t: (t.phrase, t.key, t.plural) if t.sort else None)
    moves = _strike(left, right, _said_apart, _said_apart)
    # The same word read in two ways; two heads of one key had their chance.
    for one, other in ((_head, _unbound), (_unbound, _head), (_unbound, _unbound)):
        _strike(left, right, one, other)
    back = set(same.values())
    return any(
        s.role is Role.MOTION and s.phrase in same and t.phrase in back and same[s.phrase] != t.phrase for s, t in moves
    )


def _said_apart(term: Term) -> Hashable:
    return None if term.sort not in ("", "motion") else (term.role, term.key)


def _head(term: Term) -> Hashable:
    return term.key.rstrip("e") if term.sort == "head" else None


def _unbound(term: Term) -> Hashable:
    return term.key.rstrip("e") if term.sort in ("", "motion", "noun") else None


def _strike(left: list[Term], right: list[Term], name: Name, other_name: Name) -> list[tuple[Term, Term]]:
    """Takes out pairs of one name; None is no name. Returns them."""
    partners: dict[Hashable, list[Term]] = defaultdict(list)
    for term in reversed(right):
        found = other_name(term)
        if found is not None:
            partners[found].append(term)
    pairs = []
    for term in left:
        found = name(term)
        if found is not None and partners.get(found):
            pairs.append((term, partners[found].pop()))
    gone = {id(term) for pair in pairs for term in pair}
    left[:] = [term for term in left if id(term) not in gone]
    right[:] = [term for term in right if id(term) not in gone]
    return pairs


def _without_neutral(terms: Sequence[Term], others: Sequence[Term], pairs: Mapping[int, int]) -> tuple[Term, ...]:
    """Leaves out what may be said or not, unless the partner says something else instead."""
    contradicted = {(term.phrase, term.sort) for term in others if not term.neutral}

    def said(term: Term) -> bool:
        partner = pairs.get(term.phrase) if term.phrase is not None else None
        return not term.neutral or (partner is not None and (partner, term.sort) in contradicted)

    return tuple(sorted(filter(said, terms), key=lambda term: term.words))


def _counts(term: Term, others: Sequence[Term], same: set[int], replaced: Mapping[int, int]) -> bool:
    if term.phrase is None or term.phrase in same or term.sort in ("", "head", "count", "relation"):
        return True
    contrary = replaced.get(term.phrase)
    return term.sort in _EXCLUSIVE and any(o.phrase == contrary and o.sort == term.sort for o in others)


def _inverted(matches: Mapping[int, int]) -> Matches:
    return {j: i for i, j in matches.items()}


def _span(reading: Reading, term: Term) -> tuple[int, int]:
    """Of the phrase that the term describes, else of its own words."""
    if term.phrase is not None and (term.sort not in ("", "relation") or not term.words):
        return reading.phrase_span(term.phrase)
    return reading.spans[term.words[0]][0], reading.spans[term.words[-1]][1]


def _merged(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that overlap, or that only a space parts, made one."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and not text[merged[-1][1] : start].strip():
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _new(term: Term, words: Sequence[str], known: set[str]) -> Sequence[int]:
    """The words of a term that the other prompt lacks: of "moves up" against "moves left" only "up"."""
    empty = _EMPTY | {"prep"} if term.role is Role.STYLE else _EMPTY
    content = [i for i in term.words if words[i] != "to" and lexicon.part(words[i]) not in empty]
    fresh = [i for i in content if lexicon.verb_key(words[i]) not in known] if len(term.words) > 1 else content
    return fresh or content or term.words
