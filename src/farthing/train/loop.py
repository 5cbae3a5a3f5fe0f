"""The loop: the one place where everything meets.

Evaluate and save when due, stop when asked, take a step. Everything that can change the result is
in `Run.state` or follows from (seed, step): the data order, the dropout masks and the learning
rate are functions, not state.

A signal, a notice of a cloud or a limit ends the run in `why_stop`, between two steps. A step or an
evaluation that is under way notices it after each micro-batch and raises `RunInterruptedError`:
nothing of it has happened, and the last finished step is saved.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

from farthing.errors import NotFiniteError, RunInterruptedError
from farthing.events import Note
from farthing.run.folder import SCHEDULE
from farthing.run.ledger import Ledger
from farthing.run.signals import Heard, Notice
from farthing.train.budget import LONGEST_START_S
from farthing.train.built import Run
from farthing.train.memory import rehearse
from farthing.train.schedule import Fit, keep_fit, settled_fit
from farthing.units import plural

COLLECT_EVERY_STEPS = 200  # cycles of references, each of which may hold on to tensors
STARTING = ("start_up", "load_model", "restore")  # what a start takes when data is tokenized


class Due(NamedTuple):
    """What comes before the next step; 1 where it is due. What hangs on a clock, a disk or money is
    the first rank's to say; any rank that was asked to leave speaks for all.
    """

    settle: int
    write_early: int
    save: int


def loop(run: Run) -> tuple[str, str]:
    """Steps until done, stopped early, interrupted or over a limit; returns (state, reason). Raises
    `NotFiniteError`.
    """
    meter = run.context.meter
    starting_s = sum(meter.spans.get(name, 0.0) for name in STARTING)
    run.forecast.start_s = min(LONGEST_START_S, starting_s)
    with contextlib.closing(run.feed), rare_collections():
        try:
            try:
                rehearse(run, run.steps, run.forecast)
                while True:
                    ended, due = agreed(run, why_stop(run))
                    if ended:
                        break
                    if run.evaluator is not None and run.forecast.evaluation_is_due:
                        run.log.settle()
                        run.saver.is_due_now |= run.evaluator.run()
                    else:
                        before_step(run, due)
                        began_s = meter.wall_s
                        take_step(run)
                        run.pace.turn_done(meter.wall_s - began_s)
            except RunInterruptedError:
                ended = run.context.notice.how_it_ends()
            run.log.settle()
            run.saver.save_last()
        except NotFiniteError:
            run.log.note_rest()
            run.saver.save_last()
            raise
    if ended[0] != "interrupted" and run.progress.step > 0:
        with meter.span("export"):
            run.saver.export()
    return ended


def why_stop(run: Run) -> tuple[str, str] | None:
    """(state, reason) where the run ends here; None where it continues."""
    hear(run)
    notice, forecast = run.context.notice, run.forecast
    if forecast.is_done:
        return "finished", "stopped early" if run.progress.stopped_early else "all steps done"
    if notice:
        return notice.how_it_ends()
    limit = run.context.limits.over(forecast.reserve_s)
    return ("limit", limit) if limit else None


def agreed(run: Run, ended: tuple[str, str] | None) -> tuple[tuple[str, str] | None, Due]:
    """(why the run ends here or None, what is due before the next step) for all ranks; `ended` is
    this one's answer.
    """
    ranks = run.context.ranks
    due = what_is_due(run) if ranks.is_first and ended is None else Due(0, 0, 0)
    word, marks = ranks.agree(int(ended is not None), due)
    if word and ranks.n > 1:
        state, reason = next(each for each in ranks.gather(ended) if each is not None)
        ended = str(state), str(reason)
    return ended, Due(*marks)


def what_is_due(run: Run) -> Due:
    """Whether to settle the schedule, to write the model while the limits still pay for a start,
    and to save.
    """
    fit, forecast, limits = run.schedule.fit, run.forecast, run.context.limits
    settles = bool(fit and not fit.settled and run.progress.step >= fit.settles_at)
    early = (
        not run.saver.wrote_model_early
        and limits.over(forecast.reserve_with_start_s) is not None
        # else the model is about to be written anyway
        and limits.over(forecast.reserve_s + forecast.leaving_s) is None
    )
    return Due(settles, early, run.saver.is_due)


def hear(run: Run) -> None:
    """Take note of what clouds and signals have said: where the machine may go, save sooner."""
    context = run.context
    for heard in note_news(context.notice, context.ledger):
        if not heard.is_certain:
            run.saver.is_due_now = True
            context.warn(f"{heard.what}: saving now, then continuing")
    while context.notice.warnings:
        context.warn(context.notice.warnings.pop(0))


def note_news(notice: Notice, ledger: Ledger) -> list[Heard]:
    """Put on the ledger what was heard since the last time; returns it."""
    news = notice.news()
    for heard in news:
        ledger.write(notice=heard.as_dict())
    return news


def before_step(run: Run, due: Due) -> None:
    """Settle the schedule, write the model early and save, where they are due."""
    if due.settle:
        settle_schedule(run)
    if due.write_early or due.save:
        run.log.settle()
    if due.write_early:
        run.saver.write_model_early()
    if due.save and run.saver.mark != run.progress.mark:
        run.saver.save()


def settle_schedule(run: Run) -> None:
    """Settle for good how many steps the limits buy, by the measured pace, before the rate comes
    down.
    """
    run.log.settle()
    context, schedule, forecast = run.context, run.schedule, run.forecast
    assert schedule.fit is not None
    step_s = forecast.step_with_rest_s
    # the last step begins only where the longest would fit
    end_s = forecast.leaving_s + max(0.0, forecast.next_s - (step_s or 0.0))
    fit = settled_fit(schedule.fit, context.limits.left_s, step_s, end_s)
    fit = Fit(**context.ranks.tell_all(asdict(fit)))
    keep_fit(context.folder / SCHEDULE, fit)
    schedule.follow(fit)
    run.feed.close()  # what was made ready knew the number
    steps = plural(fit.n_steps, "step")
    context.emit(Note(f"the schedule is fixed: {steps} of {fit.asked_steps:,} fit the limits"))


def take_step(run: Run) -> None:
    """One optimizer step over the global batch; nothing changes when it is interrupted."""
    taken = run.steps.take(run.progress.step)
    at, sums = run.progress, taken.sums
    at.step += 1
    at.n_tokens += run.feed.n_tokens(sums.examples)
    at.n_padded_tokens += sums.n_computed
    at.n_targets += sums.n_targets
    run.record.micro_batch(*sums.largest)
    run.log.in_flight.append(taken)
    run.log.settle(run.steps.step.update.n_ahead)
    run.saver.note_finished(run.saver.checkpoints.finished_save())
    if run.context.replica is not None:
        run.context.replica.check()
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
