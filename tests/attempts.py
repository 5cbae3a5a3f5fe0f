"""Attempts of a ledger by a clock that tests set."""

from pathlib import Path

from farthing.run.ledger import Ledger, Meter


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempt(
    path: Path, clock: Clock, price: float, first: int, last: int, *, end: str | None = None
) -> Ledger:
    """One attempt of ten seconds a step, from `first` to `last`."""
    meter = Meter(clock=clock)
    ledger = Ledger(path, meter, price)
    ledger.begin_at(first)
    for step in range(first + 1, last + 1):
        with meter.span("compute"):
            clock.now += 10
        ledger.at_step(step, {})
    if end:
        ledger.end(end)
    return ledger
