"""What the model card says about reuse in a batch's domains, for the planner; what the planner found, for the user."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from chorus_batch.jobs import templates
from chorus_batch.jobs.cards.card import Boundary, ModelCard
from chorus_batch.jobs.curve import Curve, Domain, Reuse
from chorus_batch.jobs.depth import rows_at
from chorus_batch.jobs.ingest.notes import Note
from chorus_batch.jobs.kinds import kinds
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.plan import Plan

log = logging.getLogger(__name__)

_SHOWN = 5  # templates named in notes


def domain_of(card: ModelCard, parameters: Parameters, least: float) -> Domain:
    """tau and c(m), for each kind of difference too; `least`: the similarity below which the user wants no reuse."""
    semantic = parameters.policy != "none"
    general = _reuse(rows_at(card, parameters), parameters.steps, least)
    # The policy nirvana has the general table alone, whatever differs.
    own = [_reuse(rows_at(card, parameters, kind), parameters.steps, least) for kind in known_kinds(card, parameters)]
    if general is None:
        return Domain(1.0, Curve(((1.0, 1.0),)), semantic, tuple(own))
    return Domain(general.tau, general.curve, semantic, tuple(own))


def known_kinds(card: ModelCard, parameters: Parameters) -> list[str]:
    """Kinds of difference that have tables of their own, in the order of their codes."""
    return sorted(card.kinds) if parameters.policy == "chorus" else []


def slots_of(
    card: ModelCard, prompts: Sequence[str], domains: Sequence[Parameters]
) -> tuple[templates.Slots | None, tuple[Note, ...]]:
    """Each prompt's slots where templates were found and the card tells kinds apart, and notes that say so."""
    known = sorted({kind for parameters in domains for kind in known_kinds(card, parameters)})
    if not known:
        return None, ()
    found, slots = templates.find(prompts, known, partial(kinds, synonyms=card.synonyms))
    notes = tuple(
        Note(
            kind="template",
            column="prompt",
            message=f"{each.prompts} prompts are filled into one template: where one slot differs whose kind is known,"
            f" reuse follows the model's table for that kind: {each}",
            count=1,
            line=1,
        )
        for each in sorted(found, key=lambda each: -each.prompts)[:_SHOWN]
    )
    return slots, notes


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


def _reuse(rows: Sequence[Boundary], steps: int, least: float) -> Reuse | None:
    if not rows:
        return None
    curve = Curve.of_boundaries(rows, steps)
    return Reuse(max(rows[0][0], least), curve)


def of_prompts(slots: templates.Slots | None, prompt: np.ndarray) -> templates.Slots | None:
    """The rows' slots, from those of their prompts."""
    return None if slots is None else slots[np.asarray(prompt, np.int64)]
