"""Inline flags of a prompt file: `a cat --w 832 --h 480 --f 81 --d 42 --s 20 --g 7.5 --fs 3 --n low quality`.

The flags are those of kohya's and musubi-tuner's sample prompts; the long ones are the column names.
"""

from __future__ import annotations

import re

from chorus_batch.jobs.ingest.columns import meaning

FLAGS = {
    "w": "width",
    "h": "height",
    "f": "frames",
    "d": "seed",
    "s": "steps",
    "g": "guidance_scale",
    "l": "guidance_scale",
    "fs": "shift",
    "n": "negative_prompt",
}
_FLAG = re.compile(r"(?:^|\s)--(?=[A-Za-z])")


class FlagError(Exception):
    """A flag that can't be read. `flag` is its name, `code` the row error's."""

    def __init__(self, flag: str, code: str, message: str) -> None:
        super().__init__(message)
        self.flag = flag
        self.code = code


def split_flags(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Column -> text, and column -> the flag as written, of one line. Raises FlagError.

    A dash pair that no letter follows (`dusk -- rain`) is part of the prompt.
    """
    prompt, *flags = _FLAG.split(text)
    cells = {"prompt": prompt.strip()} if prompt.strip() else {}
    names = {"prompt": "prompt"} if cells else {}
    for part in flags:
        flag, _, value = part.partition(" ")
        column = FLAGS.get(flag) or meaning(flag)
        if column is None:
            known = " ".join(f"--{name}" for name in FLAGS)
            raise FlagError(f"--{flag}", "unknown_flag", f"unknown flag --{flag[:40]}; known: {known}")
        if column in cells:
            raise FlagError(f"--{flag}", "duplicate_key", f"--{flag} and {names[column]} both give the {column}")
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] == '"'
        cells[column] = value[1:-1] if quoted else value
        names[column] = f"--{flag}"
    return cells, names
