"""Kinds of difference of pairs of prompts, as a process: JSON Lines of [source, target] in, a line of kinds for each.

The first is the difference's own kind; where that is "several", the kinds that it consists of follow it. The argument
is a JSON list of the model's synonyms, a list of words each.

A forecast needs what the engine's differ will find, and `jobs` doesn't know the engine: it starts this.
"""

from __future__ import annotations

import json
import sys

from chorus_batch.chorus.differ import LexicalDiffer, LexicalSettings


def main() -> None:
    """Until standard input ends."""
    differ = LexicalDiffer(LexicalSettings(synonyms=tuple(map(tuple, json.loads(sys.argv[1])))))
    for line in sys.stdin:
        source, target = json.loads(line)
        found = differ.compare(source, target)
        print(*dict.fromkeys([found.kind.value, *(kind.value for kind, _ in found.parts)]))


if __name__ == "__main__":
    main()
