"""What the plan says of a run before it begins.

The estimate is made once, before the first attempt, and kept in the run folder, also that there is
none: plan.json is never written again, and the receipt holds what happened against it. What the run
is then computed by is in settings.json.

A model or device that the planner does not know has no estimate, and trains all the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from farthing import clock
from farthing.data.lengths import Lengths, from_token_set
from farthing.errors import FarthingError
from farthing.events import Emit, Note, Warned
from farthing.local.machine import free_memory_bytes, local_machine
from farthing.local.measurements import MEASUREMENTS, read_measurements
from farthing.planner.estimate import Estimate
from farthing.planner.inputs import estimate_of, plan_here, shape_of, wanted_of
from farthing.planner.memory import CUDA_CONTEXT_BYTES
from farthing.planner.types import OfferPlan, Rejected
from farthing.run.folder import PLAN, SETTINGS, has_committed, keep, kept_as
from farthing.train.resolve import Examples, RunSpec


def estimated(
    spec: RunSpec,
    folder: Path,
    train: Examples,
    held_out: Examples | None,
    emit: Emit,
    n_ranks: int = 1,
) -> Estimate | None:
    """The estimate of this run: the first attempt's, or a new one; None where the planner can say
    nothing.

    `n_ranks` processes share it, each of which sees one GPU alone.
    """

    def warn(text: str) -> None:
        emit(Warned(text))

    before = kept_as(folder / PLAN, lambda values: (Estimate.from_json(values),), warn)
    if before is not None:
        return before[0]
    if has_committed(folder) and not (folder / SETTINGS).exists():
        warn(
            f"{PLAN} is gone: it is made again, and the run continues, equal to rounding but"
            " not to the bit"
        )
    made: Estimate | Rejected | None = None
    try:
        made = _make(spec, train, held_out, n_ranks)
    except FarthingError as error:
        emit(Note(f"no plan for this run: {error.what}"))
    if isinstance(made, Rejected):
        warn(f"by the plan this job does not work on this machine: {made.reason}; {made.change}")
        made = None
    # also that there is none: later attempts must not find one
    keep(folder / PLAN, {} if made is None else made.to_json())
    return made


def _make(
    spec: RunSpec, train: Examples, held_out: Examples | None, n_ranks: int
) -> Estimate | Rejected | None:
    job, numerics, config = spec.job, spec.numerics, spec.config.to_dict()

    def lengths_of(examples: Examples) -> Lengths:
        words = f"{len(examples):,} tokenized examples"
        return from_token_set(examples.tokens, examples.indices, job.task, source=words)

    shape = shape_of(job, config, max(1, len(train.tokens.label_names)))
    eval_lengths = None if held_out is None else lengths_of(held_out)
    wanted = wanted_of(job, shape, lengths_of(train), eval_lengths, config=config, now=clock.now())
    wanted = replace(wanted, is_tokenized=train.were_tokenized, precision=numerics.name)
    machine = replace(local_machine(), kind="cpu", gpus=())
    if numerics.device.type == "cuda":
        free_bytes, memory_bytes = map(int, torch.cuda.mem_get_info(numerics.device))
        own_bytes = torch.cuda.memory_reserved(numerics.device) + CUDA_CONTEXT_BYTES
        name = torch.cuda.get_device_name(numerics.device)
        n_gpus = torch.cuda.device_count()  # a container may be without nvidia-smi
        machine = replace(
            machine,
            kind="cuda",
            device_name=name,
            n_gpus=n_gpus,
            memory_bytes=memory_bytes,
            taken_bytes=max(0, memory_bytes - free_bytes - own_bytes),
        )
    else:
        machine = replace(
            machine, device_name=machine.cpu.name, memory_bytes=free_memory_bytes()
        )  # whatever GPU is here
    measurements = read_measurements(Path(job.cache_dir or ".") / MEASUREMENTS)
    plan = plan_here(wanted, machine, job, measurements, clock.today(), n_ranks)
    return estimate_of(plan, wanted) if isinstance(plan, OfferPlan) else plan
