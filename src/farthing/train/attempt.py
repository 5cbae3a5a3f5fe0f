"""What an attempt has around it: who may end it, who hears of it, and the copies of its run in a
store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farthing.config.job import Job
from farthing.dist.ranks import Ranks
from farthing.events import Emit, Note
from farthing.report.receipt import leave_receipt
from farthing.run.mirror import Mirror, open_mirror
from farthing.run.notices import Watch, services_for
from farthing.run.opening import Opened
from farthing.run.signals import Notice
from farthing.train.budget import RunLimits
from farthing.train.built import Run
from farthing.train.context import Context
from farthing.train.metrics_file import metrics_file
from farthing.train.trackers import tracked
from farthing.train.watchdog import Watchdog


@contextlib.contextmanager
def attempt(job: Job, ranks: Ranks, begun: Opened, emit: Emit) -> Iterator[Context]:
    """The context of an attempt. Signals, clouds and limits may end it within the block, and what
    the store has and this disk has not is there.
    """
    folder, meter, ledger = begun.folder, begun.meter, begun.ledger

    def last_words() -> None:
        """Bill and receipt of a run that hangs, whose main thread may hold anything."""
        with contextlib.suppress(Exception):
            ledger.end("limit")
            leave_receipt(folder)

    with contextlib.ExitStack() as stack:
        notice = stack.enter_context(Notice(ranks.one_press_s))
        watch = Watch(services_for(job.where.notices, is_spot=job.where.spot), notice)
        watch.start()
        stack.callback(watch.stop)
        ranks.notice, ranks.meter = notice, meter
        emit = stack.enter_context(tracked(emit, job.train.report_to, folder))
        if ranks.is_first:
            ranks.at_loss = lambda: ledger.end("interrupted")
            emit = stack.enter_context(metrics_file(emit, job))
        context = Context(folder, meter, ledger, RunLimits(job, ledger), notice, emit, ranks=ranks)
        context.watchdog = stack.enter_context(Watchdog(context.limits, notice.reach, last_words))
        context.replica = open_mirror(
            job.output_store, folder, job.train.save_total_limit, context.warn
        )
        yield context


# ---- copies in a store ----


def bring_back(context: Context, store: str | None, *, allow_restart: bool) -> None:
    """Fetch what the store has and this disk has not."""
    replica = context.replica
    if replica is None:
        return
    replica.on_bills = context.ledger.take_in
    with context.meter.span("restore"):
        step = replica.bring_back(allow_restart, context.is_asked_to_leave)
    context.ledger.write()
    if step is not None:
        context.emit(Note(f"step {step} was brought back from {store}"))
    if doubt := replica.doubt():
        context.emit(Note(f"{store} {doubt}"))


def offer(run: Run, *, with_model: bool = False) -> None:
    """Offer the store what is needed to continue from where the run is."""
    at, replica = run.progress, run.context.replica
    if replica is not None:
        folders = run.saver.checkpoints.to_go_on(at.step, at.best_step)
        replica.offer(at.step, folders, with_model=with_model)


def wait_for_copies(context: Context, state: str) -> bool:
    """Wait until the copies are made; whether they are, or there is no store. Raises what has made
    the copying end.
    """
    replica = context.replica
    if replica is None:
        return True
    with context.meter.span("checkpoint"):
        is_copied = _wait(context, replica, is_leaving=state == "interrupted")
    replica.check()
    return is_copied


def close_replica(context: Context) -> None:
    """Wait for the last copies and give the lease back; the wait is on the bill."""
    replica, ledger = context.replica, context.ledger
    if replica is None:
        return
    context.meter.enter("checkpoint")
    is_done = _wait(context, replica, is_leaving=True)
    with contextlib.suppress(OSError):
        ledger.write()  # the lease takes it along: the store knows it too
    replica.close(min(5.0 if is_done else 1.0, context.left_s))
    with contextlib.suppress(OSError):
        ledger.write()


def _wait(context: Context, replica: Mirror, *, is_leaving: bool) -> bool:
    """Whether all copies are made, before the machine goes or a limit is reached."""
    pace = replica.pace
    leaves_in_s = context.notice.patience_s(pace.leave_s, pace.finish_s)
    return replica.wait(min(leaves_in_s if is_leaving else pace.finish_s, context.left_s))
