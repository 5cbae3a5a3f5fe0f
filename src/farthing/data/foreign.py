"""Data of other kinds of training: preference pairs, verdicts on answers, images, sound.

Read as plain examples they would teach rejected answers, or text about a picture that the model
never sees. Each row is looked at, since files are often mixtures. Who maps the column to learn in
`data.columns` has chosen it: that is said, not refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from farthing.objectives.registry import objective_names, objective_of

LEARNED = ("messages", "conversations", "completion", "output", "target", "text")
"""Standard columns of which the model learns what they say."""


class Foreign(NamedTuple):
    """What a row is instead of an example: in words, with what can be done."""

    what: str
    to_do: str
    column: str


_PREFERENCE = re.compile(
    r"(?i)(^|[_. -])(chosen|rejected|reject|dispreferred|(non|un|not)[_-]?preferred)($|[_. -])"
    r"|(^|_)preferred_(output|response|completion|answer|messages?)$"
)
_SIDES = re.compile(
    r"(?i)^(response|completion|answer|output|conversation|reply|summary|generation|messages?)s?_?"
    r"(a|b|[0-9]|i|j|k|w|l|win|lose|better|worse|good|bad|pos|neg|positive|negative)$"
)
_MEDIA = re.compile(
    r"(?i)^(input_)?(image|img|picture|photo|pixel_value|video|audio|sound|speech)s?"
    r"(_?(path|file|filename|url|uri|bytes|data|base64|b64))?s?$"
)
_VERDICTS = ("label", "kto_tag", "desirable", "is_desirable", "is_chosen", "accepted", "thumbs_up")
_VERDICT_VALUES = ("true", "false", "0", "1", *("desirable", "undesirable", "good", "bad"))
_ANSWERED = ("messages", "conversations", "completion", "output", "target", "prompt", "instruction")
_ASKED = ("messages", "conversations", "conversation", "instruction", "input", "question", "prompt")


def foreign_kind(
    row: Mapping[str, Any], task: str, renamed: Mapping[str, Any] = {}
) -> Foreign | None:
    """What kind of other training a row is made for; None for a row of ours."""
    filled = tuple([name for name, value in row.items() if value not in (None, "", [])])
    if media := next(filter(is_media, filled), None):
        return Foreign(
            f"images, sound or video (column `{media}`), which farthing can't train on yet",
            "write the rows that are text alone to a file of their own; to learn the text all the"
            " same, name its column in data.columns",
            media,
        )
    objective = objective_of(task)
    if objective.learns_units or not objective.scores_tokens:
        return None
    if pair := _pair(filled):
        return Foreign(
            f"preference data (columns {', '.join(f'`{name}`' for name in pair[:4])}), of which"
            f" {task} would learn both answers",
            f"{_objectives(is_pair=True)}; {_how_to_keep_the_preferred(row)}",
            pair[0],
        )
    is_text = "text" in row or "text" in renamed
    if is_text and not any(name in row for name in _ANSWERED):
        return None  # a text with a label is no answer
    for name in _VERDICTS:
        if name in filled and str(row[name]).lower() in _VERDICT_VALUES:
            return Foreign(
                f"answers with a verdict (column `{name}` is {str(row[name]).lower()}), which this"
                " task would learn whatever it says",
                f"{_objectives(is_pair=False)}; or keep the rows with good answers in a file"
                f" without `{name}`; if it is no verdict, leave that column out",
                name,
            )
    return None


@lru_cache(maxsize=1024)
def is_media(name: str) -> bool:
    """Whether a column or key holds images, sound or video, by its name."""
    return _MEDIA.match(name) is not None


@lru_cache(maxsize=256)
def _pair(columns: tuple[str, ...]) -> list[str]:
    """The columns of a better and a worse answer."""
    if pair := [name for name in columns if _PREFERENCE.search(name)]:
        return pair
    sides = [(match[1].lower(), name) for name in columns if (match := _SIDES.match(name))]
    most = Counter(stem for stem, _ in sides)
    return [name for stem, name in sides if most[stem] > 1]


def _objectives(*, is_pair: bool) -> str:
    """Which objectives learn from pairs, or from verdicts on single answers."""
    found = [each for each in map(objective_of, objective_names()) if each.loss is not None]
    names = [each.name for each in found if (each.n_sequences > 1) is is_pair]
    return f"for preference tuning, set objective: {' | '.join(names)}"


def _how_to_keep_the_preferred(row: Mapping[str, Any]) -> str:
    """What makes a trainable file of preference pairs without changing what its prompts are."""
    chosen, asked = row.get("chosen"), [name for name in _ASKED if name in row]
    columns = ""
    if isinstance(chosen, str) and asked in ([], ["prompt"]):
        columns = "{prompt: prompt, completion: chosen}" if asked else "{text: chosen}"
    elif isinstance(chosen, list) and len(chosen) > 1 and asked in ([], ["prompt"]):
        columns = "{messages: chosen}"
    if columns:
        return f"to learn only the preferred answers, say so: data.columns: {columns}"
    return (
        "to learn only the preferred answers, write a file of `messages`: the turns of the prompt,"
        " then that answer"
    )


def say_ignored(ignored: Mapping[str, int], n_rows: int) -> str:
    """Ignored columns in words, e.g. "`id`, `source` (in 3 of 10 rows)"; nothing for none."""
    words = [
        f"`{name}`" + (f" (in {n:,} of {n_rows:,} rows)" if n < n_rows else "")
        for name, n in ignored.items()
    ]
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return ", ".join(words[:20]) + more
