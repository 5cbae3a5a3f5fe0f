"""The loop: the one place where everything meets.

Evaluate and save when due, stop when asked, take a step. Everything that can change the result is
in `Attempt.state` or follows from (seed, step): the data order, the dropout masks and the learning
rate are functions, not state.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

from farthing.errors import NotFiniteError, RunInterruptedError
from farthing.run.ledger import Ledger
from farthing.run.signals import Heard, Notice
from farthing.train.attempt import Attempt
from farthing.train.budget import LONGEST_START_S, over_limit
from farthing.train.evaluate import evaluate_run
from farthing.train.forecast import (
    evaluation_is_due,
    is_done,
    leaving_s,
    reserve_s,
    reserve_with_start_s,
)
from farthing.train.learning_rate import settle_schedule
from farthing.train.rehearsal import rehearse
from farthing.train.saver import (
    export,
    mark_of,
    note_finished_save,
    save,
    save_is_due,
    save_last,
    write_model_early,
)
from farthing.train.step_log import note_rest, settle

COLLECT_EVERY_STEPS = 200  # cycles of references, each of which may hold on to tensors
STARTING = ("start_up", "load_model", "restore")  # what a start takes when data is tokenized


class Due(NamedTuple):
    """What comes before the next step; 1 where it is due. What hangs on a clock, a disk or money is
    the first rank's to say; whoever was asked to leave says so for all.
    """

    settle: int
    write_early: int
    save: int


def loop(attempt: Attempt) -> tuple[str, str]:
    """Steps until done, stopped early, interrupted or over a limit; returns (state, reason). Raises
    `NotFiniteError`.
    """
    spans = attempt.meter.spans
    attempt.clocks.start_s = min(LONGEST_START_S, sum(spans.get(name, 0.0) for name in STARTING))
    with contextlib.closing(attempt.steps.feed), rare_collections():
        try:
            try:
                rehearse(attempt)
                while True:
                    ended, due = agreed(attempt, why_stop(attempt))
                    if ended:
                        break
                    if evaluation_is_due(attempt):
                        evaluate_run(attempt)
                    else:
                        before_step(attempt, due)
                        began_s = attempt.meter.wall_s
                        take_step(attempt)
                        attempt.pace.turn_done(attempt.meter.wall_s - began_s)
            except RunInterruptedError:
                ended = attempt.notice.how_it_ends()
            save_last(attempt)
        except NotFiniteError:
            note_rest(attempt)
            save_last(attempt)
            raise
    if ended[0] != "interrupted" and attempt.progress.step > 0:
        with attempt.meter.span("export"):
            export(attempt)
    return ended


def why_stop(attempt: Attempt) -> tuple[str, str] | None:
    """(state, reason) where the run ends here; None where it continues."""
    hear(attempt)
    notice, ledger = attempt.notice, attempt.ledger
    limit = over_limit(attempt.job, ledger, reserve_s(attempt))
    if evaluation_is_due(attempt) and not limit:
        return None
    if is_done(attempt):
        return "finished", "stopped early" if attempt.progress.stopped_early else "all steps done"
    if notice:
        return notice.how_it_ends()
    return ("limit", limit) if limit else None


def agreed(attempt: Attempt, ended: tuple[str, str] | None) -> tuple[tuple[str, str] | None, Due]:
    """(why the run ends here or None, what is due before the next step) for all ranks; `ended` is
    this one's answer.
    """
    ranks = attempt.ranks
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
    fit, saving, ledger = attempt.schedule.fit, attempt.saving, attempt.ledger
    settles = bool(fit and not fit.settled and attempt.progress.step >= fit.settles_at)
    early = (
        not saving.wrote_model_early
        and over_limit(attempt.job, ledger, reserve_with_start_s(attempt)) is not None
        # else the model is about to be written anyway
        and over_limit(attempt.job, ledger, reserve_s(attempt) + leaving_s(attempt)) is None
    )
    return Due(settles, early, save_is_due(attempt))


def hear(attempt: Attempt) -> None:
    """Take note of what clouds and signals have said: where the machine may go, save sooner."""
    notice = attempt.notice
    for heard in note_news(notice, attempt.ledger):
        if not heard.is_certain:
            attempt.saving.is_due_now = True
            attempt.warn(f"{heard.what}: saving now, then continuing")
    while notice.warnings:
        attempt.warn(notice.warnings.pop(0))


def note_news(notice: Notice, ledger: Ledger) -> list[Heard]:
    """Put on the ledger what was heard since the last time; returns it."""
    news = notice.news()
    for heard in news:
        ledger.write("running", notice=heard.as_dict())
    return news


def before_step(attempt: Attempt, due: Due) -> None:
    """Settle the schedule, write the model early and save, where they are due."""
    if due.settle:
        settle_schedule(attempt)
    if due.write_early:
        write_model_early(attempt)
    if due.save and attempt.saving.mark != mark_of(attempt):
        save(attempt)


def take_step(attempt: Attempt) -> None:
    """One optimizer step over the global batch; nothing changes when it is interrupted."""
    taken = attempt.steps.take(attempt.progress.step)
    at, sums = attempt.progress, taken.sums
    at.step += 1
    at.n_tokens += int(attempt.train_examples.tokens.lengths[sums.examples].sum())
    at.n_padded_tokens, at.n_targets = (
        at.n_padded_tokens + sums.n_computed,
        at.n_targets + sums.n_targets,
    )
    attempt.record.micro_batch(*sums.largest)
    attempt.in_flight.append(taken)
    settle(attempt, attempt.steps.step.n_ahead)
    note_finished_save(attempt, attempt.checkpoints.finished_save())
    if attempt.replica is not None:
        attempt.replica.check()
    if at.step % COLLECT_EVERY_STEPS == 0:
        gc.collect()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles only when told to: what was there before is never looked through
    again.

    A caller who has frozen what it holds (`gc.freeze`) keeps it frozen. One who has the collector
    off is taken to have: the command line, where it would take 0.04 s to count what is frozen.
    """
    is_frozen = not gc.isenabled() or gc.get_freeze_count() > 0
    gc.collect()
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
