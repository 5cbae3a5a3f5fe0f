"""Data of other kinds of training: preference pairs, verdicts on answers, ranked answers, images,
sound.

Read as plain examples they would teach rejected answers, or text about a picture that the model
never sees. Each row is looked at, since files are often mixtures. Who maps the column to learn in
`data.columns` has chosen it: a note tells, nothing is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from farthing.data.scored import ANSWERS
from farthing.objectives.columns import parsed_list
from farthing.objectives.registry import objective_names, objective_of

_GIVEN = ("prompt", "instruction", "input", "system", "history", "tools", "functions")
"""Standard columns of which nothing is learned."""


class Foreign(NamedTuple):
    """What a row is instead of an example, and what to do."""

    what: str
    why: str
    """What training on it would do: a clause that continues `what`."""
    to_do: str
    column: str


_NOT_YET = "which farthing can't train on yet"
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
_ANSWER = ("output", "completion", "target", "response", "answer")
_SCORES = re.compile(r"(?i)(.*_)?(score|rank|ranking|reward|rating|label)s?")
_SCORE = re.compile(r"(?i)(human_|quality_|overall_)?(score|reward|rating)s?")
_ANSWERED = ("messages", "conversations", "completion", "output", "target", "prompt", "instruction")
_TURNS = ("messages", "conversations", "conversation", "prompt", "instruction", "input")
# `<image>` as a place for one: at an end of a content or on a line of its own, and never closed
# as a tag of XML is
_PLACE = re.compile(
    r"(?:^|\n)[ \t]*<(?:image|video|audio)>|<(?:image|video|audio)>[ \t]*(?:\n|$)"
    r"|<\|(?:image|video|audio|vision)(?:_\w+)?\|>|<img>[^<\n]{1,500}</img>"
)
_MARKS = ("<image>", "<video>", "<audio>", "<|", "<img>")  # without which the search is spared
_CLOSED = re.compile(r"</(?:image|video|audio)>")
_ASKED = ("messages", "conversations", "conversation", "instruction", "input", "question", "prompt")


def chosen_column(columns: Mapping[str, Any]) -> Any:
    """What `data.columns` names to be learned; None where it leaves that open."""
    return next((own for name, own in columns.items() if name not in _GIVEN), None)


def foreign_kind(
    row: Mapping[str, Any], task: str, renamed: Mapping[str, Any] = {}
) -> Foreign | None:
    """What kind of other training a row is made for; None for a row of ours."""
    filled = {name: value for name, value in row.items() if value not in (None, "", [])}
    if media := next(filter(is_media, filled), None):
        return _media(f"column `{media}`", media)
    objective = objective_of(task)
    if objective.learns_units or not objective.scores_tokens:
        return _in_turns(row) if objective.learns_units else None
    if pair := _pair(tuple(filled)):
        return Foreign(
            f"preference data (columns {_listed(pair)})",
            f"of which {task} would learn both answers",
            f"{_objectives(is_pair=True)}; {_how_to_keep_the_preferred(row)}",
            pair[0],
        )
    # a text with a label is no answer
    is_text = "text" in row or "text" in renamed
    is_answer = not is_text or any(name in row for name in _ANSWERED)
    return (_judged(filled) if is_answer else None) or _in_turns(row)


def _judged(row: Mapping[str, Any]) -> Foreign | None:
    """Answers with a verdict or a score beside them, or several of them."""
    for name in _VERDICTS:
        if name in row and str(row[name]).lower() in _VERDICT_VALUES:
            return Foreign(
                f"answers with a verdict (column `{name}` is {str(row[name]).lower()})",
                "which this task would learn whatever it says",
                f"{_objectives(is_pair=False)}; or keep the rows with good answers in a file"
                f" without `{name}`; if it is no verdict, name the answers in data.columns",
                name,
            )
    for name, value in row.items():
        if not isinstance(value, list) or len(value) < 2:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and _SCORE.fullmatch(name) and any(each in row for each in _ANSWERED):
                return Foreign(
                    f"answers with a score (column `{name}` is {value})",
                    _NOT_YET,
                    f"keep the rows to learn in a file without `{name}`, or say which columns are"
                    " learned: data.columns: {prompt: prompt, completion: response}",
                    name,
                )
        elif name in (*ANSWERS, "choices", "options"):
            inside = value[0] if isinstance(value[0], dict) else {}
            beside = [n for n, v in row.items() if isinstance(v, list) and len(v) == len(value)]
            if scores := [each for each in (*beside, *inside) if _SCORES.fullmatch(each)]:
                return Foreign(
                    f"ranked answers (columns {_listed([name, *scores])})",
                    "which farthing learns by data.keep or data.pairs",
                    "set data.keep: best, or write a file with only the best answer of each row",
                    name,
                )
        elif name in _ANSWER and all(isinstance(each, str) for each in value):
            return Foreign(
                f"several answers to a prompt (`{name}` is a list of {len(value)} texts)",
                _NOT_YET,
                f"write the answer to learn as text in `{name}`",
                name,
            )
    return None


def _in_turns(row: Mapping[str, Any]) -> Foreign | None:
    """Images and other media in the turns of a chat."""
    for name in _TURNS:
        value = parsed_list(row.get(name))
        if isinstance(value, dict):  # OpenAI's preference files keep the messages within `input`
            value = value.get("messages")
        if isinstance(value, str) and _has_place(value):
            return _media(f"a place for one in `{name}`", name)
        for index, turn in enumerate(value if isinstance(value, list) else (), start=1):
            if isinstance(turn, dict) and (found := _of_turn(turn)):
                return _media(f"{found} in {name}, turn {index}", name)
    return None


def _of_turn(turn: Mapping[str, Any]) -> str:
    if media := next((key for key, value in turn.items() if value and is_media(key)), ""):
        return f"`{media}`"
    content = turn.get("content", turn.get("value"))
    is_given = turn.get("role", turn.get("from")) not in ("assistant", "gpt")
    if isinstance(content, str) and is_given and _has_place(content):
        return "a place for one"
    for part in content if isinstance(content, list) else ():
        keys = [str(part.get("type") or ""), *map(str, part)] if isinstance(part, dict) else []
        if kind := next((key for key in keys if is_media(key) or "file" in key), ""):
            return f"a part of type `{kind}`"
    return ""


def _has_place(text: str) -> bool:
    is_likely = any(mark in text for mark in _MARKS)
    return is_likely and _PLACE.search(text) is not None and _CLOSED.search(text) is None


def _media(found: str, column: str) -> Foreign:
    return Foreign(
        f"images, sound or video ({found})",
        _NOT_YET,
        "write the rows that are text alone to a file of their own; to learn the text all the same,"
        " name its column in data.columns",
        column,
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(dict.fromkeys(names))[:4])


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
    """Ignored columns as a text, e.g. "`id`, `source` (in 3 of 10 rows)"; nothing for none."""
    words = [
        f"`{name}`" + (f" (in {n:,} of {n_rows:,} rows)" if n < n_rows else "")
        for name, n in ignored.items()
    ]
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return ", ".join(words[:20]) + more
