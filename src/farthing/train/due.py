"""What comes before the next step, and whether there is one: alike on all ranks that share a run.

What hangs on a clock, a disk or money is the first rank's to say; whoever was asked to leave says
so for all. Refuses to do what is due: the loop does.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.train.attempt import Attempt
from farthing.train.budget import over_limit
from farthing.train.forecast import leaving_s, reserve_s, reserve_with_start_s
from farthing.train.saver import save_is_due


class Due(NamedTuple):
    """What comes before the next step; 1 where it is due."""

    settle: int
    write_early: int
    save: int


def agreed(attempt: Attempt, ended: tuple[str, str] | None) -> tuple[tuple[str, str] | None, Due]:
    """(why the run ends here or None, what is due before the next step) for all ranks; `ended` is
    this one's answer.
    """
    ranks = attempt.context.ranks
    due = what_is_due(attempt) if ranks.is_first and ended is None else Due(0, 0, 0)
    word, marks = ranks.agree(int(ended is not None), due)
    if word and ranks.n > 1:
        state, reason = next(each for each in ranks.gather(ended) if each is not None)
        ended = str(state), str(reason)
    return ended, Due(*marks)


def what_is_due(attempt: Attempt) -> Due:
    """Whether to settle the schedule, to write the model while the limits still pay for a start,
    and to save.
    """
    fit, saving, ledger = attempt.schedule.fit, attempt.saving, attempt.context.ledger
    settles = bool(fit and not fit.settled and attempt.progress.step >= fit.settles_at)
    early = (
        not saving.wrote_model_early
        and over_limit(attempt.job, ledger, reserve_with_start_s(attempt)) is not None
        # else the model is about to be written anyway
        and over_limit(attempt.job, ledger, reserve_s(attempt) + leaving_s(attempt)) is None
    )
    return Due(settles, early, save_is_due(attempt))
