"""The rows of bench/gpu.py as tables: everyone beside farthing, one thing changed at a time, and
promised against happened.

Rows that failed are shown with their reason, what was left out is listed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import aligned
from on_gpu.verdict import draw_verdict, kind_of, measured_of, shares

Row = dict[str, Any]
GIB = 2**30


def read_rows(path: Path) -> list[Row]:
    """All whole lines of the file; the last one of a process that was killed may be torn."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def number(value: float | None, form: str) -> str:
    """A value, or a dash."""
    return "-" if value is None else format(value, form)


def cells(row: Row, names: str, figures: Callable[[], list[str]], n: int) -> list[str]:
    """What a row is of, and its `n` figures, or why there are none."""
    more = [f"failed: {row['failed']}", *[""] * (n - 1)] if "failed" in row else figures()
    return [*(str(row[name]) for name in names.split()), *more]


def draw_speed(rows: list[Row], usd_per_hour: float) -> str:
    """Useful tokens/s, farthing's over theirs, utilisation against the datasheet and the measured
    product, memory.
    """
    facts = next(kind_of(rows, "facts"), {})
    own, of_product = measured_of(rows), {who: shares(rows, who) for who in {*_who(rows)}}
    most, best = facts.get("peak_flops"), facts.get("matmul_flops")

    def figures(row: Row) -> list[str]:
        key, speed = (row["shape"], row["method"], row["lengths"]), row["tokens_per_s"]
        share = of_product[row["who"]].get(key)
        return [
            f"{speed:,.0f}",
            number(own[key]["tokens_per_s"] / speed if key in own else None, ".2f"),
            number(share * best / most if share and most and best else None, ".1%"),
            number(share, ".1%"),
            f"{row['peak_bytes'] / GIB:.1f}" + " (ran out)" * row.get("ran_out_of_memory", False),
            number(row.get("idle_percent"), ".1f"),
            f"{row['useful_share']:.1%}",
            f"{1e6 / speed / 3600 * usd_per_hour:.4f}",
        ]

    head = ["shape", "method", "lengths", "who", "tok/s", "x", "MFU", "of matmul", "peak GiB"]
    head += ["idle %", "useful %", "$/Mtok"]
    names = "shape method lengths who"
    return aligned(
        head,
        [cells(row, names, lambda row=row: figures(row), 8) for row in kind_of(rows, "row")],  # type: ignore[misc]
    )


def _who(rows: list[Row]) -> list[str]:
    return [row["who"] for row in kind_of(rows, "row")]


def draw_variants(rows: list[Row]) -> str:
    """Each way beside the plan's own setting."""
    varied = [*kind_of(rows, "variant")]
    planned = {
        row["method"]: row["tokens_per_s"]
        for row in varied
        if row["group"] == "as planned" and "failed" not in row
    }

    def figures(row: Row) -> list[str]:
        base = planned.get(row["method"])
        return [
            f"{row['tokens_per_s']:,.0f}",
            number(row["tokens_per_s"] / base if base else None, ".2f"),
            f"{row['peak_bytes'] / GIB:.1f}",
            f"{row['micro_batch_tokens']:,}",
        ]

    return aligned(
        ["shape", "method", "what", "way", "tok/s", "of planned", "peak GiB", "micro-batch"],
        [cells(row, "shape method group way", lambda row=row: figures(row), 4) for row in varied],  # type: ignore[misc]
    )


# ---- the planner's truth ----


def compared(row: Row) -> dict[str, tuple[float, float]]:
    """(promised, happened) by name, for a row of farthing that had a promise."""
    promised, happened = row.get("promised"), row.get("happened")
    if not promised or not happened:
        return {}
    memory, step_s = promised["memory"], happened["step_s"]
    staying = {name: memory.get(name, 0) for name in ("weights", "optimizer")}
    aside = sum(memory.get(name, 0) for name in ("allocator slack", "CUDA context"))
    total = sum(memory.values())
    found = {
        "step, s": (promised["step_s"], step_s),
        "dollars of training": (promised["step_s"] * happened["usd"] / step_s, happened["usd"]),
    }
    sizes = {f"{name}, GiB": (n, happened[name]) for name, n in staying.items()}
    if "device_bytes" in happened:  # a CPU's peak is that of the whole process
        sizes["gradients, activations, loss, GiB"] = (
            total - aside - sum(staying.values()),
            happened["rest"] + happened["gradients"],
        )
        sizes["peak as torch counts, GiB"] = (total - aside, happened["peak_bytes"])
        sizes["peak of the device, GiB"] = (total, happened["device_bytes"])
    return found | {name: (one / GIB, other / GIB) for name, (one, other) in sizes.items()}


def draw_truth(rows: list[Row]) -> str:
    """Promised, happened and the ratio, row by row; then the median of the errors."""
    lines, errors = [], dict[tuple[str, str], list[float]]()
    for row in kind_of(rows, "row"):
        is_formula = row.get("promised", {}).get("calibration") == "formulas only"
        for what, (promised, happened) in compared(row).items():
            known = "formulas" if is_formula else "a run here"
            if happened:
                ratio = promised / happened
                errors.setdefault((what, known), []).append(abs(ratio - 1))
                of = [row["shape"], row["method"], row["lengths"], known, what]
                lines.append([*of, f"{promised:.4g}", f"{happened:.4g}", f"{ratio:.3f}"])
    medians = sorted(
        [what, known, str(len(found)), f"{median(found):.1%}", f"{max(found):.1%}"]
        for (what, known), found in errors.items()
    )
    head = ["shape", "method", "lengths", "known from", "what", "promised", "happened", "ratio"]
    summed = aligned(["error of", "known from", "rows", "median", "largest"], medians)
    return f"{aligned(head, lines)}\n\n{summed}"


# ---- all of it ----


def drawn_or_why(make: Callable[[], str]) -> str:
    """A table; where a row is not as it should be, why there is none, so that the others are."""
    try:
        return make()
    except Exception as error:
        return f"could not be drawn: {type(error).__name__}: {error}"


def draw(rows: list[Row], usd_per_hour: float) -> str:
    """Every table, and what was left out."""
    facts = next(kind_of(rows, "facts"), {})
    words = [str(facts.get("device", "no device"))]
    if facts.get("matmul_flops"):
        product = f"bf16 product of {facts['matmul_size']}: {facts['matmul_flops'] / 1e12:.1f}"
        words += [f"{product} TFLOP/s", f"copy: {facts['copy_bytes_per_s'] / 1e12:.3f} TB/s"]
    left = [f"  {row['what']}: {row['why']}" for row in kind_of(rows, "left out")]
    took = [f"  {row['what']}: {row['seconds']:g}" for row in kind_of(rows, "took")]
    speed = "Speed: useful tokens a second; x is farthing's over this one's"
    sections: dict[str, Callable[[], str]] = {
        speed: lambda: draw_speed(rows, usd_per_hour),
        "One thing changed at a time": lambda: draw_variants(rows),
        "Promised and happened": lambda: draw_truth(rows),
        "Seconds": lambda: "\n".join(took) or "  -",
        "Left out": lambda: "\n".join(left) or "  nothing",
        "Targets": lambda: draw_verdict(rows),
    }
    drawn = [f"{title}\n\n{drawn_or_why(make)}" for title, make in sections.items()]
    return "\n\n\n".join(["; ".join(words), *drawn]) + "\n"
