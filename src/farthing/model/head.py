"""The output layer and its loss, paid for only where there is a label, and without the logits of a
whole batch.

Labelled positions are taken tile by tile: logits, losses and gradients of a tile are made at once
in the forward pass, so no logits outlive their tile and no product is done twice; the backward pass
only scales what is there. A head with an adapter on it is more than a matrix: its tiles are
computed again in the backward pass (`word_losses`), and so is the loss of whole logits, where a
head is not known.

Shapes: N positions, of which n are labelled; h hidden size, V words, B examples, T tokens, D
documents.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from farthing.device_memory import in_words
from farthing.errors import DeviceError, OutOfMemoryError
from farthing.model import pairs
from farthing.model.documents import Batch
from farthing.model.loss import (
    Labelled,
    decoder_inputs,
    has_decoder,
    inner_of,
    inputs_of,
    logits_of,
)
from farthing.model.products import with_zeros
from farthing.models.families import KNOWN_HEADS
from farthing.models.tiles import CPU_BLOCK_BYTES, CUDA_BLOCK_BYTES, default_tile_tokens
from farthing.objectives.registry import objective_of


@dataclass(frozen=True)
class HeadSettings:
    """How the head's loss is computed. But for `soft_cap` and `label_smoothing` nothing here
    changes more than rounding.
    """

    soft_cap: float | None = None
    """c makes logits c·tanh(logits / c)."""
    label_smoothing: float = 0.0
    gradient_scale: float | Tensor = 1.0
    """A number, or a scalar on the device, which nobody waits for: what the gradient of the loss is
    expected to be, e.g. the loss scale divided by the targets of the step. Gradients are multiplied
    by it, and the backward pass only makes up the difference: in fp16, whose gradients would vanish
    unscaled, it has to be given; bf16 and fp32 can do without."""


def head_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labelled: Labelled, how: HeadSettings
) -> tuple[Tensor, Tensor]:
    """(sum of the cross-entropies of the labelled positions, each of them [n]) in fp32 (fp64 for
    fp64 weights). Each has a gradient where the head is not trained.

    hidden [..., h], weight [V, h], bias [V] or none. Under autocast the products are in its dtype
    and everything between them in fp32; gradients of the weight are added up in fp32, and handed
    out, not copied: one backward pass.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _HeadLoss.apply(rows, weight, bias, labelled, how, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    """Losses and gradients of the head in one pass over tiles of labelled positions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labelled: Labelled,
        how: HeadSettings,
        records: bool,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, h], weight [V, h], bias [V]. `records`: gradients are recorded."""
        positions, targets = labelled.positions, labelled.targets
        device = hidden.device.type
        computed = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        )
        summed = torch.promote_types(computed, torch.float32)
        of_hidden, of_weight, of_bias = (records and needed for needed in ctx.needs_input_grad[:3])
        n, (n_words, width) = len(positions), weight.shape
        tile = default_tile_tokens(n_words, device, width if weight.requires_grad else 0)
        new = hidden.new_empty
        losses = new(n, dtype=summed)
        grad_hidden = new((n, width), dtype=computed) if of_hidden else None
        grad_weight = new((n_words, width), dtype=summed) if of_weight else None
        grad_bias = new((n_words,), dtype=summed).zero_() if of_bias else None
        if grad_weight is not None and n == 0:
            grad_weight.zero_()
        with torch.autocast(device, enabled=False):
            matrix = weight.to(computed)
            shift = None if bias is None else bias.to(computed)
            product = (
                new((n_words, width), dtype=computed)
                if of_weight and computed != summed and n > tile
                else None
            )
            for start in range(0, n, tile):
                part = slice(start, start + tile)
                inputs = with_zeros(hidden.index_select(0, positions[part]).to(computed))
                own = len(losses[part])
                scores = torch.mm(inputs, matrix.t())
                if shift is not None:
                    scores.add_(shift)
                wants = of_hidden or of_weight or of_bias
                _to_gradients(scores[:own], targets[part], losses[part], how, wants)
                scores[own:] = 0
                if grad_hidden is not None and own == len(scores):
                    torch.mm(scores, matrix, out=grad_hidden[part])
                elif grad_hidden is not None:
                    grad_hidden[part] = torch.mm(scores, matrix)[:own]
                if grad_weight is not None:
                    _add_product(grad_weight, scores.t(), inputs, product, is_first=start == 0)
                if grad_bias is not None:
                    grad_bias += scores.sum(0, dtype=summed)
                del scores  # before those of the next tile are made
        ctx.how, ctx.n_rows, ctx.dtypes = how, len(hidden), (hidden.dtype, weight.dtype)
        ctx.of_weight, ctx.of_bias, ctx.is_spent = grad_weight, grad_bias, False
        ctx.is_trained = of_weight or of_bias
        ctx.save_for_backward(positions, grad_hidden)
        ctx.set_materialize_grads(False)
        if ctx.is_trained:
            ctx.mark_non_differentiable(losses)
        return losses.sum(dtype=torch.float64).to(summed), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sum: Tensor | None, of_each: Tensor | None) -> Any:
        """The gradients of the forward pass times what its `gradient_scale` did not foresee. A
        hidden state may be scored against several targets where each loss has a gradient.
        """
        if ctx.is_spent:
            raise RuntimeError(
                "the head's gradients were handed out already: there is one backward pass"
            )
        positions, grad_hidden = ctx.saved_tensors
        factor = 0.0 if of_sum is None else of_sum
        if of_each is not None:
            factor = factor + of_each[:, None]
        factor = factor / ctx.how.gradient_scale
        of_hidden = None
        if grad_hidden is not None:
            rows = (grad_hidden * factor).to(ctx.dtypes[0])
            of_hidden = rows.new_zeros(ctx.n_rows, rows.shape[1])
            add = of_hidden.index_copy_ if of_each is None else of_hidden.index_add_
            add(0, positions, rows)
        of_weight, of_bias = ctx.of_weight, ctx.of_bias
        ctx.of_weight = ctx.of_bias = None
        ctx.is_spent = ctx.is_trained
        for one in (of_weight, of_bias):
            if one is not None:
                one.mul_(factor)
        if of_weight is not None:
            of_weight = of_weight.to(ctx.dtypes[1])
        return of_hidden, of_weight, of_bias, None, None, None


@cache
def one_kernel(device: torch.device) -> Callable[..., None] | None:
    """`cross_entropy.fill_gradients` where Triton runs it on this device; else None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from farthing.model import cross_entropy

    try:
        return cross_entropy.fill_gradients if cross_entropy.works_on(device) else None
    except Exception as error:
        if isinstance(in_words(error), DeviceError | OutOfMemoryError):
            raise
        return None  # a Triton without a compiler, or one that does not know this GPU


def _to_gradients(
    scores: Tensor, targets: Tensor, losses: Tensor, how: HeadSettings, wants: bool
) -> None:
    """Fill in the losses [t] of scores [t, V], which become their gradients (scaled) where
    `wants`: in one kernel, or a few rows at a time, so that little is in fp32 at once
    (`models.tiles.head_bytes`).
    """
    if (fill := one_kernel(scores.device)) is not None and losses.dtype == torch.float32:
        fill(
            scores,
            targets,
            losses,
            scale=how.gradient_scale,
            label_smoothing=how.label_smoothing,
            soft_cap=how.soft_cap,
            has_gradient=wants,
        )
        return
    n_threads = torch.get_num_threads() if scores.device.type == "cpu" else 0
    block_bytes = CPU_BLOCK_BYTES * n_threads or CUDA_BLOCK_BYTES
    n_rows = max(1, n_threads, block_bytes // (losses.itemsize * scores.shape[1]))
    parts = (each.split(n_rows) for each in (scores, targets.unsqueeze(1), losses))
    for block, words, found in zip(*parts, strict=True):
        _block_to_gradients(block, words, found, how, wants)


def _block_to_gradients(
    block: Tensor, words: Tensor, losses: Tensor, how: HeadSettings, wants: bool
) -> None:
    """Fill in the losses [t] of the words [t, 1]; scores [t, V] become gradients. What it makes in
    fp32 is gone when it returns: the next block finds it free.
    """
    smooth, cap, scale, summed = how.label_smoothing, how.soft_cap, how.gradient_scale, losses.dtype
    is_scaled = isinstance(scale, Tensor) or scale != 1
    bent = block if cap is None else torch.tanh(block.to(summed) / cap)
    logs = torch.log_softmax(bent if cap is None else bent * cap, -1, dtype=summed)
    of_words = logs.gather(1, words)
    torch.mul(of_words[:, 0], smooth - 1, out=losses)
    if smooth:
        losses -= smooth * logs.mean(1)
    if not wants:
        return
    if cap is None and not smooth and not is_scaled:
        # softmax minus one at the word, which is rounded only once
        torch.exp(logs, out=block)
        block.scatter_(1, words, torch.expm1(of_words).to(block.dtype))
        return
    gradient = logs.exp_()
    if smooth:
        gradient -= smooth / block.shape[1]
    gradient.scatter_add_(1, words, gradient.new_full((1, 1), smooth - 1).expand_as(words))
    if cap is not None:
        gradient *= bent.square_().neg_().add_(1)
    if is_scaled:
        gradient *= scale
    block.copy_(gradient)


def _add_product(
    into: Tensor, left: Tensor, right: Tensor, product: Tensor | None, *, is_first: bool
) -> None:
    """into += left @ right (= for the first), by way of `product` where the dtypes differ."""
    if into.dtype == left.dtype:
        into.addmm_(left, right, beta=0 if is_first else 1)
        return
    found = left @ right if product is None else torch.mm(left, right, out=product)
    if is_first:
        into.copy_(found)
    else:
        into += found


def word_losses(
    hidden: Tensor, head: Head, labelled: Labelled, label_smoothing: float = 0.0
) -> Tensor:
    """[n]: the loss of each target in fp32, tile by tile; the logits of a tile are made again to go
    backward.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    tile = default_tile_tokens(head.n_words(rows), rows.device.type)

    def of_tile(inputs: Tensor, targets: Tensor) -> Tensor:
        scores = head.linear(inputs)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if head.shift is not None:
            scores = scores + head.shift
        if head.soft_cap is not None:
            scores = torch.tanh(scores / head.soft_cap) * head.soft_cap
        return F.cross_entropy(scores, targets, reduction="none", label_smoothing=label_smoothing)

    parts = zip(labelled.positions.split(tile), labelled.targets.split(tile), strict=True)
    return torch.cat(
        [
            checkpoint(of_tile, rows[places], targets, use_reentrant=False)
            for places, targets in parts
        ]
    )


# ---- whole models ----


@dataclass(frozen=True)
class Head:
    """What is behind the last hidden states of a model that scores words, and how to get those."""

    hidden_states: Callable[[Batch], Tensor]
    """From a batch to hidden states [B, T, h], scaled as the head takes them."""
    linear: Any
    """The output layer: a `nn.Linear`, or one with an adapter of `peft`."""
    soft_cap: float | None = None
    shift: Tensor | None = None
    """[1, V], added to the logits beside the layer's own bias, and not trained: that of BART and
    its kin.
    """
    why_whole: str = ""
    """Why all positions are scored: the hidden states are logits then, which `linear` leaves as
    they are.
    """

    @property
    def bias(self) -> Tensor | None:
        """[V]: what is added to the logits, where the layer is a matrix."""
        own: Tensor | None = self.linear.bias
        if self.shift is None:
            return own
        return self.shift[0] if own is None else own + self.shift[0]

    @property
    def is_matrix(self) -> bool:
        """Whether the layer is a matrix, perhaps with a bias, and nothing more."""
        return type(self.linear) is nn.Linear

    def n_words(self, rows: Tensor) -> int:
        return int(rows.shape[-1] if self.why_whole else self.linear.weight.shape[0])

    def loss(self, batch: Batch, label_smoothing: float, gradient_scale: float | Tensor) -> Tensor:
        """Sum of the cross-entropies of a micro-batch, for training."""
        states, labelled = self.hidden_states(batch), Labelled.of(batch)
        if not self.is_matrix:
            return word_losses(states, self, labelled, label_smoothing).sum()
        how = HeadSettings(self.soft_cap, label_smoothing, gradient_scale)
        return head_losses(states, self.linear.weight, self.bias, labelled, how)[0]

    def log_probs(self, batch: Batch) -> Tensor:
        """[n] in fp32: the log-probability of each of the batch's labelled targets, differentiable.
        A position may have several targets. Of a trained head the logits of a tile are made again
        in the backward pass.
        """
        states, labelled = self.hidden_states(batch), Labelled.of(batch)
        if not self.is_matrix or (self.linear.weight.requires_grad and torch.is_grad_enabled()):
            return -word_losses(states, self, labelled)
        how = HeadSettings(self.soft_cap)
        return -head_losses(states, self.linear.weight, self.bias, labelled, how)[1]


def find_head(model: Any, task: str) -> Head:
    """The head of a causal or sequence-to-sequence model of `transformers`, wrapped by `peft` or
    not.
    """
    inner = inner_of(model)
    family = getattr(getattr(inner, "config", None), "model_type", "")
    known = KNOWN_HEADS.get(objective_of(task).head, frozenset())
    linear: Any = inner.get_output_embeddings()
    matrix: Any = linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear
    if family not in known or not type(inner).__module__.startswith("transformers.models."):
        why = f"the head of a {family or type(inner).__name__} for {task} is not known"
    elif type(matrix) is not nn.Linear:
        why = f"the head is wrapped in {type(linear).__module__}.{type(linear).__name__}"
    elif any(
        one._forward_hooks or one._forward_pre_hooks or nn.utils.parametrize.is_parametrized(one)
        for one in {linear, matrix}
    ):
        why = "something listens to the head or rewrites its weights"
    elif not matrix.weight.is_floating_point():
        why = f"the head's weights are {matrix.weight.dtype}"
    elif has_decoder(inner):
        shift = getattr(inner, "final_logits_bias", None)
        return Head(partial(_decoder_states, inner), linear, shift=shift)
    else:
        cap = _said(inner.config, "final_logit_softcapping")
        return Head(partial(_causal_states, inner), linear, cap)
    why = f"all positions are scored: {why}"
    return Head(partial(logits_of, model), nn.Identity(), why_whole=why)


def _causal_states(inner: Any, batch: Batch) -> Tensor:
    """Hidden states [B, T, h] after the last norm, scaled where the family scales its logits
    (Cohere, Granite).
    """
    body = getattr(inner, inner.base_model_prefix)
    states: Tensor = body(**inputs_of(batch), use_cache=False).last_hidden_state
    scale = _said(inner.config, "logit_scale") or 1 / (_said(inner.config, "logits_scaling") or 1)
    return states if scale == 1 else states * scale


def _said(config: Any, key: str) -> Any:
    """What a configuration says, if its family knows the key: of others transformers keeps it, and
    computes without.
    """
    return getattr(config, key) if hasattr(type(config), key) else None


def _decoder_states(inner: Any, batch: Batch) -> Tensor:
    """Hidden states [B, T, h] of the decoder, scaled where the head shares the embeddings'
    weights.
    """
    if "documents" in batch:
        states = pairs.decoder_states(inner, batch)
    else:
        inputs = inputs_of(batch)
        source = inner.get_encoder()(**inputs).last_hidden_state
        states = inner.get_decoder()(
            input_ids=decoder_inputs(inner, batch["labels"]),
            encoder_hidden_states=source,
            encoder_attention_mask=inputs.get("attention_mask"),
            use_cache=False,
        ).last_hidden_state
    config = inner.config
    is_scaled = config.tie_word_embeddings if config.model_type == "umt5" else False
    if getattr(config, "scale_decoder_outputs", is_scaled):
        states = states * (inner.model_dim**-0.5)
    return states
