"""The differ that asks a small instruct model, read from a local folder by transformers.

What the model says counts only where it keeps to the schema and names words that stand in the prompts; everything else
is left to another differ, and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from .differ import SCOPES, Differ, Difference, Kind, LexicalDiffer, Scope, Spans
from .errors import WeightsError
from .lexicon import part, verb_key
from .phrases import read

KEYS = ("kind", "scope", "source_phrase", "target_phrase")
# The answer is an object of four short texts.
MAX_NEW_TOKENS = 96
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
    """A language model that continues a text."""

    def write(self, text: str) -> str:
        """What the model writes after `text`, the same each time. Raises ValueError where it can't."""
        ...


class LlmDiffer:
    """Asks a model, and the `fallback` where the model's answer is invalid.

    `calls` counts the pairs that the model was asked about, `fallbacks` those of them that the other differ had to
    answer: nearly all of them for a model that is too small for the question.
    """

    def __init__(self, model: str | Path | Writer, fallback: Differ | None = None) -> None:
        """`model` is a folder that transformers can load, or what writes. Raises WeightsError for a missing folder."""
        self._writer = LocalModel(Path(model)) if isinstance(model, str | Path) else model
        self._fallback = fallback or LexicalDiffer()
        self.calls = 0
        self.fallbacks = 0

    def compare(self, source: str, target: str) -> Difference:
        """The difference as the model tells it. Raises WeightsError where the model can't be loaded."""
        if source == target:
            return self._fallback.compare(source, target)
        self.calls += 1
        try:
            return parse_answer(self._writer.write(question(source, target)), source, target)
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

    def write(self, text: str) -> str:
        """What the model answers. Raises ValueError where the text is too long for it, WeightsError where it can't be
        loaded."""
        import torch

        model, tokenizer = self._loaded = self._loaded or self._load()
        tokens = _tokens(tokenizer, text).to(self._device)
        room = getattr(model.config, "max_position_embeddings", None)
        if room is not None and tokens.shape[1] + self._max_new_tokens > room:
            raise ValueError(f"{tokens.shape[1]} tokens and {self._max_new_tokens} more don't fit into {room}")
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        with torch.inference_mode():
            written = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=self._max_new_tokens,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=pad,
            )
        return str(tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True))

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{self._folder} can't be loaded as a language model: {error}",
                hint="name a folder that transformers has saved, with its tokenizer",
            ) from error
        return model.to(self._device).eval(), tokenizer


def _tokens(tokenizer: Any, text: str) -> Any:
    """Token ids [1, n]; as the user's turn for a model that was tuned on turns."""
    if not tokenizer.chat_template:
        return tokenizer(text, return_tensors="pt")["input_ids"]
    turns = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already.
    return tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]
