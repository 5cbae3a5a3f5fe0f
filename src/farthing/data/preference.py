"""Rows with answers that are compared or judged, as texts: the forms of TRL, OpenAI, Axolotl,
LLaMA-Factory, ms-swift and the Hub's data sets.

A unit's sequences have one prompt. What is learned, or scored, is what the assistant says behind
the last turn of the user; turns of the assistant before that are given. Texts without roles are
taken as they are, and end with the tokenizer's end of sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from farthing.data.chat_rows import are_turns, asked_of, messages_of, tools_of, with_system
from farthing.data.rows import RowValue
from farthing.errors import UnusableRowError
from farthing.objectives.columns import kind_of, parsed_list, text_of

Turns = list[RowValue]
_HH = re.compile(r"\n\nAssistant:")
_IS_HH = re.compile(r"^\s*Human:")


class Unit(NamedTuple):
    """What a row compares: texts, or turns of chats, of one prompt."""

    prompt: str | Turns
    answers: tuple[str | Turns, ...]
    tools: list[Any] | None = None


def _prompted(row: RowValue, *answers: str) -> Unit:
    """A column `prompt` and answers, each texts or turns."""
    prompt, first = row.get("prompt"), row.get(answers[0])
    if are_turns(first) and _says_the_prompt(parsed_list(first), prompt):
        return _whole(row, *answers)
    if are_turns(prompt):
        return _unit(messages_of(row, "prompt"), row, *answers)
    asked = text_of(row, "prompt")
    is_chat = all(isinstance(row.get(name), dict) or are_turns(row.get(name)) for name in answers)
    if is_chat or "system" in row or tools_of(row):  # a frame that only a chat has
        return _unit([{"role": "user", "content": asked}], row, *answers)
    return Unit(asked, tuple(text_of(row, name) for name in answers))


def _unit(prompt: Turns, row: RowValue, *answers: str) -> Unit:
    found = tuple(_answer(row, name) for name in answers)
    return Unit(with_system(prompt, row), found, tools_of(row))


def _says_the_prompt(turns: list[Any], prompt: Any) -> bool:
    """Whether an answer begins with its prompt: UltraFeedback's `prompt` is the user's turn too."""
    first = next(
        (turn for turn in turns if isinstance(turn, dict) and turn.get("role") != "system"), {}
    )
    if first.get("role") != "user" or not isinstance(prompt, str):
        return False
    if str(first.get("content")).strip() != prompt.strip():
        raise UnusableRowError("`prompt` is another text than the first turn of `chosen`")
    return True


def _whole(row: RowValue, *answers: str) -> Unit:
    """Answers that hold their prompt: chats, or texts of Anthropic's HH."""
    if all(isinstance(row.get(name), str) and not are_turns(row[name]) for name in answers):
        return _of_texts([text_of(row, name) for name in answers])
    chats = [messages_of(row, name) for name in answers]
    heads = [_behind_last_user(turns) for turns in chats]
    if any(chat[:n] != chats[0][: heads[0]] for chat, n in zip(chats, heads, strict=True)):
        raise UnusableRowError(
            "the answers have different prompts: turns before the last user's differ"
        )
    if heads[0] == 0:
        raise UnusableRowError("no turn of the user: the answers have no prompt")
    prompt = with_system(chats[0][: heads[0]], row)
    ends = tuple(chat[n:] for chat, n in zip(chats, heads, strict=True))
    return Unit(prompt, ends, tools_of(row))


def _behind_last_user(turns: Turns) -> int:
    users = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    return users[-1] + 1 if users else 0


def _of_texts(texts: list[str]) -> Unit:
    """Whole texts. Of Anthropic's HH the prompt ends at the last `Assistant:` that all have."""
    if not all(map(_IS_HH.match, texts)):
        raise UnusableRowError(
            "no prompt: `chosen` and `rejected` are texts; give the prompt in a column"
        )
    starts = [{text[: match.end()] for match in _HH.finditer(text)} for text in texts]
    if not (common := set.intersection(*starts)):
        raise UnusableRowError("the texts have no `Assistant:` in common: their prompts differ")
    prompt = max(common, key=len)
    return Unit(prompt, tuple(text.removeprefix(prompt) for text in texts))


def _answer(row: RowValue, name: str) -> str | Turns:
    """An answer: a text, a message, or turns."""
    value = row.get(name)
    if isinstance(value, str) and not are_turns(value):
        return text_of(row, name)
    turns = messages_of({**row, name: [value] if isinstance(value, dict) else value}, name)
    if turns[-1]["role"] != "assistant":
        raise UnusableRowError(f"`{name}` does not end with a turn of the assistant")
    if any(turn["role"] == "user" for turn in turns):
        raise UnusableRowError(
            f"`{name}` has a user's turn: preference tuning compares single answers"
        )
    return turns


def _asked(row: RowValue, *answers: str) -> Unit:
    """Alpaca's: an instruction, perhaps with an input, in a chat of one turn."""
    return _unit([{"role": "user", "content": asked_of(row)}], row, *answers)


def _openai(row: RowValue) -> Unit:
    given = row.get("input")
    if not isinstance(given, dict) or "messages" not in given:
        raise UnusableRowError(f"`input` is {kind_of(given)}, not an object with `messages`")
    answers = "preferred_output", "non_preferred_output"
    found = tuple(_answer(row, name) for name in answers)
    return Unit(messages_of(given), found, tools_of(given))


def _chat_and(row: RowValue, column: str) -> Unit:
    """Turns that end with the user's, and answers beside them."""
    turns = messages_of(row, column)
    if turns[-1]["role"] == "assistant":
        raise UnusableRowError(f"`{column}` ends with an answer, and `chosen` is another")
    return _unit(turns, row, "chosen", "rejected")


def _judged_chat(row: RowValue) -> Unit:
    """Turns that end with an answer."""
    turns = messages_of(row)
    n = _behind_last_user(turns)
    if n == 0 or turns[-1]["role"] != "assistant":
        raise UnusableRowError("`messages` does not end with an answer to the user")
    return Unit(turns[:n], (turns[n:],), tools_of(row))


def _and_rejected(row: RowValue, rejected: str) -> Unit:
    """ms-swift's: turns that end with the good answer, and another one."""
    unit, other = _judged_chat(row), row.get(rejected)
    if not are_turns(other):
        return unit._replace(answers=(*unit.answers, text_of(row, rejected)))
    others = messages_of(row, rejected)
    n = _behind_last_user(others)
    if n and others[:n] != unit.prompt:
        raise UnusableRowError(f"`{rejected}` has another prompt than `messages`")
    return unit._replace(answers=(*unit.answers, others[n:]))


FORMS: dict[str, Callable[[RowValue], Unit]] = {
    "prompt/chosen/rejected": lambda row: _prompted(row, "chosen", "rejected"),
    "chosen/rejected": lambda row: _whole(row, "chosen", "rejected"),
    "instruction/chosen/rejected": lambda row: _asked(row, "chosen", "rejected"),
    "conversations/chosen/rejected": lambda row: _chat_and(row, "conversations"),
    "messages/chosen/rejected": lambda row: (
        _whole(row, "chosen", "rejected")
        if are_turns(row.get("chosen")) and len(parsed_list(row["chosen"])) > 1
        else _chat_and(row, "messages")
    ),
    "input/preferred": _openai,
    "messages/rejected_response": lambda row: _and_rejected(row, "rejected_response"),
    "messages/rejected_messages": lambda row: _and_rejected(row, "rejected_messages"),
    "prompt/completion/label": lambda row: _prompted(row, "completion"),
    "instruction/output/label": lambda row: _asked(row, "output"),
    "messages/label": _judged_chat,
}
