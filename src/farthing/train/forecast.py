"""What comes next in a run, and how many seconds it may take: questions that change nothing."""

from __future__ import annotations

from dataclasses import dataclass

from farthing.train.context import Training
from farthing.train.evaluate import Evaluator
from farthing.train.saver import Saver
from farthing.train.schedule import EXPORT_S

WRITE_BYTES_PER_S = 100e6  # of a slow disk: a guess until an export is measured
END_S = 0.3  # of the receipt, and of a process that ends
MARGIN = 1.15  # what comes next may take so many times what it took before


@dataclass
class Forecaster:
    """Answers from what this attempt has measured, else from what earlier ones have, else from the
    plan.
    """

    training: Training
    saver: Saver
    evaluator: Evaluator | None
    start_s: float = 0.0  # of this attempt

    def _evaluation_is_at(self, step: int) -> bool:
        n_steps = self.training.schedule.n_steps
        return self.evaluator is not None and self.evaluator.is_at(step, n_steps)

    @property
    def evaluation_is_due(self) -> bool:
        at = self.training.progress
        return at.evaluated_step != at.step and self._evaluation_is_at(at.step)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be trained or evaluated."""
        at = self.training.progress
        has_ended = at.step >= self.training.schedule.n_steps or at.stopped_early
        return has_ended and not self.evaluation_is_due

    def _before(self, name: str) -> float:
        return self.training.context.ledger.takes.get(name, 0.0)

    @property
    def evaluation_s(self) -> float:
        """Of the last evaluation, or as if a forward pass took a third of a step."""
        if self.evaluator is None:
            return 0.0
        guess_s = (self.training.pace.step_s or 0.0) * self.evaluator.n_steps_like / 3
        return self.evaluator.took_s or self._before("evaluation_s") or guess_s

    @property
    def next_s(self) -> float:
        """Of an evaluation that is due; else of a step and the evaluation after it."""
        if self.evaluation_is_due:
            return MARGIN * self.evaluation_s
        comes_after = self._evaluation_is_at(self.training.progress.step + 1)
        return MARGIN * self._next_step_s() + (self.evaluation_s if comes_after else 0.0)

    def _next_step_s(self) -> float:
        """The longest step so far, and longer where the next has more tokens than any before; at
        first as in earlier attempts, else the least that the plan expects.
        """
        run, pace, planned_s = self.training, self.training.pace, 0.0
        if not pace.longest_step_s:
            if run.estimate is not None:
                least_s, likely_s, _ = run.estimate.wall_range_s
                planned_s = run.estimate.step_s * least_s / likely_s
            return self._before("step_s") or planned_s
        n_tokens = run.feed.n_tokens(run.feed.batches.examples_of(run.progress.step))
        step_s = pace.longest_step_s * max(1.0, n_tokens / pace.most_tokens)
        return step_s + pace.longest_rest_s

    @property
    def save_s(self) -> float:
        """Until a checkpoint is on the disk: of the last one, else a guess."""
        saver = self.saver
        known_s = max(saver.took_s, saver.write_s) or self._before("save_s")
        return known_s or 3 * saver.trained_bytes / WRITE_BYTES_PER_S

    @property
    def leaving_s(self) -> float:
        """Of saving, exporting, sending both to the store, and ending."""
        saver, replica = self.saver, self.training.context.replica
        export_s = saver.export_s or self._before("export_s")
        export_s = export_s or EXPORT_S + saver.trained_bytes / WRITE_BYTES_PER_S
        sent_s = 0.0 if replica is None else replica.delivery_s
        return MARGIN * (2 * self.save_s + export_s + sent_s) + END_S

    @property
    def reserve_s(self) -> float:
        """What comes next, and leaving after it: the limits must still have room for these."""
        return 0.0 if self.is_done else self.next_s + self.leaving_s

    @property
    def reserve_with_start_s(self) -> float:
        """As long as so much is left, a run that is killed now, and again while it starts, can
        still leave its model.
        """
        return self.reserve_s + self.leaving_s + 2 * self.start_s

    @property
    def remaining_s(self) -> float | None:
        """Until the end at the present pace; None before a pace is known."""
        step_s = self.step_with_rest_s
        if self.training.pace.step_s is None or step_s is None:
            return None
        return (self.training.schedule.n_steps - self.training.progress.step) * step_s

    @property
    def step_with_rest_s(self) -> float | None:
        """Of a step with its share of evaluations and saves; None before any was measured."""
        step_s = self.training.pace.step_s or self._before("step_s") or None
        if step_s is None:
            return None
        if self.evaluator is not None and self.evaluator.every_steps:
            step_s += self.evaluation_s / self.evaluator.every_steps
        between = self.saver.save_steps or max(1.0, self.saver.every_s / step_s)
        return step_s + self.saver.took_s / between

    def takes(self) -> dict[str, float]:
        """For the attempts that come."""
        return {
            "start_s": round(self.start_s, 3),
            "step_s": round(self.training.pace.longest_step_s, 4),
            "save_s": round(self.save_s, 4),
            "export_s": round(self.saver.export_s, 4),
            "evaluation_s": round(self.evaluation_s, 4),
        }
