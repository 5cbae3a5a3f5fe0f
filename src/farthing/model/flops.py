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
        of_all = sum(map(_of_weights, of_all_tokens(last_layer)))
        found -= (_of_weights(last_layer) - of_all) * (1 - read_share)
    return found


def _of_weights(module: Any) -> float:
    frozen, trained = _matrix_weights(module)
    return 6.0 * trained + 4.0 * frozen


def _matrix_weights(model: Any) -> tuple[int, int]:
    """(frozen, trained) weights of the matrix products of a module."""
    found = [0, 0]
    for name, module in model.named_modules():
        is_matrix = isinstance(module, nn.Linear | nn.Conv1d)
        weight = getattr(module, "weight", None)
        if weight is None or ".original_module" in name:
            continue
        if is_matrix or type(module).__name__ in ("Conv1D", "Linear4bit"):
            in_four_bits = type(weight).__name__ == "Params4bit"
            n = weight.numel() * (2 * weight.element_size() if in_four_bits else 1)
            found[weight.requires_grad] += n
    return found[0], found[1]


def recomputed_share(model: Any, layers: list[Any], checkpoint_every: int) -> float:
    """Of the FLOPs of a step, those that activation checkpointing of every so many `layers`
    adds.
    """
    if not checkpoint_every:
        return 0.0
    again = 2.0 * sum(sum(_matrix_weights(layer)) for layer in layers) / checkpoint_every
    return again / (_of_weights(model) + again)
