"""What disks, memory and kernels refuse, as errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from farthing.device_memory import in_words, is_out_of_memory
from farthing.errors import DiskFullError, FarthingError, OutOfMemoryError, RunInterruptedError
from farthing.model.hardware import not_deterministic, of_models_code

OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES),
    *(errno.ESTALE, errno.ENOTCONN),  # a file server has forgotten us, a mount's program has died
)


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
        if error.errno not in OF_DISKS:
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
