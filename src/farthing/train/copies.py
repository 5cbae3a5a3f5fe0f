"""Copies of a run in a store: brought back before an attempt, offered while it runs, waited for as
it ends.
"""

from __future__ import annotations

import contextlib

from farthing.events import Note
from farthing.train.built import Run
from farthing.train.context import Context


def bring_back(context: Context, store: str | None, *, allow_restart: bool) -> None:
    """What the store has and this disk has not."""
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
    """Until the copies are made, not longer than until the machine goes; whether they are, or there
    is no store. Raises what has made the copying end."""
    replica = context.replica
    if replica is None:
        return True
    with context.meter.span("checkpoint"):
        pace = replica.pace
        leaves_in_s = context.notice.patience_s(pace.leave_s, pace.finish_s)
        most_s = leaves_in_s if state == "interrupted" else pace.finish_s
        is_copied = replica.wait(min(most_s, context.left_s))
    replica.check()
    return is_copied


def close_replica(context: Context) -> None:
    """Wait for the last copies, not longer than until the machine goes or a limit is reached, and
    give the lease back; the wait is on the bill.
    """
    replica, ledger = context.replica, context.ledger
    if replica is None:
        return
    context.meter.enter("checkpoint")
    leaves_in_s = context.notice.patience_s(replica.pace.leave_s, replica.pace.finish_s)
    is_done = replica.wait(min(leaves_in_s, context.left_s))
    with contextlib.suppress(OSError):
        ledger.beat(at_once=True)  # the lease takes it along: the store knows it too
    replica.close(min(5.0 if is_done else 1.0, context.left_s))
    with contextlib.suppress(OSError):
        ledger.beat(at_once=True)
