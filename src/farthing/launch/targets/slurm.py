"""Slurm: a batch script that is told before it is ended, saves, and is queued again."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from farthing.launch.driver import InstanceStatus, job_status
from farthing.launch.machines import RentedMachine
from farthing.launch.request import GRACE_S, LaunchRequest, script_of
from farthing.launch.target import Commands, Target

BATCH = "run.sbatch"
_OVER = re.compile(
    "COMPLETED|FAILED|CANCELLED|PREEMPTED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE"
)


def render(ask: LaunchRequest) -> dict[str, str]:
    """`ask.at` is the partition, `ask.folder` the run folder, which all nodes see."""
    n_gpus, minutes = ask.offer.n_gpus, math.ceil((ask.most_s + 2 * GRACE_S) / 60)
    log = f"{ask.folder}/launch/{ask.name}/log.txt"
    options = f"""--job-name={ask.name}
--output={shlex.quote(log.replace("%", "%%"))}
--nodes=1
--ntasks=1
--requeue
--open-mode=append
--signal=B:TERM@{GRACE_S}
"""
    options += f"--partition={ask.at}\n" if ask.at else ""
    options += f"--gres=gpu:{n_gpus}\n" if n_gpus else ""
    options += f"--time={minutes}\n" if ask.most_s < 365 * 86400 else ""
    head = "".join(f"#SBATCH {option}\n" for option in options.splitlines())
    body = script_of(ask).removeprefix("#!/bin/sh\n").removesuffix('exit "$code"\n')
    again = '[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"\n'
    return {BATCH: f'#!/bin/sh\n{head}{body}{again}exit "$code"\n'}


def _rows(text: str) -> list[InstanceStatus]:
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return [
        job_status(
            name, number, bool(_OVER.fullmatch(state)), waits=state in ("PENDING", "REQUEUED")
        )
        for number, name, state in rows
    ]


def _submit(ask: LaunchRequest, folder: Path) -> list[str]:
    return ["sbatch", "--parsable", str(folder / BATCH)]


def _log(machine: RentedMachine) -> str:
    # it stands beside the script; `StdOut=` has other percent signs than its name
    where = f"scontrol show job {machine.id} | sed -n 's|{BATCH}$|log.txt|; s/ *Command=//p'"
    tail = "tr '\\n' '\\0' | xargs -r0 tail -n 200"
    return f"sh -c {shlex.quote(f'{where} | {tail}')}"


COMMANDS = Commands(
    submit=_submit,
    id_of=lambda text: text.strip().partition(";")[0],
    listing=lambda prefix: "squeue --noheader --states=all --me '--format=%i|%j|%T'",
    parse=_rows,
    destroy=lambda machine: f"scancel --full {machine.id}",
    log=_log,
)
TARGET = Target(
    "slurm",
    "Slurm",
    ends="the controller, at --time",
    render=render,
    at="[PARTITION]",
    commands=lambda at: COMMANDS,
    program="sbatch",
    install="log in to a node of the cluster",
    login=("sinfo --noheader", "log in to a node where `sinfo` answers"),
)
