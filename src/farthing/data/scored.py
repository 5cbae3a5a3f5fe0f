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
from farthing.objectives.columns import Unusable, kind_of

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
    """The rows that are learned of one. Raises `Unusable`."""
    name, answers, used = _answers(row)
    others = {key: value for key, value in row.items() if key not in used}
    best_first = sorted(answers, key=lambda each: -each[1])
    if way in ("best_worst", "adjacent"):
        ends = [(best_first[0], best_first[-1])]
        chosen = ends if way == "best_worst" else list(itertools.pairwise(best_first))
        found = [
            {**others, "chosen": better[0], "rejected": worse[0]}
            for better, worse in chosen
            if better[1] > worse[1]
        ]
        if not found:
            raise Unusable(f"no answer of `{name}` scores better than another")
        return found
    least = best_first[0][1] if way == "best" else float(way.removeprefix(_ABOVE))
    kept = best_first[:1] if way == "best" else [each for each in answers if each[1] > least]
    if not kept:
        raise Unusable(f"no answer of `{name}` scores above {least:g}")
    return [_with_answer(others, answer) for answer, _ in kept]


def _with_answer(row: RowValue, answer: str) -> RowValue:
    """The row with its answer where rows of its form have it."""
    if isinstance(row.get("messages"), list):
        turn = {"role": "assistant", "content": answer}
        return {**row, "messages": [*row["messages"], turn]}
    return {**row, ("output" if "instruction" in row else "completion"): answer}


def _answers(row: RowValue) -> tuple[str, list[tuple[str, float]], set[str]]:
    """(the column of the answers, each with its score, the columns that were read)."""
    name = next((each for each in ANSWERS if isinstance(row.get(each), list)), None)
    if name is None:
        raise Unusable(f"no list of answers; it is looked for in {', '.join(ANSWERS)}")
    items: list[Any] = row[name]
    beside = next((each for each in _SCORES if isinstance(row.get(each), list)), None)
    if not items:
        raise Unusable(f"`{name}` is empty")
    if beside is not None and len(row[beside]) != len(items):
        raise Unusable(f"`{name}` has {len(items)} answers, and `{beside}` {len(row[beside])}")
    found = []
    for place, item in enumerate(items):
        text, own = item, None
        if isinstance(item, dict):
            text = next((item[key] for key in _TEXT if isinstance(item.get(key), str)), None)
            own = next((key for key in _SCORE if item.get(key) is not None), None)
        if not isinstance(text, str) or not text.strip():
            raise Unusable(f"answer {place + 1} of `{name}` is {kind_of(text)}, not text")
        if beside is None and own is None:
            raise Unusable(f"answer {place + 1} of `{name}` has no score")
        value = row[beside][place] if beside is not None else item[own]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise Unusable(f"the score of answer {place + 1} is {value!r}, no number")
        is_rank = (beside or own or "").startswith("rank")
        found.append((text, -float(value) if is_rank else float(value)))
    return name, found, {name, *([beside] if beside else [])}
