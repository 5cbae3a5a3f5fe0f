"""The page of a search: one HTML file without scripts, from its receipt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farthing.printable import printable
from farthing.storage.files import Json
from farthing.units import say_usd

LEFT, RIGHT, TOP, BOTTOM = 70.0, 780.0, 20.0, 270.0
LOGARITHMIC = 50.0
"""Of an axis whose largest number is so many times its smallest."""


def search_page(receipt: Json) -> str:
    """The page; every text of others is escaped."""
    import jinja2

    from farthing.search.words import (
        dollars_in_words,
        in_words,
        score_in_words,
        setting_in_words,
        state_in_words,
    )

    text = (Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        text
    )
    rows = [
        {
            "trial": each["trial"],
            "settings": [printable(setting_in_words(each, key)) for key in receipt["varied"]],
            "trained": f"{100 * each['fraction']:.0f} %",
            "score": score_in_words(each),
            "usd": say_usd(each["usd"]),
            "state": printable(state_in_words(each))[:200],
            "is_bad": bool(each["reason"]),
        }
        for each in receipt["trials"]
    ]
    rungs = [
        {
            "share": f"{100 * each['fraction']:.0f} %",
            "n": each["n_trials"],
            "usd": say_usd(each["usd"]),
        }
        for each in receipt["rungs"]
    ]
    charts = [draw(receipt) for draw in (_front, _parallel, _curves)]
    return template.render(
        **{key: receipt[key] for key in ("state", "reason", "metric", "varied", "version", "next")},
        folder=printable(receipt["folder"]),
        dollars=dollars_in_words(receipt),
        words=in_words(receipt),
        charts=[chart for chart in charts if chart is not None],
        rows=rows,
        rungs=rungs,
    )


class _Scale:
    """Values to places; all in the middle where they are one."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.low, self.high = min(values), max(values)
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        width = self.high - self.low
        share = (value - self.low) / width if width else 0.5
        return round(self._first + share * (self._last - self._first), 1)

    def marks(self, n: int = 5) -> list[float]:
        """Values evenly apart, of which the first and the last are the ends."""
        if self.low == self.high:
            return [self.low]
        return [self.low + (self.high - self.low) * at / (n - 1) for at in range(n)]


def _scored(receipt: Json) -> list[Json]:
    return [each for each in receipt["trials"] if each["score"] is not None]


def _is_best(receipt: Json, trial: Json) -> bool:
    return receipt["winner"] is not None and trial["trial"] == receipt["winner"]["trial"]


def _horizontals(scale: _Scale) -> list[Json]:
    return [{"at": scale(value), "label": f"{value:.4g}"} for value in scale.marks()]


def _front(receipt: Json) -> Json | None:
    """Scores against dollars, and those that no other beats for as few dollars."""
    trials = _scored(receipt)
    if not trials:
        return None
    x = _Scale([each["usd"] for each in trials], LEFT, RIGHT)
    y = _Scale([each["score"] for each in trials], BOTTOM, TOP)
    by_number = {each["trial"]: each for each in trials}
    front = " ".join(
        f"{x(by_number[trial]['usd'])},{y(by_number[trial]['score'])}" for trial in receipt["front"]
    )
    dots = [
        {
            "x": x(each["usd"]),
            "y": y(each["score"]),
            "kind": "best" if _is_best(receipt, each) else "",
            "name": f"trial {each['trial']}: {each['score']:.4g} for {say_usd(each['usd'])}",
        }
        for each in trials
    ]
    return {
        "title": "Score against dollars",
        "caption": f"{receipt['metric']} of every trial by its dollars; the line joins those that"
        " no other beats for as few.",
        "verticals": [
            {"at": x(value), "below": say_usd(value), "above": ""} for value in x.marks()
        ],
        "horizontals": _horizontals(y),
        "lines": [{"kind": "trial", "points": front, "name": "front"}],
        "dots": dots,
    }


def _parallel(receipt: Json) -> Json | None:
    """Settings and score of every trial side by side."""
    trials, keys = _scored(receipt), receipt["varied"]
    if not trials or not keys:
        return None
    columns = [_column([each["settings"].get(key) for each in trials]) for key in keys]
    columns.append(_column([each["score"] for each in trials]))
    at = _Scale([0, len(keys)], LEFT + 30, RIGHT - 30)
    lines = sorted(
        (
            {
                "kind": "best" if _is_best(receipt, each) else "trial",
                "points": " ".join(
                    f"{at(place)},{column['at'][number]}" for place, column in enumerate(columns)
                ),
                "name": f"trial {each['trial']}",
            }
            for number, each in enumerate(trials)
        ),
        key=lambda line: line["kind"] == "best",
    )
    names = [*keys, receipt["metric"]]
    return {
        "title": "Settings of every trial",
        "caption": "From left to right: "
        + "; ".join(
            f"{name} from {column['low']} to {column['high']}"
            for name, column in zip(names, columns, strict=True)
        ),
        "verticals": [
            {"at": at(place), "below": name, "above": column["high"]}
            for place, (name, column) in enumerate(zip(names, columns, strict=True))
        ],
        "horizontals": [],
        "lines": lines,
        "dots": [],
    }


def _column(values: Sequence[Any]) -> Mapping[str, Any]:
    """Places of values on an axis: numbers by size, or by its logarithm, others by their order."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        numbers, names = [float(value) for value in values], None
    else:
        names = sorted({str(value) for value in values})
        numbers = [float(names.index(str(value))) for value in values]
    scale = _Scale(numbers, BOTTOM, TOP)
    low, high = (names[0], names[-1]) if names else (f"{scale.low:.4g}", f"{scale.high:.4g}")
    if scale.low > 0 and scale.high >= LOGARITHMIC * scale.low:
        numbers = [math.log(number) for number in numbers]
        scale = _Scale(numbers, BOTTOM, TOP)
    return {"at": [scale(number) for number in numbers], "low": low, "high": high}


def _curves(receipt: Json) -> Json | None:
    """Scores over a trial's steps."""
    trials = [
        (
            each,
            [(step / each["n_steps"], score) for step, score in each["curve"] if score is not None],
        )
        for each in receipt["trials"]
        if each["curve"]
    ]
    points = [point for _, curve in trials for point in curve]
    if not points:
        return None
    x = _Scale([0.0, *(share for share, _ in points)], LEFT, RIGHT)
    y = _Scale([score for _, score in points], BOTTOM, TOP)
    lines = [
        {
            "kind": "best" if _is_best(receipt, each) else "trial",
            "points": " ".join(f"{x(share)},{y(score)}" for share, score in curve),
            "name": f"trial {each['trial']}",
        }
        for each, curve in trials
    ]
    return {
        "title": "Learning curves",
        "caption": f"{receipt['metric']} of every trial over its steps.",
        "verticals": [
            {"at": x(value), "below": f"{100 * value:.0f} %", "above": ""} for value in x.marks()
        ],
        "horizontals": _horizontals(y),
        "lines": sorted(lines, key=lambda line: line["kind"] == "best"),
        "dots": [],
    }
