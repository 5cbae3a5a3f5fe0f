"""Every mistake farthing names. An error says what is wrong, where, and what to do; only `cli`
prints it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# What the process tells its caller. 75 is EX_TEMPFAIL of sysexits.h: "try the same command again".
EXIT_FINISHED = 0
EXIT_CRASH = 1
EXIT_MISTAKE = 2
EXIT_LIMIT = 3
EXIT_INTERRUPTED = 75
EXIT_CODES = {"finished": EXIT_FINISHED, "limit": EXIT_LIMIT, "interrupted": EXIT_INTERRUPTED}
"""By how a run or a search ended."""


class FarthingError(Exception):
    """A failure with its words: `what` happened, `where` (file:line, key), and what `to_do` about
    it.
    """

    exit_code = EXIT_CRASH

    def __init__(self, what: str, *, where: str = "", to_do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.to_do = to_do

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        return f"{first}\n  to do: {self.to_do}" if self.to_do else first

    def as_dict(self) -> dict[str, object]:
        """The same words for `--json`."""
        return {
            "error": self.what,
            "where": self.where,
            "to_do": self.to_do,
            "exit_code": self.exit_code,
        }


class InputError(FarthingError):
    """Something the person at the keyboard can fix: exit code 2."""

    exit_code = EXIT_MISTAKE


class Check(NamedTuple):
    """Something that was looked at, before it could become an error: ok, warning or failed, and
    what to do about it.
    """

    name: str
    state: str
    found: str
    to_do: str = ""


class JobError(InputError):
    """The job file is wrong. Carries every problem found, not only the first."""

    def __init__(self, problems: list[InputError], rest: Any = None) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.rest = rest
        """The job without what is wrong with it, so that its data and model can be looked at; None:
        nothing is left.
        """

    def as_dict(self) -> dict[str, object]:
        """Every problem, for `--json`."""
        return {
            "error": "the job file is wrong",
            "exit_code": self.exit_code,
            "problems": [problem.as_dict() for problem in self.problems],
        }


class PreflightError(JobError):
    """Several things are wrong that were looked at before the start; each with its place and what
    to do.
    """

    def as_dict(self) -> dict[str, object]:
        """Every problem, for `--json`."""
        return {**super().as_dict(), "error": f"{len(self.problems)} things are wrong"}


class DataError(InputError):
    """The data can't be used as the job asks."""


class UnusableRowError(FarthingError):
    """A row that can't become an example, and why.

    `given` is what its owner wrote as input, where the row could be read and only the template
    stands in the way.
    """

    given: tuple[str, ...] = ()


class ModelError(InputError):
    """The model or its tokenizer can't be used as the job asks."""


class HardwareError(InputError):
    """The job asks for something this machine does not have."""


class RunChangedError(InputError):
    """The run folder holds a run of something else: other data, tokenizer, model or settings."""


class RunDamagedError(InputError):
    """No checkpoint of an earlier attempt can be trusted; a restart from zero has to be
    asked for.
    """


class RunBusyError(InputError):
    """Another process holds the run folder."""


class DiskFullError(FarthingError):
    """The disk can't hold what the run will write: the same command resumes when there is room."""

    exit_code = EXIT_INTERRUPTED


class StoreUnavailableError(FarthingError):
    """The store that holds the run does not answer, and nothing here can stand in for it: try again
    later.
    """

    exit_code = EXIT_INTERRUPTED


class FeedsUnavailableError(InputError):
    """No price feed could be reached: what is known of prices stays as it is."""


class SaveError(DiskFullError):
    """Several checkpoints in a row could not be written."""


class OutOfMemoryError(FarthingError):
    """The job does not fit on the device."""


class DeviceError(FarthingError):
    """A GPU, or a kernel on it, has failed: this process can compute nothing more."""


class NotFiniteError(FarthingError):
    """Too many steps in a row had a loss or gradient that is not a number."""


class RunTakenError(FarthingError):
    """Another machine trains this run: the same command can be tried again later."""

    exit_code = EXIT_INTERRUPTED


class LimitError(FarthingError):
    """A limit was passed while the run could not stop by itself; what was committed is safe."""

    exit_code = EXIT_LIMIT


class RunInterruptedError(FarthingError):
    """Someone asked us to leave; what was committed is safe and the same command carries on."""

    exit_code = EXIT_INTERRUPTED
