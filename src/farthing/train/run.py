"""An attempt at a job, from the door to the receipt.

`train(job, tell)` prepares data and model, restores what an earlier attempt saved, lets `loop.py` take the steps, and leaves
ledger, receipt and copies in order however it ends. The same call starts a run, continues it, and finds a finished one
finished. Refuses to print: it tells `tell`, and returns an outcome.
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
from farthing.durability.cloud_preemption import Sign, Watch, services_for
from farthing.durability.files import make_private, only_writer
from farthing.durability.ledger import Ledger, Meter, seconds_since_process_start
from farthing.durability.preemption import Notice
from farthing.durability.replica import Mirror, open_mirror
from farthing.durability.run_folder import LEDGER, RUN, claim, is_finished, keep, keep_job, mend, unclaim
from farthing.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    Interrupted,
    NoSpace,
    OutOfMemory,
    UserMistake,
)
from farthing.model.hardware import (
    Numerics,
    choose_numerics,
    device_name,
    hardware_key,
    is_out_of_memory,
    taken_bytes,
)
from farthing.model.load import quiet_libraries
from farthing.planner.lengths import from_token_set
from farthing.report.receipt import leave_receipt
from farthing.train.autotune import as_probed, is_worth_it, subject_of
from farthing.train.autotune_cache import Subject
from farthing.train.budget import over_limit, seconds_left, why_not_start
from farthing.train.estimate import promised
from farthing.train.frozen import begin_behind_frozen_layers
from farthing.train.identity import former_names
from farthing.train.loop import Run, note_news
from farthing.train.setup import (
    Inputs,
    Meanwhile,
    Tell,
    build_model,
    check_extras,
    open_examples,
    open_inputs,
)
from farthing.train.summary import say_what_was_decided
from farthing.train.trackers import tracked
from farthing.units import say_seconds

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)


@dataclass
class Outcome:
    """How an attempt ended: finished (0), limit (3) or interrupted (75)."""

    state: str
    reason: str
    receipt: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """What the process should tell its caller."""
        return {"finished": EXIT_FINISHED, "limit": EXIT_LIMIT, "interrupted": EXIT_INTERRUPTED}[self.state]


def train(job: Job, tell: Tell, *, allow_restart: bool = False) -> Outcome:
    """Start, continue or find finished the run of `job` in its `output_dir`.

    Raises `FarthingError`s in words; whatever was committed before stays valid.
    """
    meter = Meter(already_s=seconds_since_process_start())
    quiet_libraries()
    folder = Path(job.output_dir)
    try:
        make_private(folder)
    except OSError as error:
        raise UserMistake(
            f"the run folder can't be made: {error.strerror}", where=str(folder), to_do="choose another output_dir"
        ) from error
    with (
        only_writer(folder),
        Notice() as notice,
        watched(job, notice),
        tracked(tell, job.train.report_to, folder) as tell,
    ):
        warn = partial(_warn, tell)
        mend(folder, warn)
        mirror = open_mirror(job.output_store, folder, job.train.save_total_limit, warn)
        if mirror is not None:
            with meter.span("restore"):
                step = mirror.bring_back(allow_restart, lambda: bool(notice))
            if step is not None:
                tell("note", {"text": f"step {step} was brought back from {job.output_store}"})
        try:
            ledger = Ledger(folder / LEDGER, meter, job.usd_per_hour)
            ledger.write("starting")
            ledger.keep_beating()
        except OSError as error:
            raise NoSpace(
                f"the run folder can't be written: {error.strerror}", where=str(folder), to_do="make room there"
            ) from error
        state = "failed"
        try:
            state, reason = _train(job, folder, meter, ledger, notice, tell, allow_restart, mirror)
        except Interrupted as error:
            state, reason = "interrupted", notice.reason or error.what
        except UserMistake:
            with contextlib.suppress(OSError):
                unclaim(folder)
            raise
        except OSError as error:
            if error.errno not in DISK_TROUBLE:
                raise
            raise NoSpace(
                f"the disk fails: {error.strerror}; what was saved is whole",
                where=str(error.filename or folder),
                to_do="make room or mend the disk, then run the same command again",
            ) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"the device has no memory left: {(str(error).splitlines() or [''])[0][:200]}",
                where=str(folder),
                to_do="even one example at a time, every layer computed again, is too much: lower data.max_length, or use"
                " method: qlora or a larger GPU",
            ) from error
        finally:
            with contextlib.suppress(OSError):  # a full disk must not hide the error that is on its way
                note_news(notice, ledger)
                ledger.end(state)
            if state == "failed":
                end_mirror(mirror, meter, ledger, notice)
                with contextlib.suppress(OSError):
                    ledger.close()
        try:
            receipt = leave_receipt(folder)
            if mirror is not None:
                mirror.offer_last_words()
                end_mirror(mirror, meter, ledger, notice)
                receipt = leave_receipt(folder)
        finally:
            ledger.close()
        return Outcome(state, reason, receipt)


def _train(
    job: Job,
    folder: Path,
    meter: Meter,
    ledger: Ledger,
    notice: Notice,
    tell: Tell,
    allow_restart: bool,
    mirror: Mirror | None,
) -> tuple[str, str]:
    numerics, inputs = _identify(job, meter)
    machine = {
        "device": device_name(numerics.device),
        "precision": numerics.name,
        "micro-batch": str(job.train.micro_batch_tokens or job.micro_batch_size),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    run_facts = claim(
        folder,
        inputs.identity,
        machine,
        partial(_warn, tell),
        former=former_names(job, inputs.choice, inputs.config, inputs.identity),
        allow_restart=allow_restart,
    )
    keep_job(folder, job.model_dump(mode="json"), run_facts)
    if is_finished(folder):
        return "finished", "it was finished already; nothing was trained"
    if reason := why_not_start(job, folder, ledger):
        return "limit", reason
    if ledger.clock_back_s > 60 and job.limits.deadline is not None:
        tell("warning", {"text": f"the clock is {say_seconds(ledger.clock_back_s)} behind what earlier attempts saw;"
                         " the deadline is where this clock has it"})  # fmt: skip
    run = _open(job, folder, inputs, numerics, meter, ledger, notice, tell)
    run.mirror = mirror
    meter.enter("restore")
    tell("working", {"on": "looking for a checkpoint"})
    run.restore(run_facts["run_id"], allow_restart)
    if over_limit(job, ledger, reserve_s=0.0):  # let in to write its model
        return run.loop()
    with meter.span("prefix"):
        keeps = begin_behind_frozen_layers(run, run_facts.get("keeps_frozen_output"))
    shares = run.share_beginnings(run_facts.get("shares_beginnings"))
    decided = {"keeps_frozen_output": keeps, "shares_beginnings": shares}
    if run_facts | decided != run_facts:
        run_facts |= decided
        keep(folder / RUN, run_facts)
    left_s, exact = seconds_left(job, ledger), job.train.full_determinism
    if run.progress.step == 0 and is_worth_it(job, run.promise, is_deterministic=exact, left_s=left_s):
        with meter.span("probe"):
            run.probe()
    say_what_was_decided(run)
    meter.enter("idle")
    if mirror is not None:
        mirror.offer(run.progress.step, run.checkpoints.to_go_on(run.progress.step, run.progress.best_step))
    state, reason = run.loop()
    if state == "finished":
        keep(folder / RUN, {**run_facts, "finished": True})
    if mirror is not None:
        at = run.progress
        mirror.offer(at.step, run.checkpoints.to_go_on(at.step, at.best_step), with_model=True)
        with meter.span("checkpoint"):
            leaves_in_s = notice.patience_s(mirror.pace.leave_s, mirror.pace.finish_s)
            mirror.wait(leaves_in_s if state == "interrupted" else mirror.pace.finish_s)
        mirror.check()
    run.leave_measurement()
    return state, reason


def _warn(tell: Tell, text: str) -> None:
    tell("warning", {"text": text})


def end_mirror(mirror: Mirror | None, meter: Meter, ledger: Ledger, notice: Notice) -> None:
    """Wait for the last copies, not longer than until the machine goes, and give the lease back; the wait is on the bill."""
    if mirror is not None:
        meter.enter("checkpoint")
        leaves_in_s = notice.patience_s(mirror.pace.leave_s, mirror.pace.finish_s)
        is_done = mirror.wait(leaves_in_s)
        with contextlib.suppress(OSError):
            ledger.beat(at_once=True)  # the lease takes it along: the store knows it too
        mirror.close(5.0 if is_done else 1.0)
        with contextlib.suppress(OSError):
            ledger.beat(at_once=True)


@contextlib.contextmanager
def watched(job: Job, notice: Notice) -> Iterator[None]:
    """Within the block the cloud's metadata service is asked for notices, where the job or the machine gives reason to."""

    def hears(cloud: str, sign: Sign) -> None:
        notice.say(sign.what, cloud, sign.leaves_at, is_certain=sign.is_certain)

    watch = Watch(services_for(job.where.notices, is_spot=job.where.spot), hears, notice.warnings.append)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def _identify(job: Job, meter: Meter) -> tuple[Numerics, Inputs]:
    """What a run computes in and starts from; cheap, and what is wrong is found here."""
    numerics = choose_numerics(
        job.where.device, job.train.bf16, job.train.fp16, job.train.tf32, job.train.full_determinism
    )
    check_extras(job)
    meter.enter("tokenize")
    return numerics, open_inputs(job)


def _open(
    job: Job,
    folder: Path,
    inputs: Inputs,
    numerics: Numerics,
    meter: Meter,
    ledger: Ledger,
    notice: Notice,
    tell: Tell,
) -> Run:
    """The run at step 0: tokenized, planned, with its model on the device."""
    before_bytes = taken_bytes(numerics.device)
    with contextlib.ExitStack() as stack:
        loading = None
        if job.task != "classification":  # whose head waits for the labels; else the model is read meanwhile
            loading = stack.enter_context(Meanwhile(lambda: build_model(job, inputs, numerics, ())))
        train_examples, eval_examples = open_examples(job, inputs, tell, lambda: bool(notice))
        promise = promised(job, folder, inputs, numerics, train_examples, eval_examples, tell)
        lengths = from_token_set(train_examples.tokens, train_examples.indices, job.task, source="")
        subject = subject_of(job, inputs.config, lengths, numerics.name, hardware_key(numerics.device))
        promise = as_probed(job, folder, promise, subject)
        ledger.write("starting")
        meter.enter("load_model")
        tell("working", {"on": "loading the model"})
        model = loading.result() if loading else build_model(job, inputs, numerics, train_examples.tokens.label_names)
    run = Run(job, folder, inputs, numerics, model, train_examples, eval_examples, meter, ledger, notice, tell, promise)
    run.subject = subject
    run.record.before_model_bytes = before_bytes
    ledger.write("starting")
    return run


@contextlib.contextmanager
def opened_run(job: Job, tell: Tell) -> Iterator[tuple[Run, Subject]]:
    """A run at step 0 in a folder of its own, to be probed and thrown away."""
    meter, folder = Meter(already_s=seconds_since_process_start()), Path(job.output_dir)
    quiet_libraries()
    with only_writer(folder), Notice() as notice:
        ledger = Ledger(folder / LEDGER, meter, job.usd_per_hour)
        numerics, inputs = _identify(job, meter)
        run = _open(job, folder, inputs, numerics, meter, ledger, notice, tell)
        run.restore("probe", allow_restart=False)
        assert run.subject is not None
        with contextlib.closing(run.steps):
            yield run, run.subject
        ledger.close("finished")
