"""Which names are URLs, and how to show one without its secrets."""

from __future__ import annotations

import re


def is_remote(path: str) -> bool:
    """Whether a data path goes through fsspec: it has a scheme."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", path) is not None


def without_secrets(name: str) -> str:
    """A path or URL without user, password and query, which may be keys."""
    if not is_remote(name):
        return name
    return re.sub(r"://[^/?#]*@", "://", re.sub(r"[?#].*", "", name, flags=re.DOTALL))
