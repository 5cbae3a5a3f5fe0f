"""What was aimed at on a GPU, what was measured, and whether it is met: the end of what
bench/gpu.py prints.

    python bench/on_gpu/verdict.py --kills FILE ... | --kills-without FILE ...     of what
    bench/survive.py has printed

Every target has its line, also where nothing was measured for it. Refuses to import torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
LORA_8B_SHARE, FULL_SHARE = 0.65, 0.62  # of the machine's own product in bf16
CHAT_SHARE = 0.9
OVER_TRL, OVER_TRAINER = 1.3, 2.0
MOST_IDLE_PERCENT = 3.0
LEAST_KILLS = 20


class Line(NamedTuple):
    """A target, what was measured for it, and whether it is met; None: no number was set, or
    nothing was measured.
    """

    target: str
    measured: str
    is_met: bool | None


def draw_verdict(rows: list[Row]) -> str:
    """Target, measured, met or not: a line each."""
    words = {True: "met", False: "NOT MET", None: ""}
    lines = [*of_speed(rows), *of_peers(rows), *of_promises(rows), *of_ways(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(
        f"{line.target:{widths[0]}}  {line.measured:{widths[1]}}  {words[line.is_met]}".rstrip()
        for line in lines
    )


def shares(rows: list[Row]) -> dict[tuple[str, str, str], float]:
    """(shape, method, lengths) to the share of the machine's own bf16 product that farthing's step
    reaches.
    """
    best = next((row["matmul_flops"] for row in rows if row.get("matmul_flops")), None)
    flops = {
        (row["shape"], row["lengths"]): row["flops_per_token"]
        for row in rows
        if row["kind"] == "work"
    }
    return {
        key: row["tokens_per_s"] * flops[key[0], key[2]][key[1]]["needed"] / best
        for key, row in own(rows).items()
        if best and (key[0], key[2]) in flops
    }


def own(rows: list[Row], who: str = "farthing") -> dict[tuple[str, str, str], Row]:
    """Rows with figures of farthing, or of who is asked for."""
    return {
        (row["shape"], row["method"], row["lengths"]): row
        for row in rows
        if row["kind"] == "row" and row["who"] == who and "tokens_per_s" in row
    }


def of_speed(rows: list[Row]) -> Iterator[Line]:
    """Shares of the product, chats beside full rows, and how long the GPU had nothing to do."""
    found, ours = shares(rows), own(rows)
    wanted = [("8B", "lora", LORA_8B_SHARE), ("1B", "full", FULL_SHARE), ("3B", "full", FULL_SHARE)]
    for shape, method, least in wanted:
        for lengths in ("chat", "full"):
            share = found.get((shape, method, lengths))
            target = (
                f"{shape} {method}, {lengths} lengths: {least:.0%} of the bf16 product measured"
                " here"
            )
            yield (
                Line(target, "not measured", None)
                if share is None
                else Line(target, f"{share:.1%}", share >= least)
            )
    for shape, method, lengths in ours:
        if lengths == "chat" and (shape, method, "full") in ours:
            ratio = (
                ours[shape, method, "chat"]["tokens_per_s"]
                / ours[shape, method, "full"]["tokens_per_s"]
            )
            yield Line(
                f"{shape} {method}: chats within 10 % of full rows in tokens/s",
                f"{ratio:.2f}",
                ratio >= CHAT_SHARE,
            )
    idle = {
        " ".join(key): row["idle_percent"]
        for key, row in ours.items()
        if row.get("idle_percent") is not None
    }
    target = f"the GPU idle for less than {MOST_IDLE_PERCENT:g} % of a step"
    if not idle:
        yield Line(target, "not measured", None)
    for name, percent in idle.items():
        yield Line(f"{target}: {name}", f"{percent:.1f} %", percent < MOST_IDLE_PERCENT)


def of_peers(rows: list[Row]) -> Iterator[Line]:
    """farthing over TRL as tuned, and over the Trainer as people run it, on the same examples."""
    ours = own(rows)
    for who, name, least in (
        ("trl-tuned", "TRL, tuned", OVER_TRL),
        ("hf", "Trainer as it comes", OVER_TRAINER),
    ):
        theirs = own(rows, who)
        both = [key for key in ours if key in theirs]
        if not both:
            yield Line(f"{least:g} times {name}", "not measured", None)
        for key in both:
            ratio = ours[key]["tokens_per_s"] / theirs[key]["tokens_per_s"]
            yield Line(f"{' '.join(key)}: {least:g} times {name}", f"{ratio:.2f}", ratio >= least)


def of_promises(rows: list[Row]) -> Iterator[Line]:
    """Seconds and peak that were promised, over what happened, run by run."""
    for key, row in own(rows).items():
        promised, happened = row.get("promised"), row.get("happened")
        if not promised or not happened or not happened.get("step_s"):
            continue
        aside = ("allocator slack", "CUDA context")
        peak = sum(n for name, n in promised["memory"].items() if name not in aside)
        words = f"step {promised['step_s'] / happened['step_s']:.2f}"
        if "reserved_bytes" in happened:
            words += f", peak {peak / happened['peak_bytes']:.2f}"
        known = "formulas" if promised.get("calibration") == "formulas only" else "a run here"
        yield Line(f"promised over happened, by {known}: {' '.join(key)}", words, None)


def of_ways(rows: list[Row]) -> Iterator[Line]:
    """Ways of computing, beside the plan's own: tokens/s as a ratio, and the peak."""
    varied = [row for row in rows if row["kind"] == "variant"]
    planned = {
        row["method"]: row["tokens_per_s"]
        for row in varied
        if row["group"] == "as planned" and "failed" not in row
    }
    for row in varied:
        if row["group"] not in ("compile", "optimizer", "qlora", "liger"):
            continue
        target = f"{row['shape']} {row['method']}: {row['group']}, {row['way']}"
        if "failed" in row:
            yield Line(target, f"failed: {row['failed'][:80]}", False)
            continue
        base = planned.get(row["method"])
        ratio = f"{row['tokens_per_s'] / base:.2f} of planned, " if base else ""
        yield Line(
            target,
            f"{ratio}{row['tokens_per_s']:,.0f} tokens/s, {row['peak_bytes'] / 2**30:.1f} GiB",
            None,
        )


def of_kills(texts: list[str], *, is_exact: bool) -> Line:
    """What came of runs that were killed, by the lines of bench/survive.py, those of a run that was
    stopped included.
    """
    lines = [line for text in texts for line in text.splitlines() if re.match(r"seed \d+: ", line)]
    n_kills = sum(
        len(re.findall(r"\(\d+\)", line.partition("killed in ")[2].partition("; ")[0]))
        for line in lines
    )
    n_same = sum(line.endswith(": identical") for line in lines)
    measured = f"{n_same} of {len(lines)} runs the same to the bit after {n_kills} kills"
    if not is_exact:
        return Line("kills without full_determinism", measured, None)
    return Line(
        f"{LEAST_KILLS} SIGKILLs with full_determinism",
        measured,
        n_kills >= LEAST_KILLS and n_same == len(lines),
    )


def main(words: list[str]) -> int:
    """Print the lines and what they amount to; 1 where a target is not met."""
    if len(words) < 2 or words[0] not in ("--kills", "--kills-without"):
        print(__doc__)
        return 2
    texts = [Path(name).read_text(encoding="utf-8") for name in words[1:]]
    line = of_kills(texts, is_exact=words[0] == "--kills")
    for text in texts:  # one that ended early says why last
        print(text.strip() if "seed " in text else text.strip()[-1500:])
    print(
        f"{line.target}:"
        f" {line.measured}{'' if line.is_met is None else ', met' if line.is_met else ', NOT MET'}"
    )
    return 1 if line.is_met is False else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
