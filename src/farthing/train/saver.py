"""When and how a run is saved, restored and exported: the trainer's side of
`run/checkpoint.py`.

A save takes a snapshot at once and writes it in the background; nothing is saved before the figures
of its steps were read.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

from torch import Tensor

from farthing.errors import DiskFullError, RunDamagedError, RunInterruptedError
from farthing.events import Exported, Note, Restored, Saved, Working
from farthing.export.folders import export_model
from farthing.model.adapters import put_back
from farthing.report.receipt import build_receipt
from farthing.report.training_log import keep_digest
from farthing.run.checkpoint import SaveResult, n_bytes_of
from farthing.run.folder import LOG, MODEL
from farthing.run.parts import read_part
from farthing.storage.files import DamagedFileError, Json
from farthing.train.attempt import Attempt
from farthing.train.step_log import settle
from farthing.units import plural, say_bytes


def restore(attempt: Attempt, allow_restart: bool) -> None:
    """Go back to the newest whole checkpoint, or to the start when there never was one. Raises
    `RunDamagedError`, and `RunInterruptedError` where all were damaged here and a store has the
    run: the next attempt takes its copy."""
    checkpoints, ledger, at = attempt.checkpoints, attempt.ledger, attempt.progress
    if not attempt.ranks.is_first:
        return
    may_be_in_store = attempt.replica is not None and bool(checkpoints.steps())
    try:
        step = checkpoints.newest_valid()
        if step is None and ledger.committed_step > 0:
            raise RunDamagedError(
                f"the checkpoint of step {ledger.committed_step} was written, and is gone",
                where=str(checkpoints.folder),
                to_do="restore it from a copy, or start from step 0 with --allow-restart",
            )
    except RunDamagedError as error:
        if may_be_in_store and not allow_restart:
            raise RunInterruptedError(
                f"{error.what}; the same command takes the copy in the store",
                where=error.where,
                to_do="run it again",
            ) from error
        if not allow_restart:
            raise
        checkpoints.forget_all()
        step = None
    if step is not None:
        checkpoints.restore(checkpoints.folder_of(step), attempt.state)
        attempt.saving.mark = mark_of(attempt)
        attempt.emit(Restored(step, attempt.n_steps, ledger.number))
    elif ledger.number > 1:
        attempt.emit(Note("an earlier attempt left no checkpoint: starting at step 0"))
    _keep_log(attempt)
    refuse_small_disk(attempt)
    ledger.begin_at(at.step)


def _keep_log(attempt: Attempt) -> None:
    """Drop the log's lines of steps that are taken again; warn of damaged ones, and of steps that
    it does not have.
    """
    at, steps = attempt.progress, set[int]()

    def is_kept(row: Json) -> bool:
        step = row.get("step", 0)
        if "examples" in row and 0 < step <= at.step:
            steps.add(step)
        return step <= at.step and ("metrics" not in row or step <= at.evaluated_step)

    attempt.log.keep(is_kept)
    if n_damaged := len(attempt.log.damaged):
        attempt.warn(
            f"{plural(n_damaged, 'line')} of {LOG} {'is' if n_damaged == 1 else 'are'} damaged:"
            " left out"
        )
    if n_lost := at.step - len(steps):
        attempt.warn(
            f"{LOG} lacks {n_lost} of the {plural(at.step, 'step')} so far; this does not change"
            " the result"
        )


def refuse_small_disk(attempt: Attempt) -> None:
    """Raises `DiskFullError` where checkpoints and model would not fit."""
    fsdp = attempt.ranks.fsdp
    state_bytes = n_bytes_of(attempt.state) * (fsdp.n_shards if fsdp and fsdp.trains_rows else 1)
    n_aside = 2 if attempt.replica is not None else 0  # one that is being sent, and the next
    need = state_bytes * (attempt.job.train.save_total_limit + 2 + n_aside)
    free = shutil.disk_usage(attempt.folder).free
    if free < need:
        raise DiskFullError(
            f"{say_bytes(free)} are free, checkpoints and the model may take {say_bytes(need)}",
            where=str(attempt.folder),
            to_do="make room, or set output_dir to a disk that has it",
        )


def save_is_due(attempt: Attempt) -> bool:
    """Every `save_steps` or `save_minutes`, else at the planned interval; and when the best so far
    was just found.
    """
    train, at, saving = attempt.job.train, attempt.progress, attempt.saving
    if at.step == 0 or saving.mark == mark_of(attempt):
        return False
    by_steps = train.save_steps is not None and at.step % train.save_steps == 0
    by_time = train.save_steps is None and attempt.meter.wall_s - saving.at_s >= saving.every_s
    return saving.is_due_now or by_steps or by_time


def save(attempt: Attempt) -> None:
    """Snapshot now, write in the background."""
    settle(attempt)
    meter, saving, at = attempt.meter, attempt.saving, attempt.progress
    ranks = attempt.ranks
    if not (ranks.is_first or ranks.trains_rows):
        saving.mark, saving.is_due_now = mark_of(attempt), False
        return
    with meter.span("checkpoint"):
        started_s = meter.wall_s
        attempt.log.sync()
        with contextlib.suppress(OSError):  # the log itself is safe
            saving.digest_bytes = keep_digest(attempt.log.path, saving.digest_bytes)
        note_finished_save(attempt, attempt.checkpoints.save(at.step, attempt.state, at.best_step))
        saving.took_s = meter.wall_s - started_s
        attempt.ledger.held_up_by_save(saving.took_s)
    saving.at_s, saving.mark, saving.is_due_now = meter.wall_s, mark_of(attempt), False


def wait_for_copies(attempt: Attempt) -> None:
    """Until weights and state may change: what a checkpoint still copies from a GPU would be of two
    steps.
    """
    checkpoints, meter = attempt.checkpoints, attempt.meter
    if not checkpoints.is_copying:
        return
    with meter.span("checkpoint"):
        started_s = meter.wall_s
        checkpoints.wait_until_copied()
        waited_s = meter.wall_s - started_s
        attempt.saving.took_s += waited_s
        attempt.ledger.held_up_by_save(waited_s, n_saves=0)


def save_last(attempt: Attempt) -> None:
    """Commit where the run is, and wait until it is on the disk."""
    settle(attempt)
    meter = attempt.meter
    if attempt.progress.step > 0 and attempt.saving.mark != mark_of(attempt):
        save(attempt)
    with meter.span("checkpoint"):
        started_s = meter.wall_s
        note_finished_save(attempt, attempt.checkpoints.wait())
        attempt.ledger.held_up_by_save(meter.wall_s - started_s, n_saves=0)


def note_finished_save(attempt: Attempt, result: SaveResult | None) -> None:
    """Put a finished background save on the ledger."""
    if result is not None and result.error is None:
        attempt.ledger.committed(result.step)
        attempt.saving.write_s = result.seconds
        attempt.record.saves_bytes.append(result.n_bytes)
        attempt.emit(Saved(result.step, result.n_bytes))


def export(attempt: Attempt) -> None:
    """Write the model for others: of the best checkpoint when there is evaluation data, else of the
    last step.

    Where ranks have rows of it, it is read from their checkpoint, one whole copy on this machine
    and nothing on the others.
    """
    if not attempt.ranks.is_first:
        return
    at, folder, checkpoints = attempt.progress, attempt.folder, attempt.checkpoints
    step, whole = at.step, None
    if (
        attempt.job.train.load_best_model_at_end
        and at.best_step is not None
        and at.best_step != at.step
    ):
        try:
            checkpoints.verify(at.best_step)
            step = at.best_step
        except DamagedFileError as error:
            attempt.warn(
                f"the best checkpoint (step {at.best_step}) is damaged ({error}): exporting the"
                " last step"
            )
    if attempt.ranks.trains_rows and step not in checkpoints.steps():
        attempt.warn("no model is written: no step was saved")
        return
    if attempt.saving.exported_step == step and (folder / MODEL).is_dir():
        return  # it was written a moment ago
    attempt.emit(Working("writing the model"))
    started_s = attempt.meter.wall_s
    if step != at.step or attempt.ranks.trains_rows:
        whole = read_part(checkpoints.folder_of(step), "model")
    if whole is not None and not attempt.ranks.trains_rows:
        put_back(_trained(attempt), whole)
        whole = None
    attempt.ledger.write("running", exported=step)
    export_model(
        folder / MODEL, attempt.model, attempt.spec.tokenizer, build_receipt(folder), step, whole
    )
    attempt.saving.exported_step = step
    attempt.saving.export_s = attempt.meter.wall_s - started_s
    attempt.emit(Exported(str(folder / MODEL), step))


def _trained(attempt: Attempt) -> dict[str, Tensor]:
    return attempt.state["model"].state()[0]


def write_model_early(attempt: Attempt) -> None:
    """Export while what is left still pays for a start: killed from here on, the run needs none to
    leave its model.
    """
    if attempt.progress.step == 0:
        return
    attempt.saving.wrote_model_early = True
    save_last(attempt)
    with attempt.meter.span("export"):
        own = {} if attempt.ranks.trains_rows else _trained(attempt)
        now = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        export(attempt)
        put_back(own, now)  # the best may have been written, which is another


def mark_of(attempt: Attempt) -> tuple[Any, ...]:
    """What tells one saved state from another."""
    return attempt.progress.step, attempt.progress.evaluated_step, attempt.progress.stopped_early
