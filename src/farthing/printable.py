"""Texts of others made fit to be shown: what would steer a terminal, turn lines around or begin new
ones is spelt out.

For the printing edge alone: what is kept in files and JSON stays as it is.
"""

from __future__ import annotations

import io
import re
import sys

# C0, DEL and C1; marks, overrides and isolates of direction; breaks of lines and paragraphs; what
# has no width; tags
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: object) -> str:
    """A text on one line, in which a terminal finds nothing to obey: ESC becomes the four
    characters `\\x1b`.
    """
    return _STEERING.sub(_spelt, str(text))


def printable_lines(text: object) -> str:
    """The same for a text of several lines. Further lines are set in, so that none of them looks
    like one of ours.
    """
    first, *others = str(text).split("\n")
    set_in = [line if line.startswith(" ") or not line else f"  {line}" for line in others]
    return "\n".join(printable(line) for line in (first, *set_in))


def _spelt(found: re.Match[str]) -> str:
    code = ord(found[0])
    known = {9: r"\t", 10: r"\n", 13: r"\r"}.get(code)
    return known or (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
    )


def print_any_character() -> None:
    """From now on a character that the encoding of the terminal or log lacks is printed as ?."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
