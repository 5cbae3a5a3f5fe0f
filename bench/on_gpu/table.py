"""The rows of bench/gpu.py as tables: everyone beside farthing, one thing changed at a time, and
promised against happened.

Rows that failed are shown with their reason, what was left out is listed. Refuses to import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from on_gpu.verdict import draw_verdict

Row = dict[str, Any]
GIB = 2**30
FARTHING = "farthing"
BY_FORMULAS = "step by formulas alone, s"


def read_rows(path: Path) -> list[Row]:
    """All whole lines of the file; the last one of a process that was killed may be torn."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def aligned(head: list[str], lines: Iterable[list[str]]) -> str:
    """Columns of equal width, words to the left and numbers to the right."""
    every = [head, *lines]
    widths = [max(len(line[i]) for line in every) for i in range(len(head))]

    def cell(text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() or text[:1] in "-+" else text.ljust(width)

    return "\n".join(
        "  ".join(cell(text, width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in every
    )


def number(value: float | None, form: str) -> str:
    """A value, or a dash."""
    return "-" if value is None else format(value, form)


# ---- everyone ----


def draw_speed(rows: list[Row], usd_per_hour: float) -> str:
    """Useful tokens/s, farthing's over theirs, utilisation against the datasheet and the measured
    product, memory.
    """
    facts = next((row for row in rows if row["kind"] == "facts"), {})
    flops = {
        (row["shape"], row["lengths"]): row["flops_per_token"]
        for row in rows
        if row["kind"] == "work"
    }
    own = {
        place(row): row["tokens_per_s"]
        for row in rows
        if row.get("who") == FARTHING and "tokens_per_s" in row
    }
    head = [
        "shape",
        "method",
        "lengths",
        "who",
        "tok/s",
        "x",
        "MFU",
        "of matmul",
        "peak GiB",
        "busy %",
        "idle %",
        "useful %",
        "$/Mtok",
    ]
    lines = []
    for row in rows:
        if row["kind"] != "row":
            continue
        who = row["who"] + " (memory ran out)" * bool(row.get("ran_out_of_memory"))
        what = [row["shape"], row["method"], row["lengths"], who]
        if "failed" in row:
            lines.append([*what, f"failed: {row['failed']}", *[""] * 8])
            continue
        speed = row["tokens_per_s"]
        used = speed * flops[row["shape"], row["lengths"]][row["method"]]["needed"]
        peak, best = facts.get("peak_flops"), facts.get("matmul_flops")
        ratio = own[place(row)] / speed if place(row) in own else None
        lines.append(
            [
                *what,
                f"{speed:,.0f}",
                number(ratio, ".2f"),
                number(used / peak if peak else None, ".1%"),
                number(used / best if best else None, ".1%"),
                f"{row['peak_bytes'] / GIB:.1f}",
                number(row["busy_percent"], ".0f"),
                number(row.get("idle_percent"), ".1f"),
                f"{row['useful_share']:.1%}",
                f"{1e6 / speed / 3600 * usd_per_hour:.4f}",
            ]
        )
    return aligned(head, lines)


def place(row: Row) -> tuple[str, str, str]:
    """What is compared with what."""
    return row["shape"], row["method"], row["lengths"]


# ---- variants ----


def draw_variants(rows: list[Row]) -> str:
    """Each way beside the plan's own setting."""
    planned = {
        (row["shape"], row["method"]): row["tokens_per_s"]
        for row in rows
        if row["kind"] == "variant" and row["group"] == "as planned" and "tokens_per_s" in row
    }
    head = [
        "shape",
        "method",
        "what",
        "way",
        "tok/s",
        "of planned",
        "peak GiB",
        "busy %",
        "micro-batch",
    ]
    lines = []
    for row in rows:
        if row["kind"] != "variant":
            continue
        what = [row["shape"], row["method"], row["group"], row["way"]]
        if "failed" in row:
            lines.append([*what, f"failed: {row['failed']}", *[""] * 4])
            continue
        base = planned.get((row["shape"], row["method"]))
        lines.append(
            [
                *what,
                f"{row['tokens_per_s']:,.0f}",
                number(row["tokens_per_s"] / base if base else None, ".2f"),
                f"{row['peak_bytes'] / GIB:.1f}",
                number(row["busy_percent"], ".0f"),
                f"{row['micro_batch_tokens']:,}",
            ]
        )
    return aligned(head, lines)


# ---- the planner's truth ----


def compared(row: Row) -> dict[str, tuple[float, float]]:
    """(promised, happened) by name, for a row of farthing that had a promise."""
    promised, happened = row.get("promised") or {}, row.get("happened") or {}
    if not promised or not happened:
        return {}
    memory, on_gpu = promised["memory"], "reserved_bytes" in happened
    staying = {name: float(memory.get(name, 0)) for name in ("weights", "optimizer", "gradients")}
    aside = sum(memory.get(name, 0) for name in ("allocator slack", "CUDA context"))
    allocated = sum(memory.values()) - aside
    usd_per_s = happened["usd"] / happened["step_s"] if happened["step_s"] else 0.0
    found = {
        "step, s": (promised["step_s"], happened["step_s"]),
        "dollars of training": (promised["step_s"] * usd_per_s, happened["usd"]),
        "weights, GiB": (staying["weights"] / GIB, happened["weights"] / GIB),
        "optimizer, GiB": (staying["optimizer"] / GIB, happened["optimizer"] / GIB),
    }
    if on_gpu:  # a CPU's peak is that of the whole process
        found |= {
            "gradients, activations, loss, GiB": (
                (allocated - staying["weights"] - staying["optimizer"]) / GIB,
                (happened["rest"] + happened["gradients"]) / GIB,
            ),
            "peak as torch counts, GiB": (allocated / GIB, happened["peak_bytes"] / GIB),
            "peak of the device, GiB": (sum(memory.values()) / GIB, happened["device_bytes"] / GIB),
        }
    formula = promised["formula"]
    found[BY_FORMULAS] = (formula["compute_s"] + formula["optimizer_s"], happened["step_s"])
    return found


def draw_truth(rows: list[Row]) -> str:
    """Promised, happened and the ratio, row by row; then the median of the errors."""
    head = ["shape", "method", "lengths", "known from", "what", "promised", "happened", "ratio"]
    lines, errors = [], dict[tuple[str, str], list[float]]()
    for row in rows:
        if row["kind"] != "row" or row["who"] != FARTHING:
            continue
        source = (row.get("promised") or {}).get("calibration", "")
        for what, (promised, happened) in compared(row).items():
            known = "formulas" if source == "formulas only" or what == BY_FORMULAS else "a run here"
            if not happened:
                continue
            errors.setdefault((what, known), []).append(abs(promised / happened - 1))
            place_of_row = [row["shape"], row["method"], row["lengths"], known]
            lines.append(
                [
                    *place_of_row,
                    what,
                    f"{promised:.4g}",
                    f"{happened:.4g}",
                    f"{promised / happened:.3f}",
                ]
            )
    if not lines:
        return "no row of farthing had a promise"
    medians = sorted(
        [what, known, str(len(found)), f"{median(found):.1%}", f"{max(found):.1%}"]
        for (what, known), found in errors.items()
    )
    return f"{aligned(head, lines)}\n\n{aligned(['error of', 'known from', 'rows', 'median', 'largest'], medians)}"  # noqa: E501


# ---- all of it ----


def drawn_or_why(make: Callable[[], str]) -> str:
    """A table; where a row is not as it should be, why there is none, so that the others are."""
    try:
        return make()
    except Exception as error:
        return f"could not be drawn: {type(error).__name__}: {error}"


def draw(rows: list[Row], usd_per_hour: float) -> str:
    """Every table, and what was left out."""
    facts = next((row for row in rows if row["kind"] == "facts"), {})
    words = [f"{facts.get('device', 'no device')}"]
    if facts.get("matmul_flops"):
        words.append(
            f"bf16 product of {facts['matmul_size']}: {facts['matmul_flops'] / 1e12:.1f} TFLOP/s"
        )
        words.append(f"copy: {facts['copy_bytes_per_s'] / 1e12:.3f} TB/s")
    left = [f"  {row['what']}: {row['why']}" for row in rows if row["kind"] == "left out"]
    took = [f"  {row['what']}: {row['seconds']:g}" for row in rows if row["kind"] == "took"]
    sections: list[tuple[str, Callable[[], str]]] = [
        (
            "Speed: useful tokens a second; x is farthing's over this one's",
            lambda: draw_speed(rows, usd_per_hour),
        ),
        ("One thing changed at a time", lambda: draw_variants(rows)),
        ("Promised and happened", lambda: draw_truth(rows)),
        ("Seconds", lambda: "\n".join(took) or "  -"),
        ("Left out", lambda: "\n".join(left) or "  nothing"),
        ("Targets", lambda: draw_verdict(rows)),
    ]
    drawn = [f"{title}\n\n{drawn_or_why(make)}" for title, make in sections]
    return "\n\n\n".join(["; ".join(words), *drawn]) + "\n"
