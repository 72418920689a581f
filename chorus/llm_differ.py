"""The differ that asks a small instruct model, read from a local folder by transformers.

What the model says counts only where it keeps to the schema and names words that stand in the prompts; everything else
is left to another differ, and counted.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .answers import AnswerFile
from .differ import SCOPES, Differ, Difference, Kind, LexicalDiffer, Scope, Spans
from .errors import WeightsError
from .lexicon import part, verb_key
from .loading import LOADING
from .phrases import read

KEYS = ("kind", "scope", "source_phrase", "target_phrase")
# The answer is an object of four short texts.
MAX_NEW_TOKENS = 96
AT_ONCE = 16  # pairs in one pass of the model
REMEMBERED = 8192  # pairs
INSTRUCTION = """Two prompts for videos are given. Say what differs between them, as one JSON object with four texts:
"kind": one of attribute (colour, size, texture or material of an object), object (another object), background \
(another place, backdrop, weather or light), motion, camera, style, several (more than one of these).
"scope": object if only the region of an object changes, background if only what is around it changes, else everything.
"source_phrase": words of prompt A, copied, that name the object that changes; if the background changes, those that \
name the object that stays; "" if there is none.
"target_phrase": words of prompt B, copied, that name what is new; "" if there is none.

A: a spotted dog runs in a park
B: a black dog runs in a park
{"kind": "attribute", "scope": "object", "source_phrase": "spotted dog", "target_phrase": "black dog"}

A: a boat on a calm lake
B: a boat on a stormy sea
{"kind": "background", "scope": "background", "source_phrase": "boat", "target_phrase": "stormy sea"}

A: a woman walks along the street
B: a woman dances along the street
{"kind": "motion", "scope": "everything", "source_phrase": "woman", "target_phrase": "dances"}
"""


class InvalidAnswer(ValueError):
    """The model's text isn't an answer: no object, another schema, or words that no prompt holds."""


class Writer(Protocol):
    """A language model that continues texts."""

    def write(self, texts: Sequence[str]) -> list[str | None]:
        """What the model writes after each text, the same each time; None after one that is too long for it."""
        ...


class LlmDiffer:
    """Asks a model, and the `fallback` where the model's answer is invalid.

    What was found is remembered by pair, and what the model wrote in the file `answers`, if there is one. `calls`
    counts the pairs that an answer of the model was looked at for, `fallbacks` those of them that the other differ had
    to answer: nearly all of them for a model that is too small for the question.
    """

    def __init__(
        self, model: str | Path | Writer, fallback: Differ | None = None, answers: AnswerFile | None = None
    ) -> None:
        """`model` is a folder that transformers can load, or what writes. Raises WeightsError for a missing folder."""
        self._writer = LocalModel(Path(model)) if isinstance(model, str | Path) else model
        self._fallback = fallback or LexicalDiffer()
        self._answers = answers
        self._found: OrderedDict[tuple[str, str], Difference] = OrderedDict()
        self.calls = 0
        self.fallbacks = 0

    def compare(self, source: str, target: str) -> Difference:
        """The difference as the model tells it. Raises WeightsError where the model can't be loaded."""
        (found,) = self.compare_many([(source, target)])
        return found

    def compare_many(self, pairs: Sequence[tuple[str, str]]) -> list[Difference]:
        """The difference of each (source, target), as `compare` has it; the model is asked about all at once."""
        fresh = [pair for pair in dict.fromkeys(pairs) if not self.knows(*pair)]
        told = dict(zip(fresh, self._told([question(*pair) for pair in fresh]), strict=True))
        found = []
        for pair in pairs:
            if pair in told:
                self._found[pair] = self._read(told.pop(pair), *pair)
            if pair in self._found:
                self._found.move_to_end(pair)
            found.append(self._found[pair] if pair in self._found else self._fallback.compare(*pair))
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)
        return found

    def knows(self, source: str, target: str) -> bool:
        """Whether the model needn't be asked about a pair: it was, or nothing differs."""
        return source == target or (source, target) in self._found

    def _told(self, questions: Sequence[str]) -> list[str | None]:
        """The model's answers, from the file where it has them."""
        told = {text: self._answers.get(text) if self._answers is not None else None for text in questions}
        asked = [text for text, answer in told.items() if answer is None]
        for text, answer in zip(asked, self._writer.write(asked) if asked else [], strict=True):
            told[text] = answer
            if self._answers is not None and answer is not None:
                self._answers.add(text, answer)
        return [told[text] for text in questions]

    def _read(self, answer: str | None, source: str, target: str) -> Difference:
        self.calls += 1
        try:
            if answer is None:
                raise InvalidAnswer("the prompts are too long for the model")
            return parse_answer(answer, source, target)
        except ValueError:
            self.fallbacks += 1
            return self._fallback.compare(source, target)


def question(source: str, target: str) -> str:
    """What the model is asked."""
    # A line each, whatever the prompts hold.
    first, second = (" ".join(text.split()) for text in (source, target))
    return f"{INSTRUCTION}\nA: {first}\nB: {second}\n"


def parse_answer(text: str, source: str, target: str) -> Difference:
    """The first JSON object in the model's text, checked against the schema and the prompts. Raises InvalidAnswer."""
    answer = _object(text)
    if set(answer) != set(KEYS) or not all(isinstance(value, str) for value in answer.values()):
        raise InvalidAnswer(f"the answer must have the texts {', '.join(KEYS)}, not {answer}")
    try:
        kind, scope = Kind(answer["kind"]), Scope(answer["scope"])
    except ValueError as error:
        raise InvalidAnswer(str(error)) from None
    if scope not in (SCOPES[kind], Scope.everything):
        raise InvalidAnswer(f"a difference of the kind {kind} isn't one of the scope {scope}")
    source_spans, target_spans = _find(answer["source_phrase"], source), _find(answer["target_phrase"], target)
    if not source_spans and not target_spans:
        raise InvalidAnswer("the prompts differ, and the answer names no word of them")
    return Difference(
        kind,
        scope,
        _cut(source, source_spans),
        _cut(target, target_spans),
        _whole(source_spans),
        _fresh(target, target_spans, _cut(source, source_spans)),
    )


def _object(text: str) -> dict[str, Any]:
    start = text.find("{")
    if start < 0:
        raise InvalidAnswer("the answer holds no object")
    try:
        # A small model seldom stops where it should: what follows the object is left out.
        answer, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise InvalidAnswer(f"the answer is no JSON: {error}") from None
    return dict(answer)


def _find(phrase: str, prompt: str) -> Spans:
    """The spans of the phrase's words where the prompt first holds them one after another, leading articles left out;
    none for an empty phrase. Raises InvalidAnswer where the prompt doesn't hold them."""
    wanted, held = read(phrase.strip()).words, read(prompt)
    if not wanted:
        if phrase.strip():
            raise InvalidAnswer(f"{phrase!r} holds no word")
        return ()
    size = len(wanted)
    for first in range(len(held.words) - size + 1):
        if held.words[first : first + size] == wanted:
            spans = held.spans[first : first + size]
            kept = next((i for i, word in enumerate(wanted) if word not in ("a", "an", "the")), size)
            return spans[kept:] or spans
    raise InvalidAnswer(f"{phrase!r} doesn't stand in {prompt!r}")


def _cut(prompt: str, spans: Spans) -> str:
    return prompt[spans[0][0] : spans[-1][1]] if spans else ""


def _whole(spans: Spans) -> Spans:
    return ((spans[0][0], spans[-1][1]),) if spans else ()


def _fresh(prompt: str, spans: Spans, other: str) -> Spans:
    """The words that the other phrase lacks, articles and the like left out."""
    known = {verb_key(word) for word in read(other).words}
    words = [(span, prompt[slice(*span)].lower()) for span in spans]
    return tuple(
        span for span, word in words if verb_key(word) not in known and part(word) not in ("det", "aux", "conj")
    )


class LocalModel:
    """A causal language model and its tokenizer from a folder; greedy, so that the same text gets the same answer."""

    def __init__(self, folder: Path, *, device: str = "cpu", max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        """Loads nothing yet: transformers takes seconds to import. Raises WeightsError for a missing folder."""
        if not (folder / "config.json").is_file():
            raise WeightsError(f"{folder} holds no language model", hint="name a folder that transformers has saved")
        self._folder, self._device, self._max_new_tokens = folder, device, max_new_tokens
        self._loaded: tuple[Any, Any] | None = None  # model, tokenizer

    def write(self, texts: Sequence[str]) -> list[str | None]:
        """What the model answers to each, None where a text is too long for it. Raises WeightsError where it can't be
        loaded."""
        model, tokenizer = self._loaded = self._loaded or self._load()
        room = getattr(model.config, "max_position_embeddings", None)
        tokens = [_tokens(tokenizer, text) for text in texts]
        fits = [i for i, ids in enumerate(tokens) if room is None or len(ids) + self._max_new_tokens <= room]
        written: list[str | None] = [None] * len(texts)
        # Those that are about as long go together: little is padded.
        fits.sort(key=lambda i: len(tokens[i]))
        for first in range(0, len(fits), AT_ONCE):
            some = fits[first : first + AT_ONCE]
            for i, text in zip(some, self._continued([tokens[i] for i in some]), strict=True):
                written[i] = text
        return written

    def _continued(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """What the model writes after each text, given as token ids, in one batch."""
        import torch

        assert self._loaded is not None
        model, tokenizer = self._loaded
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # On the left: a text has to end where the model goes on.
        longest = max(map(len, texts))
        ids = torch.tensor([[pad] * (longest - len(text)) + list(text) for text in texts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=self._device)
        with torch.inference_mode():
            written = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self._max_new_tokens,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=pad,
            )
        return [str(text) for text in tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True)]

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            with LOADING:
                tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
                model: Any = AutoModelForCausalLM.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{self._folder} can't be loaded as a language model: {error}",
                hint="name a folder that transformers has saved, with its tokenizer",
            ) from error
        return model.to(self._device).eval(), tokenizer


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids; as the user's turn for a model that was tuned on turns."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    return list(tokenizer(chat, add_special_tokens=False)["input_ids"])
