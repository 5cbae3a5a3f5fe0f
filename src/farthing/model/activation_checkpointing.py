"""What is kept for the backward pass, and activation checkpointing chosen by measured need: off,
every second layer, or every layer.

| part | kept |
|---|---|
| a checkpointed layer | its input; the rest is computed again, a layer at a time |
| a layer | what transformers' operations save |
| a LoRA layer (`lora_kernels.py`) | its input, shared; the thin product; dropout's byte a number |
| attention (`attention_kernels.py`) | queries, keys, values, output, one number a row |
| short documents on a CPU (`cpu.py`) | attention's weights besides |
| the head (`head.py`) | gradients of the labelled states, and of a trained matrix |
| trained weights (`casts.py`) | a copy in the precision of the run, once a step |

A short forward pass is run at two lengths, and every tensor that autograd saves is counted. What
grows between the two grows linearly with the tokens of a micro-batch; what does not, copies of the
trained matrices among it, is there once. The need is that of the moment that takes most, as the
planner's `memory` has them: the loss, the backward pass, its end with all gradients, the update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from farthing.device_memory import is_out_of_memory
from farthing.errors import ModelError
from farthing.model.loss import inner_of
from farthing.planner.activations import (
    WORKING_MLP_LEAN,
    WORKING_MLP_PLAIN,
    WORKING_STREAM,
    WORKING_STREAM_LEAN,
)

SHARE_OF_FREE = 0.9  # the rest is for the allocator's slack
# feed-forwards that keep less
LIGERS = {f"liger_kernel.transformers.{name}" for name in ("swiglu", "geglu")}


class Linear(NamedTuple):
    """Bytes that grow with the tokens of a micro-batch."""

    constant_bytes: float = 0.0
    bytes_per_token: float = 0.0

    def at(self, n_tokens: int) -> float:
        """Bytes for so many tokens."""
        return self.constant_bytes + self.bytes_per_token * n_tokens


class Gathered(NamedTuple):
    """Bytes of weights that are spread over ranks and whole for the moment, and of their gradients
    on the way to the ranks.
    """

    loss: int = 0
    backward: int = 0
    end: int = 0
    """When the backward pass is over but for the embeddings."""


NOTHING = Gathered()


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients, and what some of them take besides."""

    all_bytes: int = 0
    layer_bytes: int = 0
    """Of one layer: the last one's are not there yet when its activations are."""
    head_bytes: int = 0
    """Of a trained head, made together with the loss."""
    embedding_bytes: int = 0
    is_tied: bool = False
    """The head's weight is the embeddings': its two gradients are added up at the end."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What a step needs beside its body, and what there is, in bytes."""

    n_tokens: int
    """Of the largest micro-batch."""
    accumulates: bool
    """A step may have several micro-batches: the gradients of earlier ones are held."""
    optimizer_bytes: int
    update_bytes: int
    """That the update takes besides."""
    free_bytes: int
    head: Linear
    """What the head and the loss take of a micro-batch."""
    autocast: torch.dtype | None = None
    casts_once: bool = False
    """Copies of trained matrices are made once a step (`Casts`), and are there until they are not
    needed again. Else autocast keeps them until the forward pass is over.
    """
    gathered: Gathered = NOTHING


@dataclass(frozen=True, kw_only=True)
class MemoryNeed(Beside):
    """What training takes beyond the loaded weights, and the checkpointing that makes it fit."""

    gradients: Gradients
    saved: Linear
    """What autograd keeps of the forward pass, inputs of checkpointed layers included."""
    layer: Linear
    """What it keeps of one layer while that is computed again."""
    working: Linear
    """Of the backward pass of a layer, besides what was saved."""
    casts_bytes: int
    """Copies of trained matrices."""
    checkpoint_every: int
    """0: no layer is checkpointed; 1: each; 2: each second."""
    begins_with_a_layer: bool = False
    """The last layer is checkpointed: the backward pass begins with computing it again, beside all
    that was saved.
    """

    def moments(self) -> dict[str, float]:
        """Bytes besides weights and optimizer state, at each moment of a step."""
        grad, n = self.gradients, self.n_tokens
        held = grad.all_bytes if self.accumulates else 0
        saved, working = self.saved.at(n), self.working.at(n)
        waiting = grad.head_bytes if grad.is_tied and held else 0
        layer = self.layer.at(n) if self.begins_with_a_layer else 0.0
        almost_all = grad.all_bytes - grad.embedding_bytes - grad.layer_bytes
        copies = max(0.0, self.casts_bytes - self.saved.constant_bytes)
        going_back = copies if self.casts_once else 0.0
        at_the_end = self.casts_bytes if self.casts_once and self.accumulates else 0
        sums = grad.embedding_bytes * ((2 if grad.is_tied else 0) + (1 if held else 0))
        taken = {
            "loss": held + grad.head_bytes + saved + copies + self.head.at(n),
            "backward": (held or grad.head_bytes) + waiting + saved + going_back + layer + working,
            "last layer": (
                (held or almost_all) + waiting + self.layer.at(n) + working + at_the_end
            ),
            "embeddings": grad.all_bytes + sums + at_the_end,
        }
        of_others = {"loss": self.gathered.loss, "embeddings": self.gathered.end}
        return {
            moment: n_bytes + of_others.get(moment, self.gathered.backward)
            for moment, n_bytes in taken.items()
        } | {"update": grad.all_bytes + self.update_bytes}

    @property
    def total_bytes(self) -> int:
        """At the moment that takes most."""
        return int(self.optimizer_bytes + max(self.moments().values()))

    @property
    def fits(self) -> bool:
        """Whether it is expected to fit."""
        return self.total_bytes <= SHARE_OF_FREE * self.free_bytes


def checkpointed_layers(model: Any) -> list[Any]:
    """The layers of a model that can be checkpointed, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: Any, checkpoint_every: int) -> None:
    """Recompute every n-th layer in the backward pass instead of keeping its activations (0: none).

    Non-reentrant, and without forcing gradients through frozen embeddings: layers below the first
    trained weight stay out of the backward pass.
    """
    inner = inner_of(model)
    if checkpoint_every == 0:
        inner._set_gradient_checkpointing(enable=False)
        return

    def recompute(function: functools.partial[Any], *args: Any) -> Any:
        """`function` is a partial of a layer's forward, which may be compiled."""
        forward = vars(function.args[0]).get("compiled_forward", function.func)
        whole = functools.partial(forward, *function.args, **function.keywords)
        return torch.utils.checkpoint.checkpoint(whole, *args, use_reentrant=False)

    inner._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=recompute, every_n_layers=checkpoint_every
    )


@dataclass(frozen=True)
class Sample:
    """A forward pass of so many computed tokens through the body, whose loss it returns."""

    n_tokens: int
    forward: Callable[[], Tensor]


def saved_bytes(model: Any, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`, weights left out; nothing of it
    is kept after.
    """
    is_spread = any(hasattr(p, "_local_tensor") for p in model.parameters())
    weights, storages = _storages_of(model), dict[int, int]()
    held: list[Tensor] = []

    def note(tensor: Tensor) -> None:
        """Holds what the graph would hold, for copies that layers share, and so that no address is
        given out twice.
        """
        storage = tensor.untyped_storage()
        # weights of a layer that is spread are elsewhere while it computes
        if storage._cdata not in (weights | _storages_of(model) if is_spread else weights):
            storages[storage._cdata] = storage.nbytes()
            held.append(tensor)

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing):
            forward()
    finally:
        # the graph holds the hook, and these the graph: a circle that is never collected
        held.clear()
    return sum(storages.values())


def _storages_of(model: Any) -> set[int]:
    return {p.untyped_storage()._cdata for p in model.parameters()}


def saved_linear(model: Any, samples: tuple[Sample, Sample]) -> Linear:
    """What autograd keeps, as it grows between a sample and a larger one."""
    small, large = (saved_bytes(model, sample.forward) for sample in samples)
    of_each = max(0.0, (large - small) / max(1, samples[1].n_tokens - samples[0].n_tokens))
    return Linear(max(0.0, small - of_each * samples[0].n_tokens), of_each)


def choose_checkpointing(
    model: Any,
    samples: tuple[Sample, Sample],
    beside: Beside,
    *,
    wanted: bool | int | str,
    planned: int = 0,
    fits_all: Callable[[bool], bool] = bool,
) -> MemoryNeed:
    """Set and return the checkpointing of a run.

    `samples` go through the body, the second is the larger. `wanted` is true, false, k, or "auto"
    for the least that fits in what is free, beginning at `planned`; `fits_all` asks all who have to
    choose alike. Raises what says that memory ran out where even a sample has no room.
    """
    checkpointed = checkpointed_layers(model)
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    modes = {0: [0, 2, 1], 1: [1]}.get(planned, [2, 1]) if wanted == "auto" else [int(wanted)]
    if not layers:
        if wanted not in ("auto", 0):
            raise ModelError(
                "transformers can't recompute the layers of this family",
                where="train.gradient_checkpointing",
                to_do="leave it out, or set it to false",
            )
        modes = [0]
    need = None
    for every in modes:
        if layers:
            checkpoint_layers(model, every)
        try:
            saved = saved_linear(model, samples)
            layer = saved_of_a_layer(model, samples, saved)
        except Exception as error:
            if every == modes[-1] or not is_out_of_memory(error):
                raise
            continue
        need = MemoryNeed(
            **vars(beside),
            gradients=gradients_of(model),
            saved=saved,
            layer=layer,
            working=_working(model),
            casts_bytes=_casts_bytes(model, beside.autocast),
            checkpoint_every=every,
            begins_with_a_layer=bool(
                every and checkpointed and checkpointed[-1].gradient_checkpointing
            ),
        )
        if fits_all(need.fits):
            break
    assert need is not None
    return need


def saved_of_a_layer(model: Any, samples: tuple[Sample, Sample], saved: Linear) -> Linear:
    """What autograd keeps of the last checkpointed layer while it is computed again; of one layer
    where none is.

    `saved` is what it keeps of all as they are.
    """
    layers = checkpointed_layers(model)
    recomputed = [layer for layer in layers if layer.gradient_checkpointing][
        -2:
    ]  # the last may be of few tokens
    if not recomputed:
        return Linear(*(n_bytes / max(1, len(layers)) for n_bytes in saved))
    found = [Linear()]
    for layer in recomputed:
        layer.gradient_checkpointing = False
        try:
            but_one = saved_linear(model, samples)
        finally:
            layer.gradient_checkpointing = True
        found.append(
            Linear(*(max(0.0, more - less) for more, less in zip(but_one, saved, strict=True)))
        )
    return max(found, key=lambda each: each.at(samples[1].n_tokens))


def gradients_of(model: Any) -> Gradients:
    """The gradients of the weights that are trained, fp32 as these are; of spread ones rows, and of
    the ends whole ones in `Gathered`.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = checkpointed_layers(model)
    inner = inner_of(model)
    ends = inner.get_input_embeddings(), inner.get_output_embeddings()
    embedding, head = (getattr(module, "weight", None) for module in ends)
    if any(hasattr(weight, "_local_tensor") for weight in trained):
        embedding = head = None

    def bytes_of(*weights: Tensor | None) -> int:
        """What this process holds of trained weights, each spread over others or whole."""
        whole = (w for w in weights if isinstance(w, Tensor) and w.requires_grad)
        return sum(int(getattr(weight, "_local_tensor", weight).nbytes) for weight in whole)

    return Gradients(
        all_bytes=bytes_of(*trained),
        layer_bytes=bytes_of(*(p for layer in layers for p in layer.parameters()))
        // max(1, len(layers)),
        head_bytes=bytes_of(head),
        embedding_bytes=bytes_of(embedding),
        is_tied=head is not None and head is embedding,
    )


def _working(model: Any) -> Linear:
    """What the backward pass of a layer needs besides what was saved: the planner's figures, and a
    matrix made whole.
    """
    config = model.config.get_text_config()

    def widest(*names: str) -> int:
        for name in names:
            # of layers that differ some have no one width
            with contextlib.suppress(AttributeError, RuntimeError):
                if width := getattr(config, name):
                    return int(max(width) if isinstance(width, list | tuple) else width)
        return 0

    hidden = widest("hidden_size", "d_model")
    ffn = widest("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim") or 4 * hidden
    in_four_bits = (p for p in model.parameters() if not p.is_floating_point())
    of_mlp, of_stream = WORKING_MLP_PLAIN, WORKING_STREAM
    forwards = (getattr(vars(each).get("forward"), "__module__", "") for each in model.modules())
    if not LIGERS.isdisjoint(forwards):
        of_mlp, of_stream = WORKING_MLP_LEAN, WORKING_STREAM_LEAN
    return Linear(
        4.0 * max((p.numel() for p in in_four_bits), default=0), of_mlp * ffn + of_stream * hidden
    )


def _casts_bytes(model: Any, autocast: torch.dtype | None) -> int:
    """Copies of the matrices of layers that autocast makes once in a forward pass and keeps until
    its end.
    """
    if autocast is None:
        return 0
    inner = inner_of(model)
    head = inner.get_output_embeddings()
    weights = {
        id(m.weight): m.weight
        for m in model.modules()
        if isinstance(m, nn.Linear) and m is not head and m.weight.ndim > 1
    }
    trained = [w for w in weights.values() if w.requires_grad and w.dtype == torch.float32]
    return sum(w.numel() * autocast.itemsize for w in trained)
