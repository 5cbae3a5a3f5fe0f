"""Bytes that a step moves beside what it computes: to update weights, to and from the host, to
other GPUs; those of experts.

Counts alone, operation by operation: `speed` makes seconds of them. Refuses to import torch and to
know rates.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.models.shapes import Shape
from farthing.models.weights import Adapters
from farthing.planner.memory import NF4_BYTES, in_layers
from farthing.planner.recipe import BF16_WEIGHTS, FSDP, Recipe


def packed_bytes(shape: Shape, recipe: Recipe) -> float:
    """Quantized weights as they are read, and as they are written to be multiplied with."""
    if recipe.method != "qlora":
        return 0.0
    return recipe.stack.unpacking * shape.n_packed * (NF4_BYTES + recipe.compute_bytes)


class WholeExperts(NamedTuple):
    """What experts that are trained whole ask of a GPU beside what any weight does."""

    # products are computed in the precision of their weights, which autocast leaves alone
    is_fp32: bool = False
    more_bytes: float = 0.0  # read in a pass, for that
    moved_bytes: float = 0.0  # in a step: gradients of all experts, and casts


def whole_experts(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> WholeExperts:
    """Each micro-batch writes a gradient for every expert, whether tokens were sent to it or not,
    and adds it to those before.

    transformers' grouped product takes experts as they are: under autocast fp32 ones are multiplied
    in fp32. Spread ones are gathered in the precision of the run: rows are cast before each gather,
    and gradients for their sum.
    """
    n, c, b = (
        sum(w.copies * w.n_weights for w in shape.experts),
        recipe.compute_bytes,
        recipe.trained_bytes,
    )
    if adapters is not None or not n:
        return WholeExperts()
    n_micro, own = (
        recipe.n_micro_batches,
        n / recipe.n_gpus if recipe.sharding == FSDP else float(n),
    )
    added = 3.0 * b * own * (n_micro - 1)
    if recipe.sharding == FSDP:
        of_gathers, of_sums = 2.0 * (b + c), 2.0 * c + 4.0
        return WholeExperts(moved_bytes=n_micro * (own * of_gathers + n * of_sums) + added)
    return WholeExperts(b > c, float(n * (b - c)), n_micro * n * b + added)


def _updates_there(recipe: Recipe, adapters: Adapters | None) -> bool:
    """Whether the host updates trained weights, which it keeps."""
    return recipe.offloads_weights and adapters is None


def optimizer_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """What the GPU's own memory has of the update."""
    return 0.0 if _updates_there(recipe, adapters) else _update_bytes(shape, recipe, adapters)


def host_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """What main memory has of it, for each GPU; micro-batches after the first add to the gradients
    there.
    """
    if not _updates_there(recipe, adapters):
        return 0.0
    added = 12.0 * (recipe.n_micro_batches - 1) * _n_stepped(shape, recipe, adapters)
    return _update_bytes(shape, recipe, adapters) + added


def _update_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Clipping and the update: every trained weight, its gradient and its state are read and
    written.

    A fused kernel reads four of them and writes three; the foreach one is nine kernels that move 21
    (weight decay 2, first moment 3, second 5, square root 2, division 2, epsilon 2, update 4 and
    the learning rate's product 1). Off-loaded, the device only reads the gradient and writes the
    weight.
    """
    n, b = _n_stepped(shape, recipe, adapters), recipe.trained_bytes
    state = {"sgd": 0.0, "adamw_torch_offload": -b, "adafactor": 15.0 * b}.get(
        recipe.optim, 4.0 if "8bit" in recipe.optim else 4.0 * b
    )  # Adafactor's passes: square 2, epsilon 2, means 2, factors 3, product 3, norm 1, scales 4
    if recipe.optim == BF16_WEIGHTS:
        # clipping; to and from buckets in fp32 (24, 18); the update there (28); of two numbers
        # random bits (4), their sum (12), its end cut off (8)
        return n * (3.0 * b + 24.0 + 18.0 + 28.0 + 48.0)
    moved = 21.0 * b if recipe.optim == "adamw_torch" else 3.0 * b + state
    clipping = 3.0 * b
    slow = 4.0 if recipe.optim.startswith("paged") else 1.0  # pages come and go over the bus
    return slow * n * (moved + clipping)


def bus_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Gradients that go to the host and weights that come back, where the optimizer's state is
    there.

    Counted one after the other: what the two directions and the host's arithmetic hide of each
    other is left out.
    """
    if recipe.optim != "adamw_torch_offload":
        return 0.0
    return 2.0 * recipe.trained_bytes * _n_stepped(shape, recipe, adapters)


def hauled_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Rows of a GPU that come from main memory for every micro-batch, as they are kept there: of
    layers forward and backward, of embeddings and head once (FSDP2's `CPUOffloadPolicy`); and the
    gradients of trained ones, which go there.

    Counted beside the computing, though the next layer's rows may come while a layer computes.
    """
    if not recipe.offloads_weights:
        return 0.0
    of_weight = recipe.trained_bytes if adapters is None else recipe.frozen_bytes
    rows = of_weight * (shape.n_parameters + (in_layers(shape) if recipe.reshards else 0))
    gradients = recipe.trained_bytes * shape.n_parameters if adapters is None else 0.0
    return recipe.n_micro_batches * (rows + gradients) / recipe.n_gpus


def _n_stepped(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> int:
    """Trained weights that one GPU's optimizer has."""
    n = shape.n_parameters if adapters is None else adapters.n_trainable
    is_spread = recipe.sharding == FSDP and not (
        adapters is not None and recipe.stack.keeps_adapters_whole
    )
    return n // recipe.n_gpus if is_spread else n


def sent_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Gradients (ddp), or weights and gradients (fsdp), that a GPU sends to others.

    A ring moves 2 (n - 1) / n of the gradients (Patarasuk and Yuan 2009). With fsdp, for every
    micro-batch, layers are gathered twice, recomputed or not, or once where they are kept,
    embeddings and head once, and gradients are scattered; adapters that are whole are added up once
    a step.
    """
    n = recipe.n_gpus
    if n == 1:
        return 0.0
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    share, gradients = (n - 1) / n, float(n_trained * recipe.trained_bytes)
    if recipe.sharding != FSDP:
        return 2 * share * gradients
    of_weight = NF4_BYTES if recipe.method == "qlora" else float(recipe.gathered_bytes)
    gathered = of_weight * (shape.n_parameters + (in_layers(shape) if recipe.reshards else 0))
    if adapters is not None and recipe.stack.keeps_adapters_whole:
        return share * (recipe.n_micro_batches * gathered + 2 * gradients)
    return share * recipe.n_micro_batches * (gathered + gradients)
