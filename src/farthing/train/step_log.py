"""Steps that were taken, read and written down: the log, the meter, the ledger and what the person
sees.

On a GPU the figures of a step arrive later than the step is taken; `settle` waits for them. A step
whose loss or gradient is not finite is counted and named.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch

from farthing.errors import NotFiniteError
from farthing.events import StepSkipped, StepTaken
from farthing.local.measurements import Record
from farthing.model.compiled import n_graphs
from farthing.model.hardware import peak_bytes
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines
from farthing.train.context import Context
from farthing.train.forecast import Forecast
from farthing.train.run_settings import keep_settings
from farthing.train.schedule import Schedule
from farthing.train.state import Progress
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import StepResult
from farthing.train.throughput import Pace

FORECAST_AFTER_STEPS = 5
FIGURES = ("tokens_per_s", "padded_tokens_per_s", "mfu", "utilisation_percent")


@dataclass(kw_only=True)
class StepLog:
    context: Context
    log: SummedLines
    progress: Progress
    schedule: Schedule
    feed: StepFeed
    scaler: torch.amp.GradScaler
    pace: Pace
    record: Record
    forecast: Forecast
    is_compiled: bool
    max_skipped_steps: int
    usd_per_hour: float
    job_fingerprint: str
    expected_bytes: int
    """Peak memory, as it was reckoned before the first step."""

    def __post_init__(self) -> None:
        self.in_flight = deque[StepResult]()  # their figures may be on their way from the device
        self._n_graphs = n_graphs()
        self._compute_s = self._settled_s = 0.0  # by the meter, when figures were last read

    def settle(self, most_in_flight: int = 0) -> None:
        """Read the figures of steps that were taken, but for the last `most_in_flight`. Raises
        `NotFiniteError`.
        """
        while len(self.in_flight) > most_in_flight:
            taken = self.in_flight.popleft()
            self._judge_finite(taken, *self._note(taken))

    def note_rest(self) -> None:
        while self.in_flight:
            self._note(self.in_flight.popleft())

    def _note(self, taken: StepResult) -> tuple[list[float], float]:
        """Put a step in the log, on the meter and before the user. Returns its losses and gradient
        norm.
        """
        meter, sums = self.context.meter, taken.sums
        with meter.span("compute"):  # a GPU is waited for here
            losses, norm = taken.read()
        meter.move("compute", "optimizer", taken.update_s())
        self._note_compiling()
        seconds = meter.wall_s - max(taken.started_s, self._settled_s)
        self._settled_s = meter.wall_s
        n_tokens, peak = self.feed.n_tokens(sums.examples), peak_bytes(self.pace.numerics.device)
        self.pace.step_done(n_tokens, seconds, sums)
        n_micro_batches = len(sums.micro_batches)
        self.record.step_done(
            n_micro_batches, n_tokens, sums.n_computed, sums.n_targets, seconds, meter.spans, peak
        )
        self._report(taken, math.fsum(losses), norm, n_tokens, peak)
        return losses, norm

    def _note_compiling(self) -> None:
        """A step in which torch has compiled is warm-up: its time goes under that name, and figures
        begin again.
        """
        meter, n = self.context.meter, n_graphs()
        if self.is_compiled and n > self._n_graphs:
            meter.move("compute", "compile", meter.spans.get("compute", 0.0) - self._compute_s)
            self.pace.begin_again()
            self.record.begin_again()
        self._n_graphs, self._compute_s = n, meter.spans.get("compute", 0.0)

    def _report(
        self, taken: StepResult, loss: float, norm: float, n_tokens: int, peak: int
    ) -> None:
        ledger, at, settings = self.context.ledger, self.progress, self.feed.settings
        step, left_s, figures = taken.step + 1, self.forecast.remaining_s, self.pace.figures()
        event = StepTaken(
            step=step,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=taken.learning_rate,
            n_targets=taken.sums.n_targets,
            n_tokens=n_tokens,
            examples=tuple(taken.sums.examples.tolist()),
            n_steps=self.schedule.n_steps,
            epoch=step / self.feed.batches.steps_per_epoch,
            peak_bytes=peak,
            run_tokens=at.n_tokens,
            run_padded_tokens=at.n_padded_tokens,
            usd=ledger.spent_usd,
            usd_to_go=None if left_s is None else left_s * self.usd_per_hour / 3600,
            s_to_go=left_s,
            metrics=taken.metrics,
            **figures,
        )
        self.log.append(event.log_row())
        forecast: Json | None = None
        is_first = ledger.forecast is None and self.pace.n_steps >= FORECAST_AFTER_STEPS
        if is_first and event.s_to_go is not None and event.usd_to_go is not None:
            forecast = {
                "step": step,
                "wall_s": ledger.spent_s + event.s_to_go,
                "usd": event.usd + event.usd_to_go,
                "peak_bytes": self.expected_bytes,
            }
        facts = {
            "peak_bytes": peak,
            **figures,
            "tokens": at.n_tokens,
            "padded_tokens": at.n_padded_tokens,
            "takes": self.forecast.takes(),
            "work": self.pace.facts(
                n_steps=self.schedule.n_steps,
                micro_batch_tokens=settings.micro_batch_tokens,
                checkpoint_every=settings.checkpoint_every,
                device=self.pace.numerics.device.type,
            ),
        }
        ledger.at_step(step, facts, forecast)
        self.context.emit(event)

    def _judge_finite(self, taken: StepResult, losses: list[float], norm: float) -> None:
        """Count a skipped step and name its samples. Raises `NotFiniteError` when there were too
        many in a row.
        """
        at, scaler, warn = self.progress, self.scaler, self.context.warn
        loss, step = math.fsum(losses), taken.step + 1
        if math.isfinite(loss) and math.isfinite(norm):
            at.skipped_in_a_row = 0
            return
        at.skipped_steps += 1
        if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
            self._skipped(StepSkipped(step, "the gradients overflowed fp16"))
            scale = f"{scaler.get_scale():g}"
            warn(f"step {step}: gradients overflowed fp16, scale now {scale}; step skipped")
            return
        at.skipped_in_a_row += 1
        micro_batches = taken.sums.micro_batches
        of_each = zip(micro_batches, losses, strict=True)
        guilty = [one for one, value in of_each if not math.isfinite(value)] or micro_batches
        places = [self.feed.tokens.place(int(index)) for one in guilty for index in one]
        named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        what = "the gradient is" if math.isfinite(loss) else "the loss is"
        self._skipped(StepSkipped(step, what, tuple(places)))
        warn(f"step {step}: {what} not a number, step skipped; it may come from {named}")
        if at.skipped_in_a_row >= self.max_skipped_steps:
            raise NotFiniteError(
                f"{at.skipped_in_a_row} steps in a row had a loss or gradient that is not a number"
                f" (last: {named})",
                where=str(self.context.folder),
                to_do="lower learning_rate, look at these rows, or use bf16/fp32 instead of fp16",
            )

    def _skipped(self, event: StepSkipped) -> None:
        self.log.append(event.log_row())
        self.context.emit(event)

    def note_out_of_memory(self, step: int, why: str, is_less: bool) -> None:
        """Say that a step is taken again, and put on the receipt that it is with less at once."""
        context, settings = self.context, self.feed.settings
        if not is_less:
            freed = "unused memory was freed, and the step is taken again"
            context.warn(f"step {step + 1}: out of memory ({why}); {freed}")
            return
        event = {
            "step": step + 1,
            "micro_batch_tokens": settings.micro_batch_tokens,
            "checkpoint_every": settings.checkpoint_every,
            "why": why,
            "job": self.job_fingerprint,
        }
        context.ledger.write("running", out_of_memory=event)
        keep_settings(context, settings)
        more = ", with more activation checkpointing" if settings.checkpoint_every else ""
        context.warn(
            f"step {step + 1}: out of memory; continuing with {settings.micro_batch_tokens:,}"
            f" tokens at a time{more}: the same examples a step, the same result"
        )
