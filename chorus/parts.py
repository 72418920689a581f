"""The words of a prompt and the part that each plays where it stands.

The same form may be a noun or a verb, and what is said of the picture itself (camera, style, medium) is told apart from
what the picture shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import lexicon

_BREAK = re.compile(r"[,.;:!?()\[\]\u2013\u2014\n]")
_SENTENCE = re.compile(r"[.!?]\s")
# What a noun phrase is made of, its determiner left out.
NOMINAL = frozenset(("adj", "noun", "num", "premod", "style"))
_NOUNISH = frozenset(("adj", "noun", "num", "style", "verb-ed"))
_BEFORE_NOUN = frozenset(("det", "adj", "num", "premod", "prep"))
# What shows that an adjective before it is none: "in soft light", not "in light rain".
_LED = NOMINAL | {"verb-ing", "conj"}
_SAID = NOMINAL | {"verb"}
_CONTENT = NOMINAL | {"verb", "camera"}
_OPENING = NOMINAL | {"det", "filler", "camera"}
_BEFORE_SUBJECT = frozenset(("det", "conj", "prep", "adj", "filler", "verb"))
_PICTURES = lexicon.MEDIA | lexicon.PICTURES
_LOOKS = frozenset(("camera", "style", "styleof"))
_TELLING = _PICTURES | {"camera", "white"}
# Parts that depend on the neighbours.
_OPEN = frozenset(("verb-ing", "verb-ed", "verb-s", "verb-base", "adv", "dir", "not", "adj", "prep", "aux"))


@dataclass(slots=True)
class Unit:
    """One word, or several that are one together, and the part it plays."""

    first: int
    last: int
    text: str
    part: str
    key: str
    breaks: bool  # punctuation stands before it
    sentence: int
    segment: int  # between two breaks
    capital: bool


def take_apart(text: str) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...], list[Unit]]:
    """(character spans of the words, the words in lower case, the units that they make)."""
    found = lexicon.words_of(text)
    spans, words = tuple(span for span, _ in found), tuple(word for _, word in found)
    units = list(_units(text, spans, words))
    _say_parts(units)
    for segment in _segments(units):
        # Most segments say nothing of the picture.
        if any(unit.part in _LOOKS or unit.text in _TELLING for unit in segment):
            _find_media(segment)
            _find_camera(segment)
            _find_style(segment)
    return spans, words, units


def _units(text: str, spans: Sequence[tuple[int, int]], words: Sequence[str]) -> Iterator[Unit]:
    gaps = ["", *(text[spans[i - 1][1] : spans[i][0]] for i in range(1, len(spans)))]
    breaks = [gap not in ("", " ") and _BREAK.search(gap) is not None for gap in gaps]
    sentence = segment = index = 0
    while index < len(words):
        if breaks[index]:
            segment += 1
            sentence += _SENTENCE.search(gaps[index]) is not None
        whole = words[index]
        size, part, key = _group(words, breaks, index) if whole in lexicon.GROUPS else (1, lexicon.part(whole), "")
        if size > 1:
            whole = " ".join(words[index : index + size])
        capital = index > 0 and text[spans[index][0]].isupper()
        yield Unit(index, index + size - 1, whole, part, key, breaks[index], sentence, segment, capital)
        index += size


def _group(words: Sequence[str], breaks: Sequence[bool], index: int) -> tuple[int, str, str]:
    for group, part, key in lexicon.GROUPS[words[index]]:
        size = len(group)
        if tuple(words[index : index + size]) == group and not any(breaks[index + 1 : index + size]):
            return size, part, key
    return 1, lexicon.part(words[index]), ""


def _say_parts(units: list[Unit]) -> None:
    """Replaces the parts that depend on the neighbours."""
    before: Unit | None = None
    segment, verbs = 0, 0
    for i, unit in enumerate(units):
        after = units[i + 1] if i + 1 < len(units) and not units[i + 1].breaks else None
        if unit.segment != segment:
            segment, verbs, before = unit.segment, 0, None
        if unit.part in _OPEN:
            unit.part = _part(unit, before, after, verbs)
        verbs += unit.part == "verb"
        if unit.part != "filler":
            before = unit


def _part(unit: Unit, before: Unit | None, after: Unit | None, verbs: int) -> str:
    past = before.part if before else ""
    ahead = after.part if after else ""
    part = unit.part
    match part:
        case "verb-ing":
            leads = ahead in _NOUNISH and (past in _BEFORE_NOUN or not past)
            part = "premod" if leads else "verb"
        case "verb-ed":
            part = "adj" if ahead in _NOUNISH and past not in ("aux", "noun", "pron", "rel") else "verb"
        case "verb-s" | "verb-base":
            part = _finite(unit, before, after, verbs)
        case "adv":
            part = "adj" if ahead in ("adj", "verb-ed") else "verb"
        case "dir" | "not":
            part = _direction(unit, past, ahead)
        case "adj" if past != "aux" and ahead not in _LED:
            # "made of wood", "in soft light"
            named = unit.text in lexicon.PLACES or lexicon.ATTRIBUTES.get(unit.text) == "material"
            part = "noun" if named else "adj"
        case "prep" if not after and past in ("verb", "noun") and unit.text in ("in", "out", "over", "by"):
            part = "verb"
        case "aux" if past in ("det", "adj", "num") and unit.text.endswith("s") and len(unit.text) > 3:
            # "the features"
            part = "noun"
    return part


def _finite(unit: Unit, before: Unit | None, after: Unit | None, verbs: int) -> str:
    """Whether a form as "runs" or "run" is a verb or a noun; `verbs` stand before it in its segment."""
    past = before.part if before else ""
    third = unit.part == "verb-s"
    if past == "noun" and before:
        # "the dog runs", "dogs run", but "the morning run"
        verb = lexicon.noun_key(before.text)[1] != third
    elif past == "style" or past in _BEFORE_NOUN:
        verb = not third and before is not None and before.text == "to"
    elif past == "conj":
        verb = verbs > 0 and not _is_subject(after)
    elif not past:
        verb = third and unit.first > 0 and not _is_subject(after)
    else:
        verb = True
    return "verb" if verb else "noun"


def _is_subject(after: Unit | None) -> bool:
    """Whether what follows needs a noun before it."""
    return after is not None and (after.part.startswith("verb") or after.part == "aux" or after.text == "of")


def _direction(unit: Unit, past: str, ahead: str) -> str:
    if unit.text in ("up", "down") and ahead in ("det", "noun"):
        return "prep"
    if past in ("det", "adj") and " " not in unit.text:
        return "premod" if ahead in NOMINAL else "noun"
    return "verb"


def _segments(units: list[Unit]) -> Iterator[list[Unit]]:
    start = 0
    for i in range(1, len(units) + 1):
        if i == len(units) or units[i].segment != units[start].segment:
            yield units[start:i]
            start = i


def _find_media(segment: list[Unit]) -> None:
    """Where a segment begins with the like of "a video of", "an old photo of", "an oil painting of"."""
    for i, unit in enumerate(segment):
        if unit.part not in _OPENING:
            return
        following = segment[i + 1] if i + 1 < len(segment) else None
        if following is None or following.text not in ("of", "showing", "shows"):
            continue
        if unit.text in _PICTURES:
            unit.part = "style" if unit.text in lexicon.PICTURES else "filler"
        elif unit.part != "camera":
            return
        following.part = "filler"
        for other in segment[:i]:
            if other.part in NOMINAL:
                other.part = "camera" if unit.part == "camera" else "style"
        return


def _find_camera(segment: list[Unit]) -> None:
    subject = next((u for u in segment if u.part not in _BEFORE_SUBJECT), None)
    if subject is not None and subject.text == "camera":
        subject.part = "camera"
    cameras = [i for i, unit in enumerate(segment) if unit.part == "camera"]
    if not cameras:
        return
    last = cameras[-1]
    shows = last + 1 < len(segment) and segment[last + 1].part == "filler"
    if segment[0].segment > 0 and not shows:
        reached = len(segment)
    else:
        # "The camera slowly moves forward": the verb belongs to it.
        reached = last + 1
        while reached < len(segment) and segment[last].text == "camera" and segment[reached].part == "verb":
            reached += 1
    first = cameras[0]
    while first > 0 and segment[first - 1].part in NOMINAL:
        first -= 1
    for unit in segment[0 if reached == len(segment) else first : reached]:
        if unit.part in _SAID:
            unit.part = "camera"


def _find_style(segment: list[Unit]) -> None:
    manner = next((i for i, unit in enumerate(segment) if unit.part == "styleof"), None)
    if manner is not None:
        for unit in segment[manner:]:
            unit.part = "style"
        return
    content = [unit for unit in segment if unit.part in _CONTENT]
    if not content or content[-1].part == "camera":
        return
    last = content[-1]
    if last.text in ("style", "styles"):
        # "in cyberpunk style", "Van Gogh style": back to what the style is named with.
        for unit in reversed(segment[: segment.index(last)]):
            if unit.part not in NOMINAL:
                break
            unit.part = "style"
    apart = segment[0].segment > 0 and not any(unit.part == "verb" for unit in content)
    named = last.part == "style" or last.text in _PICTURES
    if apart and (named or [unit.text for unit in content] == ["black", "white"]):
        for unit in content:
            unit.part = "style"
