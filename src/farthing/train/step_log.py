"""Steps that were taken, read and written down: the log, the meter, the ledger and what the person
sees.

On a GPU the figures of a step arrive later than the step is taken; `settle` waits for them. A step
whose loss or gradient is not finite is counted and named.
"""

from __future__ import annotations

import math
from collections import deque

from farthing.errors import NotFiniteError
from farthing.events import StepSkipped, StepTaken
from farthing.model.compiled import n_graphs
from farthing.model.hardware import peak_bytes
from farthing.train.context import Training
from farthing.train.forecast import Forecaster
from farthing.train.run_settings import keep_settings, tried
from farthing.train.step_result import StepResult

FORECAST_AFTER_STEPS = 5


class StepLog:
    def __init__(self, training: Training, forecast: Forecaster) -> None:
        self.training, self.forecast = training, forecast
        self.expected_bytes = training.record.loaded_bytes + training.memory.total_bytes
        """Peak memory, as it was reckoned before the first step."""
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
        run, meter, sums = self.training, self.training.context.meter, taken.sums
        with meter.span("compute"):  # a GPU is waited for here
            losses, norm = taken.read()
        meter.move("compute", "optimizer", taken.update_s())
        self._note_compiling()
        seconds = meter.wall_s - max(taken.started_s, self._settled_s)
        self._settled_s = meter.wall_s
        n_tokens, peak = run.feed.n_tokens(sums.examples), peak_bytes(run.spec.numerics.device)
        run.pace.step_done(n_tokens, seconds, sums)
        n_micro_batches = len(sums.micro_batches)
        run.record.step_done(
            n_micro_batches, n_tokens, sums.n_computed, sums.n_targets, seconds, meter.spans, peak
        )
        self._report(taken, math.fsum(losses), norm, n_tokens, peak)
        return losses, norm

    def _note_compiling(self) -> None:
        """A step in which torch has compiled is warm-up: its time goes under that name, and figures
        begin again.
        """
        run, meter, n = self.training, self.training.context.meter, n_graphs()
        if isinstance(run.kernels.compiled, int) and n > self._n_graphs:
            meter.move("compute", "compile", meter.spans.get("compute", 0.0) - self._compute_s)
            run.pace.begin_again()
            run.record.begin_again()
        self._n_graphs, self._compute_s = n, meter.spans.get("compute", 0.0)

    def _report(
        self, taken: StepResult, loss: float, norm: float, n_tokens: int, peak: int
    ) -> None:
        run, ledger, at = self.training, self.training.context.ledger, self.training.progress
        step, left_s, figures = taken.step + 1, self.forecast.remaining_s, run.pace.figures()
        event = StepTaken(
            step=step,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=taken.learning_rate,
            n_targets=taken.sums.n_targets,
            n_tokens=n_tokens,
            examples=tuple(taken.sums.examples.tolist()),
            n_steps=run.schedule.n_steps,
            epoch=step / run.feed.batches.steps_per_epoch,
            peak_bytes=peak,
            run_tokens=at.n_tokens,
            run_padded_tokens=at.n_padded_tokens,
            usd=ledger.spent_usd,
            usd_to_go=None if left_s is None else left_s * run.spec.usd_per_hour / 3600,
            s_to_go=left_s,
            metrics=taken.metrics,
            **figures,
        )
        run.log_file.append(event.log_row())
        is_first = ledger.forecast is None and run.pace.n_steps >= FORECAST_AFTER_STEPS
        if is_first and event.s_to_go is not None and event.usd_to_go is not None:
            ledger.write(
                forecast={
                    "step": step,
                    "wall_s": ledger.spent_s + event.s_to_go,
                    "usd": event.usd + event.usd_to_go,
                    "peak_bytes": self.expected_bytes,
                }
            )
        work = run.pace.facts(
            n_steps=run.schedule.n_steps,
            device=run.spec.numerics.device.type,
            **tried(run.feed.settings),
        )
        facts = {
            "peak_bytes": peak,
            **figures,
            "tokens": at.n_tokens,
            "padded_tokens": at.n_padded_tokens,
            "takes": self.forecast.takes(),
            "work": work,
        }
        ledger.at_step(step, facts)
        run.context.emit(event)

    def _judge_finite(self, taken: StepResult, losses: list[float], norm: float) -> None:
        """Count a skipped step and name its samples. Raises `NotFiniteError` when there were too
        many in a row.
        """
        run, at, scaler = self.training, self.training.progress, self.training.scaler
        loss, step, warn = math.fsum(losses), taken.step + 1, self.training.context.warn
        if math.isfinite(loss) and math.isfinite(norm):
            at.skipped_in_a_row = 0
            return
        if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
            self._skipped(StepSkipped(step, "the gradients overflowed fp16"))
            scale = f"{scaler.get_scale():g}"
            warn(f"step {step}: gradients overflowed fp16, scale now {scale}; step skipped")
            return
        at.skipped_in_a_row += 1
        micro_batches = taken.sums.micro_batches
        of_each = zip(micro_batches, losses, strict=True)
        guilty = [one for one, value in of_each if not math.isfinite(value)] or micro_batches
        places = [run.feed.tokens.place(int(index)) for one in guilty for index in one]
        named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        what = "the gradient is" if math.isfinite(loss) else "the loss is"
        self._skipped(StepSkipped(step, what, tuple(places)))
        warn(f"step {step}: {what} not a number, step skipped; it may come from {named}")
        if at.skipped_in_a_row >= run.spec.train.max_skipped_steps:
            raise NotFiniteError(
                f"{at.skipped_in_a_row} steps in a row had a loss or gradient that is not a number"
                f" (last: {named})",
                where=str(run.context.folder),
                to_do="lower learning_rate, look at these rows, or use bf16/fp32 instead of fp16",
            )

    def _skipped(self, event: StepSkipped) -> None:
        self.training.log_file.append(event.log_row())
        self.training.context.emit(event)

    def note_out_of_memory(self, step: int, why: str, is_less: bool) -> None:
        """Say that a step is taken again, and put on the receipt that it is with less at once."""
        context, settings = self.training.context, self.training.feed.settings
        if not is_less:
            freed = "unused memory was freed, and the step is taken again"
            context.warn(f"step {step + 1}: out of memory ({why}); {freed}")
            return
        job = self.training.spec.fingerprint
        event = {"step": step + 1, **tried(settings), "why": why, "job": job}
        context.ledger.write(out_of_memory=event)
        keep_settings(context, settings)
        more = ", with more activation checkpointing" if settings.checkpoint_every else ""
        context.warn(
            f"step {step + 1}: out of memory; continuing with {settings.micro_batch_tokens:,}"
            f" tokens at a time{more}: the same examples a step, the same result"
        )
