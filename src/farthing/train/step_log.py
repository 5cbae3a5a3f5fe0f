"""Steps that were taken, read and written down: the log, the meter, the ledger and what the person sees.

On a GPU the figures of a step arrive later than the step is taken; `settle` waits for them. A step whose loss or gradient
is not finite is counted and named. Refuses to save or to train.
"""

from __future__ import annotations

import math
from typing import Any

from farthing.errors import NotFinite
from farthing.model.compiled import n_graphs
from farthing.model.hardware import peak_bytes
from farthing.train.attempt import Attempt
from farthing.train.forecast import remaining_s, takes
from farthing.train.settled import keep_settings
from farthing.train.step import StepResult

FORECAST_AFTER_STEPS = 5


def settle(attempt: Attempt, most_in_flight: int = 0) -> None:
    """Read the figures of steps that were taken, but for the last `most_in_flight`. Raises `NotFinite`."""
    while len(attempt.in_flight) > most_in_flight:
        taken = attempt.in_flight.popleft()
        losses, norm = note(attempt, taken)
        judge_finite(attempt, taken, losses, norm)


def note_rest(attempt: Attempt) -> None:
    """Read what is left without judging it."""
    while attempt.in_flight:
        note(attempt, attempt.in_flight.popleft())


def note(attempt: Attempt, taken: StepResult) -> tuple[list[float], float]:
    """Put a step in the log, on the meter and before the user. Returns its losses and gradient norm."""
    meter, clocks = attempt.context.meter, attempt.clocks
    with meter.span("compute"):  # a GPU is waited for here
        losses, norm = taken.read()
    meter.move("compute", "optimizer", taken.update_s())
    step, sums, loss = taken.step + 1, taken.sums, math.fsum(losses)
    n_tokens = int(attempt.train_examples.tokens.lengths[sums.examples].sum())
    row = {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": norm if math.isfinite(norm) else None,
        "lr": taken.learning_rate,
        "n_targets": sums.n_targets,
        "n_tokens": n_tokens,
        "examples": sums.examples.tolist(),
    }
    attempt.log.append(row)
    _note_compiling(attempt)
    seconds, peak = meter.wall_s - max(taken.started_s, clocks.settled_s), peak_bytes(attempt.numerics.device)
    clocks.settled_s = meter.wall_s
    attempt.pace.step_done(n_tokens, sums.n_computed, seconds)
    n_pieces = len(sums.pieces)
    attempt.record.step_done(n_pieces, n_tokens, sums.n_computed, sums.n_targets, seconds, meter.spans, peak)
    report_step(attempt, row)
    return losses, norm


def _note_compiling(attempt: Attempt) -> None:
    """A step in which torch has compiled is warm-up: its time goes under that name, and figures begin anew."""
    meter, clocks = attempt.context.meter, attempt.clocks
    compute_s, n = meter.spans.get("compute", 0.0), n_graphs()
    if isinstance(attempt.kernels.compiled, int) and n > clocks.n_graphs:
        meter.move("compute", "compile", compute_s - clocks.compute_s)
        attempt.pace.begin_again()
        attempt.record.begin_again()
    clocks.n_graphs, clocks.compute_s = n, meter.spans.get("compute", 0.0)


def judge_finite(attempt: Attempt, taken: StepResult, losses: list[float], norm: float) -> None:
    """Count a skipped step and name its samples. Raises `NotFinite` when there were too many in a row."""
    at, scaler = attempt.progress, attempt.scaler
    loss, step = math.fsum(losses), taken.step + 1
    if math.isfinite(loss) and math.isfinite(norm):
        at.skipped_in_a_row = 0
        return
    at.skipped_steps += 1
    if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
        attempt.log.append({"step": step, "skipped": "the gradients overflowed fp16"})
        attempt.warn(f"step {step}: gradients overflowed fp16, scale now {scaler.get_scale():g}; step skipped")
        return
    at.skipped_in_a_row += 1
    pieces = taken.sums.pieces
    guilty = [piece for piece, value in zip(pieces, losses, strict=True) if not math.isfinite(value)] or pieces
    places = [attempt.train_examples.tokens.place(int(index)) for piece in guilty for index in piece]
    named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
    what = "the gradient is" if math.isfinite(loss) else "the loss is"
    attempt.log.append({"step": step, "skipped": what, "samples": places})
    attempt.warn(f"step {step}: {what} not a number, step skipped; among {named}")
    if at.skipped_in_a_row >= attempt.job.train.max_skipped_steps:
        raise NotFinite(
            f"{at.skipped_in_a_row} steps in a row had a loss or gradient that is not a number (last: {named})",
            where=str(attempt.context.folder),
            to_do="lower learning_rate, look at these rows, or use bf16/fp32 instead of fp16",
        )


def note_out_of_memory(attempt: Attempt, step: int, why: str, is_less: bool) -> None:
    """Say that a step is taken again, and put on the receipt that it is with less at once."""
    settings = attempt.settings
    if not is_less:
        freed = "what was not needed was freed, it is taken again as it was"
        attempt.warn(f"step {step + 1}: out of memory ({why}); {freed}")
        return
    now = {"micro_batch_tokens": settings.micro_batch_tokens, "checkpoint_every": settings.checkpoint_every}
    attempt.context.ledger.write("running", out_of_memory={"step": step + 1, **now, "why": why})
    keep_settings(attempt)
    attempt.warn(
        f"step {step + 1}: out of memory; it goes on with {settings.micro_batch_tokens:,} tokens at a time"
        f"{', more layers computed again' if settings.checkpoint_every else ''}: the same examples a step, the same result"
    )


def report_step(attempt: Attempt, row: dict[str, Any]) -> None:
    """Tell how it goes, and put it on the ledger."""
    job, ledger, at = attempt.job, attempt.context.ledger, attempt.progress
    left_s = remaining_s(attempt)
    usd_per_s = job.usd_per_hour / 3600
    forecast: dict[str, Any] | None = None
    if ledger.forecast is None and attempt.pace.n_steps >= FORECAST_AFTER_STEPS and left_s is not None:
        forecast = {
            "step": row["step"],
            "wall_s": ledger.spent_s + left_s,
            "usd": ledger.spent_usd + left_s * usd_per_s,
            "peak_bytes": attempt.expected_bytes,
        }
    facts = {
        "peak_bytes": peak_bytes(attempt.numerics.device),
        "tokens": at.n_tokens,
        "padded_tokens": at.n_padded_tokens,
        **attempt.pace.figures(),
        "takes": takes(attempt),
    }
    ledger.at_step(row["step"], facts, forecast)
    attempt.context.tell(
        "step",
        {
            **{key: row[key] for key in ("step", "loss", "lr", "grad_norm")},
            **facts,
            "n_steps": attempt.n_steps,
            "epoch": row["step"] / attempt.batches.steps_per_epoch,
            "usd": ledger.spent_usd,
            "usd_to_go": None if left_s is None else left_s * usd_per_s,
            "s_to_go": left_s,
        },
    )
