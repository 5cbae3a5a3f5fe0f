"""shape x recipe x the largest micro-batch -> bytes by component, at the moment that takes most.

The moments of a step: the forward pass, the loss (all activations and the logits), the backward
pass of the top layer, that of the last one (nearly all gradients), that of the embeddings (all
gradients; in a model of two stacks the decoder's come before the encoder's layers), and the
optimizer's own. Each is a sum of named parts; the largest sum is the peak.

What is physics: everything but `SLACK`, `CUDA_CONTEXT_BYTES`, `CACHED_LOGITS`,
`COMMUNICATION_BYTES` and `WORKING_*`. Weights, gradients and state are counts times bytes. A
layer's activations are counted operation by operation, as autograd saves them in the modelling code
of transformers 5; `tests/test_memory.py` holds them against that code, run on tensors without data.
Fitted there are `WORKING_*`, what the backward pass of a layer needs besides what was saved. The
other four are what `nvidia-smi` showed above torch's own peak in published runs
(foundation-model-stack/fms-acceleration, A100-80GB, 1 to 4 GPUs).

Refuses to import torch and to look at the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from farthing.data.lengths import Largest
from farthing.models.shapes import Shape
from farthing.models.tiles import head_bytes
from farthing.models.weights import Adapters
from farthing.planner.activations import Layers, layers_of
from farthing.planner.recipe import (
    CHUNKED,
    DDP,
    FARTHING,
    FREED,
    FSDP,
    FUSED,
    LABELLED,
    POSITIONS,
    TILED,
    UNCAST,
    WHOLE,
    Recipe,
)

SLACK = 0.05  # of what torch has allocated: blocks that the allocator can't use
CUDA_CONTEXT_BYTES = int(0.8 * 2**30)
# of the logits of a whole micro-batch: blocks that are too large for anything else, and are kept;
# between 0.47 of one source (fms-acceleration, nvidia-smi) and nothing of another (PEFT, reserved)
CACHED_LOGITS = 0.25
# of several GPUs: what gathered layers leave in the pools of streams; buffers of NCCL, by
# assumption
COMMUNICATION_BYTES = {
    FSDP: int(4.6 * 2**30),
    DDP: 2**29,
}
# of a weight in QLoRA, double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3)
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
STATE_BYTES = {
    "sgd": 0.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "adafactor": 0.02,  # a row and a column of a matrix: 4 (a + b) / ab, of one of 512 x 32,000
    "adamw_torch_offload": 0.0,
    "adamw_8bit": 2.03,
    "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 0.0,
    "paged_adamw_32bit": 0.0,
}
TILE_BYTES = 256 << 20  # of a loss that never has more than a tile of the logits
_CAPS_LOGITS = {"gemma2"}  # a tanh of them is kept


@dataclass(frozen=True)
class Memory:
    """Peak memory of one GPU, in bytes."""

    parts: dict[str, int]
    """What is there at the peak: weights, gradients, optimizer, casts, activations, logits,
    working.
    """
    moment: str
    """When: forward, loss, backward, last layer, embeddings or optimizer; or evaluation."""
    is_cuda: bool = True
    cached_bytes: int = 0
    """That the allocator keeps beside its slack, or a library has without it."""

    @property
    def allocated_bytes(self) -> int:
        """What torch calls its peak (`torch.cuda.max_memory_allocated`)."""
        return sum(self.parts.values())

    @property
    def reserved_bytes(self) -> int:
        """With the allocator's slack (`torch.cuda.max_memory_reserved`)."""
        return self.allocated_bytes + int(SLACK * self.allocated_bytes if self.is_cuda else 0)

    @property
    def total_bytes(self) -> int:
        """What the device must have: with the CUDA context and what is cached, as `nvidia-smi`
        shows it.
        """
        return self.reserved_bytes + (CUDA_CONTEXT_BYTES + self.cached_bytes if self.is_cuda else 0)

    def as_dict(self) -> dict[str, int]:
        """All parts, slack and context included; they add up to `total_bytes`."""
        more = {"allocator slack": self.reserved_bytes - self.allocated_bytes}
        more["cache"] = self.cached_bytes
        more["CUDA context"] = self.total_bytes - self.reserved_bytes - self.cached_bytes
        return {**self.parts, **{name: value for name, value in more.items() if value}}


def estimate_memory(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None = None,
    *,
    labelled_share: float = 1.0,
    is_cuda: bool = True,
) -> Memory:
    """Peak of a step whose largest micro-batch is `largest`; `labelled_share` of its tokens go
    through the loss.

    `adapters` is what `Shape.with_lora` counts, for lora and qlora. Sharding divides what it
    divides evenly.
    """
    standing = _standing(shape, recipe, adapters)
    layers = layers_of(shape, recipe, largest, adapters, is_cuda)
    logits = logits_bytes(
        shape, recipe, largest, labelled_share, is_cuda=is_cuda, is_trained=adapters is None
    )
    # of several micro-batches copies of weights are kept to the end of the step (model/casts.py)
    is_kept = is_cuda and recipe.stack.shares_inputs and recipe.sharding != FSDP
    kept = standing.casts if is_kept and standing.held else 0.0
    moments = _moments(shape, recipe, largest, adapters, standing, layers, logits)
    for name, there in moments.items():
        if name not in ("forward", "loss", "optimizer"):
            there["casts"] = max(kept, there.get("casts", 0.0))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(value) for name, value in moments[moment].items() if value >= 1}
    cached = 0.0 if recipe.stack.loss in (TILED, CHUNKED, POSITIONS) else CACHED_LOGITS * logits
    more = int(cached) + COMMUNICATION_BYTES.get(recipe.sharding, 0) if is_cuda else 0
    return Memory(parts, moment, is_cuda, more)


class _Standing(NamedTuple):
    """Bytes of one GPU that a micro-batch has no say in."""

    weights: float
    gradients: float  # when all are there
    held: float  # of them, while the next micro-batch is computed
    state: float
    casts: float
    gathered: float  # weights that are spread and whole for the moment
    head_gradients: float


def _shards(recipe: Recipe) -> int:
    return recipe.n_gpus if recipe.sharding == FSDP else 1


def _share_kept(recipe: Recipe) -> float:
    """Of the weights that are spread, what a GPU keeps while it does not compute with them."""
    return 0.0 if recipe.offloads_weights else 1 / _shards(recipe)


def _gathers(recipe: Recipe) -> bool:
    """Whether weights are whole on a GPU for the moment only."""
    return recipe.offloads_weights or _shards(recipe) > 1


def _is_traced(recipe: Recipe) -> bool:
    """Whether FSDP2's own buffers are known moment by moment; published runs of other trainers have
    less.
    """
    return _gathers(recipe) and (recipe.offloads_weights or recipe.stack.name == FARTHING.name)


def _standing(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> _Standing:
    """Weights, gradients, the optimizer's state and casts. Sharding divides what it divides evenly."""  # noqa: E501
    stack = recipe.stack
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    # of trained weights and of frozen ones: what this GPU keeps
    own = 1.0 if adapters is not None and stack.keeps_adapters_whole else _share_kept(recipe)
    of_trained = n_trained * recipe.trained_bytes
    weights = own * of_trained + _share_kept(recipe) * (
        _weights_bytes(shape, recipe, adapters) - of_trained
    )
    gradients = of_trained * own
    head_gradients = (
        shape.n_head_matmul * recipe.trained_bytes / _shards(recipe) if adapters is None else 0.0
    )
    if adapters is None and _is_traced(recipe):  # whole until the backward pass is over
        head_gradients = float(shape.n_head_matmul * recipe.gathered_bytes)
    if stack.frees_gradients:
        gradients = max(gradients / max(1, shape.n_layers), head_gradients)
    return _Standing(
        weights,
        gradients,
        gradients if recipe.n_micro_batches > 1 and not stack.frees_gradients else 0.0,
        n_trained * optimizer_bytes(recipe, adapters) * own,
        _casts_bytes(shape, recipe, adapters),
        _gathered_bytes(shape, recipe) if _gathers(recipe) else 0.0,
        head_gradients,
    )


def _moments(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None,
    standing: _Standing,
    layers: Layers,
    logits: float,
) -> dict[str, dict[str, float]]:
    """What is there at each moment of a step, part by part."""
    stack, every = recipe.stack, recipe.settings.checkpoint_every
    gradients, held, gathered, head_gradients = (
        standing.gradients,
        standing.held,
        standing.gathered,
        standing.head_gradients,
    )
    saved, boundaries = (
        (0.0, 0.0) if stack.offloads_activations else (layers.saved, layers.boundaries)
    )
    # made in the forward pass; where the embeddings share its weight it waits for theirs, beside
    # what is held
    in_loss = head_gradients if stack.loss == POSITIONS and shape.scores_tokens else 0.0
    in_backward = in_loss if shape.is_tied and held else 0.0
    is_whole = _is_traced(recipe) and adapters is None
    if is_whole:  # beside the rows; in the loss it is in fp32, but its matrix needs no cast
        in_backward = head_gradients if held else 0.0
    last = (
        largest.n_rows
        * (largest.targets or largest.tokens)
        * shape.hidden
        * (4 + recipe.residual_bytes)
    )
    more = _embeddings_working(shape, recipe, held > 0) if adapters is None else 0.0
    is_plain = recipe.optim == "adamw_torch" and not stack.frees_gradients
    step = standing.gradients if is_plain else 0.0
    if recipe.optim == "adafactor":  # the update and its factors, of the largest weight
        largest_weight = max(
            (w.n_weights for w in shape.weights)
            if adapters is None
            else (adapters.r * max(w.n_in, w.n_out) for w, _ in adapters.adapted)
        )
        step = 3.0 * recipe.trained_bytes * largest_weight
    beside = _dora_working(recipe, adapters) + _merging_bytes(shape, adapters, largest)
    n_layers = max(1, shape.n_layers + shape.n_decoder_layers)
    of_rows = recipe.trained_bytes * _share_kept(recipe)
    before_last = head_gradients + shape.n_matmul * of_rows * (1 - 1 / n_layers)
    if adapters is not None or stack.frees_gradients:
        before_last = gradients
    base = {"weights": standing.weights, "optimizer": standing.state}
    at_work = base | {"gathered weights": gathered}
    going_back = base | {"gathered weights": gathered + _gathered_beside(shape, recipe, adapters)}
    going_on = at_work | {"gradients": held, "casts": standing.casts}
    moments = {
        "forward": going_on | {"activations": saved, "working": beside},
        "loss": (
            going_on | {"gradients": held + in_loss, "activations": saved + last, "logits": logits}
        ),
        "backward": (
            going_back
            | {
                "gradients": (held or head_gradients) + in_backward,
                "casts": 0.0 if every == 1 else standing.casts,
                "activations": (
                    saved if every != 1 else recipe.edge_copies * boundaries + layers.top
                ),
                "working": max(layers.working, beside if every else 0.0),
            }
        ),
        "last layer": (
            going_back
            | {
                "gradients": (held or before_last) + in_backward,
                "activations": layers.top,
                "working": max(layers.working, beside),
            }
        ),
        "embeddings": at_work | {"gradients": gradients, "working": more},
        "optimizer": base | {"gradients": gradients, "working": step},
    }
    if (
        shape.n_decoder_layers and shape.is_tied and adapters is None
    ):  # they come before the encoder's layers
        of_decoder = sum(
            w.copies * w.n_weights for w in shape.linear_layers if w.name.startswith("decoder.")
        )
        so_far = head_gradients + of_decoder * of_rows
        both = {"gradients": held or so_far, "activations": layers.of_encoder, "working": more}
        moments["decoder's embeddings"] = at_work | both
    return moments


def _gathered_beside(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Bytes that spread weights take in the backward pass alone: the next layer's, gathered
    meanwhile; and of a trained layer its gradient, whole in fp32 as it is summed, while those of
    the next one are made."""
    if not _gathers(recipe):
        return 0.0
    of_layer = in_layers(shape) / max(1, shape.n_layers + shape.n_decoder_layers)
    c = recipe.gathered_bytes if _is_traced(recipe) else 0
    return of_layer * ((c if recipe.reshards else 0) + (4.0 + c if adapters is None else 0.0))


def _embeddings_working(shape: Shape, recipe: Recipe, adds_up: bool) -> float:
    """Bytes beside the gradients when those of the embeddings are made: tied ones' two, and what is
    added to those before.
    """
    if _is_traced(recipe):  # embeddings and head whole, as computed and in fp32 as they are summed
        return (4.0 + recipe.gathered_bytes) * (shape.n_parameters - in_layers(shape))
    embedding = shape.vocab * shape.hidden * recipe.trained_bytes / _shards(recipe)
    return embedding * ((2 if shape.is_tied else 0) + (1 if adds_up else 0))


def evaluation_memory(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None = None,
    *,
    labelled_share: float = 1.0,
    is_cuda: bool = True,
) -> Memory:
    """Peak of an evaluation whose largest batch is `largest`: the optimizer's state stays, and no
    layer keeps anything.
    """
    standing = _standing(shape, recipe, adapters)
    layer = layers_of(shape, recipe, largest, adapters, is_cuda).top
    logits = logits_bytes(shape, recipe, largest, labelled_share, is_cuda=is_cuda)
    base = {
        "weights": standing.weights,
        "gathered weights": standing.gathered,
        "optimizer": standing.state,
        "casts": standing.casts,
    }
    found = base | ({"logits": logits} if logits > layer else {"activations": layer})
    return Memory(
        {name: int(value) for name, value in found.items() if value >= 1}, "evaluation", is_cuda
    )


def writing_memory(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None = None,
    *,
    is_cuda: bool = True,
) -> Memory:
    """Peak while a model of two stacks writes `largest.targets` tokens for each of `largest.n_rows`
    sources.

    Keys and values of all layers are kept, of the source and of what is written (as it grows, one
    layer's are there twice), and the encoder's output, padded; each new token is scored against all
    words, in fp32 once more.
    """
    standing, c, n = _standing(shape, recipe, adapters), recipe.compute_bytes, largest.n_rows
    of_layer = 2.0 * c * shape.n_kv_heads * shape.head_dim
    kept = (
        n
        * of_layer
        * (shape.n_decoder_layers * (largest.tokens + largest.targets) + largest.targets)
    )
    states = float(n * largest.tokens * shape.hidden * recipe.residual_bytes)
    if recipe.stack.is_packed:  # end to end before, in as many passes as training would take
        states *= 2.0
        working = 0.0
    else:
        working = layers_of(shape, recipe, largest._replace(targets=0), adapters, is_cuda).top
    logits = float(n * shape.vocab * (c + 4))
    found = {"weights": standing.weights, "optimizer": standing.state, "casts": standing.casts}
    found |= {"activations": states + max(working, kept), "logits": logits}
    return Memory(
        {name: int(value) for name, value in found.items() if value >= 1}, "evaluation", is_cuda
    )


def optimizer_bytes(recipe: Recipe, adapters: Adapters | None = None) -> float:
    """State for each trained weight: Adam keeps two moments in the dtype of the weight, 8-bit ones
    two bytes.

    Paged state leaves the GPU when room is needed, and off-loaded state was never there, so neither
    counts.
    """
    if recipe.optim == "adafactor" and adapters is not None:
        return 4.0 / adapters.r  # of A [r, in] and B [out, r]
    return STATE_BYTES.get(recipe.optim, 2.0 * recipe.trained_bytes)


def host_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> int:
    """Main memory of a machine for rows that are kept there (with gradients and state of trained
    ones), and for an off-loaded optimizer: copies of weights and gradients, and two moments
    (`train/offload.py`)."""
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    of_state = 16.0 * n_trained if recipe.optim == "adamw_torch_offload" else 0.0
    if not recipe.offloads_weights:
        return int(
            of_state * (1 if recipe.sharding == FSDP and adapters is None else recipe.n_gpus)
        )
    if adapters is not None:  # adapters stay on the GPU
        return int(
            (adapters.n_total - adapters.n_trainable) * recipe.frozen_bytes
            + of_state * recipe.n_gpus
        )
    return int(n_trained * (2.0 * recipe.trained_bytes + optimizer_bytes(recipe)) + of_state)


def _casts_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Autocast's copies of the weights it has cast: kept until the forward pass is over, by
    autograd longer.
    """
    if not recipe.stack.has_autocast or recipe.trained_bytes <= recipe.compute_bytes:
        return 0.0
    if (
        recipe.sharding == FSDP
        and adapters is None
        and recipe.gathered_bytes == recipe.compute_bytes
    ):
        return 0.0  # gathered in the precision of the run, and given back layer by layer
    if (
        adapters is not None
    ):  # fused layers keep the casts of their thin matrices, unless they are computed again
        kept = 1 - (1 / recipe.settings.checkpoint_every if recipe.settings.checkpoint_every else 0)
        return (
            adapters.n_adapter * recipe.compute_bytes * kept if recipe.stack.fuses_adapters else 0.0
        )
    of_head = (
        0 if recipe.stack.loss == POSITIONS else shape.n_head_matmul
    )  # cast for the time of its tiles only
    of_experts = sum(w.copies * w.n_weights for w in shape.experts)  # autocast leaves them alone
    return float((shape.n_matmul - of_experts + of_head) * recipe.compute_bytes)


def _gathered_bytes(shape: Shape, recipe: Recipe) -> float:
    """What is whole on a GPU that computes with weights that are spread: embeddings, last norm and
    head from the forward to the end of the backward pass, and the layer at work (FSDP2; held
    against fms-acceleration's runs on 2 and 4 GPUs).
    """
    root = shape.n_parameters - in_layers(shape)
    of_layer = in_layers(shape) / (
        max(1, shape.n_layers + shape.n_decoder_layers) if recipe.reshards else 1
    )
    if recipe.method == "qlora":
        return root * recipe.frozen_bytes + of_layer * NF4_BYTES
    copied = 0.0
    if recipe.offloads_weights:  # rows as the host has them, until they are cast and gathered
        copied = (
            of_layer
            / recipe.n_gpus
            * (recipe.trained_bytes if recipe.method == "full" else recipe.frozen_bytes)
        )
    return float((root + of_layer) * recipe.gathered_bytes) + copied


def in_layers(shape: Shape) -> int:
    """Weights of the layers, of which there are several: all but embeddings, last norm and head."""
    return sum(weight.n_parameters for weight in shape.weights if "*" in weight.name)


def _weights_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    if adapters is None:
        return float(shape.n_parameters * recipe.trained_bytes)
    trained = adapters.n_trainable * recipe.trained_bytes + 4.0 * adapters.n_start
    frozen = adapters.n_total - adapters.n_trainable
    if adapters.saved:  # peft keeps the original of a module that is trained whole
        frozen += sum(n * (w.n_weights + w.n_bias) for w, n in adapters.saved)
    if recipe.method != "qlora":
        return float(frozen * recipe.frozen_bytes + trained)
    return shape.n_packed * NF4_BYTES + (frozen - shape.n_packed) * recipe.frozen_bytes + trained


def logits_bytes(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    labelled_share: float,
    *,
    is_cuda: bool = True,
    is_trained: bool | None = None,
) -> float:
    """What the loss has at its worst, in bytes for each word of the vocabulary and token.

    Logits in the precision of the run, their fp32 copy, its log-softmax, and two gradients of that
    size: 14 bytes in bf16 (`whole`); 12 where nobody holds the logits in the backward pass and the
    loss takes them without a copy (`freed`), three times the logits where they are not cast
    (`uncast`). With only the labelled positions copied, 2 and 10 for each of those; in fp32, where
    nothing has to be cast, the gradient of all positions comes on top of what is left. A fused
    cross-entropy has the logits, one fp32 copy and the gradient (8); one that is chunked has the
    logits of all tokens and small copies (2). The trainer's own (`positions`) has a tile of logits:
    `_tiles_bytes`, where `is_trained` says whether the head is, and None that nothing is
    (evaluation).
    """
    n_tokens = largest.n_rows * (largest.targets or largest.tokens)
    c = recipe.compute_bytes
    if not shape.scores_tokens:
        return 0.0
    if recipe.stack.loss == TILED:
        return float(TILE_BYTES)
    if recipe.stack.loss == POSITIONS:
        return _tiles_bytes(
            shape, recipe, math.ceil(n_tokens * labelled_share), is_cuda, is_trained
        )
    of_each = {
        WHOLE: c + 12.0,
        FREED: c + 10.0,
        UNCAST: 3.0 * c,
        LABELLED: 8.0 + 4.0 * labelled_share if c == 4 else c + (c + 8.0) * labelled_share,
        FUSED: 8.0,
        CHUNKED: float(c),
    }[recipe.stack.loss]
    caps = c if shape.model_type in _CAPS_LOGITS else 0.0
    return (of_each + caps) * shape.vocab * n_tokens


def _tiles_bytes(
    shape: Shape, recipe: Recipe, n_scored: int, is_cuda: bool, is_trained: bool | None
) -> float:
    """What `head_loss` takes besides the gradient of a trained head: tiles, and gradients of the
    positions.
    """
    found = head_bytes(
        n_scored,
        shape.vocab,
        shape.hidden,
        recipe.precision,
        trained_bytes=recipe.trained_bytes if is_trained else 0,
        is_cuda=is_cuda,
        has_cap=shape.model_type in _CAPS_LOGITS,
    )
    return found + (0.0 if is_trained is None else recipe.compute_bytes * n_scored * shape.hidden)


def _dora_working(recipe: Recipe, adapters: Adapters | None) -> float:
    """Bytes with which the norm of one adapted weight is worked out: peft multiplies the adapters
    with a unit matrix.
    """
    if adapters is None or not recipe.use_dora:
        return 0.0
    c, a = recipe.compute_bytes, recipe.trained_bytes
    of_unit = a + (c if a > c else 0)
    return max(
        (
            of_unit * w.n_in**2 + 3.0 * c * w.n_weights
            for w, _ in adapters.adapted
            if w.kind == "linear"
        ),
        default=0.0,
    )


def _merging_bytes(shape: Shape, adapters: Adapters | None, largest: Largest) -> float:
    """What the last layer's experts give, weighed in fp32 and put in order, while all is kept:
    where experts have adapters.
    """
    if adapters is None or not adapters.n_merged:
        return 0.0
    return 8.0 * shape.hidden * shape.n_active * largest.n_rows * largest.tokens
