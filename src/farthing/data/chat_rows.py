"""Turns of a chat as others write them: marks of what is not to be learned, content in parts, older
function calls.

OpenAI marks an assistant's message with `weight: 0 | 1`, Axolotl a turn with `train` or `training`,
others with `loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farthing.data.rows import RowValue
from farthing.objectives.columns import Unusable

MARKS = ("weight", "train", "training", "loss")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def without_marks(messages: Sequence[RowValue]) -> tuple[list[RowValue], frozenset[int]]:
    """The messages without marks, and which (from 0) are marked as not to be learned. Raises
    `Unusable` for other marks.

    A mark on a turn that is not the assistant's may only say that it is not learned; OpenAI's
    weight says nothing there.
    """
    unlearned: set[int] = set()
    kept = []
    for index, message in enumerate(messages):
        for name in MARKS:
            value = message.get(name)
            if value is None:
                continue
            if value not in (0, 1):
                raise Unusable(
                    f"message {index + 1}: `{name}` is {value!r}; only 0 and 1, or false and true,"
                    " are known"
                )
            if message["role"] == "assistant":
                unlearned |= set() if value else {index}
            elif value and name != "weight":
                raise Unusable(
                    f"message {index + 1} of `{message['role']}` is marked to be learned; only the"
                    " assistant's can be"
                )
        kept.append({key: value for key, value in message.items() if key not in MARKS})
    return kept, frozenset(unlearned)


def refuse_silence(messages: Sequence[RowValue], unlearned: frozenset[int]) -> None:
    """Raises `Unusable` for a turn of the assistant that is learned and holds nothing."""
    for index, message in enumerate(messages):
        says = [
            value for key, value in message.items() if key not in ("role", "name", "id") and value
        ]
        if (
            message["role"] == "assistant"
            and index not in unlearned
            and not any(str(value).strip() for value in says)
        ):
            raise Unusable(
                f"message {index + 1}: the assistant's turn is empty, and the model would learn"
                " to answer nothing; mark the turn with `weight: 0`, or leave it out"
            )


_ROLES = {
    "chatbot": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "gpt": "assistant",
    "human": "user",
}


def of_usual_role(message: RowValue) -> RowValue:
    """A message with the role as templates know it: `User`, `CHATBOT` (Cohere), `model`
    (Gemini).
    """
    role = message["role"].lower()
    return {**message, "role": _ROLES.get(role, role)}


def from_openai(message: RowValue) -> RowValue:
    """A message of the API as templates read it: text parts joined, `function_call` as a tool call,
    role `function` as tool.
    """
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        message = {
            **message,
            "content": "".join(
                [str(part.get(part.get("type", "text"), part.get("text", ""))) for part in content]
            ),
        }
    call = message.get("function_call")
    if isinstance(call, dict) and not message.get("tool_calls"):
        others = {key: value for key, value in message.items() if key != "function_call"}
        message = {**others, "tool_calls": [{"type": "function", "function": call}]}
    return {**message, "role": "tool"} if message.get("role") == "function" else message


def _is_text(part: Any) -> bool:
    """Also without a type, as Bedrock has it."""
    return isinstance(part, dict) and (part.get("type") in _TEXT_PARTS or set(part) == {"text"})
