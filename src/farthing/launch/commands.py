"""Targets that have a command of their own: it is run, as the user would, and what it prints is
read.

The user's own login is used; nothing of it is read or kept. A command that fails may have done its
work: that is an `UnclearError`, and the job is looked for by its name.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from farthing.launch.driver import (
    Created,
    InstanceStatus,
    ListingDriver,
    RefusedError,
    TimedOutError,
    UnauthorizedError,
    UnclearError,
    understood,
)
from farthing.launch.machines import RentedMachine
from farthing.launch.request import LaunchRequest
from farthing.launch.target import Commands

TIMEOUT_S = 180.0
_NO_LOGIN = re.compile(
    r"unauthorized|unauthenticated|not logged in|must be logged in|permission.?denied|forbidden"
    r"|invalid (user )?(access )?(token|credentials)|reauthentication",
    re.IGNORECASE,
)
"""What commands print where the login is missing, has expired or may not do this."""


class CommandDriver(ListingDriver):
    """A target by its own command. `files` gives the folder where an ask was written."""

    is_paid_in_queue, late_s, may_refuse_twice = False, 30.0, True

    def __init__(
        self, commands: Commands, files: Callable[[LaunchRequest], Path], *, restarts: bool
    ) -> None:
        self._commands, self._files, self.restarts = commands, files, restarts

    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """Secrets are in this process' environment, where the command finds them."""
        printed = run_command(self._commands.submit(ask, self._files(ask)))
        if not printed.strip():
            raise UnclearError("it printed nothing")
        return Created(self._commands.id_of(printed) or ask.name)

    def listed(self, prefix: str) -> list[InstanceStatus]:
        with understood():
            return self._commands.parse(run_command(self._commands.listing(prefix)))

    def delete(self, machine: RentedMachine) -> None:
        run_command(self._commands.destroy(machine))

    def log(self, machine: RentedMachine) -> str:
        return run_command(self._commands.log(machine))


def ended(
    words: Sequence[str], said: str = "", timeout_s: float = TIMEOUT_S, who: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command that has read `said` and ended. Raises `RefusedError` where there is none,
    `UnclearError` where it takes too long.
    """
    try:
        return subprocess.run(
            list(words),
            input=said,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise RefusedError(
            f"there is no command `{words[0]}` here: see `farthing doctor --target`"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TimedOutError(
            f"{who or f'`{words[0]}`'} has not answered in {timeout_s:.0f} s"
        ) from error


def run_command(command: str | Sequence[str]) -> str:
    """What a command of the user's prints. Raises as `ended`, and `UnclearError` where it fails."""
    words = shlex.split(command) if isinstance(command, str) else command
    done = ended(words)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        why = f"`{words[0]}` ended with {done.returncode}: {said}"
        raise UnauthorizedError(why) if _NO_LOGIN.search(said) else UnclearError(why)
    return done.stdout
