"""Which way several GPUs share a run's weights: the job's word, or where that is `auto` what fits.

ddp: each GPU has everything, and gradients are summed. fsdp: rows of the weights are spread over
all GPUs; of an adapter's run the frozen base, in full training weights, gradients and optimizer
state. hsdp: spread over the GPUs of a machine, with a copy on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farthing.dist.ranks import Ranks
from farthing.errors import InputError
from farthing.events import Emit, Note
from farthing.model.precision import precision_of
from farthing.models.weights import begins_from_base
from farthing.planner.optimizers import optimizer
from farthing.train.resolve import RunSpec
from farthing.units import plural, say_bytes

OF_WORDS = {"embed_tokens", "lm_head"}  # peft writes such a layer with its adapter
SHARE = 0.8
"""Of a GPU's memory that weights, gradients and optimizer state may take before they are spread:
the rest is for a step.
"""


def may_shard(spec: RunSpec, ranks: Ranks) -> bool:
    """Whether the model should be read into main memory first, as its weights may not come whole to
    the GPU.
    """
    is_open = spec.where.strategy == "auto" and ranks.n > 1 and ranks.device.type == "cuda"
    return spec.method.name != "qlora" and (spec.where.strategy in ("fsdp", "hsdp") or is_open)


def read_where_it_differs(ranks: Ranks, model: Any, read: Callable[[], Any]) -> Any:
    """The model whose weights come from the first rank, alone in reading them; read here too where
    its configuration makes another one than its files have."""
    own = [
        [name, list(tensor.shape)]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return model if ranks.tell_all(own) == own else read()


def shard_weights(spec: RunSpec, ranks: Ranks, model: Any, emit: Emit) -> None:
    """Shard the weights over the ranks where the job asks for it, or they fit no other way.
    Raises `InputError`.
    """
    where, numerics = spec.where, spec.numerics
    way, because = _way_of(spec, ranks, model)
    if way == "ddp":
        if where.offload_weights:
            raise InputError(
                "weights that every GPU has all of are not kept in main memory",
                where="where.offload_weights",
                to_do="set where.strategy: fsdp as well",
            )
        if may_shard(spec, ranks):
            ranks.bring((*model.parameters(), *model.buffers()))
        return
    if why := why_not_shard(spec):
        raise InputError(
            f"the weights can't be spread: {why[0]}", where=f"where.strategy: {way}", to_do=why[1]
        )
    from farthing.dist.fsdp import (
        ShardingSettings,  # takes FSDP2 along, which other runs have no use for
    )

    n_shards = _n_shards(ranks) if way == "hsdp" else ranks.n
    gathers_in = precision_of(spec.method.name, spec.train.optim, numerics).gathers
    ranks.apply_fsdp(
        model,
        ShardingSettings(where.reshard_after_forward, n_shards, gathers_in, where.offload_weights),
    )
    zero = "ZeRO-3" if where.reshard_after_forward else "ZeRO-2"
    what = "all weights are" if ranks.trains_rows else "the frozen weights are"
    over = plural(n_shards, "rank")
    if n_shards < ranks.n:
        over += f", with a copy on each of {ranks.n // n_shards} machines"
    if where.offload_weights:
        over += ", and kept in main memory"
    emit(Note(f"{way} ({zero}): {what} spread over {over}{because}"))


def why_not_shard(spec: RunSpec) -> tuple[str, str] | None:
    """(why the weights of this job can't be spread, what to do about it); None where they can."""
    is_full, optim, where = spec.method.name == "full", spec.train.optim, spec.where
    refusals = [
        (
            begins_from_base(spec.method.init_lora_weights) and not is_full,
            "the adapter's start has no rows to share",
            "use ddp, or leave method.init_lora_weights out",
        ),
        (
            not is_full
            and bool(spec.choice.new_tokens or OF_WORDS & {*spec.method.target_modules}),
            "embeddings that an adapter changes are written whole",
            "use ddp, or method: full",
        ),
        (
            spec.method.name == "qlora",
            "4-bit weights lose their quantization when they are gathered",
            "use ddp, or method: lora",
        ),
        (
            is_full and not optimizer(optim).has_rows,
            f"the state of optim: {optim} is not by rows of the weights",
            "use adamw_torch_fused, or adamw_torch_offload, which takes no memory of the GPUs",
        ),
        (
            where.offload_weights and spec.numerics.autocast == torch.float16,
            "gradients in fp16 are not scaled in main memory",
            "use bf16: true, or leave where.offload_weights out",
        ),
        (
            spec.train.torch_compile,
            "layers are not compiled where their weights are gathered",
            "leave train.torch_compile out, or use ddp",
        ),
        (
            is_full and where.same_bits,
            "sums over spread gradients are equal to rounding, and where.same_bits asks for more",
            "leave where.same_bits out, or use ddp",
        ),
        (
            spec.writing is not None,
            "texts of different lengths are written by ranks that have to compute alike",
            "set train.predict_with_generate: false, or use ddp",
        ),
    ]
    return next(((why, to_do) for is_so, why, to_do in refusals if is_so), None)


def _way_of(spec: RunSpec, ranks: Ranks, model: Any) -> tuple[str, str]:
    """(ddp, fsdp or hsdp; why)."""
    if spec.where.strategy != "auto":
        return spec.where.strategy, ""
    if not may_shard(spec, ranks) or why_not_shard(spec):
        return "ddp", ""
    need_bytes = ranks.tell_all(resident_bytes(model, spec.train.optim))
    have_bytes = ranks.least(torch.cuda.get_device_properties(ranks.device).total_memory)
    if need_bytes <= SHARE * have_bytes:
        return "ddp", ""
    need = f"{say_bytes(need_bytes)} of weights, gradients and state"
    return "fsdp", f", as {need} leave no room for a step on one GPU"


def resident_bytes(model: Any, optim: str) -> int:
    """What weights, gradients and optimizer state take where each GPU has all of them."""
    kept = optimizer(optim)
    found = 0.0
    for weight in model.parameters():
        found += weight.nbytes
        if weight.requires_grad:
            found += weight.nbytes + weight.numel() * kept.state_bytes(weight.element_size())
    return int(found)


def _n_shards(ranks: Ranks) -> int:
    """Ranks of a machine, over which its copy of the weights is spread. Raises `InputError`."""
    if ranks.n % ranks.seat.n_local:
        raise InputError(
            f"{ranks.n} ranks are not a multiple of the {ranks.seat.n_local} of this machine",
            where="where.strategy: hsdp",
            to_do="start as many processes on every machine, or use fsdp",
        )
    return ranks.seat.n_local
