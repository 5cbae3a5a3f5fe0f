"""What the columns mean: rows of any known format become a `Text` that says which parts the model
must learn.

A row is a list of (text, is_target) segments, or a text and a label where the task has labels.
Chats are rendered by the tokenizer's own template.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from farthing.data.chat import ChatReader
from farthing.data.chat_rows import MARKS, from_openai, of_usual_role, refuse_silence, without_marks
from farthing.data.columns import (
    ELSEWHERE,
    Columns,
    Template,
    columns_of,
    guessed,
    guessed_more,
    missing,
    own_columns,
    renamed,
    suggested,
)
from farthing.data.rows import RowValue, Text
from farthing.data.shown import Shown, leaves_an_answer_empty
from farthing.errors import DataError, ModelError
from farthing.objectives.columns import Unusable, kind_of, text_of
from farthing.objectives.objective import Labels
from farthing.objectives.registry import format_of, objective_of
from farthing.storage.files import parse_json

RENDERED = frozenset({"messages", "conversations", "instruction"})
"""Formats written by a chat template, where a model predicts the next token."""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
    "function_response": "tool",
}


class Understood(NamedTuple):
    """The format of a source, the columns it is read from, and what of that was guessed, in
    words.
    """

    format: str
    columns: dict[str, Template]
    notes: tuple[str, ...] = ()


def recognise(columns: set[str], task: str, renamed: Columns, where: str) -> Understood:
    """The format these columns are in: by their names, as `renamed` says, or by usual other names
    where it says nothing.

    Raises `DataError` that says what was found and what would do.
    """
    # spaces around the names of a CSV file's columns are no part of them
    by_name = {
        name: own for name, own in renamed.items() if isinstance(own, str) and "{" not in own
    }
    renamed = {
        **renamed,
        **{name: own.strip() for name, own in by_name.items() if own not in columns},
    }
    for template in renamed.values():
        if name := missing(template, columns):
            near = difflib.get_close_matches(name, columns, n=1)
            to_do = f"did you mean `{near[0]}`?  there are: " if near else "there are: "
            raise DataError(
                f"no column `{name}` (named in `data.columns`)",
                where=where,
                to_do=to_do + _listed(columns),
            )
    read = {name for template in renamed.values() for name in own_columns(template, columns)}
    present = (columns - read) | set(renamed)
    formats = objective_of(task).formats
    may_guess = not renamed
    for each in formats:
        if set(each.needs) <= present:
            more = guessed_more(columns, each.may_have) if may_guess else {}
            return (
                _by_usual_names(each.name, more) if more else Understood(each.name, dict(renamed))
            )
    for each in formats if may_guess else ():
        found = guessed(columns, each.needs)
        if found is not None:
            more = guessed_more(columns, each.may_have)
            return _by_usual_names(each.name, found | more)
    if to_do := next((ELSEWHERE[name] for name in sorted(columns) if name in ELSEWHERE), ""):
        raise DataError(
            f"the columns ({_listed(columns)}) match no format for {task}", where=where, to_do=to_do
        )
    wanted = [" + ".join(each.needs) for each in formats]
    usual = objective_of(task).example_columns
    example = suggested(columns, tuple(re.findall(r"(\w+):", usual))) or f"{{{usual}}}"
    raise DataError(
        f"the columns ({_listed(columns)}) match no format for {task}",
        where=where,
        to_do=(
            f"{task} reads {', or '.join(wanted)}; say which of yours are meant, such as"
            f" `data.columns: {example}`"
        )
        + (
            "; if its first line names no columns, put one before it"
            if re.search(r"\.[ct]sv", where)
            else ""
        ),
    )


def _by_usual_names(name: str, found: dict[str, str]) -> Understood:
    words = ", ".join(f"`{own}` as `{standard}`" for standard, own in found.items())
    return Understood(
        name,
        dict(found),
        (f"read {words}, by the usual meaning of the name; data.columns says it otherwise",),
    )


def used_columns(format_name: str, renamed: Columns) -> set[str]:
    """The columns of the data, by their own names, that a format reads; all others are ignored."""
    _, needs, may_have = format_of(format_name)
    read = {own for name in (*needs, *may_have) for own in columns_of(renamed.get(name, name))}
    return read | {own.partition(".")[0] for own in read}


def converter(
    format_name: str,
    columns: Columns,
    label_map: dict[str, str],
    tokenizer: Any,
    task: str,
    *,
    on: str = "",
    shown: Shown | None = None,
) -> Callable[[RowValue], Text]:
    """A function from a row to its `Text`. It raises `Unusable` with the reason.

    `on` is the ISO date that a chat template sees which asks for it; `shown` notes what the
    template leaves out of chats.
    """
    shown = shown or Shown()
    labels = objective_of(task).labels
    is_chat = format_name in RENDERED and objective_of(task).predicts_next

    @functools.cache
    def reader() -> ChatReader:
        return chat_reader(tokenizer, on)

    read = reader() if is_chat else None
    writes_calls = read is not None and "tool_calls" in read.render.template
    reads_chats = objective_of(task).predicts_next
    of_tokens: dict[str, Callable[[RowValue], Text]] = {
        "messages": lambda row: chat_text(messages_of(row), tools_of(row), read, shown),
        "conversations": lambda row: chat_text(
            conversations_of(row, writes_calls), row.get("tools"), read, shown
        ),
        "instruction": lambda row: _instruction(row, read, shown),
        "prompt/completion": lambda row: (
            _pair_of_chats(row, reader, shown)
            if reads_chats
            and isinstance(row.get("prompt"), list)
            and isinstance(row.get("completion"), list)
            else _pair(row, "prompt", "completion")
        ),
        "input/target": lambda row: _pair(row, "input", "target"),
        "text": lambda row: Text(((text_of(row, "text"), True),), given=(text_of(row, "text"),)),
    }
    one = (
        of_tokens[format_name] if labels is None else lambda row: _labelled(row, labels, label_map)
    )

    return checked(one, columns)


def chat_reader(tokenizer: Any, on: str) -> ChatReader:
    """What reads chats by the tokenizer's template. Raises `ModelError` where it has none."""
    if tokenizer.chat_template is None:
        names = _listed(set(tokenizer.other_templates))
        raise ModelError(
            f"its tokenizer has several chat templates, and none is the default: {names}",
            where="the chat template",
            to_do=(
                "write the one to learn with to a file, and name that: data.chat_template:"
                " FILE.jinja"
            ),
        )
    return ChatReader.of(tokenizer, on)


def checked(one: Callable[[RowValue], Text], columns: Columns) -> Callable[[RowValue], Text]:
    """`one` of rows under their standard names. It raises `Unusable` for what is not text."""

    def convert(row: RowValue) -> Text:
        if columns:
            row = renamed(row, columns)
        text = one(row)
        try:
            for part, _ in itertools.chain(
                text.segments, *text.beside, *(each.segments for each in text.earlier)
            ):
                if not part.isascii():
                    part.encode()
        except (
            UnicodeEncodeError
        ) as error:  # JSON can spell half of a surrogate pair, no text can hold it
            raise Unusable(
                f"not text: half a surrogate pair (\\u{ord(error.object[error.start]):04x})"
            ) from error
        return text

    return convert


def _listed(columns: set[str]) -> str:
    return ", ".join(sorted(columns)[:20]) or "none"


def _pair(row: RowValue, source: str, target: str) -> Text:
    given = text_of(row, source)
    return Text(((given, False), (text_of(row, target), True)), given=(given,))


def _pair_of_chats(row: RowValue, reader: Callable[[], ChatReader], shown: Shown) -> Text:
    """Prompt and completion as messages, TRL's form: of the turns those of the completion are
    learned.
    """
    asked = messages_of(row, "prompt")
    unlearned = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in asked]
    return chat_text(unlearned + messages_of(row, "completion"), tools_of(row), reader(), shown)


def _labelled(row: RowValue, labels: Labels, label_map: dict[str, str]) -> Text:
    text, label = labels.read(row, label_map)
    if labels.per_word:
        return Text(((" ".join(text), False),), label=label, given=text, words=text)
    return Text(((text, False),), label=label, given=(text,))


def _instruction(row: RowValue, read: ChatReader | None, shown: Shown) -> Text:
    """Alpaca rows are a chat of one turn, so that the tokenizer's template frames them; seq2seq
    needs no frame.

    `history` has earlier turns, [[question, answer], ...], which are learned as the last one is:
    LLaMA-Factory's rule.
    """
    asked, answer = asked_of(row), text_of(row, "output")
    system = text_of(row, "system", may_be_empty=True)
    earlier = _history(row)
    if read is None:
        if earlier:
            raise Unusable(
                "`history` holds earlier turns of a chat, and this task has none: leave the"
                " column out"
            )
        asked = f"{system}\n\n{asked}" if system else asked
        return Text(((asked, False), (answer, True)), given=(asked,))
    messages = [
        *earlier,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]
    return chat_text(
        ([{"role": "system", "content": system}] if system else []) + messages, None, read, shown
    )


def asked_of(row: RowValue) -> str:
    """Alpaca's instruction, with its input where there is one."""
    instruction, more = text_of(row, "instruction"), text_of(row, "input", may_be_empty=True)
    return f"{instruction}\n\n{more}" if more.strip() else instruction


def _history(row: RowValue) -> list[RowValue]:
    """The turns of a column `history`. Raises `Unusable`."""
    if row.get("history") in (None, "", [], "[]"):
        return []
    messages = []
    for turn in as_list(row["history"], "history"):
        if (
            not isinstance(turn, list)
            or len(turn) != 2
            or not all(isinstance(said, str) for said in turn)
        ):
            raise Unusable("`history` is no list of [question, answer]")
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    return messages


def chat_text(messages: list[RowValue], tools: Any, read: ChatReader | None, shown: Shown) -> Text:
    """A chat as text. What its owner gave: all that the assistant does not say, or all where only
    it speaks.
    """
    assert read is not None
    tools = (as_list(tools, "tools") if tools and tools != "[]" else None) or None
    if tools:
        tools = [_as_object(each) for each in tools]
    others = [message for message in messages if message["role"] != "assistant"] or messages
    given = [str(message.get("content") or "").strip() for message in others]
    if tools:
        given.append(json.dumps(tools, sort_keys=True, default=str))
    messages, unlearned = without_marks(messages)
    refuse_silence(messages, unlearned)
    if "developer" not in read.render.template:
        messages = [
            {**each, "role": "system"} if each["role"] == "developer" else each for each in messages
        ]
    try:
        shown.look(messages, tools, read.render)
        if leaves_an_answer_empty(messages, tools, read.render, unlearned):
            raise Unusable(
                "the chat template leaves out `tool_calls`: an empty answer would be learned"
            )
        chat = read(messages, tools, unlearned)
    except Unusable as error:
        error.given = tuple(given)
        raise
    return replace(
        chat,
        given=tuple(given),
        earlier=tuple(replace(each, given=tuple(given)) for each in chat.earlier),
    )


def as_list(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):  # CSV, and data sets that store JSON in a string
        try:
            value = parse_json(value)
        except ValueError as error:
            raise Unusable(f"`{column}` is text that is not JSON") from error
    if not isinstance(value, list) or not value:
        raise Unusable(
            f"`{column}` is {'empty' if value == [] else kind_of(value)}, not a list of turns"
        )
    return value


def _as_object(tool: Any) -> Any:
    """A tool, also of a list of JSON texts."""
    try:
        return parse_json(tool) if isinstance(tool, str) else tool
    except ValueError as error:
        raise Unusable("`tools` holds text that is not JSON") from error


def with_system(messages: list[RowValue], row: RowValue) -> list[RowValue]:
    """A chat that begins with what a column `system` says. Raises `Unusable` where the chat begins
    with another.
    """
    said = from_openai({"role": "system", "content": row.get("system")})
    system = text_of({"system": said["content"]}, "system", may_be_empty=True)
    if not system.strip():
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if str(messages[0].get("content") or "").strip() != system.strip():
        raise Unusable(
            "the chat begins with another system message than its column `system`: leave one of"
            " them out"
        )
    return messages


def messages_of(row: RowValue, column: str = "messages") -> list[RowValue]:
    messages = []
    given = as_list(row.get(column), column)
    for index, message in enumerate(given, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Unusable(f"message {index} has no `role`")
        message = from_openai(of_usual_role(message))
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise Unusable(f"message {index}: `content` is {kind_of(content)}, not text")
        kept = {
            key: value for key, value in message.items() if value is not None or key == "content"
        }
        if kept.get("tool_calls") in ([], "[]", ""):
            del kept["tool_calls"]
        if "tool_calls" in kept:
            kept["tool_calls"] = [
                _parsed_arguments(call) for call in as_list(kept["tool_calls"], "tool_calls")
            ]
        messages.append(kept)
    return with_system(messages, row) if column == "messages" else messages


def _parsed_arguments(call: Any) -> Any:
    """OpenAI stores a call's arguments as JSON text, chat templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    except ValueError:
        return call


def conversations_of(row: RowValue, writes_calls: bool) -> list[RowValue]:
    """`writes_calls`: what a turn of `function_call` says is a call of a tool, which the template
    writes in its own way.
    """
    messages: list[RowValue] = []
    for index, turn in enumerate(as_list(row.get("conversations"), "conversations"), start=1):
        who, said = (
            (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        )
        if who not in _ROLES or not isinstance(said, str):
            raise Unusable(f"turn {index} has no known `from` with a text `value`")
        marks: RowValue = {name: turn[name] for name in MARKS if turn.get(name) is not None}
        if who == "function_call" and writes_calls:
            calls = [{"type": "function", "function": each} for each in _calls(said, index)]
            marks |= {"tool_calls": [_parsed_arguments(call) for call in calls]}
            said = ""
        messages.append({"role": _ROLES[who], "content": said, **marks})
    return with_system(messages, row)


def _calls(said: str, index: int) -> list[RowValue]:
    """The calls in a turn: {"name", "arguments"} as JSON, or a list of these. Raises `Unusable`."""
    try:
        found = parse_json(said)
    except ValueError:
        found = None
    calls: list[RowValue] = found if isinstance(found, list) else [found]
    if not calls or not all(
        isinstance(each, dict) and "name" in each and "arguments" in each for each in calls
    ):
        raise Unusable(f"turn {index}: a `function_call` is no JSON with `name` and `arguments`")
    return calls


def tools_of(row: RowValue) -> Any:
    """The tools that a chat may call; OpenAI's older `functions` are tools without their frame."""
    functions = row.get("functions")
    if row.get("tools") or not functions or functions == "[]":
        return row.get("tools")
    return [{"type": "function", "function": each} for each in as_list(functions, "functions")]


def hash_of_input(given: Sequence[str]) -> int:
    """A hash of `Text.given`, 64 bits; spaces around its parts make no difference, as most
    templates strip them.
    """
    text = "\0".join([part.strip() for part in given]).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
