"""What every target has to be able to do with a machine, and how it says that it could not."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from farthing.launch.machines import RentedMachine
from farthing.launch.request import LaunchRequest


class ProviderError(Exception):
    """What came of a request to a provider."""


class RefusedError(ProviderError):
    """Nothing was made or changed, and the provider gave a reason."""


class OutOfStockError(RefusedError):
    """The provider has no such machine now; it may have one later."""


class NotFoundError(RefusedError):
    """The provider knows nothing of this name."""


class UnauthorizedError(ProviderError):
    """The provider does not accept the credentials, or the account may not do this."""


class UnclearError(ProviderError):
    """No answer, or one that does not tell whether the request was carried out."""


class TimedOutError(UnclearError):
    """The provider did not answer in time."""


class RateLimitedError(UnclearError):
    """The provider asks for fewer requests."""


class ServerError(UnclearError):
    """The provider failed."""


def refusal(why: str, status: int = 400) -> ProviderError:
    """The error of a refusal, by its HTTP status and by the provider's words."""
    if status in (401, 402, 403):
        return UnauthorizedError(why)
    if _STOCK.search(why):
        return OutOfStockError(why)
    if _ACCOUNT.search(why):
        return UnauthorizedError(why)
    return NotFoundError(why) if status == 404 else RefusedError(why)


_STOCK = re.compile(
    "(?i)no longer any|capacity|no_such_ask|not available|unavailable|no instances|stock"
)
_ACCOUNT = re.compile("(?i)insufficient|credit|balance|unauthorized|api key")


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """An answer of another form than a provider's own says nothing. Raises `UnclearError`."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnclearError(
            f"an answer that can't be read ({type(error).__name__}: {error})"
        ) from error


@dataclass(frozen=True)
class InstanceStatus:
    """A machine as its provider shows it."""

    name: str
    id: str
    is_over: bool = False
    """It runs no more; it may still be paid for until it is destroyed."""
    code: int | None = None
    """The exit code of what ran on it, where the provider knows."""
    is_waiting: bool = False
    """In a queue, where nothing is paid."""
    is_paid: bool = True
    """Whether it costs money; what does not is gone."""
    usd_per_hour: float | None = None
    """What the provider charges for it; None where it does not tell."""
    stuck: str = ""
    """Why it will never begin."""


class Created(NamedTuple):
    """A machine that was made. `usd_per_hour` is None where the answer does not tell the price."""

    id: str
    usd_per_hour: float | None = None


def job_status(
    name: str, number: str, is_over: bool, *, waits: bool, code: int | None = None
) -> InstanceStatus:
    """A job of a queue: what is over is not paid for any more."""
    return InstanceStatus(
        name, number, is_over=is_over, code=code, is_waiting=waits, is_paid=not is_over
    )


class Driver(ABC):
    """A target. Every call may raise `UnclearError` and `UnauthorizedError`."""

    is_paid_in_queue = True
    """Whether waiting for a machine to boot is paid for."""
    restarts = False
    """Whether the target itself begins a job again that left with 75."""
    ends_by_itself = True
    """Whether a machine ends at `Ask.most_s` when nobody of ours lives."""
    may_overlap = False
    """Whether the next may be asked for before this one is confirmed gone: own hosts."""
    late_s = 120.0
    """For so long a new machine may be missing in its lists."""

    @property
    def clock_offset_s(self) -> float:
        """Seconds that the provider's clock, by which it bills, is ahead of this machine's."""
        return 0.0

    @abstractmethod
    def create(self, ask: LaunchRequest, asked_at: float) -> Created:
        """Make the machine. Raises `RefusedError` where nothing was made."""

    def secure(self, machine: RentedMachine) -> None:
        """Give a machine its end, where that is a request of its own. Raises `RefusedError`."""
        return None

    @abstractmethod
    def look(self, machine: RentedMachine) -> InstanceStatus | None:
        """The machine by its name, None where there is none; of jobs begun again the last."""

    @abstractmethod
    def names(self, prefix: str) -> dict[str, str]:
        """Every machine whose name begins so and that is paid for, with its id. A second one of a
        name, of a request that was carried out twice, has a name of its own."""

    @abstractmethod
    def destroy(self, machine: RentedMachine) -> None:
        """Ask that it be deleted; returns when that was acknowledged, or it was gone already."""

    def log(self, machine: RentedMachine) -> str:
        """The end of what was printed there; empty where only the store has it."""
        return ""


class ListingDriver(Driver):
    """A target that lists its machines."""

    may_refuse_twice = False
    """Whether a deletion may fail for a machine that is over, so that it is looked for first."""

    @abstractmethod
    def listed(self, prefix: str) -> list[InstanceStatus]:
        """The machines of a launch, and maybe others."""

    @abstractmethod
    def delete(self, machine: RentedMachine) -> None:
        """`destroy` a machine whose id is known."""

    def look(self, machine: RentedMachine) -> InstanceStatus | None:
        found = [
            seen
            for seen in self.listed(machine.name.rpartition("-")[0])
            if seen.name == machine.name
        ]
        return found[-1] if found else None

    def names(self, prefix: str) -> dict[str, str]:
        found = dict[str, str]()
        for seen in self.listed(prefix):
            is_ours = seen.name.startswith(f"{prefix}-") and seen.is_paid
            if is_ours and found.setdefault(seen.name, seen.id) != seen.id:
                found[f"{seen.name}+{seen.id}"] = seen.id
        return found

    def destroy(self, machine: RentedMachine) -> None:
        if self.may_refuse_twice or not machine.id:
            seen = self.look(machine)
            if seen is None and machine.id:  # a list may be late, or lack it once
                with contextlib.suppress(UnclearError):
                    self.delete(machine)
            if seen is None or not seen.is_paid:
                return
            machine = replace(machine, id=machine.id or seen.id)
        self.delete(machine)
