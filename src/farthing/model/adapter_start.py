"""PiSSA and OLoRA: adapters that begin as the main part of the weights they are put on.

PiSSA (Meng et al. 2024, arXiv 2404.02948) draws B₀A₀ from the singular values of a weight W, OLoRA
(Büyükakyüz 2024, arXiv 2406.01775) from its QR decomposition. `peft` computes both here, and would
leave W − s B₀A₀ as the base. Here the base stays as it is, and B₀A₀ is a second, frozen adapter
that is taken away: W + s (BA − B₀A₀). The same function; but a run is resumed with the B₀A₀ of its
checkpoint whatever another machine would compute, and the exported adapter, which has both, fits
the base that everyone has.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

START = "start"
"""The name of the frozen adapter."""
_OURS = "default"


@contextlib.contextmanager
def base_is_kept() -> Iterator[None]:
    """While it lasts peft makes such adapters without a change of the weights that they are
    put on.
    """
    from peft.tuners.lora import LoraLayer

    own = {name: getattr(LoraLayer, name) for name in ("pissa_init", "olora_init")}

    def kept(init: Callable[..., None]) -> Callable[..., None]:
        def begin(layer: Any, *arguments: Any) -> None:
            base = layer.get_base_layer()
            weight = base.weight.data
            base.weight.data = weight.clone()  # OLoRA writes into it
            if init is own["olora_init"] and getattr(layer, "fan_in_fan_out", False):
                base.weight.data = weight.T.clone()  # peft takes it for [out, in] always
            try:
                init(layer, *arguments)
            finally:
                base.weight.data = weight

        return begin

    try:
        for name, init in own.items():
            setattr(LoraLayer, name, kept(init))
        yield
    finally:
        for name, init in own.items():
            setattr(LoraLayer, name, init)


@torch.no_grad()
def take_start_away(model: Any) -> None:
    """Give the model the frozen adapter B₀A₀ of what its adapter is now, with a scale of the other
    sign.
    """
    from peft.tuners.lora import LoraLayer

    config = copy.deepcopy(model.peft_config[_OURS])
    config.modules_to_save, config.lora_dropout, config.init_lora_weights = None, 0.0, True
    model.add_adapter(START, config)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for ours, start in (
                (layer.lora_A[_OURS], layer.lora_A[START]),
                (layer.lora_B[_OURS], layer.lora_B[START]),
            ):
                ours.weight.data = ours.weight.data.float().contiguous()
                start.weight.data = ours.weight.data.clone()
            layer.scaling[START] = -layer.scaling[_OURS]
            layer.set_adapter([_OURS, START])
            for start in (layer.lora_A[START], layer.lora_B[START]):
                start.weight.requires_grad_(False)
    del model.peft_config[START]


def start_tensors(model: Any) -> dict[str, Tensor]:
    """B₀ and A₀ by name, which a checkpoint needs; none for other adapters."""
    return {
        name: weight.detach() for name, weight in model.named_parameters() if f".{START}." in name
    }


@contextlib.contextmanager
def as_one_adapter(model: Any) -> Iterator[dict[str, Tensor] | None]:
    """While it lasts the adapter's configuration is one of twice the rank, whose tensors are given:
    [A; A₀] and [B, −B₀], with zeros behind them where a layer has no such rank.

    Nothing changes, and None is given, for a model without B₀A₀.
    """
    if not hasattr(model, "peft_config") or not start_tensors(model):
        yield None
        return
    before = model.peft_config[_OURS]
    config = copy.deepcopy(before)
    config.r *= 2
    config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    config.init_lora_weights = True
    tensors = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if f".{START}." in name:
            continue
        start = state.get(name.replace(f".{_OURS}.", f".{START}.")) if ".lora_" in name else None
        if start is not None:
            is_a = ".lora_A." in name
            tensor = torch.cat([tensor, start if is_a else -start], 0 if is_a else 1)
            lack = config.r - tensor.shape[0 if is_a else 1]  # of layers narrower than the rank
            tensor = pad(tensor, (0, 0, 0, lack) if is_a else (0, lack))
        tensors[name] = tensor
    model.peft_config[_OURS] = config
    try:
        yield tensors
    finally:
        model.peft_config[_OURS] = before
