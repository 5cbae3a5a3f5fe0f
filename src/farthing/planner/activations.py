"""What autograd keeps of a layer, operation by operation, in the modelling code of transformers 5.

`tests/test_memory.py` holds it against that code, run on tensors without data. Fitted there are
`WORKING_*`, what the backward pass of a layer needs besides, and the same of experts.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.models.weights import Weight
from farthing.planner.recipe import Case

WORKING_MLP, WORKING_STREAM = 6, 5  # bytes for each feature of the feed-forward, of the stream
WORKING_MLP_PLAIN = 4  # in the trainer's own flat pass, where the activation is one kernel
WORKING_MLP_LEAN, WORKING_STREAM_LEAN = 2, 4  # where gradients take the place of what they are of
SHORT_KEYS = 128  # documents that a CPU attends to in one block, in fp32
_ATTENTION_OUTPUTS = {"o_proj", "dense", "out_lin", "c_proj", "out_proj", "o"}


class Layers(NamedTuple):
    """Bytes of all layers for the largest micro-batch."""

    saved: float  # by all of them
    of_encoder: float  # of that by the encoder, or the only stack
    boundaries: float  # what recomputed layers begin with
    top: float  # all of one layer
    working: float  # beside it, in its backward pass


def layers_of(case: Case) -> Layers:
    shape, recipe, adapters, largest = case.shape, case.recipe, case.adapters, case.largest
    attention, feed_forward = saved_per_token(case)
    squares = scores_per_pair(case)
    source, target = largest.n_rows * largest.tokens, largest.n_rows * largest.targets
    own, of_decoder, across = _adapter_inputs(case)
    pairs = largest.pairs or source * largest.tokens
    layer = (attention + feed_forward + own) * source + squares * pairs
    if adapters is not None:  # experts with their adapters added
        layer += recipe.compute_bytes * adapters.n_merged / max(1, shape.n_layers)
    decoder = 0.0
    if shape.n_decoder_layers:  # attends twice: to its own tokens, and to the source's
        decoder = (2 * attention + feed_forward + of_decoder) * target + across * source
        # end to end, squares are known of the inputs alone
        ratio = largest.targets / max(1, largest.tokens)
        crossed = target * (largest.targets + largest.tokens)
        decoder += squares * (largest.pairs * (ratio**2 + ratio) if largest.pairs else crossed)
        of_number = 4 if _is_math(case) else recipe.compute_bytes
        decoder += 2 * of_number * case.width[1] * (source - target)
    every = recipe.settings.checkpoint_every
    first = 0 if adapters is None else adapters.first_layer  # nothing is kept below
    n, of_all = shape.n_layers, shape.n_layers + shape.n_decoder_layers
    reached = range(min(first, n), n), range(max(first, n), of_all)
    # the numbers that `every` divides are computed again, through both stacks
    n_kept = [sum(not every or number % every > 0 for number in numbers) for numbers in reached]
    edge = shape.hidden * recipe.residual_bytes
    edges = [len(numbers) - kept for numbers, kept in zip(reached, n_kept, strict=True)]
    boundaries = edge * (edges[0] * source + edges[1] * target)
    saved = n_kept[0] * layer + n_kept[1] * decoder + boundaries
    if recipe.stack.reads_first and not every and n_kept[0]:
        # all of the last layer but keys and values is of one token a document; the most is kept
        # when the one below goes back
        q, k = case.width
        trained = 2.0 * shape.hidden * (q + k + shape.ffn) * recipe.trained_bytes
        saved -= max(0.0, layer - (trained if adapters is None else 0.0))
    of_encoder = n_kept[0] * layer + edge * edges[0] * source
    working = _working(case, max(source, target), pairs)
    return Layers(saved, of_encoder, boundaries, max(layer, decoder), working)


def _working(case: Case, n_tokens: int, pairs: int) -> float:
    shape, recipe = case.shape, case.recipe
    is_plain = recipe.stack.is_packed and case.block.activation == 1
    of_mlp = WORKING_MLP_PLAIN if is_plain else WORKING_MLP
    works: float = of_mlp * shape.ffn + WORKING_STREAM * shape.hidden
    if recipe.stack.has_liger:
        works = WORKING_MLP_LEAN * shape.ffn + WORKING_STREAM_LEAN * shape.hidden
    if shape.n_active:
        routed = shape.hidden * shape.n_active
        if recipe.method == "full":
            works = recipe.trained_bytes * (shape.ffn + 2.5 * routed)
        else:  # an expert for all tokens comes before or after them
            of_experts = shape.n_active * shape.experts[-1].n_in
            works = 2.0 * recipe.compute_bytes * (of_experts + routed) + 3.0 * shape.hidden
    works *= n_tokens
    if case.block.has_sinks:  # gradients of the scores, before and after the softmax
        works = max(works, 2.0 * _sinks_bytes(case) * shape.n_heads * pairs)
    return float(works)


def _sinks_bytes(case: Case) -> int:
    """Of a score beside sinks, which are as precise as the weights."""
    recipe = case.recipe
    return recipe.trained_bytes if recipe.method == "full" else recipe.compute_bytes


def saved_per_token(case: Case) -> tuple[float, float]:
    """Bytes that autograd keeps of one layer for each token: of its attention, its feed-forward.

    Adapters and attention scores aside. In order: norms, the products' inputs, attention,
    activation, dropout masks.
    """
    shape, recipe, block, is_cuda = case.shape, case.recipe, case.block, case.is_cuda
    stack, (q, k), is_full = recipe.stack, case.width, case.adapters is None
    c, r, h, f = recipe.compute_bytes, recipe.residual_bytes, shape.hidden, shape.ffn
    is_fused = stack.has_liger

    is_one_pass = stack.is_packed and not is_cuda and r == 4 and not block.scales_fp32
    if block.has_norm_copies and not is_fused and not is_one_pass:
        norm = h * (4 + ((4 if block.scales_fp32 else r) if is_full else 0))
    else:  # autocast on a GPU normalizes in fp32
        norm = h * (4 if recipe.has_autocast and is_cuda and not is_fused else r)
    mask = h * (1 if is_cuda else c) * block.dropouts / 2
    n_norms = block.n_norms
    if shape.model_type == "gpt_neox" and is_cuda and recipe.has_autocast and r < 4:
        n_norms = 2  # each makes its own fp32 copy of the input that they share
    both = n_norms / 2 * norm + mask
    to_attention = to_mlp = 0
    if is_full:  # on GPUs one copy in the run's precision serves all products that read it
        has_copies = recipe.has_autocast and r > c and not is_cuda
        to_attention = c * h * (block.n_attention_inputs if has_copies else 1)
        to_mlp = c * h * (block.n_mlp_inputs if has_copies else 1)

    # queries, keys, values and what comes out; repeated for their groups but in flash attention
    attention = 4 * c * q if not stack.is_flash and shape.n_kv_heads > 1 else 2 * c * (q + k)
    if stack.is_packed and not is_cuda and _keeps_outputs(case):
        attention += c * q  # what comes out of each document, and all of them in one
    if block.has_eager_scores and not is_full:
        attention -= c * q * (2 if block.has_sinks else 1)
    if _is_biased(case):
        attention = 3 * c * q + (c * q if _keeps_outputs(case) else 0)
        attention += c * q + 4 * shape.n_heads if is_cuda else 0
    elif _is_math(case):
        attention = 12 * q + (c * q if is_full else 0)
    if stack.is_packed and stack.is_flash and is_cuda:
        attention += 4 * shape.n_heads  # the logarithm of each row's sum
    if block.is_sliced:
        attention += c * (q + k)
        # heads are left in an order that has to be copied: on GPUs where rotated parts are put
        # together head by head
        on_gpu = shape.model_type == "gpt_neox" and stack.is_flash and _keeps_outputs(case)
        attention += c * q if (on_gpu if is_cuda else is_full) else 0
    if block.has_head_norms:
        of_scaled = 4 if block.scales_fp32 and not is_fused else c
        is_short = is_fused or (is_one_pass and c == 4)
        kept = of_scaled if is_full or is_short else 0
        attention += (q + k) * ((0 if is_short else 4) + kept)

    activation = float((2 if is_fused and block.is_gated else block.activation) * c)
    activation *= f
    if is_full or adapts_down(case):
        activation += c * f
    if shape.n_active:
        activation += _routed_per_token(case)
    return both + to_attention + attention, both + to_mlp + activation


def _routed_per_token(case: Case) -> float:
    """Bytes that a mixture of experts keeps for a token beside the activations of a feed-forward
    layer as wide: what comes out of its experts, weighed, and what goes in where they are trained;
    chances of all experts and the order of the tokens. Autocast leaves experts alone.
    """
    shape, adapters, c = case.shape, case.adapters, case.recipe.compute_bytes
    h, k, (up, down) = shape.hidden, shape.n_active, shape.experts
    of_expert = case.recipe.trained_bytes if adapters is None else c
    is_trained = adapters is None or adapters.n_merged > 0
    wide = k * down.n_in
    found = of_expert * h * k * (2 if is_trained else 1) + 4.0 * up.n_experts + 44.0 * k
    found += (of_expert - c) * wide * (case.block.activation + 1)
    if adapters is not None and any(w.kind == "router" for w, _ in adapters.adapted):
        found += c * h
    return found + (c * h if wide < shape.ffn else 0.0)  # an expert for all tokens is weighed too


def _is_math(case: Case) -> bool:
    """Whether attention is computed with whole scores, in fp32: with dropout on a CPU."""
    return case.block.drops_scores and not (case.is_cuda or _in_blocks(case))


def _in_blocks(case: Case) -> bool:
    """Whether a CPU attends to documents in blocks of its own (`model/cpu.py`)."""
    is_packed = case.recipe.stack.is_packed and not case.is_cuda
    return is_packed and (case.recipe.compute_bytes == 2 or _is_short(case))


def _is_short(case: Case) -> bool:
    longest = SHORT_KEYS * case.largest.n_rows * case.largest.tokens
    return case.shape.attention != "causal" and case.largest.pairs <= longest


def _is_biased(case: Case) -> bool:
    """Whether scores have a bias by distance: T5, packed."""
    return case.recipe.stack.is_packed and case.shape.n_decoder_layers > 0


def scores_per_pair(case: Case) -> float:
    """Bytes of one layer for each pair of tokens, where attention does keep its scores."""
    n_heads, c = case.shape.n_heads, case.recipe.compute_bytes
    if case.block.has_sinks:  # softmax in the precision of the sinks, and a copy in the run's
        of_score = _sinks_bytes(case)
        return n_heads * float(of_score + (c if of_score > c else 0))
    if case.block.has_eager_scores:
        return n_heads * 8.0  # the capped scores, their softmax in fp32, and a copy
    if _is_biased(case):
        if case.is_cuda:  # the bias, with minus infinity for padding
            return n_heads * float(c)
        return n_heads * 8.0  # the softmax, and what is dropped of it
    if _is_math(case):
        return n_heads * 12.0
    if _in_blocks(case) and case.block.drops_scores:  # what is dropped, and weights of few keys
        return n_heads * (8.0 if _is_short(case) else 2.2)
    stack = case.recipe.stack
    has_mask = case.shape.attention == "causal" and not (stack.is_flash or stack.is_packed)
    return float(c) if has_mask else 0.0  # of padding, kept as numbers


def _adapter_inputs(case: Case) -> tuple[float, float, float]:
    """Of a token that adapters keep: of a layer, a decoder's layer, its reading of the source."""
    found = [0.0, 0.0, 0.0]
    if case.adapters is None:
        return 0.0, 0.0, 0.0
    shared = [set[str](), set[str](), set[str]()]
    n_above = case.shape.n_above(case.adapters.first_layer)  # only those are kept
    for weight, n in case.adapters.adapted:
        if weight.kind != "linear" or weight.copies == 1:
            continue
        group = 0
        if case.shape.n_decoder_layers and weight.name.startswith("decoder"):
            group = 2 if weight.tokens == "source" else 1
        share = n / max(1, n_above[1 if group else 0])
        found[group] += share * _adapter_input(weight, case, shared[group])
    return found[0], found[1], found[2]


def _adapter_input(weight: Weight, case: Case, shared: set[str]) -> float:
    """Bytes of a token of one adapter: its input as it is multiplied, dropout's, its middle."""
    recipe, stack, width = case.recipe, case.recipe.stack, weight.n_in
    c, is_wider = recipe.compute_bytes, recipe.trained_bytes > recipe.compute_bytes
    is_down = weight.part == "mlp" and width == case.shape.ffn and width != case.shape.hidden
    kept = 0.0
    if is_wider and not recipe.has_autocast:
        kept = 4.0 * width  # the adapter casts its input, and keeps the copy
    elif is_wider and not (stack.fuses_adapters or recipe.method == "qlora"):
        kept = 0.0 if is_down else float(c * width)  # the feed-forward's own counts it
    elif not is_down:  # products of one input share it, and so does attention with what it gave
        last = weight.name.rsplit(".", 1)
        is_output = weight.part == "attention" and last[-1] in _ATTENTION_OUTPUTS
        is_copied = case.block.has_eager_scores or (
            not case.is_cuda and (case.block.is_sliced or _is_math(case))
        )
        source = weight.name if is_output else last[0]
        is_there = (is_output and not is_copied) or source in shared
        # with dropout peft's layers have each dropped other numbers of it
        has_own = recipe.lora_dropout and not stack.fuses_adapters
        kept = 0.0 if is_there and not has_own else float(c * width)
        shared.add(source)
    if recipe.lora_dropout > 0:
        kept += width * (1 if case.is_cuda or stack.fuses_adapters else 4)
    if recipe.use_dora:
        kept += 2 * c * weight.n_out
    return kept + recipe.lora_r * c


def _keeps_outputs(case: Case) -> bool:
    """Whether what reads attention's output keeps it: where it is trained, or adapted."""
    return case.adapters is None or any(
        w.part == "attention" and w.name.rsplit(".", 1)[-1] in _ATTENTION_OUTPUTS
        for w, _ in case.adapters.adapted
    )


def adapts_down(case: Case) -> bool:
    """Whether what a down projection reads is kept: it has an adapter, or experts are merged."""
    return case.adapters is not None and (
        case.adapters.n_merged > 0
        or any(w.n_in == case.shape.ffn and w.part == "mlp" for w, _ in case.adapters.adapted)
    )
