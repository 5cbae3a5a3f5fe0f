"""The constants of time fitted without one source, and how far off they then are on it.

    python bench/plan_refit.py --measurements FILE.csv [--left-out fms-acceleration] [--json]

Each constant goes up and down by a step that shrinks, as long as that makes the mean of
|ln(predicted / measured)| smaller; every source counts the same. Nothing is written: the constants
of `planner/speed.py` stay as they are.

Refuses rows whose `use` is `judges only` (`bench/published_rows.csv`): a planner fitted to them
could not be judged by them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import farthing.planner.speed as speed
from farthing.errors import FarthingError, InputError
from plan_rows import Case, NotExpressed, read_case

CONSTANTS = {
    **{
        "A100": speed.GPU_SHARE["A100-80GB"],
        "RTX 4090": speed.GPU_SHARE["RTX 4090"],
        "L40S": speed.GPU_SHARE["L40S"],
    },
    **{
        "Hopper": speed.MATMUL_SHARE["Hopper"],
        "HALF_WIDTH": speed.HALF_WIDTH,
        "EXPOSED": speed.EXPOSED,
    },
    **{"WAITING": speed.WAITING, "LAUNCH_TAIL": speed.LAUNCH_TAIL},
}
N_ROUNDS, FIRST_STEP, SHRINKS = 7, 0.12, 0.65


class Row(NamedTuple):
    """A measured speed, with what it asks of its GPU."""

    source: str
    case: Case
    work: speed.Work
    tokens_per_s: float


def read_rows(path: Path) -> list[Row]:
    """Every row with a speed that can be expressed."""
    found = []
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            if row.get("use") == "judges only":
                raise InputError(
                    "this row judges the planner, so nothing is fitted to it",
                    where=f"{path.name}:{number}",
                    to_do="give rows without `judges only` in their column `use`",
                )
            try:
                case = read_case(row)
            except (NotExpressed, FarthingError, ValueError):
                continue
            if case.measured_tokens_per_s and not case.limit:
                work = speed.work_of(
                    case.shape, case.recipe, case.padded, case.mean_tokens, case.adapters
                )
                source = row["source"].split("github.com/")[-1].split("/blob")[0]
                found.append(Row(source, case, work, case.measured_tokens_per_s))
    return found


def errors(constants: dict[str, float], rows: list[Row]) -> dict[str, list[float]]:
    """ln(predicted / measured) by source, with other constants."""
    speed.GPU_SHARE |= {"A100-80GB": constants["A100"], "A100-40GB": constants["A100"]}
    speed.GPU_SHARE |= {name: constants[name] for name in ("RTX 4090", "L40S")}
    speed.MATMUL_SHARE["Hopper"] = constants["Hopper"]
    for name in ("HALF_WIDTH", "EXPOSED", "WAITING", "LAUNCH_TAIL"):
        setattr(speed, name, constants[name])
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row.source].append(
            math.log(speed.step_time(row.work, row.case.device()).tokens_per_s / row.tokens_per_s)
        )
    return found


def fit(rows: list[Row]) -> dict[str, float]:
    """The constants that are least off on these rows."""

    def off(constants: dict[str, float]) -> float:
        return statistics.mean(
            statistics.mean(map(abs, of)) for of in errors(constants, rows).values()
        )

    best, step = dict(CONSTANTS), FIRST_STEP
    least = off(best)
    for _ in range(N_ROUNDS):
        for name in best:
            for factor in (1 + step, 1 / (1 + step)):
                tried = best | {name: best[name] * factor}
                if (now := off(tried)) < least - 1e-6:
                    best, least = tried, now
                    break
        step *= SHRINKS
    return best


def judge(rows: list[Row], left_out: str) -> dict[str, Any]:
    """How far off the source is with constants that it had no say in."""
    own = [row for row in rows if left_out in row.source]
    constants = fit([row for row in rows if left_out not in row.source])
    found = sorted((one for of in errors(constants, own).values() for one in of), key=abs)
    errors(CONSTANTS, [])  # as they were
    return {
        "left_out": left_out,
        "n": len(found),
        "median_percent": 100 * statistics.median(map(abs, found)),
        "p90_percent": 100 * abs(found[round(0.9 * (len(found) - 1))]),
        "bias_percent": 100 * statistics.median(found),
        "constants": {
            name: {"here": value, "fitted": constants[name]} for name, value in CONSTANTS.items()
        },
    }


def main() -> None:
    """Read, fit, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--measurements", type=Path, required=True)
    parser.add_argument(
        "--left-out", default="fms-acceleration", help="a part of the source's address"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = judge(read_rows(asked.measurements), asked.left_out)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    figures = "median {median_percent:.1f} %, nine of ten {p90_percent:.1f} %, bias {bias_percent:+.1f} %".format(  # noqa: E501
        **found
    )
    print(f"{found['n']} rows of {found['left_out']}, by constants fitted without them: {figures}")
    for name, pair in found["constants"].items():
        print(f"  {name:24}{pair['here']:9.3f}{pair['fitted']:9.3f}")


if __name__ == "__main__":
    main()
