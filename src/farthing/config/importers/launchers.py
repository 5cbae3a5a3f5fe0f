"""A DeepSpeed JSON or a YAML of `accelerate config` beside a job, as keys of the job (as of mid
2026). Weights on NVMe, tensor and pipeline parallelism are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from farthing.config.importers.recognise import settings_in
from farthing.config.importers.tables import Imported, KeyFate, read_keys, say
from farthing.config.job import SECTIONS, Job
from farthing.config.values import flat
from farthing.errors import InputError
from farthing.storage.files import Json


def _deepspeed(values: Json, out: Imported, method: str) -> None:
    leaves = dict(flat(values))
    _stage(out, "zero_optimization.stage", leaves, method)
    kind = leaves.get("optimizer.type")
    if kind is not None and "zero_optimization.offload_optimizer.device" in leaves:
        out.name("optimizer.type", kind, "where AdamW's state is follows from offload_optimizer")
    betas = leaves.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2 and {*map(type, betas)} <= {float, int}:
        out.put("optimizer.params.betas", betas, "train.adam_beta1", betas[0])
        out.job.setdefault("train.adam_beta2", betas[1])
    read_keys(out, values, "deepspeed")


def _stage(out: Imported, key: str, leaves: Json, method: str) -> None:
    """ZeRO's stage as a strategy: an adapter's base is spread in stage 3 alone, as there."""
    value = leaves.get(key)
    if value is None:
        return None
    if str(value) not in ("0", "1", "2", "3"):
        return out.refuse(key, value, "ZeRO has stages 0 to 3")
    stage = int(value)
    spreads = stage == 3 or (stage == 2 and method == "full")
    note = "optimizer state is on each GPU here" if stage == 1 else ""
    if stage == 2 and not spreads:
        note = "an adapter's gradients and state are small"
    out.put(key, value, "where.strategy", "fsdp" if spreads else "ddp", note)
    if spreads:
        out.job.setdefault("where.reshard_after_forward", stage == 3)
    return None


def _accelerate(values: Json, out: Imported, method: str) -> None:
    kind = str(values.get("distributed_type")).upper()
    if kind in ("FSDP", "DEEPSPEED"):
        out.keep({"distributed_type": kind}, "where.strategy")
    given = values.get("fsdp_config")
    fsdp: Json = given if isinstance(given, dict) else {}
    if kind != "FSDP":
        for key, value in flat(fsdp, "fsdp_config."):
            out.name(key, value, "distributed_type is not FSDP")
    _stage(out, "deepspeed_config.zero_stage", dict(flat(values)), method)
    if str(values.get("num_machines") or 1) != "1":
        why = "on several machines torchrun or srun starts them"
        out.name("num_processes", values.get("num_processes"), why, "differs")
    if values.get("use_cpu"):
        out.put("use_cpu", True, "where.device", "cpu")
    read_keys(out, values, "accelerate")
    if kind == "FSDP":  # FSDP 1 says by its strategy whether it reshards after forward
        out.job.setdefault("where.strategy", "fsdp")
        strategy = str(fsdp.get("fsdp_sharding_strategy")).upper()
        is_kept = strategy in ("2", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        out.job.setdefault("where.reshard_after_forward", not is_kept)


def beside(job: Job, files: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(overrides for the job, what became of every line) of files: (kind, name), deepspeed or
    accelerate.

    What the job says itself stays. Raises `InputError` for a file that can't be read, or asks for
    what farthing can't do.
    """
    overrides: Json = {}
    own = {f"{name}.{key}" for name in SECTIONS for key in getattr(job, name).model_fields_set}
    said: list[str] = []
    for kind, name in files:
        out, values = Imported(kind, Path(name)), settings_in(Path(name))
        (_deepspeed if kind == "deepspeed" else _accelerate)(values, out, job.method.name)
        if out.blockers:
            lines = [f"{line.key}: {say(line.value)} - {line.why}" for line in out.blockers]
            what = f"asks for features that farthing lacks: {'; '.join(lines)}"
            to_do = "change these lines, or leave the file out and say it in the job"
            raise InputError(what, where=name, to_do=to_do)
        stays = own | overrides.keys()
        said += [f"{name}: {_in_words(line, out, stays)}" for line in out.lines.values()]
        overrides |= {key: value for key, value in out.job.items() if key not in stays}
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()], said


def _in_words(line: KeyFate, out: Imported, stays: set[str]) -> str:
    value, became = f"{line.key}: {say(line.value)}", line.became
    if not became:
        return f"{value} - {line.why}"
    if became in stays:
        return f"{value} - left out: the job says {became} itself"
    to = f" -> {became}: {say(out.job[became])}" if became in out.job else ""
    return value + to + (f" ({line.why})" if line.why else "")
