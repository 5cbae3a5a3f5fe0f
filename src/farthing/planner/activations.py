"""What autograd keeps of a layer, operation by operation, in the modelling code of transformers 5.

`tests/test_memory.py` holds it against that code, run on tensors without data. Fitted there are
`WORKING_*` and what the backward pass of experts needs. Refuses to import torch, and to add up the
moments of a step: `memory` does.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.data.lengths import Largest
from farthing.models.shapes import Shape
from farthing.models.weights import Adapters, Weight
from farthing.planner.blocks import block_of
from farthing.planner.recipe import Recipe

WORKING_MLP, WORKING_STREAM = 6, 5  # bytes for each feature of the feed-forward, and of the stream
WORKING_MLP_PLAIN = (
    4  # the first of them in the trainer's own flat pass, where the activation is one kernel
)
_SINKS = {"gpt_oss"}  # a score for no token at all, beside those of the others
_EAGER = {"gemma2"} | _SINKS  # soft-capping, sinks: scores are computed and kept whole
_ATTENTION_OUTPUTS = {"o_proj", "dense", "out_lin", "c_proj", "out_proj", "o"}
_DROPS_SCORES = {"bert", "roberta", "xlm-roberta", "distilbert", "t5", "mt5", "gpt2", "gpt_bigcode"}


class Layers(NamedTuple):
    """Bytes of all layers for the largest micro-batch."""

    saved: float  # by all of them
    of_encoder: float  # of that by the encoder, or the only stack
    boundaries: float  # what recomputed layers begin with
    top: float  # all of one layer
    working: float  # beside it, in its backward pass


def layers_of(
    shape: Shape, recipe: Recipe, largest: Largest, adapters: Adapters | None, is_cuda: bool
) -> Layers:
    """What is kept of the layers of a model, and what works beside."""
    attention, feed_forward = saved_per_token(shape, recipe, adapters, is_cuda)
    squares = scores_per_pair(shape, recipe, is_cuda)
    source, target = largest.n_rows * largest.tokens, largest.n_rows * largest.targets
    own, of_decoder, across = _adapter_inputs(shape, recipe, adapters, is_cuda)
    layer = (attention + feed_forward + own) * source + squares * (
        largest.pairs or source * largest.tokens
    )
    if adapters is not None:  # experts with their adapters added, and unpacked weights
        n_made = adapters.n_merged + (
            shape.n_packed if recipe.stack.keeps_unpacked and recipe.method == "qlora" else 0
        )
        layer += recipe.compute_bytes * n_made / max(1, shape.n_layers)
    decoder = 0.0
    if shape.n_decoder_layers:  # attends twice: to its own tokens, and to the source's
        decoder = (2 * attention + feed_forward + of_decoder) * target + across * source
        ratio = largest.targets / max(
            1, largest.tokens
        )  # end to end, squares are known of the inputs alone
        pairs = (
            largest.pairs * (ratio**2 + ratio)
            if largest.pairs
            else target * (largest.targets + largest.tokens)
        )
        decoder += squares * pairs
        of_number = 4 if _is_math(shape, is_cuda) else recipe.compute_bytes
        decoder += 2 * of_number * shape.n_kv_heads * shape.head_dim * (source - target)
    every = recipe.settings.checkpoint_every
    first = 0 if adapters is None else adapters.first_layer  # nothing is kept below
    of_all = shape.n_layers + shape.n_decoder_layers
    reached = (
        range(min(first, shape.n_layers), shape.n_layers),
        range(max(first, shape.n_layers), of_all),
    )
    # the numbers that `every` divides are computed again, as transformers counts them, through both
    # stacks
    n_kept = [sum(not every or number % every > 0 for number in numbers) for numbers in reached]
    edge = shape.hidden * recipe.residual_bytes
    boundaries = edge * (
        (len(reached[0]) - n_kept[0]) * source + (len(reached[1]) - n_kept[1]) * target
    )
    saved = n_kept[0] * layer + n_kept[1] * decoder + boundaries
    if recipe.stack.reads_first and not every and n_kept[0]:
        # all of the last layer but keys and values is of one token a document; the most is kept
        # when the one below goes back
        trained = (
            2.0
            * shape.hidden
            * (shape.n_heads * shape.head_dim + shape.n_kv_heads * shape.head_dim + shape.ffn)
        )
        saved = float(saved) - max(
            0.0, layer - (recipe.trained_bytes * trained if adapters is None else 0.0)
        )
    of_encoder = n_kept[0] * layer + edge * (len(reached[0]) - n_kept[0]) * source
    top = max(layer, decoder)
    is_plain = recipe.stack.is_packed and block_of(shape).activation == 1
    works: float = (
        WORKING_MLP_PLAIN if is_plain else WORKING_MLP
    ) * shape.ffn + WORKING_STREAM * shape.hidden
    if recipe.stack.fused_mlp or recipe.stack.lean_mlp or recipe.stack.is_compiled:
        works = 2 * shape.ffn + 4 * shape.hidden
    if shape.n_active:
        works = _routed_working(shape, recipe)
    works *= max(source, target)
    if shape.model_type in _SINKS:  # gradients of the scores, before and after the softmax
        works = max(
            works,
            2.0 * _sinks_bytes(recipe) * shape.n_heads * (largest.pairs or source * largest.tokens),
        )
    return Layers(saved, of_encoder, boundaries, top, float(works))


def _sinks_bytes(recipe: Recipe) -> int:
    """Of a score beside sinks, which are as precise as the weights."""
    return recipe.trained_bytes if recipe.method == "full" else recipe.compute_bytes


def saved_per_token(
    shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool = True
) -> tuple[float, float]:
    """Bytes that autograd keeps of one layer for each token: (of its attention, of its
    feed-forward).

    Adapters and attention scores aside. In order: norms, the products' inputs, attention,
    activation, dropout masks.
    """
    block, stack = block_of(shape), recipe.stack
    c, r, h, f = recipe.compute_bytes, recipe.residual_bytes, shape.hidden, shape.ffn
    q, k = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    is_full = adapters is None
    is_mixed = stack.has_autocast and r > c  # products get copies in the precision of the run
    is_fused = stack.fused_norms or stack.is_compiled

    is_one_pass = (
        stack.is_packed and not is_cuda and r == 4 and not block.scales_fp32
    )  # model/norms.py
    if block.has_norm_copies and not is_fused and not is_one_pass:
        norm = h * (4 + ((4 if block.scales_fp32 else r) if is_full else 0))
    else:  # autocast on a GPU normalizes in fp32
        norm = h * (4 if stack.has_autocast and is_cuda and not is_fused else r)
    mask = h * (1 if is_cuda else c) * block.dropouts / 2
    n_norms = block.n_norms
    if shape.model_type == "gpt_neox" and is_cuda and stack.has_autocast and r < 4:
        n_norms = 2  # each makes its own fp32 copy of the input that they share
    both = n_norms / 2 * norm + mask
    to_attention = to_mlp = 0
    keeps_inputs = is_full or (stack.keeps_quantized_inputs and recipe.method == "qlora")
    if keeps_inputs:
        has_copies = is_mixed and not (stack.shares_inputs and is_cuda)
        to_attention = c * h * (block.n_attention_inputs if has_copies else 1)
        to_mlp = c * h * (block.n_mlp_inputs if has_copies else 1)

    # queries, keys, values and what comes out; keys and values are repeated for their groups but in
    # flash attention
    attention = 4 * c * q if not stack.is_flash and shape.n_kv_heads > 1 else 2 * c * q + 2 * c * k
    if stack.is_packed and not is_cuda and _keeps_outputs(shape, adapters):
        attention += c * q  # what comes out of each document, and all of them in one
    if shape.model_type in _EAGER and not is_full:
        attention -= c * q * (2 if shape.model_type in _SINKS else 1)
    if _is_biased(shape, recipe):
        attention = 3 * c * q + (c * q if is_full else 0)
    elif _is_math(shape, is_cuda):
        attention = 12 * q + (c * q if is_full else 0)
    if stack.is_packed and stack.is_flash and is_cuda:
        attention += 4 * shape.n_heads  # the logarithm of each row's sum
    if block.is_sliced:
        attention += c * (q + k)
        # heads are left in an order that has to be copied: on GPUs where rotated parts are put
        # together head by head
        on_gpu = (
            shape.model_type == "gpt_neox" and stack.is_flash and _keeps_outputs(shape, adapters)
        )
        attention += c * q if (on_gpu if is_cuda else is_full) else 0
    if block.has_head_norms:
        of_scaled = 4 if block.scales_fp32 and not is_fused else c
        is_short = is_fused or (is_one_pass and c == 4)
        attention += (q + k) * ((0 if is_short else 4) + (of_scaled if is_full or is_short else 0))

    activation = _activation_per_token(shape, recipe, is_cuda)
    if (keeps_inputs or _adapts_down(shape, adapters)) and not stack.fused_mlp:
        activation += c * f
    if shape.n_active:
        activation += _routed_per_token(shape, recipe, adapters)
    return both + to_attention + attention, both + to_mlp + activation


def _activation_per_token(shape: Shape, recipe: Recipe, is_cuda: bool) -> float:
    """Bytes that a feed-forward's activation keeps for a token."""
    block, stack, c = block_of(shape), recipe.stack, recipe.compute_bytes
    is_lean = stack.fused_mlp or stack.lean_mlp or stack.is_compiled
    found = float((2 if is_lean and block.is_gated else block.activation) * c)
    if block.takes_powers and is_cuda and stack.has_autocast and c < 4:
        found += 3 * (4 - c)
    return found * shape.ffn


def _routed_per_token(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Bytes that a mixture of experts keeps for a token beside the activations of a feed-forward
    layer as wide.

    What comes out of its experts, weighed, and what goes in where they are trained; chances of all
    experts and the order of the tokens. Autocast leaves experts alone: trained ones compute in the
    precision of their weights.
    """
    c, h, k, (up, down) = recipe.compute_bytes, shape.hidden, shape.n_active, shape.experts
    of_expert = recipe.trained_bytes if adapters is None else c
    is_trained = adapters is None or adapters.n_merged > 0
    wide = k * down.n_in
    found = of_expert * h * k * (2 if is_trained else 1) + 4.0 * up.n_experts + 44.0 * k
    found += (of_expert - c) * wide * (block_of(shape).activation + 1)
    if adapters is not None and any(w.kind == "router" for w, _ in adapters.adapted):
        found += c * h
    if wide < shape.ffn:  # an expert for all tokens: what comes of it is weighed too
        found += c * h
    return found


def _is_math(shape: Shape, is_cuda: bool) -> bool:
    """Whether attention is computed with whole scores, in fp32: with dropout on a CPU."""
    return shape.model_type in _DROPS_SCORES and not is_cuda


def _is_biased(shape: Shape, recipe: Recipe) -> bool:
    """Whether whole scores are computed in plain operations for their bias by distance: T5's, end
    to end.
    """
    return recipe.stack.is_packed and shape.n_decoder_layers > 0


def scores_per_pair(shape: Shape, recipe: Recipe, is_cuda: bool) -> float:
    """Bytes of one layer for each pair of tokens, where attention does keep its scores."""
    if (
        shape.model_type in _SINKS
    ):  # softmax in the precision of the sinks, and a copy in that of the run
        of_score, c = _sinks_bytes(recipe), recipe.compute_bytes
        return shape.n_heads * float(of_score + (c if of_score > c else 0))
    if shape.model_type in _EAGER:
        return (
            shape.n_heads * 8.0
        )  # of the capped scores, their softmax in fp32 and a copy in the precision of the run
    stack = recipe.stack
    if _is_biased(shape, recipe):
        # softmax in fp32, its copy in the precision of the run, what is dropped of it, and the rest
        c = recipe.compute_bytes
        if c == 4 and not is_cuda:  # what is dropped is dropped again (model/cpu.py)
            return shape.n_heads * 8.0
        return shape.n_heads * (4.0 + (c if c < 4 else 0) + (1 if is_cuda else c) + c)
    if _is_math(shape, is_cuda):
        return shape.n_heads * 12.0
    if stack.is_eager:  # their softmax in fp32, and its copy in the precision of the run
        return shape.n_heads * (4.0 + recipe.compute_bytes)
    if (
        shape.attention == "causal"
        and stack.masks_padding
        and not (stack.is_flash or stack.is_packed)
    ):
        # kept as numbers, layer by layer
        return float(recipe.compute_bytes)
    return 0.0


def _adapter_inputs(
    shape: Shape, recipe: Recipe, adapters: Adapters | None, is_cuda: bool
) -> tuple[float, float, float]:
    """Bytes for each token that adapters keep: of a layer, of a decoder's layer, and of its reading
    of the source.
    """
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


def _adapter_input(
    weight: Weight, shape: Shape, recipe: Recipe, is_cuda: bool, shared: set[str]
) -> float:
    """Bytes for each token of one adapter: its input in the dtype that it multiplies, what dropout
    keeps, its middle.
    """
    stack, c, width = recipe.stack, recipe.compute_bytes, weight.n_in
    is_down = weight.part == "mlp" and weight.n_in == shape.ffn and weight.n_in != shape.hidden
    kept = 0.0
    if recipe.trained_bytes == 4 and c == 2 and not stack.has_autocast:
        kept = 4.0 * width  # the adapter casts its input, and keeps the copy
    elif (
        recipe.trained_bytes == 4
        and c == 2
        and not (stack.fuses_adapters or (stack.shares_inputs and recipe.method == "qlora"))
    ):
        kept = (
            0.0 if is_down else float(c * width)
        )  # a down projection's is counted with the feed-forward
    elif (
        not is_down
    ):  # products of one input share it where dtypes agree, and so does attention with what it gave
        is_output = (
            weight.part == "attention" and weight.name.rsplit(".", 1)[-1] in _ATTENTION_OUTPUTS
        )
        is_there = is_output and not (
            shape.model_type in _EAGER
            or (not is_cuda and (block_of(shape).is_sliced or _is_math(shape, is_cuda)))
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


def _routed_working(shape: Shape, recipe: Recipe) -> float:
    """Bytes for each token that the backward pass of a layer of experts needs besides: gradients of
    what goes in and comes out of the experts of a token, and of their activations; fitted to traced
    code, as `WORKING_*` are."""
    routed = shape.hidden * shape.n_active
    if recipe.method == "full":
        return recipe.trained_bytes * (shape.ffn + 2.5 * routed)
    of_experts = (
        shape.n_active * shape.experts[-1].n_in
    )  # an expert for all tokens comes before or after them
    return 2.0 * recipe.compute_bytes * (of_experts + routed) + 3.0 * shape.hidden


def _keeps_outputs(shape: Shape, adapters: Adapters | None) -> bool:
    """Whether the product that reads attention's output keeps it: where it is trained, or adapted."""  # noqa: E501
    return adapters is None or any(
        w.part == "attention" and w.name.rsplit(".", 1)[-1] in _ATTENTION_OUTPUTS
        for w, _ in adapters.adapted
    )


def _adapts_down(shape: Shape, adapters: Adapters | None) -> bool:
    """Whether what a down projection reads is kept: where it has an adapter, or experts are merged
    with theirs.
    """
    return adapters is not None and (
        adapters.n_merged > 0
        or any(w.n_in == shape.ffn and w.part == "mlp" for w, _ in adapters.adapted)
    )
