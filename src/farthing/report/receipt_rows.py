"""What a receipt says in rows of words, for all who draw it: the terminal, the page and the model
card. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farthing.report.receipt import ROW_NAMES, Comparison
from farthing.report.receipt_types import Pair, Receipt
from farthing.units import digits_of, say_bytes, say_seconds, say_usd

Rows = list[tuple[str, ...]]
ESTIMATE = ("#estimated", "#happened", "#ratio")
CLASSES = ("class", "#precision", "#recall", "#F1", "#examples")
"""Heads of tables; those that begin with # are of numbers."""


def time_and_price(receipt: Receipt, seconds: float, usd: float) -> str:
    """`20 s ($0.012)`, in the digits of the run's bill; without dollars where there is no price."""
    return say_seconds(seconds) + (
        f" ({digits_of(receipt.usd)(usd)})" if receipt.usd_is_known else ""
    )


def estimate_rows(receipt: Receipt, least_s: float = 0.0) -> Rows:
    """What the plan said before the start, part by part, what the first steps said, and what came
    of it.

    Of the parts those that were to take, or took, `least_s`.
    """
    rows: Rows = []

    def row(name: str, pair: Pair, say: Callable[[Any], str]) -> None:
        ratio = "" if pair.ratio is None else f"{pair.ratio:.2f}"
        rows.append((name, say(pair.promised), say(pair.happened), ratio))

    if promised := receipt.promised:
        row("time", promised.wall_s, say_seconds)
        for name, pair in promised.seconds.items():
            if max(pair.promised, pair.happened or 0.0) >= least_s:
                row(f"· {name}", pair, say_seconds)
        if receipt.usd_is_known:
            row("dollars", promised.usd, digits_of(receipt.usd))
        row("peak memory", promised.peak_bytes, say_bytes)
    if forecast := receipt.forecast:
        row(f"time, forecast after step {forecast.made_after_step:,}", forecast.wall_s, say_seconds)
    return rows


def class_rows(metrics: Mapping[str, Any]) -> Rows:
    """Precision, recall, F1 and the number of examples of each class; empty for other tasks."""
    return [
        (name, *(f"{row[key]:.3f}" for key in ("precision", "recall", "f1")), str(row["n"]))
        for name, row in (metrics.get("per_class") or {}).items()
    ]


def compared_rows(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """A figure of the first run, of each that it is compared with, and the ratio to the first of
    these.
    """
    for name, row in comparisons[0].rows.items():
        say = (
            say_usd
            if "usd" in name
            else {"wall_s": say_seconds, "peak_bytes": say_bytes}.get(name, _number)
        )
        values = [
            row.run,
            *(each.rows[name].baseline if name in each.rows else None for each in comparisons),
        ]
        unknown = "no price" if "usd" in name else "-"
        texts = [unknown if value is None else say(value) for value in values]
        yield (
            ROW_NAMES.get(name, name.replace("_", " ")),
            *texts,
            "" if row.ratio is None else f"{row.ratio:.3f}",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.4g}"
