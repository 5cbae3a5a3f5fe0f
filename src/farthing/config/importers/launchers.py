"""A DeepSpeed JSON or a YAML of `accelerate config` beside a job: how its GPUs share the work, as
keys of the job.

Every line is mapped or named; what the job says itself comes before. Facts: DeepSpeed's
"Configuration JSON" page and accelerate's `accelerate config` and `FullyShardedDataParallelPlugin`,
as of mid 2026. Weights on NVMe, tensor and pipeline parallelism are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers.recognise import settings_in
from farthing.config.importers.record import Imported, Line, Odd, flat, read_keys, say
from farthing.config.importers.tables import fact, table, truth
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.storage.files import Json


def _deepspeed(values: Mapping[str, Any], out: Imported, method: str) -> None:
    """A DeepSpeed configuration, for a job of `method`."""
    leaves = dict(flat(values))
    if (stage := leaves.get("zero_optimization.stage")) is not None:
        _stage(out, "zero_optimization.stage", stage, method)
    kind = leaves.get("optimizer.type")
    if kind is not None and "zero_optimization.offload_optimizer.device" in leaves:
        out.name("optimizer.type", kind, "where AdamW's state is follows from offload_optimizer")
    for key, to in (
        ("optimizer.type", "train.optim"),
        ("scheduler.type", "train.lr_scheduler_type"),
    ):
        value = leaves.get(key)
        ours = fact(f"deepspeed {key}").get(str(value).lower())
        if ours and key not in out.lines:
            out.put(key, value, to, ours)
        elif value is not None:
            out.name(key, value, f"farthing has no {say(value)}", "blocks")
    betas = leaves.get("optimizer.params.betas")
    if isinstance(betas, list) and [type(each) for each in betas] in ([float] * 2, [int] * 2):
        out.put("optimizer.params.betas", betas, "train.adam_beta1", betas[0])
        out.job.setdefault("train.adam_beta2", betas[1])
    elif betas not in (None, "auto"):
        out.name("optimizer.params.betas", betas, "not two numbers", "blocks")
    read_keys(out, leaves.items(), table("deepspeed"))


def _stage(out: Imported, key: str, value: Any, method: str) -> None:
    """ZeRO's stage as a strategy: an adapter's base is spread in stage 3 alone, as there."""
    if str(value) not in ("0", "1", "2", "3"):
        return out.name(key, value, "ZeRO has stages 0 to 3", "blocks")
    stage = int(value)
    spreads = stage == 3 or (stage == 2 and method == "full")
    note = "optimizer state is on each GPU here" if stage == 1 else ""
    if stage == 2 and not spreads:
        note = "an adapter's gradients and state are small"
    out.put(key, value, "where.strategy", "fsdp" if spreads else "ddp", note)
    if spreads:
        out.job.setdefault("where.reshard_after_forward", stage == 3)
    return None


def _accelerate(values: Mapping[str, Any], out: Imported, method: str) -> None:
    """A file of `accelerate config`, for a job of `method`."""
    leaves = dict(flat(values))
    kind = str(values.get("distributed_type") or "NO").upper()
    if kind in ("FSDP", "DEEPSPEED"):
        out.keep([("distributed_type", kind)], "where.strategy")
    elif kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        out.put("distributed_type", kind, "where.strategy", "ddp")
    else:
        out.name("distributed_type", kind, f"farthing does not train by {say(kind)}", "blocks")
    fsdp = values.get("fsdp_config") or {}
    if kind == "FSDP" and isinstance(fsdp, Mapping):
        _fsdp(fsdp, out)
    if (stage := leaves.get("deepspeed_config.zero_stage")) is not None:
        _stage(out, "deepspeed_config.zero_stage", stage, method)
    if file := leaves.get("deepspeed_config.deepspeed_config_file"):
        why = "name this file with --deepspeed"
        out.name("deepspeed_config.deepspeed_config_file", file, why, "blocks")
    precision = values.get("mixed_precision")
    if precision in ("bf16", "fp16", "no", False, ""):
        to = "train.fp16" if precision == "fp16" else "train.bf16"
        out.put("mixed_precision", precision, to, precision in ("bf16", "fp16"))
    elif precision is not None:
        why = f"farthing computes in bf16, fp16 or fp32, not in {say(precision)}"
        out.name("mixed_precision", precision, why, "blocks")
    if str(values.get("num_machines") or 1) != "1":
        why = "on several machines torchrun or srun starts them"
        out.name("num_processes", values.get("num_processes"), why, "differs")
    if values.get("use_cpu"):
        out.put("use_cpu", True, "where.device", "cpu")
    read_keys(out, leaves.items(), table("accelerate"))


def _fsdp(values: Mapping[str, Any], out: Imported) -> None:
    """FSDP 1 has a strategy by name, FSDP 2 whether it reshards after forward."""
    given = str(values.get("fsdp_sharding_strategy") or "").upper()
    name = fact("fsdp names").get(given, given)
    strategy = {"": "fsdp", **fact("fsdp strategies")}.get(name)
    key = "fsdp_config.fsdp_sharding_strategy" if name else "fsdp_config"
    if strategy is None:
        return out.name(key, name, "not a sharding strategy that is known", "blocks")
    out.put(key, name or "FSDP", "where.strategy", strategy)
    is_kept = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    reshards = values.get("fsdp_reshard_after_forward", not is_kept)
    if isinstance(reshards, str) and reshards.upper() in ("FULL_SHARD", "SHARD_GRAD_OP"):
        reshards = reshards.upper() == "FULL_SHARD"
    key = "fsdp_config.fsdp_reshard_after_forward"
    try:
        out.put(key, reshards, "where.reshard_after_forward", truth(reshards))
    except Odd as odd:
        out.name(key, reshards, str(odd), "blocks")
    return None


def beside(job: Job, files: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(overrides for the job, what became of every line) of files: (kind, name), deepspeed or
    accelerate.

    What the job says itself stays. Raises `InputError` for a file that can't be read, or asks for
    what farthing can't do.
    """
    overrides: Json = {}
    said: list[str] = []
    for kind, name in files:
        out = Imported(kind)
        read = _deepspeed if kind == "deepspeed" else _accelerate
        read(settings_in(Path(name)), out, job.method.name)
        if out.blockers:
            lines = [f"{line.key}: {say(line.value)} - {line.why}" for line in out.blockers]
            raise InputError(
                f"asks for features that farthing lacks: {'; '.join(lines)}",
                where=name,
                to_do="change these lines, or leave the file out and say it in the job",
            )
        stays = {key for key in out.job if _says(job, key) or key in overrides}
        said += [f"{name}: {_in_words(line, out, stays)}" for line in out.lines.values()]
        overrides |= {key: value for key, value in out.job.items() if key not in stays}
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()], said


def _says(job: Job, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(job, section).model_fields_set


def _in_words(line: Line, out: Imported, stays: set[str]) -> str:
    value = f"{line.key}: {say(line.value)}"
    if not line.became:
        return f"{value} - {line.why}"
    note = f" ({line.why})" if line.why else ""
    if line.became in stays:
        return f"{value} - left out: the job says {line.became} itself"
    if line.became not in out.job:
        return f"{value}{note}"
    return f"{value} -> {line.became}: {say(out.job[line.became])}{note}"
