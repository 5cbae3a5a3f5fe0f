"""A run as `build` makes it: what the loop drives."""

from __future__ import annotations

from dataclasses import dataclass

from farthing.storage.files import Json
from farthing.train.ancestor import begin_from
from farthing.train.context import Training
from farthing.train.evaluate import Evaluator
from farthing.train.forecast import Forecaster
from farthing.train.memory import Steps
from farthing.train.saver import Saver
from farthing.train.step import Step
from farthing.train.step_log import StepLog


@dataclass(kw_only=True)
class Run(Training):
    """A run from its first step, or the one that an earlier attempt has saved, to its end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.saver = Saver(self)
        self.state = self.saver.state
        self.evaluator = None if self.eval_examples is None else Evaluator(self, self.eval_examples)
        self.forecast = Forecaster(self, self.saver, self.evaluator)
        self.log = StepLog(self, self.forecast)
        step = Step(self, before_update=self.saver.wait_for_copies)
        self.steps = Steps(step, self.log.note_out_of_memory)

    def begin_as_ancestor(self) -> Json | None:
        """Take the weights of the run that this one begins from; what the receipt says of it."""
        if self.spec.from_run is None:
            return None
        names, rows_of = self.train_examples.tokens.label_names, self.context.ranks.rows_of
        return begin_from(self.spec.from_run, self.saver.state["model"], rows_of, names)
