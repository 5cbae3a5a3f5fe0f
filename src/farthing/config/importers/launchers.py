"""A DeepSpeed JSON or a YAML of `accelerate config` beside a job: how its GPUs share the work, as
keys of the job.

Every line is mapped or named; what the job says itself comes before. Facts: DeepSpeed's
"Configuration JSON" page and accelerate's `accelerate config` and `FullyShardedDataParallelPlugin`,
as of mid 2026. Refuses what farthing can't do: weights that are off-loaded, NVMe, tensor and
pipeline parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from farthing.config.importers.recognise import settings_in
from farthing.config.importers.record import (
    Imported,
    Line,
    Odd,
    To,
    by_rule,
    flat,
    number,
    positive,
    read_keys,
    say,
    truth,
    whole,
)
from farthing.config.importers.shared import reasons
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.storage.files import Json

AUTO = "auto there: the job says it"


def _given(convert: Any) -> Any:
    """`convert` for a value that DeepSpeed does not leave to the Trainer."""

    def converted(value: Any) -> Any:
        if value == "auto":
            raise Odd(AUTO, "none")
        return convert(value)

    return converted


def _offloaded(value: Any) -> str:
    if value in ("none", None):
        raise Odd("nothing is off-loaded", "none")
    if value != "cpu":
        raise Odd(
            f"optimizer state is off-loaded to {say(value)}; farthing off-loads it to main memory:"
            " say cpu",
            "blocks",
        )
    return "adamw_torch_offload"


def _weights_offloaded(value: Any) -> bool:
    if value in ("none", None, False):
        raise Odd("weights stay on the GPUs", "none")
    if value not in ("cpu", True):
        raise Odd(
            f"weights are off-loaded to {say(value)}; farthing keeps them in main memory: say cpu",
            "blocks",
        )
    return True


def _off(value: Any) -> None:
    if value in (False, None, 0, 1, "none", "no", "NO", ""):
        raise Odd("off there", "none")
    raise Odd("farthing spreads data and weights over GPUs, and nothing else", "blocks")


DEEPSPEED: dict[str, To] = {
    "zero_optimization.offload_optimizer.device": To("train.optim", _offloaded),
    "zero_optimization.offload_param.device": To("where.offload_weights", _weights_offloaded),
    "bf16.enabled": To("train.bf16", _given(truth)),
    "bfloat16.enabled": To("train.bf16", _given(truth)),
    "fp16.enabled": To("train.fp16", _given(truth)),
    "gradient_clipping": To("train.max_grad_norm", _given(number)),
    "train_batch_size": To("train.global_batch_size", _given(whole)),
    "optimizer.params.lr": To("train.learning_rate", _given(positive)),
    "optimizer.params.eps": To("train.adam_epsilon", _given(positive)),
    "optimizer.params.weight_decay": To("train.weight_decay", _given(number)),
    "scheduler.params.warmup_num_steps": To("train.warmup_steps", _given(whole)),
    "scheduler.params.warmup_max_lr": To("train.learning_rate", _given(positive)),
    "tensor_parallel.autotp_size": To("where.strategy", _off),
    "sequence_parallel_size": To("where.strategy", _off),
}


def read_deepspeed(values: Mapping[str, Any], out: Imported, method: str) -> None:
    """A DeepSpeed configuration, for a job of `method`."""
    zero = values.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage") is not None:
        _stage(out, "zero_optimization.stage", zero["stage"], method)
    kind = (
        (values.get("optimizer") or {}).get("type")
        if isinstance(values.get("optimizer"), Mapping)
        else None
    )
    if kind is not None:
        ours = {
            "adamw": "adamw_torch_fused",
            "adam": "adamw_torch_fused",
            "fusedadam": "adamw_torch_fused",
            "cpuadam": "adamw_torch_offload",
            "deepspeedcpuadam": "adamw_torch_offload",
        }.get(str(kind).lower())
        if ours is None:
            out.name("optimizer.type", kind, f"farthing has no {say(kind)}", "blocks")
        elif "zero_optimization.offload_optimizer.device" not in dict(flat(values)):
            out.put("optimizer.type", kind, "train.optim", ours)
        else:
            out.name(
                "optimizer.type",
                kind,
                "AdamW here too; where its state is follows from offload_optimizer",
            )
    betas = dict(flat(values)).get("optimizer.params.betas")
    if (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(each, int | float) for each in betas)
    ):
        out.put("optimizer.params.betas", betas, "train.adam_beta1", betas[0])
        out.job.setdefault("train.adam_beta2", betas[1])
    elif betas not in (None, "auto"):
        out.name("optimizer.params.betas", betas, "not two numbers", "blocks")
    schedules = {
        "WarmupLR": "constant_with_warmup",
        "WarmupDecayLR": "linear",
        "WarmupCosineLR": "cosine",
    }
    schedule = dict(flat(values)).get("scheduler.type")
    if schedule is not None:
        if schedule in schedules:
            out.put("scheduler.type", schedule, "train.lr_scheduler_type", schedules[schedule])
        else:
            out.name("scheduler.type", schedule, f"farthing has no {say(schedule)}", "blocks")
    read_keys(out, flat(values), DEEPSPEED, reasons("deepspeed"))


def _stage(out: Imported, key: str, value: Any, method: str) -> None:
    """ZeRO's stage as a strategy: an adapter's base is spread in stage 3 alone, as there."""
    if str(value) not in ("0", "1", "2", "3"):
        out.name(key, value, "ZeRO has stages 0 to 3", "blocks")
        return
    stage = int(value)
    spreads = stage == 3 or (stage == 2 and method == "full")
    notes = {
        1: "optimizer state is on each GPU here",
        2: "" if spreads else "an adapter's gradients and state are small",
    }
    out.put(key, value, "where.strategy", "fsdp" if spreads else "ddp", notes.get(stage, ""))
    if spreads:
        out.job.setdefault("where.reshard_after_forward", stage == 3)


def _precision(value: Any) -> bool:
    if value not in ("bf16", "no", False, ""):
        raise Odd(f"farthing computes in bf16, fp16 or fp32, not in {say(value)}", "blocks")
    return bool(value == "bf16")


ACCELERATE: dict[str, To] = {
    "num_processes": To("where.gpus", whole),
    "gradient_clipping": To("train.max_grad_norm", number),
    "fsdp_config.fsdp_offload_params": To("where.offload_weights", _weights_offloaded),
    "deepspeed_config.gradient_clipping": To("train.max_grad_norm", _given(number)),
    "deepspeed_config.offload_optimizer_device": To("train.optim", _offloaded),
    "deepspeed_config.offload_param_device": To("where.offload_weights", _weights_offloaded),
    **{
        f"parallelism_config.parallelism_config_{kind}_size": To("where.strategy", _off)
        for kind in ("tp", "cp", "sp")
    },
}


def read_accelerate(values: Mapping[str, Any], out: Imported, method: str) -> None:
    """A file of `accelerate config`, for a job of `method`."""
    kind, fsdp = (
        str(values.get("distributed_type") or "NO").upper(),
        values.get("fsdp_config") or {},
    )
    if kind in ("FSDP", "DEEPSPEED"):
        out.keep("distributed_type", kind, "where.strategy")
    elif kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        out.put("distributed_type", kind, "where.strategy", "ddp")
    else:
        out.name("distributed_type", kind, f"farthing does not train by {say(kind)}", "blocks")
    if kind == "FSDP" and isinstance(fsdp, Mapping):
        _fsdp(fsdp, out)
    inner = values.get("deepspeed_config") or {}
    if isinstance(inner, Mapping) and inner.get("zero_stage") is not None:
        _stage(out, "deepspeed_config.zero_stage", inner["zero_stage"], method)
    if isinstance(inner, Mapping) and inner.get("deepspeed_config_file"):
        out.name(
            "deepspeed_config.deepspeed_config_file",
            inner["deepspeed_config_file"],
            "name this file with --deepspeed",
            "blocks",
        )
    if (precision := values.get("mixed_precision")) is not None:
        is_fp16 = precision == "fp16"
        rule = To("train.fp16", lambda _: True) if is_fp16 else To("train.bf16", _precision)
        by_rule(out, "mixed_precision", precision, rule)
    if str(values.get("num_machines") or 1) != "1":
        out.name(
            "num_processes",
            values.get("num_processes"),
            "on several machines torchrun or srun starts them",
            "differs",
        )
    if values.get("use_cpu"):
        out.put("use_cpu", True, "where.device", "cpu")
    read_keys(out, flat(values), ACCELERATE, reasons("accelerate"))


def _fsdp(values: Mapping[str, Any], out: Imported) -> None:
    """FSDP 1 has a strategy by name, FSDP 2 whether it reshards after forward."""
    name = str(values.get("fsdp_sharding_strategy") or "").upper()
    name = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(
        name, name
    )
    strategy = {
        "": "fsdp",
        "FULL_SHARD": "fsdp",
        "SHARD_GRAD_OP": "fsdp",
        "NO_SHARD": "ddp",
        "HYBRID_SHARD": "hsdp",
        "HYBRID_SHARD_ZERO2": "hsdp",
    }.get(name)
    key = "fsdp_config.fsdp_sharding_strategy" if name else "fsdp_config"
    if strategy is None:
        out.name(key, name, "not a sharding strategy that is known", "blocks")
        return
    out.put(key, name or "FSDP", "where.strategy", strategy)
    reshards = values.get(
        "fsdp_reshard_after_forward", name not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    )
    if isinstance(reshards, str) and reshards.upper() in ("FULL_SHARD", "SHARD_GRAD_OP"):
        reshards = reshards.upper() == "FULL_SHARD"
    try:
        out.put(
            "fsdp_config.fsdp_reshard_after_forward",
            reshards,
            "where.reshard_after_forward",
            truth(reshards),
        )
    except Odd as odd:
        out.name("fsdp_config.fsdp_reshard_after_forward", reshards, str(odd), "blocks")


# ---- beside a job ----


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
        read = read_deepspeed if kind == "deepspeed" else read_accelerate
        read(settings_in(Path(name)), out, job.method.name)
        if out.blockers:
            lines = "; ".join(
                f"{line.key}: {say(line.value)} - {line.why}" for line in out.blockers
            )
            raise InputError(
                f"asks for what farthing does not do: {lines}",
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
    return (
        f"{value} -> {line.became}: {say(out.job[line.became])}{note}"
        if line.became in out.job
        else f"{value}{note}"
    )
