"""Rows with several answers and a score for each, as rows that are learned: the best answer, those
above a score, or pairs of a better and a worse one.

The answers stand in a list, as texts or as objects that hold their score; the scores may stand in a
list beside it. A `rank` counts from the best.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from farthing.data.rows import RowValue
from farthing.errors import UnusableRowError
from farthing.objectives.columns import kind_of

ANSWERS = ("responses", "completions", "answers", "candidates", "outputs", "generations")
_TEXT = ("response", "text", "content", "answer", "completion", "output", "generated_text")
_SCORES = ("scores", "rewards", "ratings", "ranks", "rank")
_SCORE = ("score", "reward", "rating", "overall_score", "rank")
_ABOVE = "above:"


def way_of(keep: Any, pairs: str | None) -> str:
    """`data.keep` and `data.pairs` of a job in one word; empty where rows are taken as they are."""
    if keep is None:
        return pairs or ""
    return "best" if keep == "best" else f"{_ABOVE}{float(keep['above'])!r}"


def expanded(row: RowValue, way: str) -> list[RowValue]:
    """The rows that are learned of one. Raises `UnusableRowError`."""
    name = next((each for each in ANSWERS if isinstance(row.get(each), list)), None)
    if name is None:
        raise UnusableRowError(f"no list of answers; it is looked for in {', '.join(ANSWERS)}")
    beside = next((each for each in _SCORES if isinstance(row.get(each), list)), "")
    others = {key: value for key, value in row.items() if key not in (name, beside)}
    answers = _answers(row, name, beside)
    best_first = sorted(answers, key=lambda each: -each[1])
    if way in ("best_worst", "adjacent"):
        ends = [(best_first[0], best_first[-1])]
        found = [
            {**others, "chosen": better[0], "rejected": worse[0]}
            for better, worse in (ends if way == "best_worst" else itertools.pairwise(best_first))
            if better[1] > worse[1]
        ]
        if not found:
            raise UnusableRowError(f"no answer of `{name}` scores better than another")
        return found
    kept = best_first[:1]
    if way != "best":
        least = float(way.removeprefix(_ABOVE))
        kept = [each for each in answers if each[1] > least]
        if not kept:
            raise UnusableRowError(f"no answer of `{name}` scores above {least:g}")
    if isinstance(others.get("messages"), list):
        turns = others["messages"]
        return [
            {**others, "messages": [*turns, {"role": "assistant", "content": answer}]}
            for answer, _ in kept
        ]
    column = "output" if "instruction" in others else "completion"
    return [{**others, column: answer} for answer, _ in kept]


def _answers(row: RowValue, name: str, beside: str) -> list[tuple[str, float]]:
    """Each answer with its own score, or that in the list `beside`. Raises `UnusableRowError`."""
    items: list[Any] = row[name]
    if not items:
        raise UnusableRowError(f"`{name}` is empty")
    if beside and len(row[beside]) != len(items):
        raise UnusableRowError(
            f"`{name}` has {len(items)} answers, and `{beside}` {len(row[beside])}"
        )
    found = []
    for place, item in enumerate(items):
        where, held = f"answer {place + 1} of `{name}`", item if isinstance(item, dict) else {}
        text = next((held[key] for key in _TEXT if isinstance(held.get(key), str)), None)
        text = text if held else item
        if not isinstance(text, str) or not text.strip():
            raise UnusableRowError(f"{where} is {kind_of(text)}, not text")
        key = beside or next((key for key in _SCORE if held.get(key) is not None), "")
        if not key:
            raise UnusableRowError(f"{where} has no score")
        value = row[beside][place] if beside else held[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise UnusableRowError(f"the score of answer {place + 1} is {value!r}, no number")
        found.append((text, -float(value) if key.startswith("rank") else float(value)))
    return found
