"""What a target lacks before a launch: its command, a login, keys, the image. Asked with short commands; nothing is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from farthing.durability.machines import Machine
from farthing.errors import UserMistake
from farthing.launch.ask import PLAIN_IMAGE
from farthing.launch.clients import connect
from farthing.launch.driver import Refused, Unclear
from farthing.launch.prepare import S3_KEYS
from farthing.launch.registry import find_target
from farthing.launch.target import Target

ASK_S = 60.0
LOGIN: dict[str, tuple[list[str], str]] = {
    "slurm": (["sinfo", "--noheader"], "log in to a node where `sinfo` answers"),
    "kubernetes": (
        ["kubectl", "auth", "can-i", "create", "jobs"],
        "choose a context (kubectl config use-context) that may",
    ),
    "vertex": (["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"], "gcloud auth login"),
    "skypilot": (["sky", "check"], "sky check says which cloud lacks what"),
    "hf": (["hf", "auth", "whoami"], "hf auth login"),
}
"""A command that works and prints something only where one is logged in, and what to do where it does not."""
QUOTA = {
    "vertex": "Vertex AI has a quota for each accelerator and for spot: console, IAM & Admin, Quotas, `custom_model_training`",
    "skypilot": "each cloud has its own quota: sky show-gpus --infra CLOUD; a new account often has none",
    "hf": "Jobs need a Pro, Team or Enterprise account",
    "runpod": "an account spends at most $80 an hour unless its limit was raised",
}


class Found(NamedTuple):
    """One line of the list: ok, warning or failed."""

    name: str
    state: str
    found: str
    to_do: str = ""


def check_target(text: str) -> Iterator[Found]:
    """Everything that is known to be needed. Raises `UserMistake` where there is no such target."""
    target, at = find_target(text if ":" in text else _with_anything(text))
    yield Found("target", "ok", target.title)
    yield Found(
        "ended by", "ok" if target.ends else "warning", target.ends or "nothing but us", "launch with --attended"
    )
    if target.program:
        path = shutil.which(target.program)
        yield Found("command", "ok" if path else "failed", path or f"there is no `{target.program}`", target.install)
        if path:
            yield from _login(target)
    for key in target.keys:
        is_set = bool(os.environ.get(key, "").strip())
        yield Found(
            "key", "ok" if is_set else "failed", f"{key} is {'set' if is_set else 'not set'}", f"export {key}=..."
        )
        if is_set:
            yield from _answers(target)
    if target.name == "ssh" and ":" in text:
        yield from _hosts(at)
    if target.is_rented:
        absent = [name for name in S3_KEYS if not os.environ.get(name)]
        found = f"{', '.join(absent)} not set" if absent else "keys for s3:// are set"
        yield Found(
            "store",
            "warning" if absent else "ok",
            found,
            "export them, of a user who may write to the store's prefix only",
        )
    if target.name in QUOTA:
        yield Found("quota", "warning", "not asked", QUOTA[target.name])
    if target.name not in ("local", "ssh", "slurm"):
        to_do = "docker build --target cuda at the root of farthing's repository, push it, name it with --image"
        yield Found(
            "image", "warning", f"without --image {PLAIN_IMAGE}, on which farthing is installed at every start", to_do
        )


def _with_anything(name: str) -> str:
    """A target that is not told where: a place holder, so that it can be looked at."""
    return f"{name}:WHERE/KEY" if name.strip().lower() in ("vertex", "lambda", "ssh") else name


def _login(target: Target) -> Iterator[Found]:
    if target.name not in LOGIN:
        return
    words, to_do = LOGIN[target.name]
    said = ""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
        )
        is_in = done.returncode == 0 and bool(done.stdout.strip())
        said = " ".join((done.stderr or done.stdout).split())[-120:] or "nobody is logged in"
    except (OSError, subprocess.TimeoutExpired) as error:
        is_in, said = False, type(error).__name__
    yield Found(
        "login", "ok" if is_in else "failed", f"`{' '.join(words)}` {'works' if is_in else f'fails: {said}'}", to_do
    )


def _answers(target: Target) -> Iterator[Found]:
    """Whether the provider takes the key."""
    try:
        connect(target.name).look(Machine("farthing-none"))
        yield Found("login", "ok", "the key is taken")
    except (Unclear, Refused, UserMistake) as error:
        yield Found("login", "failed", str(error).splitlines()[0], "check the key, and what it may do")


def _hosts(at: str) -> Iterator[Found]:
    from farthing.launch.host_driver import HostDriver

    script = "command -v farthing || true; command -v pgrep || true; command -v timeout || true"
    for host in at.split(","):
        try:
            there = HostDriver([host]).tell(host, script)
        except (Unclear, Refused) as error:
            yield Found(host, "failed", str(error), f"ssh {host} has to work without a password (keys, ssh-agent)")
            continue
        lacks = [name for name in ("pgrep", "timeout") if f"/{name}" not in there]
        yield Found(
            host,
            "failed" if lacks else "ok",
            f"lacks {', '.join(lacks)}" if lacks else "answers",
            "install procps, coreutils",
        )
        if "/farthing" not in there:
            yield Found(
                f"{host}: farthing", "warning", "not on its PATH: pip installs it at the start", "install it there once"
            )
