"""Steps that were taken, read and written down: the log, the meter, the ledger and what the person
sees.

On a GPU the figures of a step arrive later than the step is taken; `settle` waits for them. A step
whose loss or gradient is not finite is counted and named.
"""

from __future__ import annotations

import math

from farthing.errors import NotFiniteError
from farthing.events import StepSkipped, StepTaken
from farthing.model.compiled import n_graphs
from farthing.model.hardware import peak_bytes
from farthing.storage.files import Json
from farthing.train.attempt import Attempt
from farthing.train.forecast import remaining_s, takes
from farthing.train.run_settings import keep_settings
from farthing.train.step_result import StepResult

FORECAST_AFTER_STEPS = 5
FIGURES = ("tokens_per_s", "padded_tokens_per_s", "mfu", "utilisation_percent")


def settle(attempt: Attempt, most_in_flight: int = 0) -> None:
    """Read the figures of steps that were taken, but for the last `most_in_flight`. Raises
    `NotFiniteError`.
    """
    while len(attempt.in_flight) > most_in_flight:
        taken = attempt.in_flight.popleft()
        losses, norm = note(attempt, taken)
        judge_finite(attempt, taken, losses, norm)


def note_rest(attempt: Attempt) -> None:
    """Read what is left without judging it."""
    while attempt.in_flight:
        note(attempt, attempt.in_flight.popleft())


def note(attempt: Attempt, taken: StepResult) -> tuple[list[float], float]:
    """Put a step in the log, on the meter and before the user. Returns its losses and gradient
    norm.
    """
    meter, clocks = attempt.meter, attempt.clocks
    with meter.span("compute"):  # a GPU is waited for here
        losses, norm = taken.read()
    meter.move("compute", "optimizer", taken.update_s())
    sums, loss = taken.sums, math.fsum(losses)
    n_tokens = int(attempt.train_examples.tokens.lengths[sums.examples].sum())
    _note_compiling(attempt)
    seconds, peak = (
        meter.wall_s - max(taken.started_s, clocks.settled_s),
        peak_bytes(attempt.numerics.device),
    )
    clocks.settled_s = meter.wall_s
    pass_s = sums.forward_s, sums.compute_s
    attempt.pace.step_done(n_tokens, sums.n_computed, seconds, sums.computed, *pass_s)
    n_micro_batches = len(sums.micro_batches)
    attempt.record.step_done(
        n_micro_batches, n_tokens, sums.n_computed, sums.n_targets, seconds, meter.spans, peak
    )
    event = _step_event(attempt, taken, loss, norm, n_tokens)
    attempt.log.append(event.log_row())
    _report_step(attempt, event)
    return losses, norm


def _note_compiling(attempt: Attempt) -> None:
    """A step in which torch has compiled is warm-up: its time goes under that name, and figures
    begin again.
    """
    meter, clocks = attempt.meter, attempt.clocks
    compute_s, n = meter.spans.get("compute", 0.0), n_graphs()
    if isinstance(attempt.kernels.compiled, int) and n > clocks.n_graphs:
        meter.move("compute", "compile", compute_s - clocks.compute_s)
        attempt.pace.begin_again()
        attempt.record.begin_again()
    clocks.n_graphs, clocks.compute_s = n, meter.spans.get("compute", 0.0)


def judge_finite(attempt: Attempt, taken: StepResult, losses: list[float], norm: float) -> None:
    """Count a skipped step and name its samples. Raises `NotFiniteError` when there were too many
    in a row.
    """
    at, scaler = attempt.progress, attempt.scaler
    loss, step = math.fsum(losses), taken.step + 1
    if math.isfinite(loss) and math.isfinite(norm):
        at.skipped_in_a_row = 0
        return
    at.skipped_steps += 1
    if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
        _skipped(attempt, StepSkipped(step, "the gradients overflowed fp16"))
        attempt.warn(
            f"step {step}: gradients overflowed fp16, scale now {scaler.get_scale():g}; step"
            " skipped"
        )
        return
    at.skipped_in_a_row += 1
    micro_batches = taken.sums.micro_batches
    guilty = [
        micro_batch
        for micro_batch, value in zip(micro_batches, losses, strict=True)
        if not math.isfinite(value)
    ] or micro_batches
    places = [
        attempt.train_examples.tokens.place(int(index))
        for micro_batch in guilty
        for index in micro_batch
    ]
    named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
    what = "the gradient is" if math.isfinite(loss) else "the loss is"
    _skipped(attempt, StepSkipped(step, what, tuple(places)))
    attempt.warn(f"step {step}: {what} not a number, step skipped; it may come from {named}")
    if at.skipped_in_a_row >= attempt.job.train.max_skipped_steps:
        raise NotFiniteError(
            f"{at.skipped_in_a_row} steps in a row had a loss or gradient that is not a number"
            f" (last: {named})",
            where=str(attempt.folder),
            to_do="lower learning_rate, look at these rows, or use bf16/fp32 instead of fp16",
        )


def note_out_of_memory(attempt: Attempt, step: int, why: str, is_less: bool) -> None:
    """Say that a step is taken again, and put on the receipt that it is with less at once."""
    settings = attempt.settings
    if not is_less:
        freed = "unused memory was freed, and the step is taken again"
        attempt.warn(f"step {step + 1}: out of memory ({why}); {freed}")
        return
    now = {
        "micro_batch_tokens": settings.micro_batch_tokens,
        "checkpoint_every": settings.checkpoint_every,
    }
    attempt.ledger.write(
        "running",
        out_of_memory={"step": step + 1, **now, "why": why, "job": attempt.job.fingerprint},
    )
    keep_settings(attempt)
    more = ", with more activation checkpointing" if settings.checkpoint_every else ""
    attempt.warn(
        f"step {step + 1}: out of memory; continuing with {settings.micro_batch_tokens:,} tokens at"
        f" a time{more}: the same examples a step, the same result"
    )


def _skipped(attempt: Attempt, event: StepSkipped) -> None:
    attempt.log.append(event.log_row())
    attempt.emit(event)


def _step_event(
    attempt: Attempt, taken: StepResult, loss: float, norm: float, n_tokens: int
) -> StepTaken:
    """What there is to say of a step, at the pace so far."""
    step, left_s = taken.step + 1, remaining_s(attempt)
    return StepTaken(
        step=step,
        loss=loss if math.isfinite(loss) else None,
        grad_norm=norm if math.isfinite(norm) else None,
        lr=taken.learning_rate,
        n_targets=taken.sums.n_targets,
        n_tokens=n_tokens,
        examples=tuple(taken.sums.examples.tolist()),
        n_steps=attempt.n_steps,
        epoch=step / attempt.batches.steps_per_epoch,
        peak_bytes=peak_bytes(attempt.numerics.device),
        run_tokens=attempt.progress.n_tokens,
        run_padded_tokens=attempt.progress.n_padded_tokens,
        usd=attempt.ledger.spent_usd,
        usd_to_go=None if left_s is None else left_s * attempt.job.usd_per_hour / 3600,
        s_to_go=left_s,
        metrics=taken.metrics,
        **attempt.pace.figures(),
    )


def _report_step(attempt: Attempt, event: StepTaken) -> None:
    """Put a step on the ledger, and say how it went."""
    ledger = attempt.ledger
    forecast: Json | None = None
    is_first = ledger.forecast is None and attempt.pace.n_steps >= FORECAST_AFTER_STEPS
    if is_first and event.s_to_go is not None and event.usd_to_go is not None:
        forecast = {
            "step": event.step,
            "wall_s": ledger.spent_s + event.s_to_go,
            "usd": event.usd + event.usd_to_go,
            "peak_bytes": attempt.expected_bytes,
        }
    figures = {name: getattr(event, name) for name in ("peak_bytes", *FIGURES)}
    facts = {
        **figures,
        "tokens": event.run_tokens,
        "padded_tokens": event.run_padded_tokens,
        "takes": takes(attempt),
    }
    settings = attempt.settings
    facts["work"] = attempt.pace.facts(
        n_steps=attempt.n_steps,
        micro_batch_tokens=settings.micro_batch_tokens,
        checkpoint_every=settings.checkpoint_every,
        device=attempt.numerics.device.type,
    )
    ledger.at_step(event.step, facts, forecast)
    attempt.emit(event)
