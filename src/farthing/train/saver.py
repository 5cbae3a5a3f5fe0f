"""When and how a run is saved, restored and exported: the trainer's side of
`run/checkpoint.py`.

A save takes a snapshot at once and writes it in the background; nothing is saved before the figures
of its steps were read.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

from torch import Tensor

import farthing
from farthing.errors import DiskFullError, RunDamagedError, RunInterruptedError
from farthing.events import Exported, Note, Restored, Saved, Working
from farthing.export.folders import export_model
from farthing.model.adapters import put_back
from farthing.report.receipt import build_receipt
from farthing.report.training_log import keep_digest
from farthing.run.checkpoint import Checkpoints, SaveResult, n_bytes_of
from farthing.run.folder import CHECKPOINTS, COPIES, LOG, MODEL, copies_of
from farthing.run.parts import read_part
from farthing.storage.files import DamagedFileError, Json
from farthing.train.context import Context, Training
from farthing.train.state import parts_of
from farthing.units import plural, say_bytes

SAVE_EVERY_S = 300.0  # where there is no plan


class Saver:
    def __init__(self, training: Training) -> None:
        spec, context, model = training.spec, training.context, training.model
        self.training, self.context, self.progress = training, context, training.progress
        self.state = parts_of(training)
        """Everything resumable."""
        copies: Json = {}
        self.checkpoints = Checkpoints(
            context.folder / CHECKPOINTS,
            context.run_id,
            spec.train.save_total_limit,
            warn=context.warn,
            facts=lambda: _manifest_facts(context, copies),
            copy=context.replica.offer if context.replica is not None else None,
            shared=context.ranks.shared_checkpoints(),
        )
        self.save_steps = spec.train.save_steps
        planned_s = SAVE_EVERY_S if training.estimate is None else training.estimate.interval_s
        self.every_s = 60 * (spec.train.save_minutes or 0.0) or planned_s
        """Between saves, where `save_steps` does not say."""
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.trained_bytes = sum(weight.numel() * weight.element_size() for weight in trained)
        """On all ranks together."""
        self.mark: tuple[Any, ...] = (0, 0, False)  # which state the last save holds
        self.is_due_now = False
        """Whatever the interval says: the best so far was found, or the machine may go."""
        self.wrote_model_early = False
        """The model was exported while the limits still paid for a start."""
        self.exported_step: int | None = None  # whose weights this attempt has exported
        self.took_s = 0.0  # seconds in which training stood still for the last save
        self.write_s = 0.0  # seconds until the last checkpoint was on the disk
        self.export_s = 0.0
        self.saved_at_s = context.meter.wall_s
        self._digest_bytes = 0  # of the log, up to where its digest holds

    # ---- the state that an earlier attempt left ----

    def restore(self, allow_restart: bool) -> None:
        """Go back to the newest whole checkpoint, or to the start when there never was one.

        Raises `RunDamagedError`, and `RunInterruptedError` where all were damaged here and a store
        has the run: the next attempt takes its copy.
        """
        context, checkpoints = self.context, self.checkpoints
        if not context.ranks.is_first:
            return
        ledger, step = context.ledger, self._newest(allow_restart)
        if step is not None:
            checkpoints.restore(checkpoints.folder_of(step), self.state)
            self.mark = self.progress.mark
            context.emit(Restored(step, self.training.schedule.n_steps, ledger.mine.number))
        elif ledger.mine.number > 1:
            context.emit(Note("an earlier attempt left no checkpoint: starting at step 0"))
        self._keep_log()
        self.refuse_small_disk()
        ledger.begin_at(self.progress.step)

    def _newest(self, allow_restart: bool) -> int | None:
        checkpoints, committed = self.checkpoints, self.context.ledger.committed_step
        may_be_in_store = self.context.replica is not None and bool(checkpoints.steps())
        try:
            step = checkpoints.newest_valid()
            if step is None and committed > 0:
                raise RunDamagedError(
                    f"the checkpoint of step {committed} was written, and is gone",
                    where=str(checkpoints.folder),
                    to_do="restore it from a copy, or start from step 0 with --allow-restart",
                )
            return step
        except RunDamagedError as error:
            if allow_restart:
                checkpoints.forget_all()
                return None
            if not may_be_in_store:
                raise
            raise RunInterruptedError(
                f"{error.what}; the same command takes the copy in the store",
                where=error.where,
                to_do="run it again",
            ) from error

    def _keep_log(self) -> None:
        """Drop the log's lines of steps that are taken again; warn of damaged ones, and of steps
        that it does not have.
        """
        at, log, steps = self.progress, self.training.log_file, set[int]()

        def is_kept(row: Json) -> bool:
            step = row.get("step", 0)
            if "examples" in row and 0 < step <= at.step:
                if step in steps:
                    return False
                steps.add(step)
            return step <= at.step and ("metrics" not in row or step <= at.evaluated_step)

        log.keep(is_kept)
        if n_damaged := len(log.damaged):
            are = "is" if n_damaged == 1 else "are"
            self.context.warn(f"{plural(n_damaged, 'line')} of {LOG} {are} damaged: left out")
        if n_lost := at.step - len(steps):
            self.context.warn(
                f"{LOG} lacks {n_lost} of the {plural(at.step, 'step')} so far; this does not"
                " change the result"
            )

    def refuse_small_disk(self) -> None:
        fsdp, folder = self.context.ranks.fsdp, self.context.folder
        state_bytes = n_bytes_of(self.state) * (fsdp.n_shards if fsdp and fsdp.trains_rows else 1)
        # one that is being sent, and the next
        n_aside = 2 if self.context.replica is not None else 0
        need = state_bytes * (self.training.spec.train.save_total_limit + 2 + n_aside)
        free = shutil.disk_usage(folder).free
        if free < need:
            raise DiskFullError(
                f"{say_bytes(free)} are free, checkpoints and the model may take {say_bytes(need)}",
                where=str(folder),
                to_do="make room, or set output_dir to a disk that has it",
            )

    # ---- saves ----

    @property
    def is_due(self) -> bool:
        """Every `save_steps` or `every_s`; and when the best so far was just found."""
        at = self.progress
        if at.step == 0 or self.mark == at.mark:
            return False
        if self.save_steps is None:
            has_come = self.context.meter.wall_s - self.saved_at_s >= self.every_s
        else:
            has_come = at.step % self.save_steps == 0
        return self.is_due_now or has_come

    def save(self) -> None:
        """Snapshot now, write in the background."""
        context, at = self.context, self.progress
        if context.ranks.is_first or context.ranks.trains_rows:
            with context.meter.span("checkpoint"):
                started_s = context.meter.wall_s
                self.training.log_file.sync()
                with contextlib.suppress(OSError):  # the log itself is safe
                    self._digest_bytes = keep_digest(context.folder / LOG, self._digest_bytes)
                self.note_finished(self.checkpoints.save(at.step, self.state, at.best_step))
                self.took_s = context.meter.wall_s - started_s
                context.ledger.held_up_by_save(self.took_s)
            self.saved_at_s = context.meter.wall_s
        self.mark, self.is_due_now = at.mark, False

    def save_last(self) -> None:
        """Commit where the run is, and wait until it is on the disk."""
        if self.progress.step > 0 and self.mark != self.progress.mark:
            self.save()
        self.note_finished(self._waited(self.checkpoints.wait)[0])

    def wait_for_copies(self) -> None:
        """Until weights and state may change: what a checkpoint still copies from a GPU would be of
        two steps.
        """
        if self.checkpoints.is_copying:
            self.took_s += self._waited(self.checkpoints.wait_until_copied)[1]

    def _waited(self, wait: Callable[[], SaveResult | None]) -> tuple[SaveResult | None, float]:
        meter = self.context.meter
        with meter.span("checkpoint"):
            started_s = meter.wall_s
            found = wait()
            waited_s = meter.wall_s - started_s
        self.context.ledger.held_up_by_save(waited_s, n_saves=0)
        return found, waited_s

    def note_finished(self, result: SaveResult | None) -> None:
        if result is not None and result.error is None:
            self.context.ledger.write(committed=result.step)
            self.write_s = result.seconds
            self.training.record.saves_bytes.append(result.n_bytes)
            self.context.emit(Saved(result.step, result.n_bytes))

    # ---- the model for others ----

    def export(self) -> None:
        """Write the model: of the best checkpoint when there is evaluation data, else of the last
        step.

        Where ranks have rows of it, it is read from their checkpoint, one whole copy on this
        machine and nothing on the others.
        """
        context, at, checkpoints = self.context, self.progress, self.checkpoints
        ranks, folder = context.ranks, context.folder / MODEL
        if not ranks.is_first:
            return
        step, whole, started_s = self._step_to_export(), None, context.meter.wall_s
        if ranks.trains_rows and step not in checkpoints.steps():
            context.warn("no model is written: no step was saved")
            return
        if self.exported_step == step and folder.is_dir():
            return  # it was written a moment ago
        context.emit(Working("writing the model"))
        if step != at.step or ranks.trains_rows:
            whole = read_part(checkpoints.folder_of(step), "model")
        if whole is not None and not ranks.trains_rows:
            put_back(self.trained(), whole)
            whole = None
        context.ledger.write(exported=step)
        receipt = build_receipt(context.folder)
        run = self.training
        export_model(folder, run.model, run.spec.tokenizer, receipt, step, whole)
        self.exported_step = step
        self.export_s = context.meter.wall_s - started_s
        context.emit(Exported(str(folder), step))

    def _step_to_export(self) -> int:
        at, best = self.progress, self.progress.best_step
        if not self.training.spec.train.load_best_model_at_end or best is None or best == at.step:
            return at.step
        try:
            self.checkpoints.verify(best)
            return best
        except DamagedFileError as error:
            self.context.warn(
                f"the best checkpoint (step {best}) is damaged ({error}): exporting the last step"
            )
            return at.step

    def trained(self) -> dict[str, Tensor]:
        return self.state["model"].state()[0]

    def write_model_early(self) -> None:
        """Export while what is left still pays for a start: killed from here on, the run needs none
        to leave its model.
        """
        if self.progress.step == 0:
            return
        self.wrote_model_early = True
        self.save_last()
        with self.context.meter.span("export"):
            own = {} if self.context.ranks.trains_rows else self.trained()
            now = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
            self.export()
            put_back(own, now)  # the best may have been written, which is another


def _manifest_facts(context: Context, copies: Json) -> Json:
    """What a checkpoint's manifest says of the run, with the files that decide its result. Brings
    `copies` up to date.
    """
    copies.update(copies_of(context.folder, copies))
    return {"farthing": farthing.__version__, **context.ledger.witness(), COPIES: dict(copies)}
