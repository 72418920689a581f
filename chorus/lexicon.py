"""What the lexical differ knows of English: the part that a word plays on its own, and the key of its meaning.

The lists stand in lexicon.toml. Two words of one key mean the same: another form of a word, or a synonym.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

VOWELS = frozenset("aeiou")
# A word may hold apostrophes and hyphens: "bird's", "medium-sized".
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")


def words_of(text: str) -> list[tuple[tuple[int, int], str]]:
    """The words of a text: their characters' spans, and themselves in lower case with a straight apostrophe."""
    return [(match.span(), match.group().lower().replace("\u2019", "'")) for match in _WORD.finditer(text)]


with Path(__file__).with_name("lexicon.toml").open("rb") as _file:
    _LISTS: dict[str, dict[str, Any]] = tomllib.load(_file)


def _set(section: str, name: str) -> frozenset[str]:
    return frozenset(_LISTS[section][name].split())


def _by_word(section: str) -> dict[str, str]:
    """word -> the name of its list."""
    return {word: name for name, words in _LISTS[section].items() for word in words.split()}


# word -> colour, size, texture, material or look
ATTRIBUTES = {
    word: sort for sort in ("colour", "size", "texture", "material", "look") for word in _set("attribute", sort)
}
NEUTRAL = _set("attribute", "neutral")
# What names nothing that could be seen.
FUNCTION_WORDS = frozenset().union(
    *(
        _set("grammar", name)
        for name in (
            "determiner",
            "auxiliary",
            "preposition",
            "conjunction",
            "pronoun",
            "relative",
            "filler",
            "negation",
        )
    )
)
PLACES = _set("place", "nature") | _set("place", "built") | _set("place", "moment")
BACKDROPS = _set("place", "backdrop")
PLACE_PREPOSITIONS = _set("place", "prepositions")
SURFACE_PREPOSITIONS = _set("place", "surface_prepositions")
RELATIONS = _by_word("relation")
DIRECTIONS = _by_word("direction")
PICTURES = _set("look", "pictures")
MEDIA = _set("look", "media")
SYNONYMS: dict[str, str] = {
    word: line.split()[0] for line in _LISTS["lemma"]["synonyms"].splitlines() for word in line.split()[1:]
}
# A verb and its direction that are one motion together.
MOTION_PAIRS = {
    ("move", "up"): "rise",
    ("move", "down"): "fall",
    ("rise", "up"): "rise",
    ("fall", "down"): "fall",
    ("bounce", "updown"): "bounce",
}


def _groups() -> dict[str, list[tuple[tuple[str, ...], str, str]]]:
    """By first word, the longest first: (words, part, key) of words that are one together."""
    groups: dict[str, list[tuple[tuple[str, ...], str, str]]] = {}
    for tag, key, *texts in _LISTS["groups"]["all"]:
        for words in map(str.split, texts):
            groups.setdefault(words[0], []).append((tuple(words), tag, key))
    for entries in groups.values():
        entries.sort(key=lambda entry: -len(entry[0]))
    return groups


def _doubled(base: str) -> str:
    """The last letter twice, as in "hopping": for words of one vowel, which is what English mostly does."""
    short = sum(letter in VOWELS for letter in base) == 1
    closed = len(base) > 2 and base[-1] not in VOWELS | set("wxyh") and base[-2] in VOWELS
    return base + base[-1] if short and closed else base


def _third(base: str) -> str:
    if base.endswith("y") and base[-2] not in VOWELS:
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "sh", "ch", "x", "z")) else "s")


def _participle(base: str) -> str:
    if base.endswith("ie"):
        return base[:-2] + "ying"
    if base.endswith("e") and not base.endswith(("ee", "oe", "ye")):
        return base[:-1] + "ing"
    return _doubled(base) + "ing"


def _past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if base.endswith("y") and base[-2] not in VOWELS:
        return base[:-1] + "ied"
    return _doubled(base) + "ed"


def _verbs() -> dict[str, tuple[str, str]]:
    """form -> (lemma, shape): base, s, ing or ed."""
    regular, irregular = _set("verb", "regular"), _LISTS["verb"]["irregular"]
    forms: dict[str, tuple[str, str]] = {}
    for base in sorted(regular):
        forms |= {_past(base): (base, "ed"), _third(base): (base, "s"), _participle(base): (base, "ing")}
    for base, text in irregular.items():
        for form in text.split():
            shape = "ing" if form.endswith("ing") else "s" if form.endswith("s") else "ed"
            forms[form] = (base, shape)
    forms |= {base: (base, "base") for base in sorted((regular | irregular.keys()) - _set("verb", "nouns_when_bare"))}
    nouns = _set("verb", "nouns_in_ing") | _set("verb", "nouns_with_s")
    return {form: verb for form, verb in forms.items() if form not in nouns}


GROUPS = _groups()
VERBS = _verbs()
_NOUNS_IN_ING = _set("verb", "nouns_in_ing")
_SINGULARS_IN_S = _set("lemma", "singulars_in_s")
_PLURALS: dict[str, str] = _LISTS["lemma"]["plurals"]
_NOT_ADVERBS = _set("verb", "not_adverbs")
_ADJECTIVE_ENDINGS = tuple(_LISTS["attribute"]["like_adjectives"].split())
_ENDINGS = tuple(_LISTS["attribute"]["endings"].split())


def _parts() -> dict[str, str]:
    """word -> the part it plays; of two lists that hold a word, the first counts."""
    order = (
        ("pron", _set("grammar", "pronoun")),
        ("rel", _set("grammar", "relative")),
        ("prep", _set("grammar", "preposition")),
        ("aux", _set("grammar", "auxiliary")),
        ("filler", _set("grammar", "filler")),
        ("conj", _set("grammar", "conjunction")),
        ("det", _set("grammar", "determiner")),
        ("num", _set("grammar", "number")),
        ("not", _set("grammar", "negation")),
        ("dir", DIRECTIONS),
        ("adj", ATTRIBUTES.keys() | _set("attribute", "in_ing")),
        ("camera", _set("look", "camera")),
        ("style", _set("look", "style")),
        ("adv", _set("verb", "adverbs")),
    )
    return {word: part for part, words in reversed(order) for word in words}


PARTS = _parts()


@lru_cache(maxsize=65536)
def part(word: str) -> str:
    """The part of a lower-case word on its own: one of `PARTS`' values, else "verb-" and its shape, or noun."""
    if word in PARTS:
        return PARTS[word]
    if word in VERBS:
        return f"verb-{VERBS[word][1]}"
    return _by_ending(word)


def _by_ending(word: str) -> str:
    if word[0].isdigit():
        return "num"
    if word.endswith(_ENDINGS):
        return "adj"
    if word.endswith(("-style", "-esque", "-styled")):
        return "style"
    if word.endswith("ly") and len(word) > 4 and word not in _NOT_ADVERBS:
        return "adv"
    if word.endswith("ing") and word not in _NOUNS_IN_ING and any(letter in VOWELS for letter in word[:-3]):
        return "verb-ing"
    return "noun"


def word_key(word: str) -> str:
    """The key of a lower-case word that isn't inflected, as an attribute."""
    return SYNONYMS.get(word, word)


@lru_cache(maxsize=65536)
def noun_key(word: str) -> tuple[str, bool]:
    """(key, whether it is a plural) of a lower-case noun."""
    word = word.removesuffix("'s").removesuffix("\u2019s")
    if word in _PLURALS:
        return word_key(_PLURALS[word]), True
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    if not plural or word in _SINGULARS_IN_S:
        return word_key(word), False
    return word_key(_singular(word)), True


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses", "zes", "toes")):
        return word[:-2]
    return word[:-1]


@lru_cache(maxsize=65536)
def verb_key(word: str) -> str:
    """The key of a lower-case verb, direction or adverb, whatever its form."""
    if word in VERBS:
        return word_key(VERBS[word][0])
    if word in DIRECTIONS:
        return DIRECTIONS[word]
    if word.endswith("ing") and len(word) > 4:
        stem = word[:-3]
        return word_key(stem[:-1] if stem[-1] == stem[-2] and stem[-1] not in "lsz" else stem)
    return word_key(word)


def sounds_like_adjective(word: str) -> bool:
    """By its ending; a guess, for words that stand in no list."""
    return len(word) > 4 and word.endswith(_ADJECTIVE_ENDINGS)
