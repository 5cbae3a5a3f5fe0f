"""Texts of others within a page."""

from __future__ import annotations

import html

from farthing.printable import printable


def escape(text: str) -> str:
    """No tag, no entity, nothing that turns lines around."""
    return html.escape(printable(text))
