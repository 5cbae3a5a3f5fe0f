"""An attempt at a job, from the door to the receipt.

`train(job, emit)` resolves the job, builds the run, restores what an earlier attempt saved, lets
`loop.py` take the steps, and leaves ledger, receipt and copies in order however it ends. The same
call starts a run, continues it, and finds a finished one finished.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from farthing.config.job import Job
from farthing.config.preflight import spot_without_store, unusual_settings
from farthing.errors import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    InputError,
    LimitError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.events import Emit, Note, Working
from farthing.export.folders import write_card
from farthing.model.load import quiet_libraries
from farthing.report.receipt import leave_receipt
from farthing.report.receipt_types import RunReceipt
from farthing.report.run_page import leave_page
from farthing.report.training_log import keep_digest, read_log
from farthing.run.folder import (
    EXAMPLES,
    LOG,
    RUN,
    is_finished,
    keep,
    keep_job,
    mend,
    same_examples,
    unclaim,
)
from farthing.run.group import not_followed
from farthing.run.opening import Opened, opened
from farthing.storage.files import Json
from farthing.train.admission import claimed, why_not_admitted
from farthing.train.attempt import attempt, bring_back, close_replica, offer, wait_for_copies
from farthing.train.autotune import is_worth_it, probe_run
from farthing.train.budget import refuse_start
from farthing.train.build import build
from farthing.train.built import Run
from farthing.train.context import Context
from farthing.train.finished import FOLLOWS_FROM, follows_from, publish_finished
from farthing.train.loop import loop, note_news
from farthing.train.measure import leave_measured
from farthing.train.rank_setup import follow, joined, lead, must_be_the_same, take_over
from farthing.train.reference import refer
from farthing.train.resolve import RunSpec, check_extras, resolve, sha256_of_examples
from farthing.train.run_settings import keep_settings
from farthing.train.summary import emit_summary
from farthing.train.trouble import errors_in_words

Ended = tuple[str, str]  # (state, reason) of an attempt


@dataclass
class Outcome:
    """How an attempt ended: finished (0), limit (3) or interrupted (75). The receipt is brought up
    to date when it closes.
    """

    state: str
    reason: str
    receipt: RunReceipt  # of a rank that is not the first: what is in a folder that is thrown away

    @property
    def exit_code(self) -> int:
        """What the process should tell its caller."""
        return EXIT_CODES[self.state]


def train(
    job: Job, emit: Emit, *, allow_restart: bool = False, begun: Opened | None = None
) -> Outcome:
    """Start, continue or find finished the run of `job` in its `output_dir`.

    `begun` where the attempt is on the bill already, before this module was imported; who has
    opened it closes it. Raises `FarthingError`s; whatever was committed before stays
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
                begun = stack.enter_context(opened(folder, job.usd_per_hour, ranks.n))
        context = stack.enter_context(attempt(job, ranks, begun, emit))
        with errors_in_words(folder):
            mend(folder, context.warn)
            bring_back(context, job.output_store, allow_restart=allow_restart)
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
        except InputError as error:
            with contextlib.suppress(OSError):
                if begun.belongs_elsewhere(error):
                    begun.ledger.withdraw()  # before the lease tells the store of it
                if begun.is_accepted:
                    unclaim(folder)
            raise
        finally:
            with contextlib.suppress(OSError):  # a full disk must not hide the error on its way
                note_news(context.notice, context.ledger)
                context.ledger.end(state)
            if state == "failed":
                close_replica(context)
        try:
            outcome = close(context, begun, state, reason)
            if ranks.is_first and state == "finished":
                publish_finished(job, context.emit)
            return outcome
        except LimitError as error:  # the close hung
            if context.watchdog is not None:
                context.watchdog.raise_no_more()
            return Outcome("limit", error.what, leave_receipt(folder))


def _lead(job: Job, context: Context, begun: Opened, allow_restart: bool) -> Ended:
    """The attempt of a run, or of its first rank."""
    folder = context.folder
    if damage := begun.damage_in_words():
        context.warn(damage)
    begun.refuse_forgotten(allow_restart=allow_restart)
    read_from = follows_from(job)  # as it is before anything is read
    spec = _resolved(job, context)
    facts = claimed(spec, context, allow_restart=allow_restart)
    context.run_id, begun.is_accepted = facts["run_id"], True
    keep_job(folder, job.model_dump(mode="json"), facts)
    was_finished = is_finished(folder)
    for text in filter(None, (*unusual_settings(job), spot_without_store(job))):
        context.warn(text)
    ended = why_not_admitted(context, was_finished=was_finished)
    if ended is None and (names := not_followed(os.environ)):
        context.emit(Note(f"not followed, the job says how to train: {', '.join(names)}"))
    lead(context, ended, was_finished=was_finished)
    if ended:
        return ended
    run = build(spec, context, has_begun=EXAMPLES in facts)
    facts = _restore(run, facts, allow_restart, was_finished)
    if was_finished or context.limits.over(run.forecast.reserve_s):
        take_over(run)  # let in to write its model
        return loop(run)
    _settle(run, facts)
    emit_summary(run)
    context.meter.enter("idle")
    offer(run)
    take_over(run)
    state, reason = loop(run)
    offer(run, with_model=True)
    is_copied = wait_for_copies(context, state)
    if is_copied and state == "finished":  # else the same command brings the model to the store
        keep(folder / RUN, {**facts, "finished": True, FOLLOWS_FROM: read_from})
    leave_measured(run)
    return state, reason


def _compute_along(job: Job, context: Context) -> Ended:
    """An attempt that the first rank leads."""
    told = follow(context)
    if told["ended"] is not None:
        state, reason = told["ended"]
        return state, reason
    facts, spec = told["files"][RUN], _resolved(job, context)
    must_be_the_same(context, spec.identity, facts["identity"])
    run = build(spec, context, has_begun=EXAMPLES in facts)
    if not told["was_finished"]:  # all ranks share that
        refer(run)
    take_over(run)
    return loop(run)


def _resolved(job: Job, context: Context) -> RunSpec:
    check_extras(job)
    context.meter.enter("tokenize")
    return resolve(job, context.emit)


def _restore(run: Run, facts: Json, allow_restart: bool, was_finished: bool) -> Json:
    """Bring the run to where earlier attempts left it, or to its ancestor; its facts."""
    context, folder = run.context, run.context.folder
    if context.watchdog is not None:
        context.watchdog.reserve_s = lambda: run.forecast.leaving_s
    sha256 = sha256_of_examples(run.train_examples, run.eval_examples)
    tokens = run.train_examples.tokens
    are_chats = tokens.facts["n_rendered"] > 0
    if run.spec.job.data.chat_template and not are_chats:
        context.warn("data.chat_template is not used: no row is a chat")
    facts = same_examples(folder, facts, sha256, tokens.label_names, are_chats=are_chats)
    context.meter.enter("restore")
    context.emit(Working("looking for a checkpoint"))
    if not run.saver.checkpoints.steps() and (ancestor := run.begin_as_ancestor()) is not None:
        facts = {**facts, "ancestor": ancestor}
        keep(folder / RUN, facts)
        text = f"begins with the weights of step {ancestor['step']} of {ancestor['run']}"
        context.emit(Note(text))
    if not was_finished:
        refer(run)
    run.saver.restore(allow_restart)
    taken, asked = run.progress.step, run.schedule.n_steps
    if taken > asked:
        context.warn(f"the run has taken {taken} steps, and the job asks for {asked}: it ends here")
    return facts


def _settle(run: Run, facts: Json) -> None:
    """What the first attempt decides for all: the settings, where a probe pays."""
    context, n = run.context, run.feed.batches.steps_per_epoch
    if facts.get("steps_per_epoch") != n:
        facts["steps_per_epoch"] = n
        keep(context.folder / RUN, facts)
    pays = is_worth_it(run.spec, run.estimate, run.feed.settings, context.limits.left_s)
    # over spread weights the others would have to try the same
    if run.progress.step == 0 and pays and not context.ranks.is_fsdp:
        with context.meter.span("probe"):
            context.emit(Note("trying a few micro-batch sizes before the first step"))
            probe_run(run.steps, context.emit)
    keep_settings(context, run.feed.settings)


def close(context: Context, begun: Opened, state: str, reason: str) -> Outcome:
    """How an attempt ended, with its receipt, card and copies. The receipt and the page are brought
    up to the last second when the bill is closed.
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
    return outcome
