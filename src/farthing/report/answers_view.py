"""What a run that compares answers shows: figures, oddities, and the work it saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farthing.objectives.registry import find_objective
from farthing.report.receipt_types import OfAnswers
from farthing.report.words import lines
from farthing.storage.files import Json

Points = list[list[float]]


def answers_of(
    job: Json | None,
    curves: Mapping[str, Points],
    spans: Mapping[str, float],
    usd_of: Mapping[str, float],
    n_tokens: int,
    n_computed: int | None,
) -> OfAnswers | None:
    """None of a run without such figures. `n_tokens` with every prompt, `n_computed` of them."""
    objective = find_objective(str((job or {}).get("task", "")))
    if objective is None or not objective.learns_units or job is None:
        return None
    compute_s, compute_usd = spans.get("compute", 0.0), usd_of.get("compute", 0.0)
    shared = max(0.0, n_tokens / n_computed - 1.0) if n_computed else 0.0
    live = 0.0
    if objective.needs_reference:  # a forward pass beside each: 2 of 6, or of 4 with an adapter
        is_full = (job.get("method") or {}).get("name") == "full"
        live = (1 / 3 if is_full else 1 / 2) * compute_s
    spared_s = max(0.0, live - spans.get("reference", 0.0))
    rate = compute_usd / compute_s if compute_s else 0.0
    ends = {name: _ends(points) for name, points in curves.items()}
    return OfAnswers(
        figures={name: curves[name] for name in objective.figures if name in curves},
        notes=lines("receipt.txt", "answers_notes", ends),
        shared_share=shared / (1 + shared),
        shared_s=shared * compute_s,
        shared_usd=shared * compute_usd,
        reference_s=spared_s,
        reference_usd=spared_s * rate,
    )


def _ends(points: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The means of the first and of the last fifth."""
    if len(points) < 5:
        return None
    n = max(1, len(points) // 5)
    first, last = ([y for _, y in part] for part in (points[:n], points[-n:]))
    return sum(first) / n, sum(last) / n
