"""What a target says of itself, in one value; `registry` has them all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farthing.launch.driver import Driver, InstanceStatus
from farthing.launch.http import Api
from farthing.launch.machines import RentedMachine
from farthing.launch.request import SCRIPT, LaunchRequest, script_of, values_of

Files = dict[str, str]
"""Name -> text."""


@dataclass(frozen=True)
class Commands:
    """A command of the target's own, split as a shell does, and how to read what it prints."""

    submit: Callable[[LaunchRequest, Path], Sequence[str]]
    """Files of the launch lie in the folder."""
    id_of: Callable[[str], str]
    listing: Callable[[str], str]
    parse: Callable[[str], list[InstanceStatus]]
    destroy: Callable[[RentedMachine], str]
    log: Callable[[RentedMachine], str]


@dataclass(frozen=True)
class Target:
    """Somewhere to train, as far as it can be told offline."""

    name: str
    title: str
    ends: str
    """What ends the machine when every process of ours is dead; empty where nothing does."""
    render: Callable[[LaunchRequest], dict[str, Any]] = lambda ask: {}
    """Files of its own beside the script: texts, and values that are written as JSON."""
    is_rented: bool = False
    """From somebody who bills: a cap is asked for, and a store reached from anywhere."""
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
    providers: tuple[str, ...] = ()
    """Whose offers of the price table it can rent. Hugging Face's prices are not in it."""
    rents_instances: bool = False
    """Whether a machine is asked for by the name of its kind, as the price table has it."""
    api: str = ""
    client: Callable[[Api], Driver] | None = None
    """Our own client, for the API at that address."""
    login: tuple[str, str] | None = None
    """A command that prints only where one is logged in, and what to do elsewhere."""
    quota: str = ""
    """What an account may lack."""
    takes_values: bool = False
    """Whether the values of secrets travel with the request, from the environment here."""
    check: Callable[[Mapping[str, str]], list[str]] = lambda files: []
    """What of the files the target would refuse for something that the user has said."""

    @property
    def needs_place(self) -> bool:
        """Whether it has to be told where."""
        return bool(self.at) and not self.at.startswith("[")

    def files(self, ask: LaunchRequest) -> Files:
        """What is written for a machine; the same on every day."""
        own = self.render(ask)
        texts = {
            name: text if isinstance(text, str) else json.dumps(text, indent=1) + "\n"
            for name, text in own.items()
        }
        return {SCRIPT: script_of(ask), **texts}

    def connect(self) -> Driver:
        """Our own client, with the key from the environment. Raises `InputError`.

        FARTHING_LAUNCH_API names another address, for tests.
        """
        assert self.client is not None
        (key,) = self.keys
        headers = {"Authorization": f"Bearer {values_of([key], 'your account')[key]}"}
        return self.client(Api(os.environ.get("FARTHING_LAUNCH_API") or self.api, headers))
