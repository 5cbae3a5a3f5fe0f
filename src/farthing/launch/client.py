"""What our own clients of providers share: requests filled in, answers that can't be read, lists of
machines. A provider's client is a class in its file of `targets/`.

Money first: what can't be given an end is destroyed at once. A machine is destroyed, never stopped:
disks of stopped ones are paid for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farthing.launch.driver import Driver, InstanceStatus, NotFoundError, RefusedError, UnclearError
from farthing.launch.http import Api
from farthing.storage.files import Json

_PLACE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A request with what is known only now in place of each string that is ${NAME}, or has it in
    an address.
    """
    if isinstance(value, dict):
        return {key: filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, values) for item in value]
    if isinstance(value, str):
        whole = _PLACE.fullmatch(value)
        if whole and whole[1] in values:
            return values[whole[1]]
        if value.startswith("/"):
            return _PLACE.sub(lambda found: str(values.get(found[1], found[0])), value)
    return value


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """An answer of another form than a provider's own says nothing. Raises `UnclearError`."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnclearError(
            f"an answer that can't be read ({type(error).__name__}: {error})"
        ) from error


class Client(Driver):
    """A provider by its API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def clock_offset_s(self) -> float:
        """See `Driver`."""
        return self._api.clock_offset_s


def statuses(
    rows: list[Json],
    name: str,
    state: str,
    *,
    over: Sequence[str],
    gone: Sequence[str] = (),
    price: Callable[[Json], Any],
) -> list[InstanceStatus]:
    """Machines as a provider lists them, by the names of its fields."""
    found = []
    for row in rows:
        if row.get(state) in gone:
            continue
        try:
            usd_per_hour = price_of(price(row))
        except (LookupError, TypeError):
            usd_per_hour = None
        found.append(
            InstanceStatus(
                str(row.get(name)),
                str(row["id"]),
                is_over=row.get(state) in over,
                usd_per_hour=usd_per_hour,
            )
        )
    return found


def price_of(value: Any) -> float | None:
    """Dollars an hour as a provider tells them; None for what is no price."""
    try:
        usd = float(value)
    except (TypeError, ValueError):
        return None
    return usd if 0 < usd < 100_000 else None


def sure(api: Api, method: str, path: str, body: Any = None, *, may_be_gone: bool = False) -> Any:
    """The answer to a question or a deletion, whose refusal settles nothing. Raises `UnclearError`,
    `UnauthorizedError`.
    """
    try:
        return api.ask(method, path, body)
    except RefusedError as error:
        if may_be_gone and isinstance(error, NotFoundError):
            return None
        raise UnclearError(str(error)) from error
