"""What a target lacks before a launch: its command, a login, keys, the image. Asked with short
commands; nothing is changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from farthing.errors import Check, InputError
from farthing.launch.commands import run_command
from farthing.launch.driver import RefusedError, UnclearError
from farthing.launch.machines import Machine
from farthing.launch.prepare import S3_KEYS
from farthing.launch.registry import TARGETS, find_target
from farthing.launch.request import PLAIN_IMAGES
from farthing.launch.target import Target
from farthing.launch.targets.hosts import HostDriver


def _ok(name: str, is_so: bool, found: str, to_do: str) -> Check:
    return Check(name, "ok" if is_so else "failed", found, to_do)


def check_target(text: str) -> Iterator[Check]:
    """Raises `InputError` where there is no such target."""
    known = TARGETS.get(text.strip().lower())
    is_open = known is not None and known.needs_place
    target, at = find_target(f"{text}:WHERE/KEY" if is_open else text)
    yield Check("target", "ok", target.title)
    yield Check(
        "ended by",
        "ok" if target.ends else "warning",
        target.ends or "only this process",
        "launch with --attended",
    )
    if target.program:
        path = shutil.which(target.program)
        yield _ok(
            "command", path is not None, path or f"there is no `{target.program}`", target.install
        )
        if path and target.login:
            yield _login(*target.login)
    for key in target.keys:
        is_set = bool(os.environ.get(key, "").strip())
        yield _ok("key", is_set, f"{key} is {'set' if is_set else 'not set'}", f"export {key}=...")
        if is_set:
            yield _answers(target)
    if target.name == "ssh" and ":" in text:
        yield from _hosts(at)
    if target.is_rented:
        absent = ", ".join(name for name in S3_KEYS if not os.environ.get(name))
        found = f"{absent} not set" if absent else "keys for s3:// are set"
        to_do = "export them, of a user who may write to the store's prefix only"
        yield Check("store", "warning" if absent else "ok", found, to_do)
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


def _login(command: str, to_do: str) -> Check:
    try:
        why = "" if run_command(command).strip() else f"`{command}` fails: you are not logged in"
    except (UnclearError, RefusedError) as error:
        why = str(error)
    return _ok("login", not why, why or f"`{command}` works", to_do)


def _answers(target: Target) -> Check:
    try:
        target.connect().look(Machine("farthing-none"))
        return Check("login", "ok", "the key is taken")
    except (UnclearError, RefusedError, InputError) as error:
        return Check(
            "login", "failed", str(error).splitlines()[0], "check the key and its permissions"
        )


def _hosts(at: str) -> Iterator[Check]:
    script = "command -v farthing || true; command -v pgrep || true; command -v timeout || true"
    for host in at.split(","):
        try:
            there = HostDriver([host]).tell(host, script)
        except (UnclearError, RefusedError) as error:
            yield Check(
                host,
                "failed",
                str(error),
                f"ssh {host} has to work without a password (keys, ssh-agent)",
            )
            continue
        lacks = ", ".join(name for name in ("pgrep", "timeout") if f"/{name}" not in there)
        yield _ok(
            host, not lacks, f"lacks {lacks}" if lacks else "answers", "install procps, coreutils"
        )
        if "/farthing" not in there:
            found = "not on its PATH: pip installs it at the start"
            yield Check(f"{host}: farthing", "warning", found, "install it there once")
