"""How many measurements the planner's 80 % ranges hold, when the source of a measurement has no say
in its range.

Each source is left out in turn; the width of its ranges is the error that 80 % of the other
sources' rows stay within, each source counting the same, with the correction for a finite sample
(Vovk et al., Algorithmic Learning in a Random World, 2005).

The coverage is the mean of the sources' shares, each alike, as the widths are made: rows of one
source resemble each other, so counted by rows the largest source decides. Both are printed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

SHARE = 0.80
Row = dict[str, Any]


def width_of(errors: dict[str, list[float]], share: float = SHARE) -> float:
    """The relative error that `share` of new rows should stay within; each group of the errors
    counts the same.
    """
    weighted = sorted(
        (abs(error), 1 / len(group) / len(errors)) for group in errors.values() for error in group
    )
    n_effective = 1 / sum(weight * weight for _, weight in weighted)  # Kish
    level, reached = min(1.0, share * (n_effective + 1) / n_effective), 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= level - 1e-9:
            return error
    return weighted[-1][0]


def grouped(rows: Sequence[Row], key: str, of: str) -> dict[str, list[float]]:
    """The errors `key` of rows by what they have as `of`."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            found[row[of]].append(row[key])
    return dict(found)


def left_out(rows: Sequence[Row], key: str, of: str = "source") -> list[dict[str, Any]]:
    """For each group: the width that the others give it, and how many of its rows that holds; the
    first is all together.
    """
    errors = grouped(rows, key, of)
    if len(errors) < 2:
        return []
    found = []
    for name, own in sorted(errors.items()):
        width = width_of({other: group for other, group in errors.items() if other != name})
        found.append(
            {
                "left_out": name,
                "width": width,
                "n": len(own),
                "n_held": sum(abs(e) <= width for e in own),
            }
        )
    n, n_held = (sum(one[what] for one in found) for what in ("n", "n_held"))
    whole = {"left_out": "each in turn", "width": width_of(errors), "n": n, "n_held": n_held}
    judged = [one | {"share": one["n_held"] / one["n"]} for one in (whole, *found)]
    judged[0]["share_of_groups"] = sum(one["share"] for one in judged[1:]) / len(found)
    return judged


def held_by(rows: Sequence[Row], key: str, width: Callable[[Row], float]) -> dict[str, Any]:
    """How many rows the ranges hold that a plan would print today."""
    judged = [row for row in rows if row[key] is not None]
    n_held = sum(abs(row[key]) <= width(row) for row in judged)
    return {"n": len(judged), "n_held": n_held, "share": n_held / max(1, len(judged))}
