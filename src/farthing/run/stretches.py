"""Where the seconds of an attempt went over time: a few dozen stretches, whose spans add up to
those of the attempt.

A stretch is a list [last step, tokens of the run at its end, saves in it, {span: seconds}]. As an
attempt grows neighbours are joined, so that all stay about equally long. Refuses to know what a
span means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Stretch = list[Any]
N_STRETCHES = 32
T = TypeVar("T")


def note(
    stretches: list[Stretch], step: int, tokens: int, n_saves: int, spans: Mapping[str, float]
) -> list[Stretch]:
    """The stretches of an attempt that stands at `step`, with `n_saves` saves and `spans` in all."""  # noqa: E501
    before: dict[str, float] = {}
    for stretch in stretches:
        for name, seconds in stretch[3].items():
            before[name] = before.get(name, 0.0) + seconds
    new = {name: round(seconds - before.get(name, 0.0), 3) for name, seconds in spans.items()}
    stretches = _taken_back(
        stretches, {name: -seconds for name, seconds in new.items() if seconds < 0}
    )
    newest: Stretch = [
        max(step, 0),
        max(tokens, 0),
        max(0, n_saves - sum(s[2] for s in stretches)),
        {name: seconds for name, seconds in new.items() if seconds > 0},
    ]
    wall_s = sum(spans.values())
    if stretches and _seconds(stretches[-1]) < wall_s / N_STRETCHES:
        return [*stretches[:-1], joined(stretches[-1], newest)]
    return thinned([*stretches, newest], N_STRETCHES)


def joined(one: Stretch, other: Stretch) -> Stretch:
    """Two neighbours as one."""
    spans = dict(one[3])
    for name, seconds in other[3].items():
        spans[name] = round(spans.get(name, 0.0) + seconds, 3)
    return [other[0], max(one[1], other[1]), one[2] + other[2], spans]


def thinned(
    series: list[list[T]], most: int, join: Callable[[list[T], list[T]], list[T]] = joined
) -> list[list[T]]:
    """At most so many: neighbours are joined in pairs until it is so."""
    while len(series) > most:
        pairs = [series[i : i + 2] for i in range(0, len(series), 2)]
        series = [join(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return series


def read(values: Any) -> list[Stretch]:
    """What of a line's value are stretches."""
    lists = (
        [list(value) for value in values if isinstance(value, list)]
        if isinstance(values, list)
        else []
    )
    return [
        stretch
        for stretch in lists
        if len(stretch) == 4
        and isinstance(stretch[3], dict)
        and all(
            isinstance(each, int | float) and 0 <= each < 1e18
            for each in [*stretch[:3], *stretch[3].values()]
        )
    ]


def _seconds(stretch: Stretch) -> float:
    return float(sum(stretch[3].values()))


def _taken_back(stretches: list[Stretch], seconds: Mapping[str, float]) -> list[Stretch]:
    """Without seconds that were given to another span since, the newest first."""
    left, changed = dict(seconds), []
    for stretch in reversed(stretches) if left else ():
        spans = dict(stretch[3])
        for name, missing in left.items():
            taken = min(missing, spans.get(name, 0.0))
            left[name] = missing - taken
            if taken:
                spans[name] = round(spans[name] - taken, 3)
        changed.append([*stretch[:3], {name: value for name, value in spans.items() if value > 0}])
    return changed[::-1] or stretches
