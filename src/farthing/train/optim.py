"""Optimizers by their Hugging Face names, and their state by weight name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farthing.config.job import TrainSection
from farthing.errors import ModelError
from farthing.model.load import need_bitsandbytes
from farthing.planner.optimizers import BF16_WEIGHTS
from farthing.run.checkpoint import State
from farthing.storage.files import Json
from farthing.train.bf16_adamw import StochasticAdamW, adamw_state
from farthing.train.offload import OffloadedAdamW

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay is for, by the rule of transformers' `Trainer`
    (`get_decay_parameter_names` of version 5): all but those of a `LayerNorm` and those that are
    called bias or norm.

    By name and not by shape: the magnitudes of DoRA and the `D` of Mamba are decayed, the biases of
    experts and T5's biases of distances are not, though some of these are matrices.
    """
    norms = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)
    )
    return {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(norms) and not _UNDECAYED.search(name.lower())
    }


def make_optimizer(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    train: TrainSection,
    learning_rate: float,
    loraplus: float | None = None,
) -> torch.optim.Optimizer:
    """The job's optimizer over the trained `weights` of a model by name, whole or the rows of this
    rank, those that are decayed in a group of their own.

    With `loraplus` the rate of LoRA's B matrices and of all vectors is so many times
    that of the others, as in peft's `create_loraplus_optimizer`. Raises `HardwareError` for an
    8-bit or paged one where bitsandbytes does not work.
    """
    decayed, places = decayed_names(model), dict[tuple[bool, bool], list[nn.Parameter]]()
    for of, weight in weights.items():
        is_fast = loraplus is not None and ("lora_B" in of or weight.ndim == 1)
        places.setdefault((is_fast, of not in decayed), []).append(weight)
    groups: list[dict[str, object]] = [
        {
            "params": some,
            "weight_decay": 0.0 if is_undecayed else train.weight_decay,
            "lr_ratio": loraplus if is_fast else 1.0,
        }
        for (is_fast, is_undecayed), some in places.items()
    ]
    name = train.optim
    plain = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if name in plain:  # decay copies a weight at a time, not all
        return plain[name](groups, lr=learning_rate, foreach=False)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(
            groups, lr=learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    betas = train.adam_beta1, train.adam_beta2
    adam: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": train.adam_epsilon}
    ours: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw_torch_fused": partial(torch.optim.AdamW, fused=True),
        "adamw_torch": partial(torch.optim.AdamW, fused=False),
        "adamw_torch_offload": OffloadedAdamW,
        BF16_WEIGHTS: StochasticAdamW,
    }
    if name in ours:
        return ours[name](groups, **adam)
    bitsandbytes = need_bitsandbytes(f"optim: {name}")
    kind = {
        "adamw_8bit": "AdamW8bit",
        "adamw_bnb_8bit": "AdamW8bit",
        "paged_adamw_8bit": "PagedAdamW8bit",
        "paged_adamw_32bit": "PagedAdamW32bit",
    }[name]
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(groups, **adam)
    return waiting_once(optimizer, bitsandbytes.optim.optimizer)


def waiting_once(optimizer: Any, module: Any) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes that waits for the GPU once a step where its state is paged,
    which the host reads; else not at all. By itself it would after each weight (`sync_gpu` in its
    `step`, 0.50.2)."""
    step, wait = optimizer.step, module.sync_gpu

    def step_and_wait(*args: Any, **kwargs: Any) -> Any:
        module.sync_gpu = lambda weight: None
        try:
            return step(*args, **kwargs)
        finally:
            module.sync_gpu = wait
            if optimizer.is_paged:
                wait(optimizer.param_groups[0]["params"][0])

    optimizer.step = step_and_wait
    made: torch.optim.Optimizer = optimizer
    return made


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """State that is on a device, in bytes. Off-loaded and paged state is the host's, and does not
    count on a GPU.
    """
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(
        value.nbytes
        for value in values
        if isinstance(value, Tensor) and value.device.type == device.type
    )


def state_tensors(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> State:
    """(tensors, plain values) of the optimizer's state as flat `weight|key` dicts."""
    tensors: dict[str, Tensor] = {}
    values: Json = {}
    for name, weight in weights.items():
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}|{key}"] = value.detach()
            elif isinstance(value, int | float | str | bool) or value is None:
                values[f"{name}|{key}"] = value
            else:
                raise ModelError(
                    f"optimizer state {name}|{key} is a {type(value).__name__}, which can't be"
                    " saved safely"
                )
    return tensors, values


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of every weight now, as the first step would: memory that is not there is
    missed before any step, and what the first rank restores has its place on every rank.

    What is there stays as it is. Plain SGD has none.
    """
    is_bitsandbytes = hasattr(optimizer, "init_state")  # 8 bits, and pages that the driver moves
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.allocate()
    if is_bitsandbytes and not optimizer.initialized:
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    for at, group in enumerate(optimizer.param_groups):
        for within, weight in enumerate(group["params"]):
            if optimizer.state[weight]:
                continue
            if is_bitsandbytes:
                optimizer.init_state(group, weight, at, within)
            elif isinstance(optimizer, torch.optim.AdamW):
                where = weight.device if group["fused"] else torch.device("cpu")
                optimizer.state[weight] = adamw_state(weight, where)
            elif is_adafactor(optimizer):
                shape = weight.shape
                sums = {"exp_avg_sq": shape}
                if weight.ndim > 1:
                    column = shape[:-2] + shape[-1:]
                    sums = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": column}
                zeros = {key: weight.new_zeros(of) for key, of in sums.items()}
                rms = torch.zeros((), device=weight.device)
                optimizer.state[weight] = {"step": 0, **zeros, "RMS": rms}
            elif isinstance(optimizer, torch.optim.RMSprop):
                kept = {"step": torch.zeros(()), "square_avg": torch.zeros_like(weight)}
                optimizer.state[weight] = kept


def load_state(
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    values: Json,
) -> None:
    """Put saved state back, tensor for tensor, in the dtypes it was saved in.

    It is copied into the state that is there: paged state stays in pages, off-loaded state never
    comes near the weight's device, and nothing is in memory twice.
    """
    saved = {**values, **tensors}
    strange = {place.rpartition("|")[0] for place in saved} - set(weights)
    if strange:
        raise ModelError(
            "the checkpoint's optimizer knows weights that this model has not, e.g."
            f" {sorted(strange)[0]}"
        )
    allocate_state(optimizer)
    counts_on_host = not any(group.get("fused") for group in optimizer.param_groups)
    for place, value in saved.items():
        name, _, key = place.rpartition("|")
        weight, own = weights[name], optimizer.state[weights[name]]
        there = own.get(key)
        if not isinstance(value, Tensor):
            own[key] = value
        elif (
            isinstance(there, Tensor) and there.shape == value.shape and there.dtype == value.dtype
        ):
            there.copy_(value)
        elif isinstance(optimizer, OffloadedAdamW) or (key == "step" and counts_on_host):
            own[key] = value.clone()
        else:
            own[key] = value.to(weight.device, copy=True)


def is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is transformers' Adafactor, which is not imported for other optimizers."""
    return type(optimizer).__name__ == "Adafactor"
