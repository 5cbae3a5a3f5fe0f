"""Data of other kinds of training: preference pairs, verdicts on answers, ranked answers, images,
sound.

Read as plain examples they would teach rejected answers, or text about a picture that the model
never sees. Each row is looked at, since files are often mixtures. Who maps the column to learn in
`data.columns` has chosen it: that is said, not refused. A verdict chooses rows, which no mapping
can, so it is always refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from farthing.data.rows import RowValue
from farthing.objectives.registry import objective_names, objective_of
from farthing.storage.files import parse_json

LEARNED = ("messages", "conversations", "completion", "output", "target", "text")
"""Standard columns of which the model learns what they say."""


class Foreign(NamedTuple):
    """What a row is instead of an example: in words, with what can be done, and whether a mapping
    may overrule it.
    """

    what: str
    to_do: str
    column: str
    can_be_chosen: bool = True


_PREFERENCE = re.compile(
    r"(?i)(^|[_. -])(chosen|rejected|reject|dispreferred|(non|un|not)[_-]?preferred)($|[_. -])"
    r"|(^|_)preferred_(output|response|completion|answer|messages?)$"
)
_SIDES = re.compile(
    r"(?i)^(response|completion|answer|output|conversation|reply|summary|generation|human_ref|messages?)s?_?(a|b|[0-9]|i|j|k|w|l|win|lose|"
    r"better|worse|good|bad|pos|neg|positive|negative)$"
)
_MEDIA = re.compile(
    r"(?i)^(input_)?(image|img|picture|photo|pixel_value|video|audio|sound|speech)s?"
    r"(_?(path|file|filename|url|uri|bytes|data|base64|b64))?s?$"
)
_VERDICTS = ("label", "kto_tag", "desirable", "is_desirable", "is_chosen", "accepted", "thumbs_up")
_VERDICT_VALUES = {
    "true",
    "false",
    "0",
    "1",
    "desirable",
    "undesirable",
    "good",
    "bad",
    "chosen",
    "rejected",
}
_CANDIDATES = (
    "responses",
    "completions",
    "answers",
    "candidates",
    "outputs",
    "generations",
    "replies",
    "choices",
    "options",
)
_SCORES = re.compile(r"(^|_)(score|rank|ranking|reward|rating|label)s?$", re.IGNORECASE)
_SCORE = re.compile(r"(?i)(score|reward|rating|human_score|quality_score|overall_score)s?")
_ANSWERED = ("messages", "conversations", "completion", "output", "target", "prompt", "instruction")
_TURNS = ("messages", "conversations", "conversation", "prompt", "instruction", "input")
# `<image>` as a place for one: at an end of what is said or on a line of its own, and never closed
# as a tag of XML is
_PLACE = re.compile(
    r"(?:^|\n)[ \t]*<(?:image|video|audio)>|<(?:image|video|audio)>[ \t]*(?:\n|$)"
    r"|<\|(?:image|video|audio)(?:_\d+|_pad)?\|>|<\|(?:vision|audio)_(?:start|bos)\|>|<img>[^<\n]{1,500}</img>"
)
_MARKS = ("<image>", "<video>", "<audio>", "<|", "<img>")  # without which the search is spared
_CLOSED = re.compile(r"</(?:image|video|audio)>")
_PARTS = ("image", "video", "audio", "file")


def foreign_kind(
    row: Mapping[str, Any], task: str, renamed: Mapping[str, Any] = {}
) -> Foreign | None:
    """What kind of other training a row is made for; None for a row of ours."""
    columns = tuple(
        [name for name, value in row.items() if value is not None and value not in ("", [])]
    )
    named = _by_columns(columns, task)
    if named is not None:
        to_do = f"{_objectives(is_pair=True)}; {_how_to_keep_the_preferred(row)}"
        return named if named.to_do else named._replace(to_do=to_do)
    if objective_of(task).learns_units:
        return _in_turns(row)
    if not objective_of(task).scores_tokens:
        return None
    return _verdict(row, renamed) or _ranked(row) or _scored(row) or _in_turns(row)


@lru_cache(maxsize=256)
def _by_columns(columns: tuple[str, ...], task: str) -> Foreign | None:
    media = next((name for name in columns if _MEDIA.match(name)), None)
    if media is not None:
        return _media(f"column `{media}`", media)
    if objective_of(task).learns_units or not objective_of(task).scores_tokens:
        return None
    pair = [name for name in columns if _PREFERENCE.search(name)]
    if not pair:
        sides = [(match[1].lower(), name) for name in columns if (match := _SIDES.match(name))]
        most = Counter(stem for stem, _ in sides)
        pair = [name for stem, name in sides if most[stem] > 1]
    if not pair:
        return None
    return Foreign(
        f"preference data (columns {_listed(pair)}), of which {task} would learn both answers",
        "",
        pair[0],
    )


def _objectives(*, is_pair: bool) -> str:
    """Which objectives learn from pairs, or from verdicts on single answers."""
    found = [each for each in map(objective_of, objective_names()) if each.loss is not None]
    names = [each.name for each in found if (each.n_sequences > 1) is is_pair]
    return f"for preference tuning, set objective: {' | '.join(names)}"


def _how_to_keep_the_preferred(row: Mapping[str, Any]) -> str:
    """What makes a trainable file of preference pairs without changing what its prompts are."""
    chosen, prompt = row.get("chosen"), row.get("prompt")
    if isinstance(chosen, str) and "prompt" in row and isinstance(prompt, str):
        return (
            "to learn only the preferred answers, say so: data.columns: {prompt: prompt,"
            " completion: chosen}"
        )
    if isinstance(chosen, str) and not any(name in row for name in (*_TURNS, "question")):
        return "to learn only the preferred texts, say so: data.columns: {text: chosen}"
    if (
        isinstance(chosen, list)
        and len(chosen) > 1
        and not any(name in row for name in _TURNS if name != "prompt")
    ):
        return "to learn only the preferred chats, say so: data.columns: {messages: chosen}"
    return (
        "to learn only the preferred answers, write a file of `messages`: the turns of the prompt,"
        " then that answer"
    )


def _verdict(row: Mapping[str, Any], renamed: Mapping[str, Any]) -> Foreign | None:
    if ("text" in row or "text" in renamed) and not any(name in row for name in _ANSWERED):
        return None  # a text with a label is no answer
    for name in _VERDICTS:
        value = row.get(name)
        if (
            value is not None
            and not isinstance(value, dict | list)
            and str(value).lower() in _VERDICT_VALUES
        ):
            return Foreign(
                f"answers with a verdict (column `{name}` is {str(value).lower()}), which this task"
                " would learn whatever it says",
                f"{_objectives(is_pair=False)}; or keep the rows with good answers in a file"
                f" without `{name}`; if it is no verdict,"
                " leave that column out",
                name,
            )
    return None


def _scored(row: Mapping[str, Any]) -> Foreign | None:
    """An answer with a score beside it, or several answers in a column of one."""
    if not any(name in row for name in _ANSWERED):
        return None
    for name in ("output", "completion", "target", "response", "answer"):
        value = row.get(name)
        if (
            isinstance(value, list)
            and len(value) > 1
            and all(isinstance(each, str) for each in value)
        ):
            return Foreign(
                f"several answers to a prompt (`{name}` is a list of {len(value)} texts), which"
                " farthing can't train on yet",
                f"write the answer to learn as text in `{name}`",
                name,
            )
    for name, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and _SCORE.fullmatch(name):
            return Foreign(
                f"answers with a score (column `{name}` is {value}), which farthing can't train on"
                " yet",
                f"keep the rows to learn in a file without `{name}`, or say which columns are"
                " learned: data.columns: {prompt: prompt, completion: response}",
                name,
            )
    return None


def _ranked(row: Mapping[str, Any]) -> Foreign | None:
    for name in _CANDIDATES:
        answers = row.get(name)
        if not isinstance(answers, list) or len(answers) < 2:
            continue
        inside = (
            [key for key in answers[0] if _SCORES.search(key)]
            if isinstance(answers[0], dict)
            else []
        )
        beside = [
            key for key, value in row.items() if _SCORES.search(key) and _is_of(value, len(answers))
        ]
        if inside or beside:
            return Foreign(
                f"ranked answers (columns {_listed([name, *beside, *inside])}), which farthing"
                " can't train on yet",
                "write a file with only the best answer of each row",
                name,
                can_be_chosen=False,
            )
    return None


def _is_of(value: Any, n: int) -> bool:
    return isinstance(value, list) and len(value) == n


def _in_turns(row: Mapping[str, Any]) -> Foreign | None:
    for name in _TURNS:
        value = row.get(name)
        if isinstance(value, str):
            if value[:1] == "[" and '"' in value:
                try:
                    value = parse_json(value)
                except ValueError:
                    continue
            elif _has_place(value):
                return _media(f"a place for one in `{name}`", name)
        if isinstance(value, dict):  # OpenAI's preference files keep the messages within `input`
            value = value.get("messages")
        if isinstance(value, list):
            for index, turn in enumerate(value, start=1):
                found = _of_turn(turn, index, name) if isinstance(turn, dict) else None
                if found is not None:
                    return found
    return None


@lru_cache(maxsize=1024)
def _is_media(name: str) -> bool:
    return _MEDIA.match(name) is not None


def _of_turn(turn: RowValue, index: int, column: str) -> Foreign | None:
    for key, value in turn.items():
        if value and _is_media(key):
            return _media(f"`{key}` in {column}, turn {index}", column)
    content = turn.get("content", turn.get("value"))
    if isinstance(content, str):
        if turn.get("role", turn.get("from")) not in ("assistant", "gpt") and _has_place(content):
            return _media(f"a place for one in {column}, turn {index}", column)
    elif isinstance(content, list):
        for part in content:
            keys = [str(part.get("type") or ""), *map(str, part)] if isinstance(part, dict) else []
            kind = next((key for key in keys if any(word in key for word in _PARTS)), None)
            if kind is not None:
                return _media(f"a part of type `{kind}` in {column}, turn {index}", column)
    return None


def _has_place(text: str) -> bool:
    return (
        any(mark in text for mark in _MARKS)
        and _PLACE.search(text) is not None
        and _CLOSED.search(text) is None
    )


def _media(found: str, column: str) -> Foreign:
    return Foreign(
        f"images, sound or video ({found}), which farthing can't train on yet",
        "write the rows that are text alone to a file of their own; to learn the text all the same,"
        " name its column in data.columns",
        column,
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(dict.fromkeys(names))[:4])


def say_ignored(ignored: Mapping[str, int], n_rows: int) -> str:
    """Ignored columns in words, e.g. "`id`, `source` (in 3 of 10 rows)"; nothing for none."""
    words = []
    for name, n in ignored.items():
        words.append(f"`{name}`" + (f" (in {n:,} of {n_rows:,} rows)" if n < n_rows else ""))
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return ", ".join(words[:20]) + more
