"""The beginning of an attempt: on the bill before anything slow is imported, and off it again where
it was a mistake.

`opened(folder)` makes the run folder, holds it against other processes, and writes the attempt's
first line, counted from the start of the process; a thread keeps writing while libraries are
imported. An attempt that is refused because of what was asked for leaves the folder as it found it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farthing.errors import (
    InputError,
    JobError,
    LimitError,
    RunBusyError,
    RunChangedError,
    RunDamagedError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.run.accounts import RUNNING
from farthing.run.folder import (
    CHECKPOINTS,
    LEDGER,
    LOG,
    MODEL,
    RUN,
    witnesses_of,
)
from farthing.run.ledger import Ledger, Meter, seconds_since_process_start
from farthing.storage.files import cannot_write, make_private, only_writer, sweep_drafts
from farthing.storage.mounts import bucket_mount_of
from farthing.units import plural, say_seconds, say_usd

_counted_by: set[int] = set()
"""Processes whose age is on a bill: a fork has another number."""
PAUSED = "FARTHING_PAUSED_S"
"""By this variable a supervisor tells an attempt how long ago the one before has ended."""
MOST_PAUSED_S = 3600.0
_DRAFTS = (MODEL, LOG, LEDGER, "restore")
"""What a killed attempt may leave half done; nobody without the lock writes them."""


@dataclass
class Opened:
    """An attempt that costs money from now on."""

    folder: Path
    meter: Meter
    ledger: Ledger
    is_accepted: bool = False
    """Whether the run in the folder is known to be the job's."""
    at_close: Callable[[], None] | None = None
    """Called when the last second is on the bill: what shows the bill can be written then."""

    def belongs_elsewhere(self, error: BaseException) -> bool:
        """Whether the attempt was none of this run: refused before it, or another's."""
        is_first = not any(account.wall_s for account in self.ledger.past)
        of_others = isinstance(error, JobError | RunBusyError | RunChangedError | RunDamagedError)
        refused = isinstance(error, InputError) and (is_first or of_others)
        return (refused or isinstance(error, RunTakenError)) and not self.is_accepted

    def damage_in_words(self) -> str | None:
        """What was wrong with the ledger, and what became of the money; None where all was well."""
        found = self.ledger.damage
        if found is None:
            return None
        broken = (
            f"{plural(found.n_broken, 'line')} can't be read"
            if found.n_broken
            else "lines are missing"
        )
        lost = "nothing is missing from the bill"
        if found.lost_s or found.lost_usd:
            lost = (
                f"{say_usd(found.lost_usd)} for {say_seconds(found.lost_s)} are known in sum only,"
                " and stay on the bill"
            )
        return f"{LEDGER} was damaged ({broken}; kept as {LEDGER}.damaged-*): {lost}"

    def refuse_forgotten(self, *, allow_restart: bool) -> None:
        """Refuse a run of whose cost nothing is known. Raises `RunDamagedError`."""
        if not allow_restart and not any(account.wall_s for account in self.ledger.past):
            refuse_unpaid(self.folder)


def refuse_unpaid(folder: Path) -> None:
    """Refuse a run in a folder without a ledger. Raises `RunDamagedError`."""
    left = [name for name in (RUN, LOG) if (folder / name).exists()]
    left += [CHECKPOINTS] if any((folder / CHECKPOINTS).glob("step-*")) else []
    if left:
        raise RunDamagedError(
            f"the ledger of this run is gone ({', '.join(left)} are there): its cost so far is"
            " unknown",
            where=str(folder / LEDGER),
            to_do="restore it from a copy, or start the bill at $0 with --allow-restart",
        )


def refuse_bucket(folder: Path) -> None:
    """Refuse to begin a run in a bucket. Raises `InputError`. One that began there continues: its
    checkpoints have checksums.
    """
    if (program := bucket_mount_of(folder)) and not (folder / RUN).exists():
        raise InputError(
            f"this folder is a bucket, mounted by {program}: a kill can leave half a checkpoint"
            " there, and nothing keeps another machine out",
            where=f"output_dir: {folder}",
            to_do=(
                "set output_dir to a disk, and output_store to the bucket's own address (s3://...,"
                " gs://...)"
            ),
        )


def refuse_folder(folder: Path) -> None:
    """Refuse a run folder that can't be made or written. Raises `InputError`."""
    refuse_bucket(folder)
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    code = 0
    if not there.is_dir():
        code = errno.ENOTDIR
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(there, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        done = "written" if there == folder else "made"
        raise InputError(
            f"the run folder can't be {done}: {os.strerror(code)}",
            where=str(folder),
            to_do="choose another output_dir",
        )


@contextlib.contextmanager
def opened(folder: Path, usd_per_hour: float, n_gpus: int = 1) -> Iterator[Opened]:
    """An attempt in a run folder, which is made if need be and held by this process for as long as
    the block runs; `n_gpus` share it.

    Raises `InputError` where the folder can't be made,
    `RunBusyError`, `DiskFullError`.
    """
    had_lock = (folder / ".lock").exists()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    refuse_folder(folder)
    try:
        make_private(folder)
    except OSError as error:
        raise InputError(
            f"the run folder can't be made: {error.strerror}",
            where=str(folder),
            to_do="choose another output_dir",
        ) from error
    with only_writer(folder):
        meter = Meter(already_s=uncounted_age_s(), idle_s=_paused_s())
        ledger = Ledger(folder / LEDGER, meter, usd_per_hour, witnesses_of(folder), n_gpus)
        attempt = Opened(folder, meter, ledger)
        try:
            sweep_drafts(folder, _DRAFTS)
            ledger.write()
            ledger.keep_beating()
        except OSError as error:
            raise cannot_write(folder, error) from error
        try:
            yield attempt
        except BaseException as error:
            if attempt.belongs_elsewhere(error):
                ledger.withdraw()
                if not had_lock:
                    (folder / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for path in made:
                        path.rmdir()
            elif ledger.mine.state == RUNNING:
                with contextlib.suppress(OSError):
                    ledger.end(_state_after(error))
            raise
        finally:
            with contextlib.suppress(OSError):
                ledger.close()
                if attempt.at_close is not None:
                    attempt.at_close()


def _state_after(error: BaseException) -> str:
    if isinstance(error, LimitError):
        return "limit"
    is_asked = isinstance(error, RunInterruptedError | KeyboardInterrupt)
    return "interrupted" if is_asked else "failed"


def uncounted_age_s() -> float:
    """Seconds of this process that are on no bill yet: its age, the first time that it is asked."""
    if os.getpid() in _counted_by:
        return 0.0
    _counted_by.add(os.getpid())
    return seconds_since_process_start()


def _paused_s() -> float:
    """Since the attempt before, by its supervisor, on this machine: paid for too."""
    try:
        seconds = float(os.environ.pop(PAUSED, "0"))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < MOST_PAUSED_S else 0.0
