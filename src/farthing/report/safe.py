"""The printing edge of rich: markup and control characters of others are shown, never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import markup
from rich.console import Console
from rich.segment import Segment

from farthing.printable import printable, printable_lines


def escape(text: object) -> str:
    """A text of others as a part of rich markup, on one line."""
    return markup.escape(printable(text))


def escape_lines(text: object) -> str:
    """The same for a text of several lines."""
    return markup.escape(printable_lines(text))


class SafeConsole(Console):
    """A console that spells out control characters in what it prints; its own colours stay."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of something to print, without what would steer the terminal."""
        for text, style, control in super().render(renderable, options):
            if not (control or (text.isascii() and text.isprintable())):
                text = "\n".join(map(printable, text.split("\n")))
            yield Segment(text, style, control)
