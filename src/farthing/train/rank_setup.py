"""How the processes that share a run come together: what the first decides, and what the others
take over from it.

The first rank alone has the run folder, the ledger that counts, the limits, the store and the
terminal. The others run the same code in a folder of their own that is thrown away, for a job
without limits and copies, with the files that decide the result as the first has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from farthing.config.job import Job, LimitsSection, WhereSection
from farthing.data.packing import MicroBatchCost
from farthing.dist.ranks import Ranks
from farthing.dist.reduce import n_slots_for
from farthing.dist.rendezvous import RankLostError
from farthing.errors import (
    EXIT_CRASH,
    DiskFullError,
    FarthingError,
    InputError,
    RunChangedError,
)
from farthing.events import Emit, Warned
from farthing.local.measurements import MEASUREMENTS, link_of, read_measurements
from farthing.model.hardware import hardware_key
from farthing.run.folder import DECIDING, RUN, SCHEDULE, keep, kept
from farthing.run.group import EXIT_RANK_LOST, STORE, seat_in
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.train.built import Run
from farthing.train.context import Context
from farthing.train.schedule import Fit, keep_fit


@contextlib.contextmanager
def joined(job: Job) -> Iterator[tuple[Ranks, Job]]:
    """The ranks of the run, and the job as this one has it. Parts from them in order, and tells
    them where this one fails.

    An error that the first rank speaks of is marked `is_told`.
    """
    seat = seat_in(os.environ)
    has_gpu = torch.cuda.is_available() and job.where.device != "cpu"
    ranks = Ranks(seat, torch.device("cuda" if has_gpu else "cpu"), job.where.patience_s)
    with contextlib.ExitStack() as stack:
        try:
            if not ranks.is_first:
                folder = stack.enter_context(own_folder())
                ranks.at_loss = lambda: shutil.rmtree(folder, ignore_errors=True)
                job = _shadow(job, folder, asks_cloud=seat.local_index == 0)
            yield ranks, job
        except BaseException as error:
            code = error.exit_code if isinstance(error, FarthingError) else EXIT_CRASH
            error.is_told = not ranks.fail(code, error)  # type: ignore[attr-defined]
            if isinstance(error, RankLostError) and seat.by == "farthing":
                error.exit_code = EXIT_RANK_LOST
            raise
        finally:
            ranks.close()


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Of a rank that is not the first, thrown away as it parts; where `farthing` has started it and
    it is killed, with what the ranks have met in. Raises `DiskFullError`."""
    meeting = os.environ.get(STORE)
    try:
        return tempfile.TemporaryDirectory(
            prefix="farthing-rank-", dir=meeting and os.path.dirname(meeting)
        )
    except OSError as error:
        raise DiskFullError(
            f"a rank has no folder for its files: {error.strerror or error}",
            where=str(error.filename or "TMPDIR"),
            to_do="make room there, or set TMPDIR to a folder on another disk",
        ) from error


def _shadow(job: Job, folder: str, *, asks_cloud: bool) -> Job:
    """The job of a rank that computes and decides nothing."""
    return job.model_copy(
        update={
            "output_dir": folder,
            "output_store": None,
            "limits": LimitsSection(),
            "train": job.train.model_copy(update={"report_to": ()}),
            "where": job.where if asks_cloud else job.where.model_copy(update={"notices": "off"}),
        }
    )


def lead(
    context: Context, ended: tuple[str, str] | None = None, *, was_finished: bool = False
) -> None:
    """The first rank lets the others in: with the files that decide the result, or with how the run
    has ended already; `was_finished` where only its model is written.
    """
    ranks, folder = context.ranks, context.folder
    if ranks.n > 1:
        files = {name: kept(folder / name) for name in DECIDING} if ended is None else {}
        how = {"ended": ended, "was_finished": was_finished}
        ranks.tell_all({**how, "run_id": context.run_id, "files": files})


def follow(context: Context) -> Json:
    """Another rank is let in, with the files that decide the result: what `lead` has told."""
    told: Json = context.ranks.tell_all(None)
    for name, value in told["files"].items():
        if value is not None:
            keep(context.folder / name, value)
    context.run_id = told["run_id"]
    return told


def must_be_the_same(
    context: Context, identity: Mapping[str, object], of_first: Mapping[str, object]
) -> None:
    """Refuse a rank that reads other data, or another model, than the first. Raises
    `RunChangedError`.
    """
    own = json.loads(json.dumps(identity))  # as it was sent
    odd = [key for key, value in of_first.items() if own.get(key) != value]
    if odd:
        raise RunChangedError(
            f"rank {context.ranks.index} has another {', '.join(odd[:3])} than the first rank",
            to_do="give every machine the same job, data and model, or a disk that all share",
        )


def slots_of_run(where: WhereSection, ranks: Ranks, before: int, emit: Emit) -> int:
    """How many slots the run's steps have where `where.same_bits` asks for them: as `before`, more
    where there are more ranks than that; else 0.
    """
    wanted, seat = where.gpus, ranks.seat
    if isinstance(wanted, int) and seat.by != "farthing" and wanted not in (seat.n, seat.n_local):
        started = f"{seat.by} has started {seat.n}, which share the run"
        alone = "this is one process: `farthing train` or torchrun starts as many"
        emit(Warned(f"where.gpus is {wanted}, and {started if seat.by else alone}"))
    if ranks.n > 1 and ranks.device.type == "cpu" and where.device == "auto":
        text = (
            f"no GPU is here: {ranks.n} processes share the processor; where.device: cpu says that"
            " this is meant"
        )
        emit(Warned(text))
    if not where.same_bits:
        return 0
    if ranks.n <= before:
        return before
    found = n_slots_for(ranks.n)
    if before:
        text = (
            f"the run's steps were shared out among {before}, now among {found}: equal to"
            " rounding, not to the bit"
        )
        emit(Warned(text))
    return found


def take_over(run: Run) -> None:
    """Compute from here on as the first rank does: its state, its cut, its schedule."""
    ranks, schedule = run.context.ranks, run.schedule
    if ranks.n == 1:
        return
    run.record.link_bytes_per_s = _link_bytes_per_s(run)
    fit = None if schedule.fit is None else asdict(schedule.fit)
    settings, fit = ranks.tell_all([run.feed.settings.to_json(), fit])
    if not ranks.is_first:
        told = Settings.from_json(settings)
        run.steps.use(told)
        run.forward.shares = bool(told.shares_prefix)
        run.forward.micro_batch_cost = MicroBatchCost(told.least_tokens, told.more_tokens)
        if fit is not None:
            keep_fit(run.context.folder / SCHEDULE, Fit(**fit))
            schedule.follow(Fit(**fit))
    if ranks.trains_rows:
        _take_rows(run)
    ranks.bring_together(run.state)


def _link_bytes_per_s(run: Run) -> float:
    """Between the ranks: as it was measured before, else now."""
    ranks = run.context.ranks
    measured = read_measurements(run.spec.cache_dir / MEASUREMENTS) if ranks.is_first else []
    found = link_of(measured, hardware_key(run.spec.numerics.device), ranks.n)
    return float(ranks.tell_all(found) or ranks.link_bytes_per_s())


def _take_rows(run: Run) -> None:
    """Restore this rank's rows of what the first rank has restored: of its checkpoint, or of the
    run's ancestor.
    """
    context, checkpoints, step = run.context, run.saver.checkpoints, run.progress.step
    ranks = context.ranks
    saves = checkpoints.steps() if ranks.is_first else []
    saved = str(checkpoints.folder_of(step).resolve()) if step in saves else None
    folder, saved, mark = ranks.tell_all([str(context.folder.resolve()), saved, run.saver.mark])
    if ranks.is_first:
        return
    if (kept(Path(folder) / RUN) or {}).get("run_id") != context.run_id:
        raise InputError(
            f"rank {ranks.index} does not see the run folder of the first rank, {folder}, where"
            " each saves its rows",
            where="output_dir, where.strategy",
            to_do="put output_dir on a disk that all machines share, or use ddp",
        )
    if saved is not None:
        checkpoints.restore(Path(saved), run.state)
    else:
        run.begin_as_ancestor()
    run.saver.mark = tuple(mark)
