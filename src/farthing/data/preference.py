"""Rows with answers that are compared or judged, as texts: the forms of TRL, OpenAI, Axolotl,
LLaMA-Factory, ms-swift and the Hub's data sets.

A unit's sequences have one prompt. What is learned, or scored, is what the assistant says behind
the last turn of the user; turns of the assistant before that are given. Texts without roles are
taken as they are, and end with the tokenizer's end of sequence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from farthing.data.chat import ChatReader
from farthing.data.columns import Columns
from farthing.data.formats import (
    as_list,
    asked_of,
    chat_reader,
    chat_text,
    checked,
    conversations_of,
    messages_of,
    tools_of,
    with_system,
)
from farthing.data.rows import RowValue, Text
from farthing.data.shown import Shown
from farthing.objectives.columns import Unusable, kind_of, text_of
from farthing.objectives.registry import objective_of

Turns = list[RowValue]
_HH = re.compile(r"\n\nAssistant:")
_IS_HH = re.compile(r"^\s*Human:")


class Unit(NamedTuple):
    """What a row compares: texts, or turns of chats, of one prompt."""

    prompt: str | Turns
    answers: tuple[str | Turns, ...]
    tools: Any = None


def converter(
    format_name: str,
    columns: Columns,
    task: str,
    tokenizer: Any,
    *,
    on: str = "",
    shown: Shown | None = None,
) -> Callable[[RowValue], Text]:
    """A function from a row to the `Text` of its unit. It raises `Unusable` with the reason."""
    shown, value = shown or Shown(), objective_of(task).value
    read_unit = _FORMS[format_name]

    @functools.cache
    def reader() -> ChatReader:
        return chat_reader(tokenizer, on)

    def one(row: RowValue) -> Text:
        unit = read_unit(row)
        texts = [_text(unit, answer, reader, shown) for answer in unit.answers]
        first = texts[0]
        return replace(
            first,
            given=_given(unit),
            beside=tuple(text.segments for text in texts[1:]),
            value=0.0 if value is None else value(row),
        )

    return checked(one, columns)


def _text(unit: Unit, answer: str | Turns, reader: Callable[[], ChatReader], shown: Shown) -> Text:
    if isinstance(unit.prompt, str):
        assert isinstance(answer, str)
        return Text(((unit.prompt, False), (answer, True)))
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    before = [
        {**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in unit.prompt
    ]
    text = chat_text([*before, *turns], unit.tools, reader(), shown)
    if text.earlier:
        raise Unusable("the chat template shows the answer in several forms")
    return text


def _given(unit: Unit) -> tuple[str, ...]:
    if isinstance(unit.prompt, str):
        return (unit.prompt,)
    return tuple(str(turn.get("content") or "").strip() for turn in unit.prompt)


# ---- forms of rows ----


def _prompted(row: RowValue, prompt: str, *answers: str) -> Unit:
    """A prompt and answers, each texts or turns."""
    given, tools = row.get(prompt), tools_of(row)
    first = row.get(answers[0])
    if isinstance(first, list) and _says_the_prompt(first, given, row):
        return _whole(row, *answers)
    if isinstance(given, list) or _is_json_list(given):
        return Unit(
            with_system(messages_of(row, prompt), row),
            tuple(_answer(row, name) for name in answers),
            tools,
        )
    asked = text_of(row, prompt)
    if all(isinstance(row.get(name), list | dict) for name in answers):
        turns = with_system([{"role": "user", "content": asked}], row)
        return Unit(turns, tuple(_answer(row, name) for name in answers), tools)
    texts = tuple(text_of(row, name) for name in answers)
    if "system" in row or tools:  # a frame that only a chat has
        turns = with_system([{"role": "user", "content": asked}], row)
        return Unit(turns, tuple(texts), tools)
    return Unit(asked, texts)


def _says_the_prompt(turns: list[Any], prompt: Any, row: RowValue) -> bool:
    """Whether an answer begins with its prompt: UltraFeedback's `prompt` is the user's turn too."""
    first = next(
        (turn for turn in turns if isinstance(turn, dict) and turn.get("role") != "system"), {}
    )
    if first.get("role") != "user" or not isinstance(prompt, str):
        return False
    if str(first.get("content")).strip() != prompt.strip():
        raise Unusable("`prompt` is another text than the first turn of `chosen`")
    return True


def _whole(row: RowValue, *answers: str) -> Unit:
    """Answers that hold their prompt: chats, or texts of Anthropic's HH."""
    if all(isinstance(row.get(name), str) and not _is_json_list(row[name]) for name in answers):
        return _of_texts([text_of(row, name) for name in answers])
    chats = [messages_of(row, name) for name in answers]
    heads = [_behind_last_user(turns) for turns in chats]
    if any(chat[:n] != chats[0][: heads[0]] for chat, n in zip(chats, heads, strict=True)):
        raise Unusable("the answers have different prompts: turns before the last user's differ")
    if heads[0] == 0:
        raise Unusable("no turn of the user: the answers have no prompt")
    return Unit(
        with_system(chats[0][: heads[0]], row),
        tuple(chat[n:] for chat, n in zip(chats, heads, strict=True)),
        tools_of(row),
    )


def _behind_last_user(turns: Turns) -> int:
    users = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    return users[-1] + 1 if users else 0


def _of_texts(texts: list[str]) -> Unit:
    """Whole texts. Of Anthropic's HH the prompt ends at the last `Assistant:` that all have."""
    if not all(_IS_HH.match(text) for text in texts):
        raise Unusable("no prompt: `chosen` and `rejected` are texts; give the prompt in a column")
    ends = [[match.end() for match in _HH.finditer(text)] for text in texts]
    common = [
        end
        for end in ends[0]
        if all(end in ends[n] and texts[n][:end] == texts[0][:end] for n in range(len(texts)))
    ]
    if not common:
        raise Unusable("the texts have no `Assistant:` in common: their prompts differ")
    cut = common[-1]
    return Unit(texts[0][:cut], tuple(text[cut:] for text in texts))


def _answer(row: RowValue, name: str) -> str | Turns:
    """An answer: a text, a message, or turns."""
    value = row.get(name)
    if isinstance(value, str) and not _is_json_list(value):
        return text_of(row, name)
    turns = _turns({**row, name: [value] if isinstance(value, dict) else value}, name)
    if not turns or turns[-1]["role"] != "assistant":
        raise Unusable(f"`{name}` does not end with a turn of the assistant")
    if any(turn["role"] == "user" for turn in turns):
        raise Unusable(f"`{name}` has a user's turn: preference tuning compares single answers")
    return turns


def _turns(row: RowValue, name: str) -> Turns:
    """Messages, or ShareGPT's turns."""
    first = next(iter(as_list(row.get(name), name)), None)
    if isinstance(first, dict) and "from" in first:
        return conversations_of({"conversations": row[name]}, True)
    return messages_of(row, name)


def _is_json_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[{")


def _asked(row: RowValue, *answers: str) -> Unit:
    """Alpaca's: an instruction, perhaps with an input, in a chat of one turn."""
    turns = with_system([{"role": "user", "content": asked_of(row)}], row)
    return Unit(turns, tuple(_answer(row, name) for name in answers), tools_of(row))


def _openai(row: RowValue) -> Unit:
    given = row.get("input")
    if not isinstance(given, dict) or "messages" not in given:
        raise Unusable(f"`input` is {kind_of(given)}, not an object with `messages`")
    inner = {**given, **{name: row.get(name) for name in _OPENAI}}
    return Unit(
        messages_of(inner), tuple(_answer(inner, name) for name in _OPENAI), tools_of(inner)
    )


_OPENAI = ("preferred_output", "non_preferred_output")


def _chat_and(row: RowValue, column: str) -> Unit:
    """Turns that end with the user's, and answers beside them."""
    turns = _turns(row, column)
    if turns[-1]["role"] == "assistant":
        raise Unusable(f"`{column}` ends with an answer, and `chosen` is another")
    return Unit(
        with_system(turns, row), (_answer(row, "chosen"), _answer(row, "rejected")), tools_of(row)
    )


def _judged_chat(row: RowValue) -> Unit:
    """Turns that end with an answer."""
    turns = messages_of(row)
    n = _behind_last_user(turns)
    if n == 0 or turns[-1]["role"] != "assistant":
        raise Unusable("`messages` does not end with an answer to the user")
    return Unit(turns[:n], (turns[n:],), tools_of(row))


def _and_rejected(row: RowValue, rejected: str) -> Unit:
    """ms-swift's: turns that end with the good answer, and another one."""
    unit, other = _judged_chat(row), row.get(rejected)
    if not isinstance(other, list) and not _is_json_list(other):
        return unit._replace(answers=(*unit.answers, text_of(row, rejected)))
    others = messages_of(row, rejected)
    if m := _behind_last_user(others):
        if others[:m] != unit.prompt:
            raise Unusable(f"`{rejected}` has another prompt than `messages`")
        others = others[m:]
    return unit._replace(answers=(*unit.answers, others))


_FORMS: dict[str, Callable[[RowValue], Unit]] = {
    "prompt/chosen/rejected": lambda row: _prompted(row, "prompt", "chosen", "rejected"),
    "chosen/rejected": lambda row: _whole(row, "chosen", "rejected"),
    "instruction/chosen/rejected": lambda row: _asked(row, "chosen", "rejected"),
    "conversations/chosen/rejected": lambda row: _chat_and(row, "conversations"),
    "messages/chosen/rejected": lambda row: (
        _whole(row, "chosen", "rejected")
        if isinstance(row.get("chosen"), list) and len(row["chosen"]) > 1
        else _chat_and(row, "messages")
    ),
    "input/preferred": _openai,
    "messages/rejected_response": lambda row: _and_rejected(row, "rejected_response"),
    "messages/rejected_messages": lambda row: _and_rejected(row, "rejected_messages"),
    "prompt/completion/label": lambda row: _prompted(row, "prompt", "completion"),
    "instruction/output/label": lambda row: _asked(row, "output"),
    "messages/label": _judged_chat,
}
