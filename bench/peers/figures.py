"""From the marks of a clock to figures, from figures to ratios, from ratios to what was aimed at.
Plain numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any


def rates(run: dict[str, Any], first: int, last: int) -> dict[str, float] | None:
    """Figures of the steps `first` to `last` (counted from 0, `last` not included); None when there
    are none.

    `run` has the marks `wall` and `cpu` [steps + 1] and the tokens `useful` and `computed` [steps]
    of a `Clock`. `useful_share` is over 1 where a shared prefix was computed once.
    """
    if not 0 <= first < last <= len(run["useful"]):
        return None
    useful, computed = sum(run["useful"][first:last]), sum(run["computed"][first:last])
    wall_s, cpu_s = (run[name][last] - run[name][first] for name in ("wall", "cpu"))
    device_s = wall_s if run.get("on_gpu") else cpu_s
    return {
        "useful_tokens": useful,
        "wall_s": wall_s,
        "device_s": device_s,
        "tokens_per_s": useful / wall_s,
        "tokens_per_device_s": useful / device_s,
        "device_s_per_million": device_s / useful * 1e6,
        "useful_share": useful / computed,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one contestant as one row: medians, the range of speed, the highest memory."""  # noqa: E501
    speeds = [run["steady"]["tokens_per_device_s"] for run in runs]
    return {
        "n": len(runs),
        "speed": median(speeds),
        "speed_range": [min(speeds), max(speeds)],
        "per_s": median(run["steady"]["tokens_per_s"] for run in runs),
        "device_s_per_million": median(run["steady"]["device_s_per_million"] for run in runs),
        "useful_share": median(run["epoch"]["useful_share"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "usd": median(run["usd"] for run in runs),
        "process_s": median(run["process_wall_s"] for run in runs),
        "process_cpu_s": median(run["process_cpu_s"] for run in runs),
        "examples_per_step": median(run["examples_per_step"] for run in runs),
        "eval_loss": sum(run["eval_loss"] for run in runs) / len(runs),
        "losses": {run["seed"]: run["eval_loss"] for run in runs},
        "settings": runs[-1]["settings"],
    }


# ---- targets ----

Table = dict[str, dict[str, Any]]
"""The rows of one workload, method and precision, by contestant."""


@dataclass(frozen=True)
class Target:
    """Something aimed at: a least ratio of farthing's figure to a peer's."""

    words: str
    least: float
    peer: str
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def applies(self, workload: str, method: str) -> bool:
        """Whether it is about this table."""
        about = ((self.workloads, workload), (self.methods, method))
        return all(not wanted or value in wanted for wanted, value in about)


CAUSAL = ("short", "chat", "full", "shared")
TARGETS = (
    Target("against Trainer, tuned, on chat lengths", 1.4, "hf-tuned", workloads=("chat",)),
    Target("against Trainer, tuned, on full-length rows", 1.1, "hf-tuned", workloads=("full",)),
    Target("against TRL, tuned", 1.3, "trl-tuned", workloads=CAUSAL),
    Target(
        "LoRA on all layers against TRL's defaults", 1.4, "trl", methods=("lora",), workloads=CAUSAL
    ),
)
LEAST_SHARE = {"causal-lm": 0.9999, "seq2seq": 0.97, "classification": 0.97}


def ratio(table: Table, peer: str) -> float | None:
    """farthing's speed over the peer's; None where one is missing or void."""
    rows = [table.get(name) for name in ("farthing", peer)]
    if any(row is None or row.get("void") or "speed" not in row for row in rows):
        return None
    return float(rows[0]["speed"] / rows[1]["speed"])  # type: ignore[index]


def against_targets(table: Table, workload: str, method: str, task: str) -> list[dict[str, Any]]:
    """Each target about this table, with what was measured: met, missed, or not measured."""
    found = []
    for target in TARGETS:
        if target.applies(workload, method):
            value = ratio(table, target.peer)
            found.append(
                _judged(target.words, target.least, value, lambda value, least: value >= least)
            )
    ours = table.get("farthing", {})
    if "peak_bytes" not in ours:
        return found
    share = ours["useful_share"]
    found.append(
        _judged(
            "useful share of computed tokens",
            LEAST_SHARE[task],
            share,
            lambda value, least: value >= least,
        )
    )
    others = [
        row["peak_bytes"]
        for name, row in table.items()
        if name != "farthing" and "peak_bytes" in row
    ]
    if others:
        value = ours["peak_bytes"] / min(others)
        found.append(
            _judged(
                "peak memory over the least of the others",
                1.0,
                value,
                lambda value, most: value <= most,
            )
        )
    return found


def _judged(
    words: str, bound: float, value: float | None, holds: Callable[[float, float], bool]
) -> dict[str, Any]:
    state = (
        "not measured"
        if value is None or math.isnan(value)
        else "met"
        if holds(value, bound)
        else "missed"
    )
    return {"target": words, "bound": bound, "measured": value, "state": state}
