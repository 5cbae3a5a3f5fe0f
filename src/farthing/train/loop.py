"""The loop: the one place where everything meets.

Evaluate and save when due, stop when asked, take a step. Everything that can change the result is
in `Attempt.state` or follows from (seed, step): the data order, the dropout masks and the learning
rate are functions, not state.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from farthing.errors import NotFiniteError, RunInterruptedError
from farthing.run.ledger import Ledger
from farthing.run.signals import Heard, Notice
from farthing.train.attempt import Attempt
from farthing.train.budget import LONGEST_START_S, over_limit
from farthing.train.due import Due, agreed
from farthing.train.evaluation import evaluate_run
from farthing.train.forecast import evaluation_is_due, is_done, reserve_s
from farthing.train.learning_rate import settle_schedule
from farthing.train.rehearsal import rehearse
from farthing.train.saver import (
    export,
    mark_of,
    note_finished_save,
    save,
    save_last,
    write_model_early,
)
from farthing.train.step_log import note_rest, settle

COLLECT_EVERY_STEPS = 200  # cycles of references, each of which may hold on to tensors
STARTING = ("start_up", "load_model", "restore")  # what a start takes when data is tokenized


def loop(attempt: Attempt) -> tuple[str, str]:
    """Steps until done, stopped early, interrupted or over a limit; returns (state, reason). Raises
    `NotFiniteError`.
    """
    spans = attempt.context.meter.spans
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
                        take_step(attempt)
            except RunInterruptedError:
                ended = attempt.context.notice.how_it_ends()
            save_last(attempt)
        except NotFiniteError:
            note_rest(attempt)
            save_last(attempt)
            raise
    if ended[0] != "interrupted" and attempt.progress.step > 0:
        with attempt.context.meter.span("export"):
            export(attempt)
    return ended


def why_stop(attempt: Attempt) -> tuple[str, str] | None:
    """(state, reason) where the run ends here; None where it goes on."""
    hear(attempt)
    notice, ledger = attempt.context.notice, attempt.context.ledger
    limit = over_limit(attempt.job, ledger, reserve_s(attempt))
    if evaluation_is_due(attempt) and not limit:
        return None
    if is_done(attempt):
        return "finished", "stopped early" if attempt.progress.stopped_early else "all steps done"
    if notice:
        return notice.how_it_ends()
    return ("limit", limit) if limit else None


def hear(attempt: Attempt) -> None:
    """Take note of what clouds and signals have said: where the machine may go, save sooner."""
    notice = attempt.context.notice
    for heard in note_news(notice, attempt.context.ledger):
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
    if attempt.context.replica is not None:
        attempt.context.replica.check()
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
