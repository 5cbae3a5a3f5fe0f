"""Turns of a chat as others write them: OpenAI, ShareGPT, Bedrock, Cohere, Gemma, and the exports
of ChatGPT and Claude.

OpenAI marks an assistant's message with `weight: 0 | 1`, Axolotl a turn with `train` or `training`,
others with `loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farthing.data.rows import RowValue
from farthing.errors import UnusableRowError
from farthing.objectives.columns import kind_of, parsed_list, text_of
from farthing.storage.files import parse_json

_MARKS = ("weight", "train", "training", "loss")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_NOT_SAID = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context")
_ROLES = {
    **dict.fromkeys(("chatbot", "model", "bot", "gpt"), "assistant"),
    "human": "user",
    "function": "tool",
}
_SHAREGPT = {
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("human", "user"), "user"),
    "system": "system",
}


def usual_role(role: str) -> str:
    """A role as templates know it: of `User`, `CHATBOT` (Cohere), `model` (Gemini)."""
    return _ROLES.get(role.lower(), role.lower())


def messages_of(
    row: RowValue, column: str = "messages", *, writes_calls: bool = True
) -> list[RowValue]:
    """The turns in a column as templates read them. Raises `UnusableRowError`.

    `writes_calls`: what a turn of `function_call` says is a call of a tool, which the template
    writes in its own way.
    """
    given = _branch(row) if column == "mapping" else as_list(row.get(column), column)
    first = given[0] if isinstance(given[0], dict) else {}
    is_sharegpt = "role" not in first and (column == "conversations" or "from" in first)
    messages = []
    for index, turn in enumerate(given, start=1):
        if is_sharegpt:
            messages.append(_of_sharegpt(turn, index, writes_calls))
        else:
            messages.append(_of_openai(turn, index))
    return with_system(messages, row) if column in ("messages", "conversations") else messages


def _of_openai(message: Any, index: int) -> RowValue:
    """A message with its text parts joined, and `function_call` as a tool call."""
    if isinstance(message, dict) and isinstance(message.get("text"), str) and "sender" in message:
        message = {"role": message["sender"], "content": message["text"]}  # Claude's export
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnusableRowError(f"message {index} has no `role`")
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    kept["role"] = usual_role(kept["role"])
    content = _joined(kept.get("content"))
    if content is not None and not isinstance(content, str):
        raise UnusableRowError(f"message {index}: `content` is {kind_of(content)}, not text")
    if "content" in kept:
        kept["content"] = content
    calls = kept.pop("tool_calls", None)
    if isinstance(kept.get("function_call"), dict) and not calls:
        calls = [{"type": "function", "function": kept.pop("function_call")}]
    if calls not in (None, [], "[]", ""):
        kept["tool_calls"] = list(map(_parsed_arguments, as_list(calls, "tool_calls")))
    return kept


def _branch(row: RowValue) -> list[RowValue]:
    """The messages of ChatGPT's export, which keeps a tree of them: the branch that was shown last.
    Raises `UnusableRowError`.
    """
    found: list[RowValue] = []
    try:
        nodes, at = dict(row["mapping"]), row["current_node"]
        while node := nodes.pop(at, None):
            at, message = node["parent"], node["message"] or {"content": {"parts": []}}
            content = message["content"]
            said = [] if content.get("content_type") in _NOT_SAID else content.get("parts", [None])
            is_text = all(isinstance(part, str) for part in said)
            if not is_text or message.get("recipient", "all") != "all":
                what = f"a turn is `{content['content_type']}`, or asks a tool"
                raise UnusableRowError(f"{what}, which can't be learned as text")
            if text := "".join(said).strip():
                found.append({"role": message["author"]["role"], "content": text})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableRowError("`mapping` is not as ChatGPT's export has it") from error
    if not found:
        raise UnusableRowError("`mapping` has no turn with text above its `current_node`")
    return found[::-1]


def _joined(content: Any) -> Any:
    """The text of a list of text parts, also without a type, as Bedrock has them; else as it is."""
    parts = content if isinstance(content, list) else []
    is_text = [
        isinstance(part, dict) and (part.get("type") in _TEXT_PARTS or set(part) == {"text"})
        for part in parts
    ]
    if not parts or not all(is_text):
        return content
    return "".join(str(part.get(part.get("type", "text"), part.get("text", ""))) for part in parts)


def _of_sharegpt(turn: Any, index: int, writes_calls: bool) -> RowValue:
    who, said = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if who not in _SHAREGPT or not isinstance(said, str):
        raise UnusableRowError(f"turn {index} has no known `from` with a text `value`")
    marks: RowValue = {name: turn[name] for name in _MARKS if turn.get(name) is not None}
    if who == "function_call" and writes_calls:
        calls = _calls(said, index)
        marks["tool_calls"] = [
            _parsed_arguments({"type": "function", "function": each}) for each in calls
        ]
        said = ""
    return {"role": _SHAREGPT[who], "content": said, **marks}


def _calls(said: str, index: int) -> list[RowValue]:
    """The calls in a turn: {"name", "arguments"} as JSON, or a list. Raises `UnusableRowError`."""
    try:
        found = parse_json(said)
    except ValueError:
        found = None
    calls: list[RowValue] = found if isinstance(found, list) else [found]
    if not calls or not all(
        isinstance(each, dict) and "name" in each and "arguments" in each for each in calls
    ):
        raise UnusableRowError(
            f"turn {index}: a `function_call` is no JSON with `name` and `arguments`"
        )
    return calls


def _parsed_arguments(call: Any) -> Any:
    """OpenAI stores a call's arguments as JSON text, chat templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    except ValueError:
        return call


def with_system(messages: list[RowValue], row: RowValue) -> list[RowValue]:
    """A chat that begins with its column `system`. Raises `UnusableRowError` where the chat begins
    with another.
    """
    system = text_of({"system": _joined(row.get("system"))}, "system", may_be_empty=True)
    if not system.strip():
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if str(messages[0].get("content") or "").strip() != system.strip():
        raise UnusableRowError(
            "the chat begins with another system message than its column `system`: leave one of"
            " them out"
        )
    return messages


def tools_of(row: RowValue) -> list[Any] | None:
    """The tools that a chat may call; OpenAI's older `functions` are tools without their frame."""
    for column, framed in (("tools", _as_object), ("functions", _framed)):
        if row.get(column) and row[column] != "[]":
            return list(map(framed, as_list(row[column], column)))
    return None


def _framed(function: Any) -> RowValue:
    return {"type": "function", "function": function}


def _as_object(tool: Any) -> Any:
    """A tool, also of a list of JSON texts."""
    try:
        return parse_json(tool) if isinstance(tool, str) else tool
    except ValueError as error:
        raise UnusableRowError("`tools` holds text that is not JSON") from error


def asked_of(row: RowValue) -> str:
    """Alpaca's instruction, with its input where there is one."""
    instruction, more = text_of(row, "instruction"), text_of(row, "input", may_be_empty=True)
    return f"{instruction}\n\n{more}" if more.strip() else instruction


def as_list(value: Any, column: str) -> list[Any]:
    """A list of turns and the like, also as JSON. Raises `UnusableRowError`."""
    if isinstance(value, str):  # CSV, and data sets that store JSON in a string
        try:
            value = parse_json(value)
        except ValueError as error:
            raise UnusableRowError(f"`{column}` is text that is not JSON") from error
    if not isinstance(value, list) or not value:
        raise UnusableRowError(
            f"`{column}` is {'empty' if value == [] else kind_of(value)}, not a list of turns"
        )
    return value


def are_turns(value: Any) -> bool:
    """Whether a value is a list, or text of a list of turns."""
    found = parsed_list(value)
    return isinstance(value, list) or (
        isinstance(found, list)
        and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in found)
        and bool(found)
    )


# ---- what is learned ----


def as_context(messages: Sequence[RowValue]) -> list[RowValue]:
    """The messages with the assistant's marked as not to be learned."""
    return [{**each, "weight": 0} if each["role"] == "assistant" else each for each in messages]


def without_marks(messages: Sequence[RowValue]) -> tuple[list[RowValue], frozenset[int]]:
    """The messages without marks, and which (from 0) are marked as not to be learned. Raises
    `UnusableRowError` for other marks, and for a turn that is learned and holds nothing.

    A mark on a turn that is not the assistant's may only say that it is not learned; OpenAI's
    weight says nothing there.
    """
    unlearned: set[int] = set()
    kept = []
    for index, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        for name in _MARKS:
            value = message.get(name)
            if value not in (None, 0, 1):
                raise UnusableRowError(
                    f"message {index + 1}: `{name}` is {value!r}; only 0 and 1, or false and true,"
                    " are known"
                )
            if value and not is_assistant and name != "weight":
                raise UnusableRowError(
                    f"message {index + 1} of `{message['role']}` is marked to be learned; only the"
                    " assistant's can be"
                )
            if is_assistant and value is not None and not value:
                unlearned.add(index)
        kept.append({key: value for key, value in message.items() if key not in _MARKS})
        says = [value for key, value in kept[-1].items() if key not in ("role", "name", "id")]
        is_empty = not any(value and str(value).strip() for value in says)
        if is_assistant and index not in unlearned and is_empty:
            raise UnusableRowError(
                f"message {index + 1}: the assistant's turn is empty, and the model would learn"
                " to answer nothing; mark the turn with `weight: 0`, or leave it out"
            )
    return kept, frozenset(unlearned)
