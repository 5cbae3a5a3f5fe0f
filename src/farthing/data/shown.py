"""What of a chat its template writes: keys of messages, tools and whole roles that it leaves out
are found by trying.

A template that knows nothing of tools writes neither them nor the calls, and says nothing. So a
chat is rendered once more without each thing that was not yet seen to matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from farthing.data.rows import RowValue
from farthing.storage.files import Json

Render = Callable[[list[RowValue], Any], str]
"""A chat's messages and tools as text."""
_MOST_TRIES = 100
_SILENT = ("role", "content", "tool_call_id", "id")
"""Keys that are not tried: `content` goes by role; ids say which call is meant, and few templates
show them.
"""
_OTHER = "Qj7wZk"
"""A text that no chat holds."""


class Shown:
    """What the template of a source's chats was seen to write, and what not."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._left_out: Counter[str] = Counter()

    def look(self, messages: list[RowValue], tools: Any, render: Render) -> None:
        """Try the keys of this chat's messages, its roles and its tools that were not seen to be
        written yet.

        After so many chats of which a thing was not written it is not tried again.
        """
        asked = {key for message in messages for key in message if key not in _SILENT}
        roles = {message["role"] for message in messages} - {"assistant"}
        asked |= {f"role {role}" for role in roles} | ({"tools"} if tools else set())
        for thing in sorted(asked - self._shown):
            is_tried = self._left_out[thing] < _MOST_TRIES
            if is_tried and not _is_same(
                render, (messages, tools), _without(thing, messages, tools)
            ):
                self._shown.add(thing)
                del self._left_out[thing]
            else:
                self._left_out[thing] += 1

    def state(self) -> Json:
        """What was seen, in plain values."""
        return {"shown": sorted(self._shown), "left_out": dict(self._left_out)}

    def merge(self, state: Json) -> None:
        """Add what was seen in other chats."""
        self._shown |= set(state["shown"])
        self._left_out.update(state["left_out"])
        for thing in self._shown:
            del self._left_out[thing]

    def said(self) -> list[str]:
        """What was never written."""
        said = []
        for thing, n in sorted(self._left_out.items()):
            key, _, role = thing.partition(" ")
            of_messages = f"`{key}`" if key == "tools" else f"`{key}` of messages"
            what = f"messages of `{role}`" if role else of_messages
            said.append(
                f"the chat template leaves out {what} (in {n:,} chats): the model does not see it"
            )
        return said


def leaves_an_answer_empty(
    messages: list[RowValue], tools: Any, render: Render, unlearned: frozenset[int] = frozenset()
) -> bool:
    """Whether answers that are learned and are calls of tools alone are written as if they said
    nothing.
    """
    without = [
        {**message, "tool_calls": None}
        if message["role"] == "assistant"
        and message.get("tool_calls")
        and index not in unlearned
        and not str(message.get("content") or "").strip()
        else message
        for index, message in enumerate(messages)
    ]
    return without != messages and _is_same(render, (messages, tools), (without, tools))


def _is_same(
    render: Render, one: tuple[list[RowValue], Any], other: tuple[list[RowValue], Any]
) -> bool:
    try:
        return render(*one) == render(*other)
    except Exception:  # templates are programs: one that misses a thing reads it
        return False


def _without(thing: str, messages: list[RowValue], tools: Any) -> tuple[list[RowValue], Any]:
    """The chat without `tools` or a key; with another text in the messages of a role."""
    if thing == "tools":
        return messages, None
    role = thing.partition(" ")[2]
    if role:
        other = [{**each, "content": _OTHER} if each["role"] == role else each for each in messages]
        return other, tools
    return [{key: value for key, value in each.items() if key != thing} for each in messages], tools
