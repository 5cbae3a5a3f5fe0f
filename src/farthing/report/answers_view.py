"""What a run that compares answers shows: its figures over the steps, what is odd in them, and what
was saved by computing prompts and references once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farthing.objectives.registry import find_objective
from farthing.report.receipt_types import OfAnswers
from farthing.storage.files import Json

_FALLS = 0.05
"""Of the reward of chosen answers, from where its fall is worth a word."""
_LONGER = 1.15
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
    shared = 0.0
    if n_computed and n_tokens > n_computed:
        shared = n_tokens / n_computed - 1.0
    live = 0.0
    if objective.needs_reference:  # a forward pass beside each: 2 of 6, or of 4 with an adapter
        is_full = (job.get("method") or {}).get("name") == "full"
        live = (1 / 3 if is_full else 1 / 2) * compute_s
    spared_s = max(0.0, live - spans.get("reference", 0.0))
    rate = compute_usd / compute_s if compute_s else 0.0
    return OfAnswers(
        figures={name: curves[name] for name in objective.figures if name in curves},
        notes=_notes(curves),
        shared_share=shared / (1 + shared),
        shared_s=shared * compute_s,
        shared_usd=shared * compute_usd,
        reference_s=spared_s,
        reference_usd=spared_s * rate,
    )


def _notes(curves: Mapping[str, Points]) -> list[str]:
    notes = []
    chosen, rejected = (_ends(curves.get(f"rewards/{side}", ())) for side in ("chosen", "rejected"))
    if chosen and rejected and chosen[1] < chosen[0] - _FALLS:
        notes.append(
            f"The reward of the chosen answers fell from {chosen[0]:.3g} to {chosen[1]:.3g}: they"
            " became less likely than before training, as often happens while the margin grows."
            " A term that learns them (loss_type: [sigmoid, sft]) or apo_zero holds them up."
        )
    lengths = [_ends(curves.get(f"length/{side}", ())) for side in ("chosen", "rejected")]
    by_sum, by_token = (
        _ends(curves.get("rewards/accuracies", ())),
        _ends(curves.get("accuracy", ())),
    )
    if lengths[0] and lengths[1] and by_sum and by_token:
        longer = lengths[0][1] / max(1.0, lengths[1][1])
        gained, by_mean = by_sum[1] - by_sum[0], by_token[1] - by_token[0]
        if longer > _LONGER and gained > 0.1 and by_mean < 0.25 * gained:
            notes.append(
                f"Chosen answers are {longer - 1:.0%} longer, and accuracy a token grew by"
                f" {by_mean:+.2f} where accuracy of sums grew by {gained:+.2f}: the model may"
                " mostly have learned length. sigmoid_norm and simpo compare answers by token."
            )
    return notes


def _ends(points: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The means of the first and of the last fifth."""
    if len(points) < 5:
        return None
    n = max(1, len(points) // 5)
    first, last = ([y for _, y in part] for part in (points[:n], points[-n:]))
    return sum(first) / n, sum(last) / n
