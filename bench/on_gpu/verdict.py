"""What was aimed at on a GPU, what was measured, and whether it is met: the end of what
bench/gpu.py prints.

    python bench/on_gpu/verdict.py --kills FILE ... | --kills-without FILE ...     of what
    bench/survive.py has printed

Every target has its line, also where nothing was measured for it. Needs no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Key = tuple[str, str, str]
SHARES = (("8B", "lora", 0.65), ("1B", "full", 0.62), ("3B", "full", 0.62))
"""Of the machine's own product in bf16."""
OVER = (("trl-tuned", "TRL, tuned", 1.3), ("hf", "Trainer as it comes", 2.0))
CHAT_SHARE = 0.9
MOST_IDLE_PERCENT = 3.0
LEAST_KILLS = 20


class Line(NamedTuple):
    """A target, what was measured for it, and whether it is met; None: nothing was measured."""

    target: str
    measured: str = "not measured"
    is_met: bool | None = None


def kind_of(rows: list[Row], kind: str) -> Iterator[Row]:
    """Rows of a kind."""
    return (row for row in rows if row["kind"] == kind)


def measured_of(rows: list[Row], who: str = "farthing") -> dict[Key, Row]:
    """Rows with figures of farthing, or of who is asked for, by shape, method and lengths."""
    return {
        (row["shape"], row["method"], row["lengths"]): row
        for row in kind_of(rows, "row")
        if row["who"] == who and "tokens_per_s" in row
    }


def shares(rows: list[Row], who: str = "farthing") -> dict[Key, float]:
    """The share of the machine's own bf16 product that a step reaches."""
    best = next((row.get("matmul_flops") for row in kind_of(rows, "facts")), None)
    flops = {
        (row["shape"], row["lengths"]): row["flops_per_token"] for row in kind_of(rows, "work")
    }
    return {
        key: row["tokens_per_s"] * flops[key[0], key[2]][key[1]]["needed"] / best
        for key, row in measured_of(rows, who).items()
        if best
    }


def lines_of(rows: list[Row]) -> Iterator[Line]:
    """Shares of the product, chats beside full rows, how long the GPU had nothing to do, and
    farthing over the others on the same examples.
    """
    found, ours = shares(rows), measured_of(rows)
    for shape, method, least in SHARES:
        for lengths in ("chat", "full"):
            share = found.get((shape, method, lengths))
            target = f"{shape} {method}, {lengths} lengths: {least:.0%} of the bf16 product here"
            yield Line(target) if share is None else Line(target, f"{share:.1%}", share >= least)
    for (shape, method, lengths), row in ours.items():
        full = ours.get((shape, method, "full"))
        if lengths == "chat" and full is not None:
            ratio = row["tokens_per_s"] / full["tokens_per_s"]
            target = f"{shape} {method}: chats within 10 % of full rows in tokens/s"
            yield Line(target, f"{ratio:.2f}", ratio >= CHAT_SHARE)
    idle = {key: row.get("idle_percent") for key, row in ours.items()}
    known = {" ".join(key): percent for key, percent in idle.items() if percent is not None}
    target = f"the GPU idle for less than {MOST_IDLE_PERCENT:g} % of a step"
    if not known:
        yield Line(target)
    for name, percent in known.items():
        yield Line(f"{target}: {name}", f"{percent:.1f} %", percent < MOST_IDLE_PERCENT)
    for who, name, least in OVER:
        theirs = measured_of(rows, who)
        both = [key for key in ours if key in theirs]
        if not both:
            yield Line(f"{least:g} times {name}")
        for key in both:
            ratio = ours[key]["tokens_per_s"] / theirs[key]["tokens_per_s"]
            yield Line(f"{' '.join(key)}: {least:g} times {name}", f"{ratio:.2f}", ratio >= least)


def draw_verdict(rows: list[Row]) -> str:
    """Target, measured, met or not: a line each."""
    return "\n".join(map(said, lines_of(rows)))


def said(line: Line) -> str:
    """A line as text."""
    words = {True: ", met", False: ", NOT MET", None: ""}
    return f"{line.target}: {line.measured}{words[line.is_met]}"


def of_kills(texts: list[str], *, is_exact: bool) -> Line:
    """What came of runs that were killed, by the lines of bench/survive.py, those of a run that was
    stopped included.
    """
    lines = [line for text in texts for line in text.splitlines() if re.match(r"seed \d+: ", line)]
    killed = [line.partition("killed in ")[2].partition("; ")[0] for line in lines]
    n_kills = sum(len(re.findall(r"\(\d+\)", words)) for words in killed)
    n_same = sum(line.endswith(": identical") for line in lines)
    measured = f"{n_same} of {len(lines)} runs the same to the bit after {n_kills} kills"
    if not is_exact:
        return Line("kills without full_determinism", measured)
    is_met = n_kills >= LEAST_KILLS and n_same == len(lines)
    return Line(f"{LEAST_KILLS} SIGKILLs with full_determinism", measured, is_met)


def main(words: list[str]) -> int:
    """Print the lines and what they amount to; 1 where a target is not met."""
    texts = [Path(name).read_text(encoding="utf-8") for name in words[1:]]
    line = of_kills(texts, is_exact=words[0] == "--kills")
    for text in texts:  # one that ended early says why last
        print(text.strip() if "seed " in text else text.strip()[-1500:])
    print(said(line))
    return 1 if line.is_met is False else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
