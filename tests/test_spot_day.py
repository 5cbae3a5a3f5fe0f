"""A day of spot capacity in a minute: real runs, begun and taken away as a trace has it, end as if
nothing had happened.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spot_day
from farthing.planner.spot import Trace


def test_capacity_is_met_in_real_seconds() -> None:
    trace = Trace("zone", 3600, (0, 1, 1, 0, 0, 2, 0, 1))
    assert spot_day.spells_in(trace, 3600) == [(1, 3), (5, 6), (7, 8)]
    assert spot_day.spells_in(Trace("zone", 3600, (1, 1)), 36) == [(0, 200)]


def day(folder: Path, *arguments: str) -> dict[str, Any]:
    """`bench/spot_day.py` in a process of its own: it forks."""
    command = [sys.executable, spot_day.__file__, "--traces", str(folder), "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, result
    return result


@pytest.mark.slow
@pytest.mark.parametrize("notice", ["1", "0"], ids=["all are told", "none is told"])
def test_a_made_up_day_ends_in_the_same_bits(notice: str, tmp_path: Path) -> None:
    data = [1, 1, 0] * 8
    (tmp_path / "zone_v100_1.json").write_text(
        json.dumps({"metadata": {"gap_seconds": 3600}, "data": data})
    )
    result = day(tmp_path, "--trace", "zone_v100_1", "--seconds", "120", "--notice", notice)
    assert result["differences"] == []
    assert result["n_machines"] > 1
    assert (result["n_noticed"] > 0) == (notice == "1")
    assert (result["n_killed"] > 0) == (notice == "0")
    assert 0 < result["goodput"] < 1
    assert result["on_ledger_hours"] == pytest.approx(result["billed_hours"], rel=0.25)
