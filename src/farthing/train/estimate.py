"""What the plan says of a run before it begins.

The promise is made once, before the first attempt, and kept in the run folder, also that there is none: later attempts are
cut as the first was, so that they go on to the bit, and the receipt holds what happened against the first word.

Refuses to decide: `plan` does. A model or device that the planner does not know has no promise, and trains all the same.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from farthing.config.job import Job
from farthing.durability.files import Damaged
from farthing.durability.run_folder import PLAN, has_committed, keep, kept
from farthing.errors import FarthingError, RunDamaged
from farthing.events import Emit, Note, Warned
from farthing.model.hardware import Numerics
from farthing.planner.inputs import plan_here, promise_of, shape_of, wanted_of
from farthing.planner.lengths import Lengths, from_token_set
from farthing.planner.machine import local_machine
from farthing.planner.measurements import MEASUREMENTS, read_measurements
from farthing.planner.types import Rejected
from farthing.train.setup import Examples, Inputs


def promised(
    job: Job,
    folder: Path,
    inputs: Inputs,
    numerics: Numerics,
    train: Examples,
    held_out: Examples | None,
    emit: Emit,
) -> dict[str, Any]:
    """The promise of this run: the first attempt's, or a new one; empty where the planner can say nothing."""
    before = _kept(folder, emit)
    if before is not None:
        return before if "wall_range_s" in before else {}
    try:
        made = _make(job, inputs, numerics, train, held_out)
    except FarthingError as error:
        emit(Note(f"no plan for this run: {error.what}"))
        made = {}
    if isinstance(made, Rejected):
        emit(Warned(f"by the plan this job does not work on this machine: {made.reason}; {made.change}"))
        made = {}
    keep(folder / PLAN, made)  # also that there is none: later attempts must not find one
    return made


def _kept(folder: Path, emit: Emit) -> dict[str, Any] | None:
    """The plan that earlier attempts were cut by; None where it has to be made. Raises `RunDamaged`."""
    try:
        plan = kept(folder / PLAN)
    except Damaged as error:
        if has_committed(folder):
            raise RunDamaged(
                f"{error}: how the run is cut into micro-batches is not known",
                where=str(folder / PLAN),
                to_do="bring it back from a copy, or remove it: the run goes on, equal to rounding",
            ) from error
        emit(Warned(f"{error}; no checkpoint depends on it yet: it is made again"))
        return None
    if plan is None and has_committed(folder):
        emit(Warned(f"{PLAN} is gone: it is made again, and the run goes on equal to rounding, not to the bit"))
    return plan


def _make(
    job: Job, inputs: Inputs, numerics: Numerics, train: Examples, held_out: Examples | None
) -> dict[str, Any] | Rejected:
    def lengths_of(examples: Examples) -> Lengths:
        words = f"{len(examples):,} tokenized examples"
        return from_token_set(examples.tokens, examples.indices, job.task, source=words)

    config = inputs.config.to_dict()
    shape = shape_of(job, config, max(1, len(train.tokens.label_names)))
    now = datetime.now().astimezone()
    eval_lengths = None if held_out is None else lengths_of(held_out)
    wanted = wanted_of(job, shape, lengths_of(train), eval_lengths, config=config, now=now)
    wanted = replace(wanted, is_tokenized=train.were_tokenized, precision=numerics.name)
    machine = replace(local_machine(), kind="cpu")
    if numerics.device.type == "cuda":
        memory_bytes = int(torch.cuda.mem_get_info(numerics.device)[1])
        name = torch.cuda.get_device_name(numerics.device)
        machine = replace(machine, kind="cuda", device_name=name, memory_bytes=memory_bytes)
    else:
        machine = replace(machine, device_name=machine.cpu.name)
    measurements = read_measurements(Path(job.cache_dir or ".") / MEASUREMENTS)
    plan = plan_here(wanted, machine, job, measurements, now.date())
    if plan is None:
        return {}
    return plan if isinstance(plan, Rejected) else promise_of(plan, wanted)
