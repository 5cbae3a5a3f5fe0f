"""Activation checkpointing chosen by measured need: off, every second layer, or every layer.

One short forward pass is run and every tensor that autograd saves is counted; activations grow linearly with the
tokens of a micro-batch (attention is never materialised with sdpa), so the largest micro-batch follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

SHARE_OF_FREE = 0.9  # the rest is for the allocator's slack


@dataclass(frozen=True)
class MemoryNeed:
    """What training takes beyond the loaded weights, in bytes, and the checkpointing that makes it fit."""

    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    free_bytes: int
    every_n_layers: int
    """0: no layer is checkpointed; 1: each; 2: each second."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    @property
    def fits(self) -> bool:
        """Whether it is expected to fit."""
        return self.total_bytes <= SHARE_OF_FREE * self.free_bytes


def checkpoint_layers(model: Any, every_n_layers: int) -> None:
    """Recompute every n-th layer in the backward pass instead of keeping its activations (0: none).

    Non-reentrant, and without forcing gradients through frozen embeddings: layers below the first trained weight
    stay out of the backward pass.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if every_n_layers == 0:
        inner._set_gradient_checkpointing(enable=False)
        return

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    inner._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute, every_n_layers=every_n_layers)


def saved_bytes(model: Any, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that an address is not given out twice while we count

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(storages.values())


def choose_checkpointing(
    model: Any,
    *,
    forward: Callable[[], Tensor],
    sample_tokens: int,
    largest_tokens: int,
    n_trained: int,
    optimizer_bytes_per_weight: float,
    free_bytes: int,
    wanted: bool | int | str,
    planned: int = 0,
    head_bytes: int = 0,
) -> MemoryNeed:
    """Set and return the checkpointing of a run.

    `forward` runs a sample of `sample_tokens` computed tokens through the body; `largest_tokens` is the size of the
    largest micro-batch, for which the head takes `head_bytes` more. `wanted` is true, false, k, or "auto" for the least
    that fits in `free_bytes`, beginning at `planned`.
    """
    scale = largest_tokens / max(1, sample_tokens)
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    modes = {0: [0, 2, 1], 1: [1]}.get(planned, [2, 1]) if wanted == "auto" else [int(wanted)]
    if wanted == "auto" and not layers:
        modes = [0]
    need = None
    for every in modes:
        checkpoint_layers(model, every) if layers or every else None
        # a recomputed layer's input is kept by the recomputation itself, out of sight of the hooks
        inputs = _layer_inputs_bytes(model, sample_tokens) if every else 0
        activations = int((saved_bytes(model, forward) + inputs) * scale) + head_bytes
        need = MemoryNeed(4 * n_trained, int(optimizer_bytes_per_weight * n_trained), activations, free_bytes, every)
        if need.fits:
            break
    assert need is not None
    return need


def _layer_inputs_bytes(model: Any, n_tokens: int) -> int:
    """Inputs of the layers that the backward pass reaches: nothing is kept below the first trained weight."""
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None) or getattr(config, "d_model", 0)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    reached = any(p.requires_grad and id(p) not in in_layers for p in _below(model, layers))
    n_reached = 0
    for layer in layers:
        reached = reached or any(p.requires_grad for p in layer.parameters())
        n_reached += reached
    return int(n_reached * (hidden or 0) * n_tokens * 4)


def _below(model: Any, layers: list[Any]) -> list[Tensor]:
    """Weights that stand before the layers: the embeddings'."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    embeddings = inner.get_input_embeddings()
    return [] if embeddings is None else list(embeddings.parameters())
