"""What the rows of a batch ask for, as columns: all that planning needs of them."""

from __future__ import annotations

import hashlib
import unicodedata
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from chorus_batch.jobs.graph import AUTO, FORCE, OFF
from chorus_batch.jobs.ingest.rows import Row
from chorus_batch.jobs.parameters import Parameters

_REUSE = {"auto": AUTO, "force": FORCE, "off": OFF}


@dataclass
class Requested:
    """What planning needs of the rows, compact: about 70 bytes a row, and the text of each different prompt."""

    domains: list[Parameters] = field(default_factory=list)
    domain: array[int] = field(default_factory=lambda: array("i"))
    prompt: array[int] = field(default_factory=lambda: array("q"))
    request: array[int] = field(default_factory=lambda: array("q"))
    reuse: array[int] = field(default_factory=lambda: array("b"))
    priority: array[int] = field(default_factory=lambda: array("q"))
    prompt_keys: list[bytes] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # cleaned
    given_ids: Collection[str] = ()  # that rows brought along
    _domain_codes: dict[Parameters, int] = field(default_factory=dict)
    _prompt_codes: dict[bytes, int] = field(default_factory=dict)
    _request_codes: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.domain)

    def add(self, row: Row) -> None:
        """Append a row."""
        domain = self._domain_codes.setdefault(_without_fps(row.parameters), len(self.domains))
        if domain == len(self.domains):
            self.domains.append(_without_fps(row.parameters))
        key = prompt_key(row.cleaned_prompt)
        prompt = self._prompt_codes.setdefault(key, len(self.prompts))
        if prompt == len(self.prompts):
            self.prompts.append(row.cleaned_prompt)
            self.prompt_keys.append(key)
        request = (domain, prompt, row.seed, row.parameters.fps)
        self.domain.append(domain)
        self.prompt.append(prompt)
        self.request.append(self._request_codes.setdefault(request, len(self._request_codes)))
        self.reuse.append(_REUSE[row.reuse])
        self.priority.append(row.priority)


def prompt_key(cleaned_prompt: str) -> bytes:
    """sha256 of a cleaned prompt; equal for equal text in whatever Unicode form."""
    return hashlib.sha256(unicodedata.normalize("NFC", cleaned_prompt).encode()).digest()


def _without_fps(parameters: Parameters) -> Parameters:
    # The frame rate doesn't touch the latents: rows that differ in nothing else may reuse each other.
    return parameters if parameters.fps == 1 else replace(parameters, fps=1)
