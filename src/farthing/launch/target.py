"""What a target says of itself, in one value; `registry` has them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from farthing.launch.ask import Ask

Files = dict[str, str]
"""Name -> text."""


@dataclass(frozen=True)
class Target:
    """Somewhere to train, as far as it can be told offline."""

    name: str
    title: str
    render: Callable[[Ask], Files]
    check: Callable[[Mapping[str, str]], list[str]]
    """What of the files the target would refuse or misunderstand: our own rules, where its schema is blind."""
    ends: str
    """What ends the machine when every process of ours is dead; empty where nothing does."""
    is_rented: bool = False
    """From somebody who bills: a cap is asked for, and a store that can be reached from anywhere."""
    may_share_folders: bool = False
    """Whether its machines can have a file system in common, so that a run needs no store."""
    at: str = ""
    """What stands behind the colon of --on; in brackets where it may be left out."""
    keys: tuple[str, ...] = ()
    """Environment variables that our own client needs."""
    program: str = ""
    """The command of its own that is used."""
    install: str = ""
    """How to get it."""
    picks_gpus: bool = False
    """Whether a GPU has to have a name in facts/launch.csv to be had there."""


def missing(value: Any, where: str, *paths: str) -> list[str]:
    """Which of the dotted paths lead to nothing in a document: what a schema without required fields lets pass."""
    found = []
    for path in paths:
        at = value
        for part in path.split("."):
            if isinstance(at, list):
                at = at[int(part)] if part.isdigit() and int(part) < len(at) else None
            else:
                at = at.get(part) if isinstance(at, dict) else None
        if at in (None, "", [], {}):
            found.append(f"{where}: `{path}` is missing")
    return found


def not_a_name(name: str, most: int = 63) -> list[str]:
    """A complaint about a name that is none for DNS: what most targets ask of the names of jobs."""
    is_name = re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= most
    return [] if is_name else [f"`{name}` is no name: small letters, digits and dashes, at most {most}"]
