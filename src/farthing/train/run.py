"""An attempt at a job, from the door to the receipt.

`train(job, emit)` prepares data and model, restores what an earlier attempt saved, lets `loop.py`
take the steps, and leaves ledger, receipt and copies in order however it ends. The same call starts
a run, continues it, and finds a finished one finished. Refuses to print: it emits events, and
returns an outcome.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers

from farthing.config.job import Job
from farthing.config.preflight import spot_without_store, unusual_settings
from farthing.data.token_set import notes_of
from farthing.device_memory import in_words, is_out_of_memory
from farthing.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    DiskFullError,
    FarthingError,
    InputError,
    LimitError,
    OutOfMemoryError,
    RunDamagedError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.events import Emit, Note, Warned, Working
from farthing.export.folders import write_card
from farthing.model.hardware import (
    Numerics,
    device_name,
    not_deterministic,
    of_models_code,
    taken_bytes,
)
from farthing.model.load import quiet_libraries
from farthing.objectives.registry import objective_of
from farthing.report.receipt import leave_receipt
from farthing.report.receipt_types import Receipt
from farthing.report.run_page import leave_page
from farthing.report.training_log import keep_digest, read_log
from farthing.run.exported import damage_of, damaged_checkpoints
from farthing.run.folder import (
    DATA_NOTES,
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
from farthing.settings import Settings
from farthing.storage.files import Json, only_writer, set_aside, write_json
from farthing.train.ancestor import begin_from, find_ancestor
from farthing.train.assemble import assemble
from farthing.train.attempt import Attempt, Context
from farthing.train.autotune import is_worth_it, probe_run
from farthing.train.budget import (
    allowance_s,
    over_limit,
    refuse_start,
    seconds_left,
    why_not_start,
)
from farthing.train.estimate import estimated
from farthing.train.finished import STAMPS, stamps_of
from farthing.train.forecast import leaving_s, reserve_s
from farthing.train.loop import loop, note_news
from farthing.train.measure import leave_measured
from farthing.train.metrics_file import metrics_file
from farthing.train.prefix_budget import share_prefix
from farthing.train.published import publish_finished
from farthing.train.rank_setup import (
    follow,
    joined,
    lead,
    must_be_the_same,
    take_over,
    tell_of_launchers,
    with_slots,
)
from farthing.train.reference import refer, without_references
from farthing.train.run_settings import first_settings, keep_settings
from farthing.train.saver import restore
from farthing.train.setup import (
    Inputs,
    build_model,
    examples_sha256,
    identify,
    meanwhile,
    open_examples,
)
from farthing.train.strategy import may_shard, read_where_it_differs, shard_weights
from farthing.train.summary import emit_summary
from farthing.train.trackers import tracked
from farthing.train.watchdog import Watchdog
from farthing.units import say_seconds

DISK_TROUBLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES),
    *(
        errno.ESTALE,
        errno.ENOTCONN,
    ),  # a file server has forgotten us, the program behind a mount has died
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
        return {"finished": EXIT_FINISHED, "limit": EXIT_LIMIT, "interrupted": EXIT_INTERRUPTED}[
            self.state
        ]


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
        if begun is None:
            with errors_in_words(Path(job.output_dir)):
                begun = stack.enter_context(opened(Path(job.output_dir), job.usd_per_hour))
        folder, meter, ledger = begun.folder, begun.meter, begun.ledger
        notice = stack.enter_context(Notice(ranks.one_press_s))
        ranks.listen(
            lambda: bool(notice),
            lambda: meter.span("ranks"),
            lambda: ledger.end("interrupted"),
            lambda: meter.at in ON_DISKS_AND_NETWORKS,
        )
        stack.enter_context(watched(job, notice))
        emit = stack.enter_context(tracked(emit, job.train.report_to, folder))
        if ranks.is_first:
            emit = stack.enter_context(metrics_file(emit, job))
        warn = partial(_warn, emit)
        replica = open_mirror(job.output_store, folder, job.train.save_total_limit, warn)
        watchdog = Watchdog(
            job,
            ledger,
            notice.reach,
            partial(_last_words, folder, ledger),
            allowance_s(job, folder, ledger),
        )
        stack.enter_context(watchdog)
        context = Context(folder, "", meter, ledger, notice, emit, ranks, replica, watchdog)
        with errors_in_words(folder):
            mend(folder, warn)
            if replica is not None:
                _bring_back(job, context, allow_restart)
        if damage := begun.damage_in_words():
            warn(damage)
        state = "failed"
        try:
            with errors_in_words(folder):
                state, reason = _train(job, begun, context, allow_restart)
        except RunInterruptedError as error:
            ranks.fail(EXIT_INTERRUPTED)  # before the loop: the others wait for what does not come
            state, reason = notice.how_it_ends() if notice else ("interrupted", error.what)
        except RunTakenError as error:
            ranks.fail(EXIT_INTERRUPTED)
            state, reason = "interrupted", error.what
        except LimitError as error:
            ranks.fail(EXIT_INTERRUPTED)
            state, reason = "limit", error.what
        except InputError:
            with contextlib.suppress(OSError):
                unclaim(folder)
            raise
        finally:
            with contextlib.suppress(
                OSError
            ):  # a full disk must not hide the error that is on its way
                note_news(notice, ledger)
                ledger.end(state)
            if state == "failed":
                end_mirror(context)
        if not ranks.is_first:
            return Outcome(state, reason, leave_receipt(folder))
        outcome, begun.at_close = _told_at_the_end(context, state, reason)
        if state == "finished":
            publish_finished(job, emit)
        return outcome


def _told_at_the_end(
    context: Context, state: str, reason: str
) -> tuple[Outcome, Callable[[], None]]:
    """How an attempt ended, with its receipt and card; and what brings them, and the page, up to
    the last second.
    """
    folder, replica = context.folder, context.replica
    with contextlib.suppress(OSError):
        keep_digest(folder / LOG)
    log = read_log(folder / LOG)
    receipt = leave_receipt(folder, log)
    if replica is not None:
        replica.offer_last_words()
        end_mirror(context)
        receipt = leave_receipt(folder, log)
    with contextlib.suppress(OSError):  # a full disk: the receipt is there
        write_card(folder, receipt)
    outcome = Outcome(state, reason, receipt)

    def with_the_last_second() -> None:
        outcome.receipt = leave_receipt(folder, log)
        write_card(folder, outcome.receipt)
        leave_page(folder, outcome.receipt)

    return outcome, with_the_last_second


def _last_words(folder: Path, ledger: Ledger) -> None:
    """Bill and receipt of a run that hangs; called while its main thread may hold anything."""
    with contextlib.suppress(Exception):
        ledger.end("limit")
        leave_receipt(folder)


def _bring_back(job: Job, context: Context, allow_restart: bool) -> None:
    """What the store has and this disk has not."""
    assert context.replica is not None
    context.replica.on_bills = context.ledger.take_in

    def asks() -> bool:
        return context.ranks.others_ask_to_leave or bool(context.notice)

    with context.meter.span("restore"):
        step = context.replica.bring_back(allow_restart, asks)
    context.ledger.write()
    if step is not None:
        context.emit(Note(f"step {step} was brought back from {job.output_store}"))
    if doubt := context.replica.doubt():
        context.emit(Note(f"{job.output_store} {doubt}"))


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


def _train(job: Job, begun: Opened, context: Context, allow_restart: bool) -> tuple[str, str]:
    """(state, reason) of an attempt that is let in."""
    folder, meter, ledger, emit, ranks = (
        context.folder,
        context.meter,
        context.ledger,
        context.emit,
        context.ranks,
    )
    if not ranks.is_first:
        return _compute_along(job, context)
    begun.refuse_forgotten(allow_restart=allow_restart)
    stamps = stamps_of(job)  # as they are before anything is read
    numerics, inputs = identify(job, emit, lambda: meter.enter("tokenize"))
    run_facts = _claim(job, context, numerics, inputs, allow_restart)
    context.run_id, begun.is_accepted = run_facts["run_id"], True
    run_facts = _unfinished_where_more_is_asked(job, folder, run_facts)
    keep_job(folder, job.model_dump(mode="json"), run_facts)
    was_finished = is_finished(folder)
    for text in filter(None, (*unusual_settings(job), spot_without_store(job))):
        _warn(emit, text)
    ended = _why_not_let_in(job, context, inputs, was_finished)
    lead(context, ended)
    if ended:
        return ended
    attempt = _open(job, context, inputs, numerics, EXAMPLES in run_facts)
    if context.watchdog is not None:
        context.watchdog.reserve_s = partial(leaving_s, attempt)
    run_facts = same_examples(
        folder,
        run_facts,
        examples_sha256(attempt.train_examples, attempt.eval_examples),
        attempt.train_examples.tokens.label_names,
    )
    meter.enter("restore")
    emit(Working("looking for a checkpoint"))
    run_facts = _begin(attempt, run_facts)
    if not was_finished:
        refer(attempt)
    restore(attempt, allow_restart)
    if was_finished or over_limit(job, ledger, reserve_s(attempt)):  # let in to write its model
        take_over(attempt)
        return loop(attempt)
    _decide(attempt, run_facts)
    emit_summary(attempt)
    meter.enter("idle")
    _offer(attempt)
    take_over(attempt)
    state, reason = loop(attempt)
    _offer(attempt, with_model=True)
    if (
        _wait_for_replica(context, state) and state == "finished"
    ):  # else the same command brings the model to the store
        keep(folder / RUN, {**run_facts, "finished": True, STAMPS: stamps})
    leave_measured(attempt)
    return state, reason


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


def _compute_along(job: Job, context: Context) -> tuple[str, str]:
    """(state, reason) of an attempt that the first rank leads."""
    let_in = follow(context)
    if let_in.ended is not None:
        return let_in.ended
    numerics, inputs = identify(job, context.emit, lambda: context.meter.enter("tokenize"))
    must_be_the_same(context, inputs.identity, let_in.identity)
    attempt = _open(job, context, inputs, numerics, let_in.has_begun)
    refer(attempt)
    take_over(attempt)
    return loop(attempt)


def _why_not_let_in(
    job: Job, context: Context, inputs: Inputs, was_finished: bool
) -> tuple[str, str] | None:
    """(state, reason) where nothing is to be trained: the run has ended, or its limits have no room
    for an attempt.
    """
    folder, ledger, emit = context.folder, context.ledger, context.emit
    if not clear_damaged_model(folder, emit) and was_finished:
        ledger.withdraw()
        for text in damaged_checkpoints(folder):
            _warn(emit, text)
        return "finished", "the run had finished already; nothing was trained"
    if reason := why_not_start(job, folder, ledger):
        return "limit", reason
    if ledger.clock_back_s > 60 and job.limits.deadline is not None:
        _warn(
            emit,
            f"the clock is {say_seconds(ledger.clock_back_s)} behind what earlier attempts saw;"
            " the deadline counts by this clock",
        )
    tell_of_launchers(emit)
    return None


def _begin(attempt: Attempt, run_facts: Json) -> Json:
    """Begin with the weights of the job's ancestor, where it has one and the run has no checkpoint
    of its own.
    """
    if attempt.checkpoints.steps():
        return run_facts
    found = find_ancestor(attempt.job)
    if found is None:
        return run_facts
    run_facts = {
        **run_facts,
        "ancestor": begin_from(
            found,
            attempt.state["model"],
            attempt.context.ranks.rows_of,
            attempt.train_examples.tokens.label_names,
        ),
    }
    keep(attempt.context.folder / RUN, run_facts)
    attempt.context.emit(Note(f"begins with the weights of step {found.step} of {found.run}"))
    return run_facts


def _claim(
    job: Job, context: Context, numerics: Numerics, inputs: Inputs, allow_restart: bool
) -> Json:
    """What the folder's run says of itself, which is this one. Raises `RunChangedError`,
    `RunDamagedError`.
    """
    machine = {
        "device": device_name(numerics.device),
        "precision": numerics.name,
        "micro-batch": str(job.train.micro_batch_tokens or job.micro_batch_size),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if not job.where.same_bits:
        machine["processes"] = str(context.ranks.n)
    return claim(
        context.folder,
        inputs.identity,
        machine,
        partial(_warn, context.emit),
        allow_restart=allow_restart,
    )


def _decide(attempt: Attempt, run_facts: Json) -> None:
    """What the first attempt decides for all, as it changes rounding; and the settings, where a
    probe pays.
    """
    context, job = attempt.context, attempt.job
    share_prefix(attempt)
    if run_facts.get("steps_per_epoch") != attempt.batches.steps_per_epoch:
        run_facts["steps_per_epoch"] = attempt.batches.steps_per_epoch
        keep(context.folder / RUN, run_facts)
    left_s, exact = seconds_left(job, context.ledger), job.train.full_determinism
    pays = is_worth_it(
        job, attempt.estimate, attempt.settings, is_deterministic=exact, left_s=left_s
    )
    if (
        attempt.progress.step == 0 and pays and not context.ranks.is_fsdp
    ):  # the others would have to try the same
        with context.meter.span("probe"):
            context.emit(Note("trying a few micro-batch sizes before the first step"))
            probe_run(attempt)
    keep_settings(attempt)


def _offer(attempt: Attempt, *, with_model: bool = False) -> None:
    """Offer the store what is needed to go on from where the run is."""
    at, replica = attempt.progress, attempt.context.replica
    if replica is not None:
        replica.offer(
            at.step, attempt.checkpoints.to_go_on(at.step, at.best_step), with_model=with_model
        )


def _wait_for_replica(context: Context, state: str) -> bool:
    """Until the copies are made, not longer than until the machine goes; whether they are, or there
    is no store. Raises what has made the copying end."""
    replica, notice = context.replica, context.notice
    if replica is None:
        return True
    with context.meter.span("checkpoint"):
        leaves_in_s = notice.patience_s(replica.pace.leave_s, replica.pace.finish_s)
        most_s = leaves_in_s if state == "interrupted" else replica.pace.finish_s
        is_copied = replica.wait(min(most_s, context.left_s))
    replica.check()
    return is_copied


def clear_damaged_model(folder: Path, emit: Emit) -> bool:
    """Set an exported model aside that is not what was written, with a warning; whether it
    was so.
    """
    damage = damage_of(folder)
    if damage is None:
        return False
    aside = set_aside(folder / MODEL)
    text = (
        f"the exported model is damaged ({damage}): set aside as {aside.name}, and written again"
        " from the checkpoint"
    )
    emit(Warned(text))
    return True


def _warn(emit: Emit, text: str) -> None:
    emit(Warned(text))


def end_mirror(context: Context) -> None:
    """Wait for the last copies, not longer than until the machine goes or a limit is reached, and
    give the lease back; the wait is on the bill.
    """
    mirror, ledger = context.replica, context.ledger
    if mirror is None:
        return
    context.meter.enter("checkpoint")
    leaves_in_s = context.notice.patience_s(mirror.pace.leave_s, mirror.pace.finish_s)
    is_done = mirror.wait(min(leaves_in_s, context.left_s))
    with contextlib.suppress(OSError):
        ledger.beat(at_once=True)  # the lease takes it along: the store knows it too
    mirror.close(min(5.0 if is_done else 1.0, context.left_s))
    with contextlib.suppress(OSError):
        ledger.beat(at_once=True)


@contextlib.contextmanager
def watched(job: Job, notice: Notice) -> Iterator[None]:
    """Within the block the cloud's metadata service is asked for notices, where the job or the
    machine gives reason to.
    """
    watch = Watch(services_for(job.where.notices, is_spot=job.where.spot), notice)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def _open(
    job: Job, context: Context, inputs: Inputs, numerics: Numerics, has_begun: bool = False
) -> Attempt:
    """The attempt at step 0: tokenized, planned, with its model on the device."""
    meter, ledger, notice, emit = context.meter, context.ledger, context.notice, context.emit
    before_bytes, ranks = taken_bytes(numerics.device), context.ranks
    on_host = may_shard(job, ranks)
    build = partial(
        build_model,
        job,
        inputs,
        numerics,
        on_host=on_host,
        reads=ranks.is_first or not on_host,
        warn=partial(_warn, emit),
    )
    with contextlib.ExitStack() as stack:
        loading = None
        if (
            objective_of(job.task).labels is None
        ):  # else the head waits for them; the model is read meanwhile
            loading = stack.enter_context(meanwhile(lambda: build(())))
        if not ranks.is_first:  # it has tokenized, and estimated, for all
            follow(context)
        examples, held_out = open_examples(
            job, inputs, emit, lambda: bool(notice) or ranks.others_ask_to_leave
        )
        sets = [each.tokens for each in (examples, held_out) if each is not None]
        notes = list(dict.fromkeys(note for each in sets for note in notes_of(each.facts)))
        write_json(context.folder / DATA_NOTES, notes)
        estimate = estimated(
            job, context.folder, inputs, numerics, examples, held_out, emit, ranks.n
        )
        settings = first_settings(job, context, inputs, numerics, examples, estimate)
        settings = with_slots(job, ranks, settings, has_begun, emit)
        if ranks.is_first:
            lead(context)
        settings = Settings.from_json(ranks.tell_all(settings.to_json()))
        ledger.write("starting")
        meter.enter("load_model")
        emit(Working("loading the model"))
        model = loading.result() if loading else build(examples.tokens.label_names)
        model = read_where_it_differs(
            job, ranks, model, lambda: build(examples.tokens.label_names, reads=True)
        )
    shard_weights(job, ranks, model, numerics, emit)
    attempt = assemble(
        job, context, inputs, numerics, model, (examples, held_out), estimate, settings
    )
    attempt.record.before_model_bytes = before_bytes
    ledger.write("starting")
    return attempt


@contextlib.contextmanager
def opened_attempt(job: Job, emit: Emit) -> Iterator[Attempt]:
    """An attempt at step 0 in a folder of its own, to be measured and thrown away: of one process,
    which has all weights.
    """
    job = job.model_copy(update={"where": job.where.model_copy(update={"strategy": "ddp"})})
    meter, folder = Meter(already_s=seconds_since_process_start()), Path(job.output_dir)
    quiet_libraries()
    with only_writer(folder), Notice() as notice:
        ledger = Ledger(folder / LEDGER, meter, job.usd_per_hour)
        numerics, inputs = identify(job, emit, lambda: meter.enter("tokenize"))
        attempt = _open(
            job, Context(folder, "probe", meter, ledger, notice, emit), inputs, numerics
        )
        if attempt.forward.of.needs_reference:
            without_references(attempt.forward, attempt.train_examples.tokens)
        restore(attempt, allow_restart=False)
        with contextlib.closing(attempt.steps.feed):
            yield attempt
        ledger.close("finished")
