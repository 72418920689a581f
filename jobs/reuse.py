"""What the model card says about reuse in a batch's domains, for the planner; what the planner found, for the user."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from chorus_batch.jobs import templates
from chorus_batch.jobs.cards.card import Boundary, ModelCard
from chorus_batch.jobs.costs import Costs
from chorus_batch.jobs.curve import Curve, Domain, FloatArray, Price, Reuse
from chorus_batch.jobs.depth import rows_at
from chorus_batch.jobs.ingest.notes import Note
from chorus_batch.jobs.kinds import kinds
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.plan import Plan

log = logging.getLogger(__name__)

_SHOWN = 5  # templates named in notes


def domain_of(card: ModelCard, parameters: Parameters, least: float, price: Price) -> Domain:
    """tau and c(m), for each kind of difference too; `least`: the similarity below which the user wants no reuse."""
    semantic = parameters.policy != "none"
    steps = parameters.steps
    general = _reuse(rows_at(card, parameters), steps, least, price)
    # The policy nirvana has the general table alone, whatever differs.
    kinds = known_kinds(card, parameters)
    own = [_reuse(rows_at(card, parameters, kind), steps, least, price) for kind in kinds]
    if general is None:
        return Domain(1.0, Curve(((1.0, 1.0),)), semantic, tuple(own))
    return Domain(general.tau, general.curve, semantic, tuple(own))


def price_of(costs: Costs) -> Price:
    """What a job costs beside full steps, as far as it was measured."""
    if costs.tokens_per_step is None or costs.seconds_per_token is None:
        return Price(costs.region_share.expected)
    step = costs.tokens_per_step * costs.seconds_per_token.expected
    held = {result: spread.expected / step for result, spread in costs.held.items()}
    return Price(costs.region_share.expected, held["miss"], held["semantic"])


def known_kinds(card: ModelCard, parameters: Parameters) -> list[str]:
    """Kinds of difference that have tables of their own, in the order of their codes."""
    return sorted(card.kinds) if parameters.policy == "chorus" else []


def slots_of(
    card: ModelCard,
    prompts: Sequence[str],
    vectors: FloatArray,
    domains: Sequence[Parameters],
    cached: Sequence[str] = (),
) -> tuple[templates.Slots | None, tuple[Note, ...]]:
    """The slots of each prompt, then of each cached one, where templates were found; and notes that say so.

    `vectors`: the prompts' unit embeddings [n, d].
    """
    known = sorted({kind for parameters in domains for kind in known_kinds(card, parameters)})
    found, slots = templates.find(
        prompts, known, partial(kinds, synonyms=card.synonyms) if known else _nobody_knows, cached
    )
    if slots is None:
        return None, ()
    slots = slots.calibrated(vectors)
    told = sorted(zip(found, slots.alike.tolist(), strict=True), key=lambda each: -each[0].prompts)
    return slots, tuple(_note(template, alike) for template, alike in told[:_SHOWN])


def embedder_notes(card: ModelCard, embedder: str) -> tuple[Note, ...]:
    """That the card's thresholds are another embedder's, where they are: those of added models are the paper's."""
    if card.weights is None or embedder.partition(":")[0] == "clip":
        return ()
    message = (
        f"the thresholds of {card.name} are for similarities of CLIP, not of {embedder}: set"
        " CHORUS_EMBEDDER=clip:FOLDER, or CHORUS_MIN_SIMILARITY to what was found to be safe"
    )
    return (Note(kind="embedder", column="prompt", message=message, count=1, line=1),)


def _nobody_knows(pairs: Sequence[tuple[str, str]]) -> list[str | None]:
    """Where the policy makes no difference between kinds."""
    return [None] * len(pairs)


def _note(template: templates.Template, alike: float) -> Note:
    known = all(template.kinds)
    follows = "reuse follows the model's tables for what the slots hold"
    needs = f"a pair must be more similar than {alike:.2f}, which two prompts of it are by the template alone"
    rule = follows if known else f"{follows} where that is known, else {needs}" if any(template.kinds) else needs
    message = f"{template.prompts} prompts are filled into one template; {rule}: {template}"
    return Note(kind="template", column="prompt", message=message, count=1, line=1)


def reported(planned: Plan) -> dict[str, object]:
    """For the stored plan and the log: on how many pairs it stands, and what share of nearest neighbors was found."""
    for graph in planned.graphs:
        found = (
            "no sampled row has a neighbor" if graph.recall is None else f"nearest neighbors found {graph.recall:.3f}"
        )
        log.info("plan: %d rows, %d entries, %d pairs, %s", graph.rows, graph.entries, graph.arcs, found)
    found_shares = [graph.recall for graph in planned.graphs if graph.recall is not None]
    return {
        "recall": min(found_shares, default=None),
        "pairs": sum(graph.arcs for graph in planned.graphs),
        "entries": sum(graph.entries for graph in planned.graphs),
    }


def _reuse(rows: Sequence[Boundary], steps: int, least: float, price: Price) -> Reuse | None:
    if not rows:
        return None
    curve = Curve.of_boundaries(rows, steps, price)
    return Reuse(max(rows[0][0], least), curve)
