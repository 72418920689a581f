"""How deep the built-in model's latents may be reused, by kind of difference: what a model card's tables come from.

    uv run --extra dev python -m tests.bench.boundaries run out.jsonl [--steps 4] [--pairs 40] [--part 0/2]
    uv run --extra dev python -m tests.bench.boundaries read out.jsonl [more.jsonl] [--tolerance 0.02]

`run` takes pairs of prompts that differ in one attribute and makes, with the engine and the policy that workers use, the
target in full and in each arm `K1-K2-gain` from its source's latents. It goes on where the file ends. `read` prints what
each arm computes and gets right, picks on every other pair the cheapest arm that loses no more than the tolerance
against full computation, and reports that arm on the pairs left; beside it stand arms of stage 1 alone, and the one that
the same rule picks for all kinds together: what nirvana, which doesn't know the kind, could use.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.differ import LexicalDiffer, LexicalSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.policy import Candidate, Policy, ReusePolicy
from chorus_batch.chorus.request import Request, Result
from chorus_batch.chorus.segment import EvidenceSegmenter, Source
from chorus_batch.chorus.tiny.checker import read_frames
from chorus_batch.chorus.tiny.pairs import KINDS, Pair, draw_pairs, outcome_of
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.workers.runtime import reuse_policy

ARMS = {
    20: ("8-8-1", "12-12-1", "12-12-2", "14-14-1", "14-14-2", "16-16-1", "16-16-2", "12-16-2", "14-16-2", "14-18-2"),
    4: ("1-1-1", "1-1-2", "2-2-1", "2-2-2", "3-3-1", "1-2-1", "1-2-2", "2-3-1"),
}
# The kinds that the differ tells apart, which a card's tables are for.
DIFFERENCES = {
    "colour": "attribute", "texture": "attribute", "shape": "object", "background": "background", "motion": "motion"
}  # fmt: skip
FULL = "full"
MATCH = 0.8  # the gains' strength depends on it; the tables are asked at no other


@dataclass(frozen=True)
class Record:
    """One target in one arm: right in the attribute that differs, in the other four, and the share of tokens."""

    kind: str
    pair: int
    arm: str
    changed: bool
    kept: bool
    tokens: float

    @property
    def right(self) -> bool:
        return self.changed and self.kept


def policy_of(arm: str, settings: GenerationSettings, card: ModelCard) -> ReusePolicy:
    """The workers' policy, with this arm for every difference."""
    k1, k2, gain = arm.split("-")
    card = replace(
        card,
        boundaries={settings.steps: ((0.0, int(k1), int(k2)),)},
        kinds={},
        gains={"key": float(gain), "output": 1.0, "until": 1.0},
        kind_gains={},
    )
    differ = LexicalDiffer(LexicalSettings(synonyms=card.synonyms))
    return reuse_policy(card, Policy.chorus, differ, differ, EvidenceSegmenter())


def answer(
    engine: Engine, pair: Pair, number: int, settings: GenerationSettings, policies: Mapping[str, ReusePolicy]
) -> list[Record]:
    """The target in full, and in every arm."""
    first, second = (
        Request(question.caption, 10_000 + 2 * number + place, settings, "study")
        for place, question in enumerate((pair.source, pair.target))
    )
    source = engine.generate(first, keep=frozenset(range(1, settings.steps)), evidence=True)
    # Policies remember regions by entry, so each source is one of its own.
    entry = number * len(KINDS) + list(KINDS).index(pair.kind)
    candidate = Candidate(entry, MATCH, Source(first.prompt, source.evidence), source.trajectory)
    offsets = engine.model.token_offsets(second.prompt)
    records = [judged(engine, pair, number, FULL, engine.generate(second))]
    for arm, policy in policies.items():
        decision = policy.decide(second.prompt, offsets, settings, "study", candidate)
        records.append(judged(engine, pair, number, arm, engine.generate(second, decision.reuse)))
    return records


def judged(engine: Engine, pair: Pair, number: int, arm: str, result: Result) -> Record:
    outcome = outcome_of(read_frames(engine.decode(result.latents)), pair)
    share = result.trace.tokens_computed / result.trace.tokens_total
    return Record(pair.kind, number, arm, outcome.changed, outcome.kept, round(share, 4))


def run(options: argparse.Namespace) -> None:
    """Answers every pair of this part that the file lacks."""
    card, known = load_card(options.model), set[tuple[str, int]]()
    if options.out.exists():
        known = {(record.kind, record.pair) for record in read([options.out])}
    of, side, steps = card.defaults, options.size or card.defaults.width, options.steps or card.defaults.steps
    settings = GenerationSettings(side, side, of.frames, of.fps, steps, of.guidance_scale, of.shift)
    if options.radii:
        edit, see = options.radii
        card = replace(card, regions={**card.regions, "edit_spatial": edit, "see_spatial": see})
    policies = {arm: policy_of(arm, settings, card) for arm in options.arms or ARMS[steps]}
    engine = Engine.load(options.model)
    part, parts = map(int, options.part.split("/"))
    pairs = {kind: draw_pairs(kind, options.pairs, options.seed) for kind in options.kinds}
    with options.out.open("a") as file:
        for number in range(part, options.pairs, parts):
            for kind in options.kinds:
                if (kind, number) not in known:
                    for record in answer(engine, pairs[kind][number], number, settings, policies):
                        file.write(json.dumps(asdict(record)) + "\n")
                    file.flush()


def read(paths: Iterable[Path]) -> list[Record]:
    return [Record(**json.loads(line)) for path in paths for line in path.read_text().splitlines()]


def report(records: Sequence[Record], tolerance: float) -> None:
    """A table of all arms by kind, then the arms chosen on even pairs with what they reach on odd ones."""
    by_arm: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        by_arm[record.kind, record.arm].append(record)
    print(f"{'kind':<11} {'arm':<9} {'pairs':>5} {'tokens':>6} {'changed':>7} {'kept':>6} {'all':>6}")
    for (kind, arm), found in by_arm.items():
        line(kind, arm, found)
    print("\nchosen on even pairs, reported on odd ones")
    chosen: list[Record] = []
    for kind in dict.fromkeys(DIFFERENCES[r.kind] for r in records):
        arms = by_name(r for r in records if DIFFERENCES[r.kind] == kind)
        arm = cheapest(even(arms), tolerance)
        line(kind, arm, odd := [r for r in arms[arm] if r.pair % 2])
        chosen += odd
    line("together", "chosen", chosen)
    blind = by_name(r for r in records if r.arm == FULL or is_first_stage_alone(r.arm))
    for arm, found in blind.items():
        line("together", arm, [r for r in found if r.pair % 2])
    print("the first stage alone, for every kind:", cheapest(even(blind), tolerance))


def by_name(records: Iterable[Record]) -> dict[str, list[Record]]:
    arms: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        arms[record.arm].append(record)
    return arms


def even(arms: Mapping[str, Sequence[Record]]) -> dict[str, list[Record]]:
    return {arm: [r for r in found if r.pair % 2 == 0] for arm, found in arms.items()}


def is_first_stage_alone(arm: str) -> bool:
    k1, k2, gain = arm.split("-")
    return k1 == k2 and float(gain) == 1


def line(kind: str, arm: str, records: Sequence[Record]) -> None:
    shares = [float(np.mean([getattr(r, name) for r in records])) for name in ("tokens", "changed", "kept", "right")]
    print(f"{kind:<11} {arm:<9} {len(records):>5} " + " ".join(f"{share:6.3f}" for share in shares))


def cheapest(arms: dict[str, list[Record]], tolerance: float) -> str:
    """The arm of the fewest tokens that is right as often as full computation, less the tolerance."""
    right, tokens = ({arm: np.mean([getattr(r, name) for r in found]) for arm, found in arms.items()}
                     for name in ("right", "tokens"))  # fmt: skip
    return min((arm for arm in arms if right[arm] >= right[FULL] - tolerance), key=lambda arm: float(tokens[arm]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("out", type=Path)
    runs.add_argument("--model", default="builtin")
    runs.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    runs.add_argument("--arms", nargs="+", help="default: those of 20 or of 4 steps")
    runs.add_argument("--radii", nargs=2, type=int, metavar=("EDIT", "SEE"), help="of regions; default: the card's")
    runs.add_argument("--pairs", type=int, default=40)
    runs.add_argument("--size", type=int, help="default: the card's")
    runs.add_argument("--steps", type=int, help="default: the card's")
    runs.add_argument("--seed", type=int, default=3000)
    runs.add_argument("--part", default="0/1", help="which of how many processes this is, each with a file of its own")
    reads = commands.add_parser("read")
    reads.add_argument("files", type=Path, nargs="+")
    reads.add_argument("--tolerance", type=float, default=0.02)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        report(read(options.files), options.tolerance)


if __name__ == "__main__":
    main()
