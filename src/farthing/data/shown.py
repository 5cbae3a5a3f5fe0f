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
        asked = {key for message in messages for key in message if key not in _SILENT} - self._shown
        asked |= {
            f"role {message['role']}" for message in messages if message["role"] != "assistant"
        } - self._shown
        asked |= ({"tools"} if tools else set()) - self._shown
        whole = None
        for thing in sorted(asked):
            if self._left_out[thing] < _MOST_TRIES:
                try:
                    whole = render(messages, tools) if whole is None else whole
                    is_shown = render(*_without(thing, messages, tools)) != whole
                except Exception:  # templates are programs: one that misses a thing reads it
                    is_shown = True
                if is_shown:
                    self._shown.add(thing)
                    del self._left_out[thing]
                    continue
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
            what = (
                f"messages of `{role}`"
                if role
                else "`tools`"
                if key == "tools"
                else f"`{key}` of messages"
            )
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
    calls = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("tool_calls") and index not in unlearned
        if not str(message.get("content") or "").strip()
    ]
    if not calls:
        return False
    without = [
        {key: value for key, value in message.items() if index not in calls or key != "tool_calls"}
        for index, message in enumerate(messages)
    ]
    try:
        return render(without, tools) == render(messages, tools)
    except Exception:  # as above; what is wrong with the chat itself is said where it is read
        return False


def _without(thing: str, messages: list[RowValue], tools: Any) -> tuple[list[RowValue], Any]:
    """The chat without `tools` or a key; with another text in the messages of a role."""
    if thing == "tools":
        return messages, None
    role = thing.partition(" ")[2]
    if role:
        return [
            {**each, "content": _OTHER} if each["role"] == role else each for each in messages
        ], tools
    return [{key: value for key, value in each.items() if key != thing} for each in messages], tools
