"""Whether an attempt may train: it belongs to the folder's run, which has not ended, and the limits
have room for a start.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from farthing.errors import RunDamagedError
from farthing.model.hardware import device_name
from farthing.run.exported import damage_of, damaged_checkpoints
from farthing.run.folder import MODEL, MORE_STEPS, RUN, claim, keep, kept_job
from farthing.storage.files import Json, set_aside
from farthing.train.context import Context
from farthing.train.resolve import RunSpec
from farthing.units import say_seconds


def claimed(spec: RunSpec, context: Context, *, allow_restart: bool) -> Json:
    """The facts of the folder's run, which is this one. Raises `RunChangedError`,
    `RunDamagedError`.
    """
    machine = {
        "device": device_name(spec.numerics.device),
        "precision": spec.numerics.name,
        "micro-batch": str(spec.train.micro_batch_tokens or spec.micro_batch_size),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if not spec.where.same_bits:
        machine["processes"] = str(context.ranks.n)
    folder, warn = context.folder, context.warn
    facts = claim(folder, spec.identity, machine, warn, allow_restart=allow_restart)
    if facts.get("finished") and _asks_for_other_steps(spec, folder):
        del facts["finished"]
        keep(folder / RUN, facts)
    return facts


def _asks_for_other_steps(spec: RunSpec, folder: Path) -> bool:
    """Whether a finished run resumes, for more steps or to write the model of another one."""
    try:
        before = kept_job(folder)["train"]
    except RunDamagedError:
        return True  # nobody knows: a run at its last step ends at once
    return any(before[key] != getattr(spec.train, key) for key in MORE_STEPS)


def why_not_admitted(context: Context, *, was_finished: bool) -> tuple[str, str] | None:
    """(state, reason) where there is nothing to train."""
    folder, ledger, limits = context.folder, context.ledger, context.limits
    if damage := damage_of(folder):
        aside = set_aside(folder / MODEL)
        context.warn(
            f"the exported model is damaged ({damage}): set aside as {aside.name}, and written"
            " again from the checkpoint"
        )
    elif was_finished:
        ledger.withdraw()
        for text in damaged_checkpoints(folder):
            context.warn(text)
        return "finished", "the run had finished already; nothing was trained"
    if reason := limits.why_not_start():
        return "limit", reason
    if ledger.clock_back_s > 60 and any(each.is_time_of_day for each in limits.left()):
        context.warn(
            f"the clock is {say_seconds(ledger.clock_back_s)} behind what earlier attempts saw;"
            " the deadline counts by this clock"
        )
    return None
