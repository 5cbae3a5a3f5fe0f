"""An attempt at a job, from the door to the receipt.

`train(job, emit)` resolves the job, builds the run, restores what an earlier attempt saved, lets
`loop.py` take the steps, and leaves ledger, receipt and copies in order however it ends. The same
call starts a run, continues it, and finds a finished one finished.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from farthing.config.job import Job
from farthing.config.preflight import spot_without_store, unusual_settings
from farthing.device_memory import in_words, is_out_of_memory
from farthing.dist.ranks import Ranks
from farthing.errors import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    DiskFullError,
    FarthingError,
    InputError,
    LimitError,
    OutOfMemoryError,
    RunDamagedError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.events import Emit, Note, Working
from farthing.export.folders import write_card
from farthing.model.hardware import device_name, not_deterministic, of_models_code
from farthing.model.load import quiet_libraries
from farthing.report.receipt import leave_receipt
from farthing.report.receipt_types import Receipt
from farthing.report.run_page import leave_page
from farthing.report.training_log import keep_digest, read_log
from farthing.run.exported import damage_of, damaged_checkpoints
from farthing.run.folder import (
    EXAMPLES,
    LEDGER,
    LOG,
    MODEL,
    RUN,
    claim,
    is_finished,
    keep,
    keep_job,
    kept_job,
    mend,
    same_examples,
    unclaim,
)
from farthing.run.ledger import Ledger, Meter, seconds_since_process_start
from farthing.run.mirror import open_mirror
from farthing.run.notices import Watch, services_for
from farthing.run.opening import Opened, opened
from farthing.run.signals import Notice
from farthing.storage.files import Json, only_writer, set_aside
from farthing.train.autotune import is_worth_it, probe_run
from farthing.train.budget import (
    allowance_s,
    over_limit,
    refuse_start,
    seconds_left,
    why_not_start,
)
from farthing.train.build import build
from farthing.train.built import Run
from farthing.train.context import Context
from farthing.train.copies import bring_back, close_replica, offer, wait_for_copies
from farthing.train.finished import FOLLOWS_FROM, follows_from, publish_finished
from farthing.train.loop import loop, note_news
from farthing.train.measure import leave_measured
from farthing.train.metrics_file import metrics_file
from farthing.train.rank_setup import (
    follow,
    joined,
    lead,
    must_be_the_same,
    take_over,
    tell_of_launchers,
)
from farthing.train.reference import refer, without_references
from farthing.train.resolve import RunSpec, check_extras, resolve, sha256_of_examples
from farthing.train.run_settings import keep_settings
from farthing.train.summary import emit_summary
from farthing.train.trackers import tracked
from farthing.train.watchdog import Watchdog
from farthing.units import say_seconds

DISK_TROUBLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES),
    *(errno.ESTALE, errno.ENOTCONN),  # a file server has forgotten us, a mount's program has died
)
ON_DISKS_AND_NETWORKS = (
    *("start_up", "tokenize", "load_model", "restore", "checkpoint", "export"),
)
"""Spans in which a process may wait long for others than its ranks."""


@dataclass
class Outcome:
    """How an attempt ended: finished (0), limit (3) or interrupted (75). The receipt is brought up
    to date when it closes.
    """

    state: str
    reason: str
    receipt: Receipt
    """Of a rank that is not the first: what is in a folder that is thrown away."""

    @property
    def exit_code(self) -> int:
        """What the process should tell its caller."""
        return EXIT_CODES[self.state]


def train(
    job: Job, emit: Emit, *, allow_restart: bool = False, begun: Opened | None = None
) -> Outcome:
    """Start, continue or find finished the run of `job` in its `output_dir`.

    `begun` where the attempt is on the bill already, before this module was imported; who has
    opened it closes it. Raises `FarthingError`s in words; whatever was committed before stays
    valid.
    """
    if begun is None:
        refuse_start(job)
    if job.search.is_asked:
        raise InputError(
            "this job is a search of settings",
            where="search",
            to_do="run `farthing search` with it, or take `search:` out",
        )
    quiet_libraries()
    with contextlib.ExitStack() as stack:
        ranks, job = stack.enter_context(joined(job))
        folder = Path(job.output_dir)
        if begun is None:
            with errors_in_words(folder):
                begun = stack.enter_context(opened(folder, job.usd_per_hour))
        context = _watched_context(job, ranks, begun, emit, stack)
        with errors_in_words(folder):
            mend(folder, context.warn)
            bring_back(context, job.output_store, allow_restart=allow_restart)
        if damage := begun.damage_in_words():
            context.warn(damage)
        state = "failed"
        try:
            with errors_in_words(folder):
                if ranks.is_first:
                    state, reason = _lead(job, context, begun, allow_restart)
                else:
                    state, reason = _compute_along(job, context)
        except (RunInterruptedError, RunTakenError, LimitError) as error:
            ranks.fail(EXIT_INTERRUPTED)  # before the loop: the others wait for what does not come
            state = "limit" if isinstance(error, LimitError) else "interrupted"
            reason = error.what
            if isinstance(error, RunInterruptedError) and context.notice:
                state, reason = context.notice.how_it_ends()
        except InputError:
            with contextlib.suppress(OSError):
                unclaim(folder)
            raise
        finally:
            with contextlib.suppress(OSError):  # a full disk must not hide the error on its way
                note_news(context.notice, context.ledger)
                context.ledger.end(state)
            if state == "failed":
                close_replica(context)
        try:
            return close(job, context, begun, state, reason)
        except LimitError as error:  # the close hung
            if context.watchdog is not None:
                context.watchdog.raise_no_more()
            return Outcome("limit", error.what, leave_receipt(folder))


def _context(
    job: Job, meter: Meter, ledger: Ledger, notice: Notice, emit: Emit, run_id: str = ""
) -> Context:
    return Context(
        Path(job.output_dir),
        run_id,
        meter,
        ledger,
        notice,
        emit,
        over_limit=partial(over_limit, job, ledger),
        seconds_left=partial(seconds_left, job, ledger),
    )


def _watched_context(
    job: Job, ranks: Ranks, begun: Opened, emit: Emit, stack: contextlib.ExitStack
) -> Context:
    """The context of an attempt, with all who listen to it and may end it until `stack` closes."""
    folder, meter, ledger = begun.folder, begun.meter, begun.ledger
    notice = stack.enter_context(Notice(ranks.one_press_s))
    ranks.asks_to_leave = lambda: bool(notice)
    ranks.waiting = lambda: meter.span("ranks")
    ranks.may_be_still = lambda: meter.at in ON_DISKS_AND_NETWORKS
    if ranks.is_first:
        ranks.at_loss = lambda: ledger.end("interrupted")
    watch = Watch(services_for(job.where.notices, is_spot=job.where.spot), notice)
    watch.start()
    stack.callback(watch.stop)
    emit = stack.enter_context(tracked(emit, job.train.report_to, folder))
    if ranks.is_first:
        emit = stack.enter_context(metrics_file(emit, job))
    context = _context(job, meter, ledger, notice, emit)
    context.ranks = ranks
    context.replica = open_mirror(
        job.output_store, folder, job.train.save_total_limit, context.warn
    )

    def last_words() -> None:
        """Bill and receipt of a run that hangs, whose main thread may hold anything."""
        with contextlib.suppress(Exception):
            ledger.end("limit")
            leave_receipt(folder)

    allowed_s = allowance_s(job, folder, ledger)
    watchdog = Watchdog(job, ledger, notice.reach, last_words, allowed_s)
    context.watchdog = stack.enter_context(watchdog)
    return context


def close(job: Job, context: Context, begun: Opened, state: str, reason: str) -> Outcome:
    """How an attempt ended, with its receipt, card and copies; what brings them, and the page, up
    to the last second is called when the bill is closed.
    """
    folder, replica = context.folder, context.replica
    if not context.ranks.is_first:
        return Outcome(state, reason, leave_receipt(folder))
    with contextlib.suppress(OSError):
        keep_digest(folder / LOG)
    log = read_log(folder / LOG)
    outcome = Outcome(state, reason, leave_receipt(folder, log))
    if replica is not None:
        replica.offer_last_words()
        close_replica(context)
        outcome.receipt = leave_receipt(folder, log)
    with contextlib.suppress(OSError):  # a full disk: the receipt is there
        write_card(folder, outcome.receipt)

    def with_the_last_second() -> None:
        outcome.receipt = leave_receipt(folder, log)
        write_card(folder, outcome.receipt)
        leave_page(folder, outcome.receipt)

    begun.at_close = with_the_last_second
    if state == "finished":
        publish_finished(job, context.emit)
    return outcome


@contextlib.contextmanager
def errors_in_words(folder: Path) -> Iterator[None]:
    """Within the block what disks, memory and kernels refuse is raised as a `FarthingError`."""
    try:
        yield
    except (FarthingError, RunInterruptedError):
        raise
    except OSError as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"the machine has no memory left: {error.strerror}",
                where=str(folder),
                to_do=(
                    "stop other programs here, or use a machine with more main memory; the same"
                    " command resumes"
                ),
            ) from error
        if error.errno not in DISK_TROUBLE:
            raise
        raise DiskFullError(
            f"the disk fails: {error.strerror}; saved checkpoints are intact",
            where=str(error.filename or folder),
            to_do="make room or repair the disk, then run the same command again",
        ) from error
    except Exception as error:
        said = not_deterministic(error) or in_words(error, str(folder)) or of_models_code(error)
        if said is None:
            raise
        raise said from error


# ---- the first rank, and the others ----


def _resolved(job: Job, context: Context) -> RunSpec:
    check_extras(job)
    context.meter.enter("tokenize")
    return resolve(job, context.emit)


def _lead(job: Job, context: Context, begun: Opened, allow_restart: bool) -> tuple[str, str]:
    """(state, reason) of the attempt of a run, or of its first rank."""
    folder, meter, emit = context.folder, context.meter, context.emit
    begun.refuse_forgotten(allow_restart=allow_restart)
    read_from = follows_from(job)  # as it is before anything is read
    spec = _resolved(job, context)
    run_facts = _claim(spec, context, allow_restart)
    context.run_id, begun.is_accepted = run_facts["run_id"], True
    run_facts = _unfinished_where_more_is_asked(job, folder, run_facts)
    keep_job(folder, job.model_dump(mode="json"), run_facts)
    was_finished = is_finished(folder)
    for text in filter(None, (*unusual_settings(job), spot_without_store(job))):
        context.warn(text)
    ended = _why_not_let_in(job, context, was_finished)
    lead(context, ended)
    if ended:
        return ended
    run = build(spec, context, has_begun=EXAMPLES in run_facts)
    if context.watchdog is not None:
        context.watchdog.reserve_s = lambda: run.forecast.leaving_s
    names = run.train_examples.tokens.label_names
    run_facts = same_examples(
        folder, run_facts, sha256_of_examples(run.train_examples, run.eval_examples), names
    )
    meter.enter("restore")
    emit(Working("looking for a checkpoint"))
    if not run.saver.checkpoints.steps() and (ancestor := run.begin_as_ancestor()) is not None:
        run_facts = {**run_facts, "ancestor": ancestor}
        keep(folder / RUN, run_facts)
        emit(Note(f"begins with the weights of step {ancestor['step']} of {ancestor['run']}"))
    if not was_finished:
        refer(run)
    run.saver.restore(allow_restart)
    if was_finished or context.over_limit(run.forecast.reserve_s):
        take_over(run)  # let in to write its model
        return loop(run)
    _decide(job, run, run_facts)
    emit_summary(job, run)
    meter.enter("idle")
    offer(run)
    take_over(run)
    state, reason = loop(run)
    offer(run, with_model=True)
    is_copied = wait_for_copies(context, state)
    if is_copied and state == "finished":  # else the same command brings the model to the store
        keep(folder / RUN, {**run_facts, "finished": True, FOLLOWS_FROM: read_from})
    leave_measured(run)
    return state, reason


def _compute_along(job: Job, context: Context) -> tuple[str, str]:
    """(state, reason) of an attempt that the first rank leads."""
    let_in = follow(context)
    if let_in.ended is not None:
        return let_in.ended
    spec = _resolved(job, context)
    must_be_the_same(context, spec.identity, let_in.identity)
    run = build(spec, context, has_begun=let_in.has_begun)
    refer(run)
    take_over(run)
    return loop(run)


def _unfinished_where_more_is_asked(job: Job, folder: Path, run_facts: Json) -> Json:
    """The facts of a finished run, whose job may ask for more steps than it did: then it resumes.
    Its identity says where that changes the steps it has taken.
    """
    keys = ("max_steps", "num_train_epochs")
    with contextlib.suppress(RunDamagedError):
        before = kept_job(folder)["train"]
        if run_facts.get("finished") and any(
            before[key] != getattr(job.train, key) for key in keys
        ):
            run_facts = {key: value for key, value in run_facts.items() if key != "finished"}
            keep(folder / RUN, run_facts)
    return run_facts


def _why_not_let_in(job: Job, context: Context, was_finished: bool) -> tuple[str, str] | None:
    """(state, reason) where nothing is to be trained: the run has ended, or its limits have no room
    for an attempt.
    """
    folder, ledger = context.folder, context.ledger
    if damage := damage_of(folder):
        aside = set_aside(folder / MODEL)
        context.warn(
            f"the exported model is damaged ({damage}): set aside as {aside.name}, and written"
            " again from the checkpoint"
        )
    elif was_finished:
        ledger.withdraw()
        for text in damaged_checkpoints(folder):
            context.warn(text)
        return "finished", "the run had finished already; nothing was trained"
    if reason := why_not_start(job, folder, ledger):
        return "limit", reason
    if ledger.clock_back_s > 60 and job.limits.deadline is not None:
        context.warn(
            f"the clock is {say_seconds(ledger.clock_back_s)} behind what earlier attempts saw;"
            " the deadline counts by this clock"
        )
    tell_of_launchers(context.emit)
    return None


def _claim(spec: RunSpec, context: Context, allow_restart: bool) -> Json:
    """What the folder's run says of itself, which is this one. Raises `RunChangedError`,
    `RunDamagedError`.
    """
    job, numerics = spec.job, spec.numerics
    machine = {
        "device": device_name(numerics.device),
        "precision": numerics.name,
        "micro-batch": str(job.train.micro_batch_tokens or job.micro_batch_size),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if not job.where.same_bits:
        machine["processes"] = str(context.ranks.n)
    folder, warn = context.folder, context.warn
    return claim(folder, spec.identity, machine, warn, allow_restart=allow_restart)


def _decide(job: Job, run: Run, run_facts: Json) -> None:
    """What the first attempt decides for all: the settings, where a probe pays."""
    context, steps, n = run.context, run.steps, run.steps.feed.batches.steps_per_epoch
    if run_facts.get("steps_per_epoch") != n:
        run_facts["steps_per_epoch"] = n
        keep(context.folder / RUN, run_facts)
    pays = is_worth_it(job, run.estimate, steps.settings, context.seconds_left())
    # over spread weights the others would have to try the same
    if run.progress.step == 0 and pays and not context.ranks.is_fsdp:
        with context.meter.span("probe"):
            context.emit(Note("trying a few micro-batch sizes before the first step"))
            probe_run(steps, context.emit)
    keep_settings(context, steps.settings)


def short_job(job: Job, folder: str, **train: Any) -> Job:
    """A few steps of a job, in a folder of their own."""
    keys = {"eval_strategy": "no", "report_to": (), **train}
    return job.model_copy(update={"output_dir": folder, "train": job.train.model_copy(update=keys)})


@contextlib.contextmanager
def opened_run(job: Job, emit: Emit) -> Iterator[Run]:
    """A run at step 0 in a folder of its own, to be measured and thrown away: of one process,
    which has all weights.
    """
    job = job.model_copy(update={"where": job.where.model_copy(update={"strategy": "ddp"})})
    meter, folder = Meter(already_s=seconds_since_process_start()), Path(job.output_dir)
    quiet_libraries()
    with only_writer(folder), Notice() as notice:
        ledger = Ledger(folder / LEDGER, meter, job.usd_per_hour)
        context = _context(job, meter, ledger, notice, emit, "probe")
        run = build(_resolved(job, context), context)
        if run.forward.of.needs_reference:
            without_references(run.forward, run.train_examples.tokens)
        run.saver.restore(allow_restart=False)
        with contextlib.closing(run.steps.feed):
            yield run
        ledger.close("finished")
