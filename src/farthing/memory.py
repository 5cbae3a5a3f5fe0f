"""shape x recipe x the largest micro-batch -> bytes by component, at the moment that takes most.

A step has four such moments: the loss (all activations and the logits), the backward pass of the top layer, that of the
embeddings (all gradients), and the optimizer's own. Each is a sum of named parts; the largest sum is the peak.

What is physics: everything but `SLACK`, `CUDA_CONTEXT_BYTES` and `WORKING_*`. Weights, gradients and state are counts times
bytes. A layer's activations are counted operation by operation, as autograd saves them in the modelling code of
transformers 5; `tests/test_memory.py` holds them against that code, run on tensors without data. Fitted there are
`WORKING_*`, what the backward pass of a layer needs besides what was saved. `SLACK` and `CUDA_CONTEXT_BYTES` are what
`nvidia-smi` showed above torch's own peak in published runs with a fused loss (foundation-model-stack/fms-acceleration,
A100-80GB: 6 to 11 %, and 0.5 to 0.8 GiB).

Refuses to import torch and to look at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from farthing.lengths import Largest
from farthing.recipe import CHUNKED, FUSED, LABELLED, TILED, WHOLE, Recipe
from farthing.shapes import Adapters, Shape

SLACK = 0.05  # of what torch has allocated: blocks that the allocator can't use
CUDA_CONTEXT_BYTES = int(0.6 * 2**30)
NF4_BYTES = (
    0.5 + 1 / 64 + 4 / (64 * 256)
)  # QLoRA, double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3)
STATE_BYTES = {
    "sgd": 0.0,
    "adamw_8bit": 2.03,
    "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 0.0,
    "paged_adamw_32bit": 0.0,
}
WORKING_MLP, WORKING_STREAM = 6, 5  # bytes for each feature of the feed-forward, and of the stream
TILE_BYTES = 256 << 20  # of a loss that never has more than a tile of the logits


class Block(NamedTuple):
    """What a layer of a family keeps besides its matrix products' inputs, in numbers of that many bytes a token."""

    n_norms: int  # of the stream's width, in a layer
    activation: float  # copies of the feed-forward's width that its activation keeps
    is_gated: bool
    n_attention_inputs: int  # separate products that read the first norm's output
    n_mlp_inputs: int
    dropouts: int  # of the stream's width
    has_norm_copies: bool  # RMS norms of transformers keep what they normalized in fp32


_GATED = Block(2, 3, True, 3, 2, 0, True)
BLOCKS = {
    "gemma2": _GATED._replace(n_norms=4),
    "gemma3_text": _GATED._replace(n_norms=4),
    "phi3": _GATED._replace(n_attention_inputs=3, n_mlp_inputs=1),
    "gpt2": Block(2, 4, False, 1, 1, 2, False),
    "gpt_bigcode": Block(2, 1, False, 1, 1, 2, False),
    "gpt_neox": Block(2, 1, False, 1, 1, 0, False),
    "mpt": Block(2, 1, False, 1, 1, 0, False),
    "t5": Block(2, 5, True, 3, 2, 2, True),
    "mt5": Block(2, 5, True, 3, 2, 2, True),
    "bert": Block(2, 1, False, 3, 1, 2, False),
    "roberta": Block(2, 1, False, 3, 1, 2, False),
    "xlm-roberta": Block(2, 1, False, 3, 1, 2, False),
    "distilbert": Block(2, 1, False, 3, 1, 2, False),
}
_CAPS_LOGITS = {"gemma2"}  # a tanh of them is kept
_EAGER = {"gemma2"}  # soft-capping: scores are computed and kept whole
_DROPS_SCORES = {"bert", "roberta", "xlm-roberta", "distilbert", "t5", "mt5", "gpt2", "gpt_bigcode"}


@dataclass(frozen=True)
class Memory:
    """Peak memory of one GPU, in bytes."""

    parts: dict[str, int]
    """What is there at the peak: weights, gradients, optimizer, casts, activations, logits, working."""
    moment: str
    """When: loss, backward, embeddings or optimizer."""
    is_cuda: bool = True

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
        """What the device must have: with the CUDA context, as `nvidia-smi` shows it."""
        return self.reserved_bytes + (CUDA_CONTEXT_BYTES if self.is_cuda else 0)

    def as_dict(self) -> dict[str, int]:
        """All parts, slack and context included; they add up to `total_bytes`."""
        more = {"allocator slack": self.reserved_bytes - self.allocated_bytes}
        more["CUDA context"] = self.total_bytes - self.reserved_bytes
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
    """Peak of a step whose largest micro-batch is `largest`; `labelled_share` of its tokens go through the loss.

    `adapters` is what `Shape.with_lora` counts, for lora and qlora. Sharding divides what it divides evenly.
    """
    stack = recipe.stack
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    shards = recipe.n_gpus if recipe.sharding == "fsdp" else 1
    weights = _weights_bytes(shape, recipe, adapters) / shards
    gradients = n_trained * recipe.trained_bytes / shards
    if shards > 1:  # the layer at work is whole on every GPU, and the next one is being fetched
        weights += 2 * _weights_bytes(shape, recipe, adapters) / max(1, shape.n_layers + shape.n_decoder_layers)
    state = n_trained * optimizer_bytes(recipe) / shards
    head_gradients = shape.n_head_matmul * recipe.trained_bytes / shards if adapters is None else 0.0
    if stack.frees_gradients:
        gradients = max(gradients / max(1, shape.n_layers), head_gradients)
    held = gradients if recipe.n_micro_batches > 1 and not stack.frees_gradients else 0.0
    casts = 0.0
    if adapters is None and stack.has_autocast and recipe.trained_bytes > recipe.compute_bytes:
        # autocast keeps a copy of every weight it has cast until the forward pass is over, and autograd longer
        casts = (shape.n_matmul + shape.n_head_matmul) * recipe.compute_bytes / shards

    layers = _layers(shape, recipe, largest, adapters, is_cuda)
    saved, boundaries, top, working = layers
    logits = logits_bytes(shape, recipe, largest, labelled_share)
    last = largest.n_rows * (largest.targets or largest.tokens) * shape.hidden * (4 + recipe.residual_bytes)
    if stack.offloads_activations:
        saved, boundaries = 0.0, 0.0
    embedding = shape.vocab * shape.hidden * recipe.trained_bytes if adapters is None else 0.0
    more = embedding * (2 if shape.is_tied else 0) + (embedding if held and not shape.is_tied else 0.0)
    step = n_trained * recipe.trained_bytes / shards if recipe.optim == "adamw_torch" else 0.0
    if stack.frees_gradients:
        step = 0.0

    base = {"weights": weights, "optimizer": state}
    moments = {
        "loss": base | {"gradients": held, "casts": casts, "activations": saved + last, "logits": logits},
        "backward": base
        | {
            "gradients": held or head_gradients,
            "casts": 0.0 if recipe.every_n_layers == 1 else casts,
            "activations": (saved if recipe.every_n_layers != 1 else boundaries + top),
            "working": working,
        },
        "embeddings": base | {"gradients": gradients, "working": more / shards},
        "optimizer": base | {"gradients": gradients, "working": step},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(value) for name, value in moments[moment].items() if value >= 1}
    return Memory(parts, moment, is_cuda)


def optimizer_bytes(recipe: Recipe) -> float:
    """State for each trained weight: Adam keeps two moments in the dtype of the weight, 8-bit ones two bytes.

    Paged state leaves the GPU when room is needed, so it does not count.
    """
    return STATE_BYTES.get(recipe.optim, 2.0 * recipe.trained_bytes)


def _weights_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    if adapters is None:
        return float(shape.n_parameters * recipe.trained_bytes)
    trained = adapters.n_trainable * recipe.trained_bytes
    frozen = adapters.n_total - adapters.n_trainable
    if recipe.method != "qlora":
        return float(frozen * recipe.frozen_bytes + trained)
    return shape.n_matmul * NF4_BYTES + (frozen - shape.n_matmul) * recipe.frozen_bytes + trained


def logits_bytes(shape: Shape, recipe: Recipe, largest: Largest, labelled_share: float) -> float:
    """What the loss has at its worst, in bytes for each word of the vocabulary and token.

    Logits in the precision of the run, their fp32 copy, its log-softmax, and two gradients of that size: 14 bytes in
    bf16 (`whole`). With only the labelled positions copied, 2 and 10 for each of those; in fp32, where nothing has to be
    cast, the gradient of all positions comes on top of what is left. A fused cross-entropy has the logits, one fp32 copy
    and the gradient (8); one that is chunked has the logits of all tokens and small copies (2).
    """
    n_tokens = largest.n_rows * (largest.targets or largest.tokens)
    c = recipe.compute_bytes
    if shape.task in ("classification", "body"):
        return 0.0
    if recipe.stack.loss == TILED:
        return float(TILE_BYTES)
    of_each = {
        WHOLE: c + 12.0,
        LABELLED: 8.0 + 4.0 * labelled_share if c == 4 else c + (c + 8.0) * labelled_share,
        FUSED: 8.0,
        CHUNKED: float(c),
    }[recipe.stack.loss]
    caps = c if shape.model_type in _CAPS_LOGITS else 0.0
    return (of_each + caps) * shape.vocab * n_tokens


def _layers(
    shape: Shape, recipe: Recipe, largest: Largest, adapters: Adapters | None, is_cuda: bool
) -> tuple[float, float, float, float]:
    """(all saved activations, inputs of checkpointed layers, all of one layer, what its backward pass works with)."""
    one = saved_per_token(shape, recipe, adapters, is_cuda)
    squares = scores_per_pair(shape, recipe, is_cuda)
    source, target = largest.n_rows * largest.tokens, largest.n_rows * largest.targets
    layer = one * source + squares * source * largest.tokens
    decoder = 0.0
    if shape.n_decoder_layers:  # attends twice: its own tokens, and the source's
        decoder = 1.45 * one * target + squares * target * (largest.targets + largest.tokens)
        decoder += 2 * recipe.compute_bytes * shape.n_kv_heads * shape.head_dim * source
    every = recipe.every_n_layers
    n_kept = [n - n // every if every else n for n in (shape.n_layers, shape.n_decoder_layers)]
    edge = shape.hidden * (4 if recipe.stack.upcasts_frozen and recipe.method == "qlora" else recipe.residual_bytes)
    boundaries = edge * ((shape.n_layers - n_kept[0]) * source + (shape.n_decoder_layers - n_kept[1]) * target)
    saved = n_kept[0] * layer + n_kept[1] * decoder + boundaries
    top = max(layer, decoder)
    works = WORKING_MLP * shape.ffn + WORKING_STREAM * shape.hidden
    if recipe.stack.fused_mlp or recipe.stack.is_compiled:
        works = 2 * shape.ffn + 4 * shape.hidden
    return saved, boundaries, top, float(works * max(source, target))


def saved_per_token(shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool = True) -> float:
    """Bytes that autograd keeps of one layer for each token, its attention scores aside.

    In order: norms, the products' inputs, attention, feed-forward, dropout masks, the adapters' inputs.
    """
    block, stack = BLOCKS.get(shape.model_type, _GATED), recipe.stack
    c, r, h, f = recipe.compute_bytes, recipe.residual_bytes, shape.hidden, shape.ffn
    q, k = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    is_full = adapters is None
    is_mixed = stack.has_autocast and r > c  # products get copies in the precision of the run

    norms = block.n_norms * h * (r if stack.fused_norms or stack.is_compiled else 4)
    inputs = 0
    if is_full:
        if block.has_norm_copies and not (stack.fused_norms or stack.is_compiled):
            norms += block.n_norms * h * r
        if is_mixed:
            inputs = (block.n_attention_inputs + block.n_mlp_inputs) * c * h
            if not block.has_norm_copies:
                norms += block.n_norms * h * r
        else:
            inputs = 2 * r * h
    attention = 4 * c * q if not stack.is_flash else 2 * c * q + 2 * c * k
    n_copies = (2 if stack.fused_mlp or stack.is_compiled else block.activation) if block.is_gated else block.activation
    feed_forward = n_copies * c * f
    if is_full or _adapts_down(shape, adapters):
        feed_forward += c * f if not stack.fused_mlp else 0
    masks = block.dropouts * h * (1 if is_cuda else c)
    return norms + inputs + attention + feed_forward + masks + _adapter_inputs(shape, recipe, adapters, is_cuda)


def scores_per_pair(shape: Shape, recipe: Recipe, is_cuda: bool) -> float:
    """Bytes of one layer for each pair of tokens, where attention does keep its scores."""
    if shape.model_type in _EAGER:
        return shape.n_heads * (4 + 2 * recipe.compute_bytes)
    if shape.model_type in _DROPS_SCORES and not is_cuda:  # sdpa with dropout, on a CPU
        return shape.n_heads * 12.0
    return 0.0


def _adapter_inputs(shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool) -> float:
    """Bytes for each token of a layer that adapters keep: each its input in the dtype that it multiplies, and dropout."""
    if adapters is None:
        return 0.0
    stack, c = recipe.stack, recipe.compute_bytes
    n_layers = max(1, shape.n_layers)
    bytes_of, seen_stream = 0.0, False
    for weight, n in adapters.adapted:
        if weight.kind != "linear" or weight.copies == 1:
            continue
        share = n / n_layers if not shape.n_decoder_layers else n / (shape.n_layers + shape.n_decoder_layers)
        is_down = weight.n_in == shape.ffn and weight.n_in != shape.hidden
        width = weight.n_in
        if recipe.lora_dropout > 0:
            bytes_of += share * width * (1 if is_cuda else 4)
        if recipe.trained_bytes == 4 and c == 2 and not stack.has_autocast:
            bytes_of += share * 4 * width  # the adapter casts its input, and keeps the copy
        elif recipe.trained_bytes == 4 and c == 2:
            bytes_of += (
                share * c * width * (0 if is_down else 1)
            )  # a down projection's is counted with the feed-forward
        elif not is_down and not seen_stream:  # the dtypes agree: what is multiplied is shared
            bytes_of += 2 * c * shape.hidden
            seen_stream = True
        bytes_of += share * recipe.lora_r * c
        if recipe.use_dora:
            bytes_of += share * 2 * c * weight.n_out
    return bytes_of


def _adapts_down(shape: Shape, adapters: Adapters | None) -> bool:
    return adapters is not None and any(w.n_in == shape.ffn and w.part == "mlp" for w, _ in adapters.adapted)
