"""shape x recipe x the largest micro-batch -> bytes by component, at the moment that takes most.

The moments of a step: the forward pass, the loss (all activations and the logits), the backward pass of the top layer, that
of the last one (nearly all gradients), that of the embeddings (all gradients; in a model of two stacks the decoder's come
before the encoder's layers), and the optimizer's own. Each is a sum of named parts; the largest sum is the peak.

What is physics: everything but `SLACK`, `CUDA_CONTEXT_BYTES`, `CACHED_LOGITS`, `COMMUNICATION_BYTES` and `WORKING_*`. Weights,
gradients and state are counts times bytes. A layer's activations are counted operation by operation, as autograd saves them in
the modelling code of transformers 5; `tests/test_memory.py` holds them against that code, run on tensors without data. Fitted
there are `WORKING_*`, what the backward pass of a layer needs besides what was saved. The other four are what `nvidia-smi`
showed above torch's own peak in published runs (foundation-model-stack/fms-acceleration, A100-80GB, 1 to 4 GPUs).

Refuses to import torch and to look at the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farthing.planner.blocks import block_of
from farthing.planner.lengths import Largest
from farthing.planner.recipe import CHUNKED, DDP, FSDP, FUSED, LABELLED, POSITIONS, SAVED, TILED, WHOLE, Recipe
from farthing.planner.shapes import Adapters, Shape, Weight
from farthing.planner.tiles import CPU_BLOCK_BYTES, CUDA_BLOCK_BYTES, default_tile_tokens

SLACK = 0.05  # of what torch has allocated: blocks that the allocator can't use
CUDA_CONTEXT_BYTES = int(0.8 * 2**30)
# of the logits of a whole micro-batch: blocks that are too large for anything else, and are kept; between 0.47 of one source
# (fms-acceleration, nvidia-smi) and nothing of another (PEFT, reserved)
CACHED_LOGITS = 0.25
COMMUNICATION_BYTES = {  # of several GPUs: what gathered layers leave in the pools of streams; buffers of NCCL, by assumption
    FSDP: int(4.6 * 2**30),
    DDP: 2**29,
}
# of a weight in QLoRA, double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3)
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
STATE_BYTES = {
    "sgd": 0.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "adamw_torch_offload": 0.0,
    "adamw_8bit": 2.03,
    "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 0.0,
    "paged_adamw_32bit": 0.0,
}
WORKING_MLP, WORKING_STREAM = 6, 5  # bytes for each feature of the feed-forward, and of the stream
WORKING_MLP_PLAIN = 4  # the first of them in the trainer's own flat pass, where the activation is one kernel
TILE_BYTES = 256 << 20  # of a loss that never has more than a tile of the logits


_CAPS_LOGITS = {"gemma2"}  # a tanh of them is kept
_EAGER = {"gemma2", "gpt_oss"}  # soft-capping, sinks: scores are computed and kept whole
_ATTENTION_OUTPUTS = {"o_proj", "dense", "out_lin", "c_proj", "out_proj", "o"}
_DROPS_SCORES = {"bert", "roberta", "xlm-roberta", "distilbert", "t5", "mt5", "gpt2", "gpt_bigcode"}


@dataclass(frozen=True)
class Memory:
    """Peak memory of one GPU, in bytes."""

    parts: dict[str, int]
    """What is there at the peak: weights, gradients, optimizer, casts, activations, logits, working."""
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
        """What the device must have: with the CUDA context and what is cached, as `nvidia-smi` shows it."""
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
    """Peak of a step whose largest micro-batch is `largest`; `labelled_share` of its tokens go through the loss.

    `adapters` is what `Shape.with_lora` counts, for lora and qlora. Sharding divides what it divides evenly.
    """
    stack = recipe.stack
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    shards = recipe.n_gpus if recipe.sharding == FSDP else 1
    own = 1 if adapters is not None and recipe.stack.keeps_adapters_whole else shards  # trained weights are spread over
    weights = _weights_bytes(shape, recipe, adapters) / shards
    weights += n_trained * recipe.trained_bytes * (1 / own - 1 / shards)
    # beside the part of a step that is being computed: the sums of those that this GPU has computed
    gradients = (1 + math.ceil(math.log2(recipe.lanes_of_gpu))) * n_trained * recipe.trained_bytes / own
    gathered = _gathered_bytes(shape, recipe) if shards > 1 else 0.0
    state = n_trained * optimizer_bytes(recipe) / own
    head_gradients = shape.n_head_matmul * recipe.trained_bytes / shards if adapters is None else 0.0
    if stack.frees_gradients:
        gradients = max(gradients / max(1, shape.n_layers), head_gradients)
    held = gradients if recipe.n_micro_batches > 1 and not stack.frees_gradients else 0.0
    by_positions = stack.loss == POSITIONS and shape.scores_tokens
    # made in the forward pass; where the embeddings share its weight it waits for theirs, beside what is held
    in_loss = head_gradients if by_positions else 0.0
    in_backward = in_loss if shape.is_tied and held else 0.0
    casts = _casts_bytes(shape, recipe, adapters) / shards

    saved, of_encoder, boundaries, top, working = _layers(shape, recipe, largest, adapters, is_cuda)
    logits = logits_bytes(shape, recipe, largest, labelled_share, is_cuda=is_cuda, is_trained=adapters is None)
    last = largest.n_rows * (largest.targets or largest.tokens) * shape.hidden * (4 + recipe.residual_bytes)
    if stack.offloads_activations:
        saved, boundaries = 0.0, 0.0
    embedding = shape.vocab * shape.hidden * recipe.trained_bytes if adapters is None else 0.0
    more = embedding * ((2 if shape.is_tied else 0) + (1 if held else 0))
    step = n_trained * recipe.trained_bytes / own if recipe.optim == "adamw_torch" else 0.0
    if stack.frees_gradients:
        step = 0.0

    n_layers = max(1, shape.n_layers + shape.n_decoder_layers)
    base = {"weights": weights, "optimizer": state}
    dora = _dora_working(recipe, adapters) + _merged_bytes(shape, recipe, adapters)
    before_last = head_gradients + shape.n_matmul * recipe.trained_bytes / shards * (1 - 1 / n_layers)
    if adapters is not None or stack.frees_gradients:
        before_last = gradients
    at_work = base | {"gathered weights": gathered}
    # a trained layer's gradient is whole, in fp32 as it is summed, until each GPU has its part of the sum
    of_layer = 4.0 * in_layers(shape) / n_layers if shards > 1 and adapters is None else 0.0
    going_back = base | {"gathered weights": gathered + of_layer}
    moments = {
        "forward": at_work | {"gradients": held, "casts": casts, "activations": saved, "working": dora},
        "loss": at_work | {"gradients": held + in_loss, "casts": casts, "activations": saved + last, "logits": logits},
        "backward": going_back
        | {
            "gradients": (held or head_gradients) + in_backward,
            "casts": 0.0 if recipe.settings.checkpoint_every == 1 else casts,
            "activations": saved if recipe.settings.checkpoint_every != 1 else recipe.edge_copies * boundaries + top,
            "working": max(working, dora if recipe.settings.checkpoint_every else 0.0),
        },
        "last layer": going_back
        | {"gradients": (held or before_last) + in_backward, "activations": top, "working": max(working, dora)},
        "embeddings": at_work | {"gradients": gradients, "working": more / shards},
        "optimizer": base | {"gradients": gradients, "working": step},
    }
    if shape.n_decoder_layers and shape.is_tied and adapters is None:  # they come before the encoder's layers
        of_decoder = sum(w.copies * w.n_weights for w in shape.linear_layers if w.name.startswith("decoder."))
        so_far = head_gradients + of_decoder * recipe.trained_bytes / shards
        moments["decoder's embeddings"] = at_work | {
            "gradients": held or so_far,
            "activations": of_encoder,
            "working": more / shards,
        }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(value) for name, value in moments[moment].items() if value >= 1}
    if not is_cuda:
        return Memory(parts, moment, is_cuda)
    cached = CACHED_LOGITS * logits if stack.loss in (LABELLED, WHOLE, FUSED, SAVED) else 0.0
    return Memory(parts, moment, is_cuda, int(cached) + COMMUNICATION_BYTES.get(recipe.sharding, 0))


def evaluation_memory(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None = None,
    *,
    labelled_share: float = 1.0,
    is_cuda: bool = True,
) -> Memory:
    """Peak of an evaluation whose largest batch is `largest`: the optimizer's state stays, and no layer keeps anything."""
    shards = recipe.n_gpus if recipe.sharding == FSDP else 1
    n_trained = shape.n_parameters if adapters is None else adapters.n_trainable
    _, _, _, layer, _ = _layers(shape, recipe, largest, adapters, is_cuda)
    logits = logits_bytes(shape, recipe, largest, labelled_share, is_cuda=is_cuda)
    base = {
        "weights": _weights_bytes(shape, recipe, adapters) / shards,
        "gathered weights": _gathered_bytes(shape, recipe) if shards > 1 else 0.0,
        "optimizer": n_trained * optimizer_bytes(recipe) / shards,
        "casts": _casts_bytes(shape, recipe, adapters) / shards,
    }
    found = base | ({"logits": logits} if logits > layer else {"activations": layer})
    return Memory({name: int(value) for name, value in found.items() if value >= 1}, "evaluation", is_cuda)


def optimizer_bytes(recipe: Recipe) -> float:
    """State for each trained weight: Adam keeps two moments in the dtype of the weight, 8-bit ones two bytes.

    Paged state leaves the GPU when room is needed, and off-loaded state was never there, so neither counts.
    """
    return STATE_BYTES.get(recipe.optim, 2.0 * recipe.trained_bytes)


def _casts_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Autocast's copies of the weights it has cast: kept until the forward pass is over, by autograd longer."""
    if not recipe.stack.has_autocast or recipe.trained_bytes <= recipe.compute_bytes:
        return 0.0
    if recipe.sharding == "fsdp" and adapters is None:
        return 0.0  # gathered in the precision of the run, and given back layer by layer
    if adapters is not None:  # fused layers keep the casts of their thin matrices, unless they are computed again
        kept = 1 - (1 / recipe.settings.checkpoint_every if recipe.settings.checkpoint_every else 0)
        return adapters.n_adapter * recipe.compute_bytes * kept if recipe.stack.fuses_adapters else 0.0
    of_head = 0 if recipe.stack.loss == POSITIONS else shape.n_head_matmul  # cast for the time of its tiles only
    return float((shape.n_matmul + of_head) * recipe.compute_bytes)


def _gathered_bytes(shape: Shape, recipe: Recipe) -> float:
    """What is whole on a GPU that computes with weights that are spread: embeddings, last norm and head from the forward to
    the end of the backward pass, and the layer at work (FSDP2; held against fms-acceleration's runs on 2 and 4 GPUs).
    """
    root = shape.n_parameters - in_layers(shape)
    of_layer = in_layers(shape) / max(1, shape.n_layers + shape.n_decoder_layers)
    if recipe.method == "qlora":
        return root * recipe.frozen_bytes + of_layer * NF4_BYTES
    return float((root + of_layer) * recipe.compute_bytes)


def in_layers(shape: Shape) -> int:
    """Weights of the layers, of which there are several: all but embeddings, last norm and head."""
    return sum(weight.n_parameters for weight in shape.weights if "*" in weight.name)


def _weights_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    if adapters is None:
        return float(shape.n_parameters * recipe.trained_bytes)
    trained = adapters.n_trainable * recipe.trained_bytes
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

    Logits in the precision of the run, their fp32 copy, its log-softmax, and two gradients of that size: 14 bytes in
    bf16 (`whole`). With only the labelled positions copied, 2 and 10 for each of those; in fp32, where nothing has to be
    cast, the gradient of all positions comes on top of what is left. A fused cross-entropy has the logits, one fp32 copy
    and the gradient (8); one that is chunked has the logits of all tokens and small copies (2), and their log-softmax too
    where that is not recomputed (`saved`, 4). The trainer's own (`positions`) has a tile of logits: `_tiles_bytes`, where
    `is_trained` says whether the head is, and None that nothing is (evaluation).
    """
    n_tokens = largest.n_rows * (largest.targets or largest.tokens)
    c = recipe.compute_bytes
    if not shape.scores_tokens:
        return 0.0
    if recipe.stack.loss == TILED:
        return float(TILE_BYTES)
    if recipe.stack.loss == POSITIONS:
        return _tiles_bytes(shape, recipe, math.ceil(n_tokens * labelled_share), is_cuda, is_trained)
    of_each = {
        WHOLE: c + 12.0,
        LABELLED: 8.0 + 4.0 * labelled_share if c == 4 else c + (c + 8.0) * labelled_share,
        FUSED: 8.0,
        CHUNKED: float(c),
        SAVED: 2.0 * c,
    }[recipe.stack.loss]
    caps = c if shape.model_type in _CAPS_LOGITS else 0.0
    return (of_each + caps) * shape.vocab * n_tokens


def _tiles_bytes(shape: Shape, recipe: Recipe, n_scored: int, is_cuda: bool, is_trained: bool | None) -> float:
    """What `head_loss` takes besides the gradient of a trained head: a tile, fp32 rows, gradients of the positions, casts."""
    n_words, h, c = shape.vocab, shape.hidden, recipe.compute_bytes
    tile = min(n_scored, default_tile_tokens(n_words, "cuda" if is_cuda else "cpu", h if is_trained else 0))
    rows = min(tile, max(1, (CUDA_BLOCK_BYTES if is_cuda else CPU_BLOCK_BYTES) // (4 * n_words)))
    n_blocks = 2 if rows < tile else 1  # the last ones are there while the next are made
    if shape.model_type in _CAPS_LOGITS:
        n_blocks += 2
    elif c == 2 and not is_cuda:
        n_blocks += 1
    found = c * tile * (n_words + h) + 4.0 * n_blocks * rows * n_words
    if is_trained is not None:
        found += c * n_scored * h
    if is_trained and recipe.trained_bytes > c:  # the matrix in the precision of the run, and the product of a tile
        found += c * n_words * h * (2 if n_scored > tile else 1)
    return found


def _layers(
    shape: Shape, recipe: Recipe, largest: Largest, adapters: Adapters | None, is_cuda: bool
) -> tuple[float, float, float, float, float]:
    """(all saved activations, those of the encoder, inputs of checkpointed layers, all of a layer, what works beside it)."""
    attention, feed_forward = saved_per_token(shape, recipe, adapters, is_cuda)
    squares = scores_per_pair(shape, recipe, is_cuda)
    source, target = largest.n_rows * largest.tokens, largest.n_rows * largest.targets
    own, of_decoder, across = _adapter_inputs(shape, recipe, adapters, is_cuda)
    layer = (attention + feed_forward + own) * source + squares * (largest.pairs or source * largest.tokens)
    decoder = 0.0
    if shape.n_decoder_layers:  # attends twice: to its own tokens, and to the source's
        decoder = (2 * attention + feed_forward + of_decoder) * target + across * source
        ratio = largest.targets / max(1, largest.tokens)  # end to end, squares are known of the inputs alone
        pairs = largest.pairs * (ratio**2 + ratio) if largest.pairs else target * (largest.targets + largest.tokens)
        decoder += squares * pairs
        of_number = 4 if _is_math(shape, is_cuda) else recipe.compute_bytes
        decoder += 2 * of_number * shape.n_kv_heads * shape.head_dim * (source - target)
    every = recipe.settings.checkpoint_every
    first = 0 if adapters is None else adapters.first_layer  # nothing is kept below
    of_all = shape.n_layers + shape.n_decoder_layers
    reached = range(min(first, shape.n_layers), shape.n_layers), range(max(first, shape.n_layers), of_all)
    # the numbers that `every` divides are computed again, as transformers counts them, through both stacks
    n_kept = [sum(not every or number % every > 0 for number in numbers) for numbers in reached]
    edge = shape.hidden * recipe.edge_bytes
    boundaries = edge * ((len(reached[0]) - n_kept[0]) * source + (len(reached[1]) - n_kept[1]) * target)
    saved = n_kept[0] * layer + n_kept[1] * decoder + boundaries
    if recipe.stack.is_packed and shape.attention == "bidirectional" and not every and n_kept[0]:
        # all of the last layer but keys and values is of one token a document; the most is kept when the one below goes back
        trained = 2.0 * shape.hidden * (shape.n_heads * shape.head_dim + shape.n_kv_heads * shape.head_dim + shape.ffn)
        saved = float(saved) - max(0.0, layer - (recipe.trained_bytes * trained if adapters is None else 0.0))
    of_encoder = n_kept[0] * layer + edge * (len(reached[0]) - n_kept[0]) * source
    top = max(layer, decoder)
    is_plain = recipe.stack.is_packed and block_of(shape).activation == 1
    works = (WORKING_MLP_PLAIN if is_plain else WORKING_MLP) * shape.ffn + WORKING_STREAM * shape.hidden
    if recipe.stack.fused_mlp or recipe.stack.is_compiled:
        works = 2 * shape.ffn + 4 * shape.hidden
    return saved, of_encoder, boundaries, top, float(works * max(source, target))


def saved_per_token(
    shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool = True
) -> tuple[float, float]:
    """Bytes that autograd keeps of one layer for each token: (of its attention, of its feed-forward).

    Adapters and attention scores aside. In order: norms, the products' inputs, attention, activation, dropout masks.
    """
    block, stack = block_of(shape), recipe.stack
    c, r, h, f = recipe.compute_bytes, recipe.residual_bytes, shape.hidden, shape.ffn
    q, k = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    is_full = adapters is None
    is_mixed = stack.has_autocast and r > c  # products get copies in the precision of the run
    is_fused = stack.fused_norms or stack.is_compiled

    if block.has_norm_copies and not is_fused:
        norm = h * (4 + ((4 if block.scales_fp32 else r) if is_full else 0))
    else:  # autocast on a GPU normalizes in fp32
        norm = h * (4 if stack.has_autocast and is_cuda and not is_fused else r)
    mask = h * (1 if is_cuda else c) * block.dropouts / 2
    both = block.n_norms / 2 * norm + mask
    to_attention = to_mlp = 0
    if is_full:
        to_attention = c * h * (block.n_attention_inputs if is_mixed else 1)
        to_mlp = c * h * (block.n_mlp_inputs if is_mixed else 1)

    # queries, keys, values and what comes out; keys and values are repeated for their groups but in flash attention
    attention = 4 * c * q if not stack.is_flash and shape.n_kv_heads > 1 else 2 * c * q + 2 * c * k
    if stack.is_packed and not is_cuda and _keeps_outputs(shape, adapters):
        attention += c * q  # what comes out of each document, and all of them in one
    if shape.model_type in _EAGER and not is_full:
        attention -= c * q
    if _is_biased(shape, recipe):
        attention = 3 * c * q + (c * q if is_full else 0)
    elif _is_math(shape, is_cuda):
        attention = 12 * q + (c * q if is_full else 0)
    if block.is_sliced:
        attention += c * (q + k)
        attention += 0 if is_cuda or not is_full else c * q  # a CPU leaves heads in an order that has to be copied
    if shape.n_active:  # what comes of experts, weighed; where they are trained also what goes in
        attention += c * h * shape.n_active * (2 if is_full or (adapters and adapters.n_merged) else 1)
    if block.has_head_norms:
        of_scaled = 4 if block.scales_fp32 and not is_fused else c
        attention += (q + k) * ((0 if is_fused else 4) + (of_scaled if is_full or is_fused else 0))

    is_lean = stack.fused_mlp or stack.is_compiled
    activation = (2 if is_lean and block.is_gated else block.activation) * c * f
    if (is_full or _adapts_down(shape, adapters)) and not stack.fused_mlp:
        activation += c * f
    return both + to_attention + attention, both + to_mlp + activation


def _is_math(shape: Shape, is_cuda: bool) -> bool:
    """Whether attention is computed with whole scores, in fp32: with dropout on a CPU."""
    return shape.model_type in _DROPS_SCORES and not is_cuda


def _is_biased(shape: Shape, recipe: Recipe) -> bool:
    """Whether whole scores are computed in plain operations for their bias by distance: T5's, end to end."""
    return recipe.stack.is_packed and shape.n_decoder_layers > 0


def scores_per_pair(shape: Shape, recipe: Recipe, is_cuda: bool) -> float:
    """Bytes of one layer for each pair of tokens, where attention does keep its scores."""
    if shape.model_type in _EAGER:
        return shape.n_heads * 8.0  # of the capped scores, their softmax in fp32 and a copy in the precision of the run
    stack = recipe.stack
    if _is_biased(shape, recipe):
        # softmax in fp32, its copy in the precision of the run, what is dropped of it, and the rest
        c = recipe.compute_bytes
        return shape.n_heads * (4.0 + (c if c < 4 else 0) + (1 if is_cuda else c) + c)
    if _is_math(shape, is_cuda):
        return shape.n_heads * 12.0
    if stack.is_eager:  # their softmax in fp32, and its copy in the precision of the run
        return shape.n_heads * (4.0 + recipe.compute_bytes)
    if shape.attention == "causal" and stack.masks_padding and not (stack.is_flash or stack.is_packed):
        # kept as numbers, layer by layer
        return float(recipe.compute_bytes)
    return 0.0


def _adapter_inputs(
    shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool
) -> tuple[float, float, float]:
    """Bytes for each token that adapters keep: of a layer, of a decoder's layer, and of its reading of the source."""
    found = [0.0, 0.0, 0.0]
    if adapters is None:
        return 0.0, 0.0, 0.0
    shared = [set[str](), set[str](), set[str]()]
    n_above = shape.n_above(adapters.first_layer)  # only those are kept
    for weight, n in adapters.adapted:
        if weight.kind != "linear" or weight.copies == 1:
            continue
        group = 0
        if shape.n_decoder_layers and weight.name.startswith("decoder"):
            group = 2 if weight.tokens == "source" else 1
        share = n / max(1, n_above[1 if group else 0])
        found[group] += share * _adapter_input(weight, shape, recipe, is_cuda, shared[group])
    return found[0], found[1], found[2]


def _adapter_input(weight: Weight, shape: Shape, recipe: Recipe, is_cuda: bool, shared: set[str]) -> float:
    """Bytes for each token of one adapter: its input in the dtype that it multiplies, what dropout keeps, its middle."""
    stack, c, width = recipe.stack, recipe.compute_bytes, weight.n_in
    is_down = weight.part == "mlp" and weight.n_in == shape.ffn and weight.n_in != shape.hidden
    kept = 0.0
    if recipe.trained_bytes == 4 and c == 2 and not stack.has_autocast:
        kept = 4.0 * width  # the adapter casts its input, and keeps the copy
    elif recipe.trained_bytes == 4 and c == 2 and not stack.fuses_adapters:
        kept = 0.0 if is_down else float(c * width)  # a down projection's is counted with the feed-forward
    elif not is_down:  # products of one input share it where dtypes agree, and so does attention with what it gave
        is_output = weight.part == "attention" and weight.name.rsplit(".", 1)[-1] in _ATTENTION_OUTPUTS
        is_there = is_output and not (
            shape.model_type in _EAGER or (not is_cuda and (block_of(shape).is_sliced or _is_math(shape, is_cuda)))
        )
        source = f"{weight.name.rsplit('.', 1)[0] if not is_output else weight.name}"
        kept = 0.0 if is_there or source in shared else float(c * width)
        if recipe.lora_dropout > 0:  # each has dropped other numbers of it
            kept = float(c * width)
        shared.add(source)
    if recipe.lora_dropout > 0:
        kept += width * (1 if is_cuda else 4)
    if recipe.use_dora:
        kept += 2 * c * weight.n_out
    return kept + recipe.lora_r * c


def _dora_working(recipe: Recipe, adapters: Adapters | None) -> float:
    """Bytes with which the norm of one adapted weight is worked out: peft multiplies the adapters with a unit matrix."""
    if adapters is None or not recipe.use_dora:
        return 0.0
    c, a = recipe.compute_bytes, recipe.trained_bytes
    of_unit = a + (c if a > c else 0)
    return max(
        (of_unit * w.n_in**2 + 3.0 * c * w.n_weights for w, _ in adapters.adapted if w.kind == "linear"), default=0.0
    )


def _merged_bytes(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Experts with their adapters added, of each layer that is not computed again, and the gradient of one of them."""
    if adapters is None or not adapters.n_merged:
        return 0.0
    every = recipe.settings.checkpoint_every
    n_kept = 1 + (shape.n_layers - 1) * (1 - 1 / every if every else 1.0)
    return recipe.compute_bytes * adapters.n_merged / shape.n_layers * (n_kept + 1)


def _keeps_outputs(shape: Shape, adapters: Adapters | None) -> bool:
    """Whether the product that reads attention's output keeps it: where it is trained, or adapted."""
    return adapters is None or any(
        w.part == "attention" and w.name.rsplit(".", 1)[-1] in _ATTENTION_OUTPUTS for w, _ in adapters.adapted
    )


def _adapts_down(shape: Shape, adapters: Adapters | None) -> bool:
    return adapters is not None and any(w.n_in == shape.ffn and w.part == "mlp" for w, _ in adapters.adapted)
