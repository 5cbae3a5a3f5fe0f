"""What a target says of itself, in one value; `registry` has them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farthing.launch.driver import InstanceStatus
from farthing.launch.request import LaunchRequest
from farthing.run.machines import Machine

Files = dict[str, str]
"""Name -> text."""


@dataclass(frozen=True)
class Commands:
    """A command of the target's own: argument lists, and how to read what they print."""

    submit: Callable[[LaunchRequest, Path], Sequence[str]]
    """Files of the launch lie in the folder."""
    id_of: Callable[[str], str]
    listing: Callable[[str], Sequence[str]]
    parse: Callable[[str], list[InstanceStatus]]
    destroy: Callable[[Machine], Sequence[str]]
    log: Callable[[Machine], Sequence[str]]


@dataclass(frozen=True)
class Target:
    """Somewhere to train, as far as it can be told offline."""

    name: str
    title: str
    render: Callable[[LaunchRequest], Files]
    ends: str
    """What ends the machine when every process of ours is dead; empty where nothing does."""
    is_rented: bool = False
    """From somebody who bills: a cap is asked for, and a store that can be reached from anywhere.
    """
    at: str = ""
    """What stands behind the colon of --on; in brackets where it may be left out."""
    keys: tuple[str, ...] = ()
    """Environment variables that our own client needs."""
    program: str = ""
    """The command of its own that is used."""
    install: str = ""
    """How to get it."""
    commands: Callable[[str], Commands] | None = None
    """How that command is used, by what stands behind the colon of --on."""
    picks_gpus: bool = False
    """Whether a GPU has to have a name in facts/launch.csv to be had there."""
    keeps_billing: tuple[str, str] | None = None
    """What it bills beside the machines, and what ends that."""
    check: Callable[[Mapping[str, str]], list[str]] = lambda files: []
    """What of the files the target would refuse for something that the user has said."""
