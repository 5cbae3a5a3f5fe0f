"""What a target lacks before a launch: its command, a login, keys, the image. Asked with short
commands; nothing is changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial

from farthing.errors import Check, InputError
from farthing.launch.commands import run_command
from farthing.launch.driver import ProviderError
from farthing.launch.machines import RentedMachine
from farthing.launch.prepare import S3_KEYS
from farthing.launch.registry import TARGETS, find_target
from farthing.launch.request import PLAIN_IMAGES
from farthing.launch.targets.hosts import HostDriver


def check_target(text: str) -> Iterator[Check]:
    """Raises `InputError` where there is no such target."""
    known = TARGETS.get(text.strip().lower())
    target, at = find_target(f"{text}:WHERE/KEY" if known and known.needs_place else text)
    yield Check("target", "ok", target.title)
    yield _check("ended by", target.ends, "only this process", "launch with --attended", "warning")
    if target.program:
        path = shutil.which(target.program) or ""
        yield _check("command", path, f"there is no `{target.program}`", target.install)
        if path and target.login:
            command, to_do = target.login
            yield _tried("login", lambda: run_command(command), to_do)
    for key in target.keys:
        is_set = f"{key} is set" if os.environ.get(key, "").strip() else ""
        yield _check("key", is_set, f"{key} is not set", f"export {key}=...")
        if is_set:
            to_do = "check the key and its permissions"
            yield _tried(
                "login", lambda: target.connect().look(RentedMachine("farthing-none")), to_do
            )
    for host in at.split(",") if target.name == "ssh" and ":" in text else ():
        to_do = f"ssh {host} has to work without a password, and pgrep and timeout there"
        tell = partial(HostDriver([host]).tell, host, "command -v pgrep && command -v timeout")
        yield _tried(host, tell, to_do)
    if target.is_rented:
        absent = ", ".join(name for name in S3_KEYS if not os.environ.get(name))
        found = "" if absent else "keys for s3:// are set"
        to_do = "export them, of a user who may write to the store's prefix only"
        yield _check("store", found, f"{absent} not set", to_do, "warning")
    if target.quota:
        yield Check("quota", "warning", "not asked", target.quota)
    if target.name not in ("local", "ssh", "slurm"):
        to_do = (
            "docker build --target cuda at the root of farthing's repository, push it, name it with"
            " --image"
        )
        found = f"without --image {PLAIN_IMAGES['cu126']}, on which farthing is installed at every"
        found += " start; for Blackwell its build for CUDA 13"
        yield Check("image", "warning", found, to_do)


def _check(name: str, found: str, why: str, to_do: str, state: str = "failed") -> Check:
    return Check(name, "ok", found) if found else Check(name, state, why, to_do)


def _tried(name: str, call: Callable[[], object], to_do: str) -> Check:
    """Failed where the call fails, or a command prints nothing."""
    try:
        return _check(name, "it works" if call() != "" else "", "not logged in", to_do)
    except (ProviderError, InputError) as error:
        return Check(name, "failed", str(error).splitlines()[0], to_do)
