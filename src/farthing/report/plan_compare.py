"""Finding the plan that a rank or a name means, and two plans side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from farthing.errors import UserMistake
from farthing.planner.ownership import (
    saving,
)
from farthing.prices.gpus import find_gpu, gpus
from farthing.report.plan_words import LOCAL, say_cost, say_saving
from farthing.units import say_seconds, say_usd


def find_plan(view: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The plan that a rank or a name means: `3`, `H100`, `2x RTX 4090 spot`, `verda/A100-80GB`, `own`.

    The first that answers to the name, one GPU before several. Raises `UserMistake`, with the reason where all that
    answer were rejected.
    """
    rows: list[dict[str, Any]] = view["plans"]
    wanted = text.strip()
    if re.fullmatch(r"#?\d+", wanted):
        rank = int(wanted.lstrip("#"))
        row = next((row for row in rows if row["rank"] == rank), None)
        if row is None:
            raise UserMistake(f"there is no plan {rank}", where="plan", to_do=f"give a rank from 1 to {len(rows)}")
        return row
    found = sorted((row for row in rows if _answers(row, wanted)), key=lambda row: not row["is_runnable"])
    if found:
        return found[0]
    no = next((one for one in view["rejected"] if _answers(one, wanted)), None)
    if no is not None:
        raise UserMistake(f"`{wanted}` was rejected: {no['reason']}", where="plan", to_do=no["change"])
    to_do = 'give a rank, or a name such as "H100", "2x RTX 4090 spot" or "RunPod/L40S"'
    raise UserMistake(f"no plan is called `{wanted}`", where="plan", to_do=to_do)


def _answers(row: Mapping[str, Any], text: str) -> bool:
    """Whether a plan or a rejection is what `text` names."""
    provider, slash, rest = text.rpartition("/")
    rest = rest.strip().lower()
    for word, kinds in (("on-demand", ("on-demand",)), ("on demand", ("on-demand",)), ("spot", ("spot",))):
        if rest.endswith(word):
            rest = rest.removesuffix(word).strip()
            if row["kind"] not in kinds:
                return False
            break
    if slash and _key(provider) not in _key(row["provider"]):
        return False
    count = re.match(r"(\d+)\s*x\s*", rest)
    if count:
        rest = rest[count.end() :]
        if row["n_gpus"] != int(count[1]):
            return False
    if not rest:
        return True
    if rest in ("own", "here", LOCAL) or _key(rest) == _key(row["provider"]):
        return rest in (row["kind"], row["provider"]) or _key(rest) == _key(row["provider"])
    names = {_key(row["gpu"])}
    if row["gpu"] in gpus():
        names |= {_key(alias) for alias in gpus()[row["gpu"]].aliases}
    if _key(rest) in names or _key(row["gpu"]).startswith(_key(rest)):
        return True
    try:
        return find_gpu(rest).name == row["gpu"]
    except UserMistake:
        return False


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def compare_plans(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Two plans side by side: figures of both with the ratio b / a, and a sentence."""

    def memory(row: Mapping[str, Any]) -> float:
        return float(row["memory"]["needed_bytes"])

    figures: dict[str, tuple[float | None, float | None]] = {
        "total_usd": (a["total_usd"], b["total_usd"]),
        "hours": (a["hours"], b["hours"]),
        "usd_per_hour": (a["usd_per_hour"], b["usd_per_hour"]),
        "tokens_per_s": (a["step"]["tokens_per_s"], b["step"]["tokens_per_s"]),
        "step_s": (a["step"]["seconds"], b["step"]["seconds"]),
        "memory_bytes": (memory(a), memory(b)),
        "capacity_bytes": (a["memory"]["capacity_bytes"], b["memory"]["capacity_bytes"]),
    }
    saved = saving(b["total_usd"], a["total_usd"])
    return dict(
        plain(
            {
                "a": {"rank": a["rank"], "name": a["name"]},
                "b": {"rank": b["rank"], "name": b["name"]},
                "rows": {
                    name: {"a": one, "b": other, "ratio": other / one if one and other is not None else None}
                    for name, (one, other) in figures.items()
                },
                "saved_usd": saved.usd,
                "saved_share": saved.share,
                "words": f"{_sum_of(a)}; {_sum_of(b)}: {say_saving(saved)}",
            }
        )
    )


def _sum_of(row: Mapping[str, Any]) -> str:
    """`2x RTX 4090 at $0.50 each for 7 h = $7.00`."""
    each = " each" if row["n_gpus"] > 1 else ""
    price = "" if row["usd_per_gpu_hour"] is None else f" at {say_usd(row['usd_per_gpu_hour'])}{each}"
    kind = " spot" if row["kind"] == "spot" else ""
    return f"{row['n_gpus']}x {row['gpu']}{kind}{price} for {say_seconds(row['wall_s'])} = {say_cost(row['total_usd'])}"


def plain(value: Any) -> Any:
    """Values that JSON has: numbers of numpy become Python's, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return float(f"{number:.10g}")
