"""What an attempt runs in: where it writes, who pays, who may ask it to leave, who hears of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from farthing.dist.ranks import Ranks
from farthing.events import Emit, Warned
from farthing.run.ledger import Ledger, Meter
from farthing.run.mirror import Mirror
from farthing.run.signals import Notice
from farthing.train.watchdog import Watchdog


@dataclass
class Context:
    folder: Path
    run_id: str
    """Which run the folder's checkpoints belong to."""
    meter: Meter
    ledger: Ledger
    notice: Notice
    emit: Emit
    over_limit: Callable[[float], str | None] = lambda reserve_s: None
    """Why the run has to stop, if so many more seconds would pass a limit."""
    seconds_left: Callable[[], float] = lambda: math.inf
    """Until the first limit, as the ledger has it."""
    ranks: Ranks = field(default_factory=Ranks)
    replica: Mirror | None = None
    """The copy of this run in a store, where the job names one."""
    watchdog: Watchdog | None = None
    """Ends an attempt that hangs past a limit."""

    @property
    def left_s(self) -> float:
        """Seconds until the watchdog acts; infinite without limits."""
        return math.inf if self.watchdog is None else self.watchdog.left_s

    def is_asked_to_leave(self) -> bool:
        """Whether this rank or another was asked to leave."""
        return bool(self.notice) or self.ranks.others_ask_to_leave

    def warn(self, text: str) -> None:
        self.emit(Warned(text))
