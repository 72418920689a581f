"""How many tokens of a prompt a model reads, counted with the model's own tokenizer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chorus_batch.jobs.errors import DependencyDown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = 8  # generous: no tokenizer adds more tokens of its own to a text
_KNOWN_WORDS = 50_000
_WORD = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9\s]")


def tokenizer_path(name: str) -> Path:
    """The file of a card's tokenizer, `package:path in it` or a path. The package isn't imported: it may pull in torch.

    Raises DependencyDown if it isn't there.
    """
    package, colon, inside = name.rpartition(":")
    path = Path(name)
    if colon and package.isidentifier():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise DependencyDown(
                f"the tokenizer's package {package} isn't installed", hint="install chorus-batch again"
            )
        path = Path(spec.origin).parent / inside
    if not path.is_file():
        raise DependencyDown(f"{path}: there is no tokenizer", hint="check the model card")
    return path


class TokenCounter:
    """Counts tokens, special ones included. Loads the tokenizer only when a prompt comes near a limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tokenizer: Tokenizer | None = None
        self._words: dict[str, int] | None = None  # pieces of ASCII words; None: not a word-by-word tokenizer

    def over(self, texts: Sequence[str], limit: int) -> dict[int, int]:
        """Index -> tokens, of the texts with more than `limit` tokens. Texts must be cleaned."""
        # A token stands for a byte or more: most prompts can't reach a limit of hundreds.
        near = [index for index, text in enumerate(texts) if not _short(text, limit)]
        if not near:
            return {}
        tokenizer = self._loaded()
        if self._words is not None:
            near = [index for index in near if self._bound(texts[index], self._words) > limit]
        encodings = tokenizer.encode_batch_fast([texts[index] for index in near])
        counts = zip(near, (len(encoding.ids) for encoding in encodings), strict=True)
        return {index: count for index, count in counts if count > limit}

    def _bound(self, text: str, words: dict[str, int]) -> int:
        """At least as many tokens as the text has.

        A BERT tokenizer splits at white space and punctuation first and then treats every word by itself, so words that
        were seen needn't be tokenized again.
        """
        if not text.isascii():
            return len(text) + (1 << 30)
        found = _WORD.findall(text)
        try:
            return sum(map(words.__getitem__, found)) + self._special
        except KeyError:
            pass
        if len(words) > _KNOWN_WORDS:
            words.clear()
        fresh = list({word for word in found if word not in words})
        encodings = self._loaded().encode_batch_fast(fresh, add_special_tokens=False)
        words.update(zip(fresh, (len(encoding.ids) for encoding in encodings), strict=True))
        return sum(words[word] for word in found) + self._special

    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            path = tokenizer_path(self._name)
            tokenizer = Tokenizer.from_file(str(path))
            # The file may say to cut and pad every text to one length: then every text would count the same.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            config = json.loads(path.read_text(encoding="utf-8"))
            if config["model"]["type"] == "WordPiece" and (config["pre_tokenizer"] or {})["type"] == "BertPreTokenizer":
                self._words = {}
            self._special = len(tokenizer.encode("").ids)
            self._tokenizer = tokenizer
        return self._tokenizer


def _short(text: str, limit: int) -> bool:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size + _SPECIAL <= limit
