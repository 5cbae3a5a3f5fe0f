"""What is written for a run that was killed at a limit. Imports nothing until then.

Run as a program it watches the process whose number it is given.
"""

from __future__ import annotations

import sys
from pathlib import Path

from farthing.run.guard import watch_beside


def leave_last_words(folder: Path, why: str, late_s: float) -> None:
    """Bill and receipt of a run that was killed at a limit, `late_s` after its last line."""
    from farthing.report.receipt import leave_receipt
    from farthing.run.folder import LEDGER
    from farthing.run.ledger import end_for

    end_for(folder / LEDGER, "limit", late_s)
    leave_receipt(folder)


if __name__ == "__main__":
    watch_beside(int(sys.argv[1]), leave_last_words)
