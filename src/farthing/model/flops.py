"""Floating-point operations a token costs in training."""

from __future__ import annotations

from typing import Any

from torch import nn

from farthing.model.last_layer import of_all_tokens


def flops_per_token(model: Any, last_layer: Any = None, read_share: float = 1.0) -> float:
    """FLOPs of forward and backward for one token: 2 for each weight of a matrix product forward, 2
    back through its input, 2 for its own gradient where it is trained (Kaplan et al. 2020, arXiv
    2001.08361, section 2.1).

    Attention scores, under a tenth of the whole at usual lengths, and recomputation are not
    counted. A `last_layer` that is computed for a share of the tokens counts so, but for what its
    keys and values come of.
    """
    found = _of_weights(model)
    if last_layer is not None:
        of_all = sum(_of_weights(each) for each in of_all_tokens(last_layer))
        found -= (_of_weights(last_layer) - of_all) * (1 - read_share)
    return found


def _of_weights(module: Any) -> float:
    frozen, trained = matrix_weights(module)
    return 6.0 * trained + 4.0 * frozen


def matrix_weights(model: Any) -> tuple[int, int]:
    """(frozen, trained) weights of the matrix products of a module."""
    matrix = nn.Linear, nn.Conv1d
    frozen = trained = 0
    for name, module in model.named_modules():
        if isinstance(module, matrix) or module.__class__.__name__ in ("Conv1D", "Linear4bit"):
            weight = getattr(module, "weight", None)
            if weight is None or ".original_module" in name:
                continue
            n = weight.numel()
            if weight.__class__.__name__ == "Params4bit":
                n = n * 2 * weight.element_size()
            if weight.requires_grad:
                trained += n
            else:
                frozen += n
    return frozen, trained


def recomputed_of_forward(model: Any, layers: list[Any], checkpoint_every: int) -> float:
    """Of the FLOPs of a forward pass, those that activation checkpointing of every so many `layers`
    does again.
    """
    weights = sum(matrix_weights(model))
    return (
        sum(sum(matrix_weights(layer)) for layer in layers) / checkpoint_every / weights
        if checkpoint_every
        else 0.0
    )


def recomputed_share(model: Any, layers: list[Any], checkpoint_every: int) -> float:
    """Of the FLOPs of a step, those that activation checkpointing of every so many `layers`
    adds.
    """
    frozen, trained = matrix_weights(model)
    again = 2.0 * (frozen + trained) * recomputed_of_forward(model, layers, checkpoint_every)
    return again / (6.0 * trained + 4.0 * frozen + again) if again else 0.0
