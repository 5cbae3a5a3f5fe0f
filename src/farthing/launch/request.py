"""What is asked of a target, in plain values: all that a renderer knows, and the script that every
machine runs.

An `LaunchRequest` holds names of secrets, never their values. What is known only when a machine is
made (the time, the secrets) stands in the files as ${NAME} and is filled in on the way out.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farthing.errors import InputError
from farthing.prices.offers import Offer
from farthing.storage.files import Json

PLAIN_IMAGES = {
    "cu126": "pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime",
    "cu130": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
}
"""What is used where no image is named, by the build of torch: farthing is installed on top."""
GRACE_S = 120
"""Between a polite end and a hard one: for the last checkpoint and its way to the store."""
CREATED_AT, ENDS_AT = "FARTHING_CREATED_AT", "FARTHING_ENDS_AT"
JOB, TOLD, FETCH, SCRIPT = "job.yaml", "told.json", "fetch.py", "run.sh"
_MARK = "END_OF_FARTHING_FILE"


@dataclass(frozen=True)
class LaunchRequest:
    """One machine for one run."""

    name: str
    """`farthing-<launch id>-<number>`: the same on every try."""
    target: str
    at: str
    """What stood behind the colon of --on: a host, a partition, a project."""
    offer: Offer
    usd_per_hour: float
    most_s: int
    """Seconds from the request until the provider ends it, whoever of us is still alive."""
    job_text: str
    told: Json
    """What farthing is told there beside the job."""
    gpu_id: str = ""
    """The GPU or the instance as the provider calls it."""
    machine_type: str = ""
    image: str = ""
    install: str = ""
    """Shell commands that install farthing where the machine has none."""
    left_usd: float | None = None
    """What of the cap was left before it; None without a cap in dollars."""
    needs: tuple[str, ...] = ()
    """farthing's version and modules, without which the machine installs farthing anew."""
    fetch: str = ""
    """The script `fetch.py` of those commands; empty where they need none."""
    disk_gb: int = 100
    folder: str = ""
    """A folder that all machines of the target share, where there is no store."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are no secrets."""

    @property
    def on(self) -> str:
        """The target as --on names it."""
        return f"{self.target}:{self.at}" if self.at else self.target

    @property
    def launch_id(self) -> str:
        """The part of the name that all machines of a launch share."""
        return self.name.rpartition("-")[0]

    def exports(self, asked_at: float) -> str:
        """Lines for a shell with settings and values of secrets. Raises `InputError` where one is
        not set here."""
        values = {**self.settings, **values_of(self.secrets), CREATED_AT: f"{asked_at:.0f}"}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


Value = Callable[[str], Any]
"""(name) -> what stands for it in a request: `placeholder` in files, else the value itself."""


def placeholder(name: str) -> str:
    """What is known only when a machine is made."""
    return f"${{{name}}}"


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    poll_s: float = 10.0
    boot_s: float = 600.0
    """From the request to the first word; then it is destroyed, its offer left out."""
    lost_s: float = 180.0
    """Without any answer about a machine it is given up, and the next one asked for."""
    silent_s: float = 600.0
    """The same for a machine that its provider shows and that says nothing itself."""
    stubborn_s: float = 60.0
    """For a host of one's own to be confirmed gone; then the next machine is asked for."""
    farewell_s: float = 60.0
    """The same at the end of a launch."""
    stock_s: float = 300.0
    """Before offers that were out of stock are tried again ..."""
    n_stock_rounds: int = 3
    """... and how often."""
    n_in_vain: int = 3
    """Machines in a row that saved nothing new."""


TEARDOWN_S = 120
"""Kept back of every cap: from the end of training to the confirmed deletion."""
MOST_OVER = 1.1
"""So many times the planned price may be charged: a machine's own end holds the cap then."""
LEAST_USE_S = 60.0
"""A machine that could train for less is not rented."""


def least_s(boot_s: float) -> float:
    """Seconds that a machine must be worth: it boots, trains a while, and has its grace to save."""
    return boot_s + LEAST_USE_S + GRACE_S


def values_of(names: Sequence[str], who: str = "the machine") -> dict[str, str]:
    """Variables of the environment here. Raises `InputError` where one is not set."""
    absent = [name for name in names if not os.environ.get(name, "").strip()]
    if absent:
        raise InputError(
            f"{', '.join(absent)} is not set here, and {who} needs it",
            where="environment",
            to_do=f"export {absent[0]}=... first",
        )
    return {name: os.environ[name].strip() for name in names}


def home_of(shared: str) -> str:
    """The folder of a host's machines, for a shell; within `shared`, if there is one."""
    return f"{shlex.quote(shared)}/launch" if shared else '"${FARTHING_HOME:-$HOME/.farthing}"'


def script_of(ask: LaunchRequest) -> str:
    """What a machine runs, as a POSIX shell script: bring farthing, train, end in time. Its exit
    code is the run's.

    Signals are handed on and the script waits for the end of the last checkpoint. 124 of `timeout`
    (nothing else ended it in time) becomes 3, stopped by a limit; 143 (told to leave before it
    could listen) becomes 75, interrupted.
    """
    folder = f"{home_of(ask.folder)}/{ask.name}"
    install = f"{{ {ask.install}; }}" if ask.install else "false"
    fetch = _file(FETCH, ask.fetch) if ask.fetch else ""
    return f"""#!/bin/sh
# {ask.name}: trains, and ends after {ask.most_s} seconds at the latest.
umask 077
: "${{{CREATED_AT}:=$(date +%s)}}"; export {CREATED_AT}
child=
trap '[ -z "$child" ] && exit 75; kill -TERM "$child" 2>/dev/null' TERM INT HUP USR1
mkdir -p {folder} && cd {folder} || exit 2
{_file(JOB, ask.job_text)}{_file(TOLD, json.dumps(ask.told, indent=1, sort_keys=True))}{fetch}\
has() {{ command -v farthing >/dev/null 2>&1 && farthing launch needs {" ".join(ask.needs)}; }}
has || {install} || {{ echo "farthing can't be installed here" >&2; exit 2; }}
has || exit 2
timeout --signal=TERM --kill-after={GRACE_S} {ask.most_s} farthing launch agent {JOB} {TOLD} &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
[ "$code" -eq 124 ] && code=3
[ "$code" -eq 143 ] && code=75
exit "$code"
"""


def _file(name: str, text: str) -> str:
    """A here-document that is taken literally."""
    if _MARK in text:
        raise InputError(f"it holds the word {_MARK}", where=name, to_do="take it out")
    return f"cat > {name} <<'{_MARK}'\n{text.rstrip(chr(10))}\n{_MARK}\n"
