"""A case -> what a step asks of each GPU, whatever the GPU: FLOPs, and bytes that are moved.

FLOPs are those of Kaplan et al. 2020, with three products for a trained weight, two for a frozen
one, one below the first trained layer, and one more where a layer is recomputed. Bytes are counted
operation by operation.
"""

from __future__ import annotations

from typing import NamedTuple

from farthing.data.lengths import Padded
from farthing.planner.memory import NF4_BYTES
from farthing.planner.recipe import FSDP, Case

LAUNCH_S = 6.4e-6
"""Of the host for one kernel: 1.85 ms for the 288 of a layer with seven adapters, on a processor of
2025. Those of rented GPUs take half to twice as long, see `speed.LAUNCH_ERROR`.
"""
OUTER_LAUNCHES = 125  # of a micro-batch outside its layers: embeddings, head, loss
STEP_HOST_S = (
    1.3e-3  # of a step beside its micro-batches: clipping, the update, the log, the ledger
)
"""Both from small Llamas of 1 to 8 layers, whose tokens cost nothing: 0.8 ms, and 0.35 ms of an
update with 1 ms of the loop's own.
"""
ADAPTER_LAUNCHES = 14  # kernels of one adapted product, forward and backward
EXPERTS_LAUNCHES = 2.0  # times those of a layer without experts: sorting, sums, grouped products
EXPERTS_SHARE = 0.7  # of the rate of one large product that products of experts reach: assumed
# as long as in this precision: TF32 on GPUs that compute in bf16, fp32 on older ones
FP32_TIMES = {"bf16": 2.0, "fp16": 8.0}
UNFUSED = 0.72
"""Of the rate of wide products that those of a model with biases, dropout and plain attention reach
(encoders, pairs): published rows that were not fitted to were 16 to 65 % slower without it.
"""


class Work(NamedTuple):
    matmul_flops: float
    attention_flops: float
    read_bytes: float  # weights that come out of memory for every micro-batch
    traffic_bytes: float  # outside of matrix products
    dequantization_bytes: float
    optimizer_bytes: float
    sent_bytes: float  # to other GPUs
    host_s: float  # to launch the kernels of all micro-batches
    tokens_per_micro_batch: float
    n_tokens: float  # of all GPUs, from here on: useful
    n_padded_tokens: float
    flops: float
    forward_share: float  # of those FLOPs that a forward pass alone takes
    bus_bytes: float = 0.0  # between each GPU and its host, for the optimizer
    width: float = 4096.0  # of the stream
    hauled_bytes: float = 0.0  # weights from the host and gradients to it, for every micro-batch
    step_host_s: float = 0.0  # of the host, once a step
    host_bytes: float = 0.0  # that the host moves in its own memory to update what it keeps


_COMPUTED = (
    *("matmul_flops", "attention_flops", "read_bytes", "traffic_bytes", "dequantization_bytes"),
    *("host_s", "hauled_bytes"),
)


def work_of(case: Case) -> Work:
    """A step of `recipe.global_batch` examples, each padded as it is computed."""
    shape, recipe, adapters, padded = case.shape, case.recipe, case.adapters, case.padded
    n_each, n_micro = recipe.global_batch / recipe.n_gpus, recipe.n_micro_batches
    all_tokens = recipe.global_batch * (padded.tokens + padded.targets)
    every = recipe.settings.checkpoint_every
    recompute = 1.0 / every if every else 0.0
    flops, c, b = _flops(case, recompute), recipe.compute_bytes, recipe.trained_bytes
    below = _share_below(case)
    passes = 1 + (1 - below) * (1 + recompute)
    of_experts = sum(w.copies * w.n_weights * w.share for w in shape.experts) / shape.n_met()
    whole = _whole_experts(case)
    longer = (FP32_TIMES.get(recipe.precision, 1.0) if whole.is_fp32 else 1.0) / EXPERTS_SHARE
    n_merged = adapters.n_merged if adapters is not None else 0
    is_unfused = recipe.has_autocast and not case.block.is_gated and case.block.dropouts
    rate = UNFUSED if is_unfused else 1.0
    body = flops.body * (1 + of_experts * (longer - 1)) + flops.adapters
    casts = 0.0
    if adapters is None and recipe.has_autocast and b > c:  # weights, and their gradients back
        casts = n_micro * (shape.n_matmul + shape.n_head_matmul) * recipe.kept_share * 2.0 * (b + c)
    n_adapted = 0.0 if adapters is None else sum(n for _, n in adapters.adapted) / case.n_layers
    adapted = ADAPTER_LAUNCHES * n_adapted
    if adapters is not None and adapters.keeps_start:
        adapted *= 2.0
    launches = case.block.launches * (EXPERTS_LAUNCHES if shape.n_active else 1.0)
    of_layer = LAUNCH_S * (launches + adapted)
    of_passes = 1 + recompute / 3 - below * (2 + recompute) / 3
    packed = shape.n_packed * (NF4_BYTES + c) if recipe.method == "qlora" else 0.0
    n_read = c * (shape.n_matmul + shape.n_head_matmul + 2 * n_merged) + whole.more_bytes
    return Work(
        matmul_flops=n_each * (body / rate + flops.head),
        attention_flops=n_each * flops.attention / rate,
        read_bytes=n_micro * passes * n_read,
        traffic_bytes=n_each * _traffic(case, recompute) + whole.moved_bytes + casts,
        dequantization_bytes=n_micro * passes * packed,
        optimizer_bytes=0.0 if _updates_there(case) else _update_bytes(case),
        sent_bytes=_sent_bytes(case),
        host_s=n_micro * (case.n_layers * of_layer * of_passes + OUTER_LAUNCHES * LAUNCH_S),
        tokens_per_micro_batch=max(1.0, all_tokens / recipe.n_gpus / n_micro),
        n_tokens=recipe.global_batch * case.mean_tokens,
        n_padded_tokens=all_tokens,
        flops=recipe.global_batch * flops.total,
        forward_share=flops.forward / flops.total,
        # what the two directions and the host's arithmetic hide of each other is left out
        bus_bytes=2.0 * b * _n_stepped(case) if recipe.optimizer.is_on_host else 0.0,
        width=float(shape.hidden),
        hauled_bytes=_hauled_bytes(case),
        step_host_s=STEP_HOST_S,
        host_bytes=_host_update_bytes(case),
    )


def forward_work(work: Work, n_steps: float) -> Work:
    share = n_steps * work.forward_share
    scaled = {name: getattr(work, name) * share for name in _COMPUTED}
    names = ("optimizer_bytes", "sent_bytes", "bus_bytes", "host_bytes", "step_host_s")
    return work._replace(**scaled, **dict.fromkeys(names, 0.0))


# ---- FLOPs ----


class _Flops(NamedTuple):
    body: float
    attention: float
    head: float
    adapters: float
    forward: float  # of all of them, what a forward pass alone takes

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head + self.adapters


def _flops(case: Case, recompute: float) -> _Flops:
    """FLOPs of one padded example, forward, backward and recomputed."""
    shape, padded, adapters, stack = case.shape, case.padded, case.adapters, case.recipe.stack
    tokens, targets = max(1, round(padded.tokens)), round(padded.targets)
    scale = padded.tokens / tokens
    n_read = 1.0 if stack.reads_first else None
    once = shape.forward_flops(tokens, targets, n_read=n_read)
    both = shape.training_flops(tokens, targets, adapters=adapters, n_read=n_read)
    first = 0 if adapters is None else adapters.first_layer
    above = once
    if first:
        above = shape.forward_flops(tokens, targets, first_layer=first, n_read=n_read)
    spread = padded.token_pairs / max(1.0, padded.tokens**2)  # long examples attend more
    scored = case.labelled_share if stack.scores_positions and shape.scores_tokens else 1.0
    # flash recomputes the scores in the backward pass
    attention = (both.attention + recompute * above.attention) * 3.5 / 3
    forward = once.body + spread * once.attention + scored * once.head + both.adapters / 3
    return _Flops(
        scale * (both.body + recompute * above.body),
        scale * spread * (attention - (once.attention - above.attention) / 6),
        scale * both.head * scored,
        scale * both.adapters * (1 + recompute / 3),
        scale * forward,
    )


def _share_below(case: Case) -> float:
    """Share of the work in layers below the first trained one, which has no backward pass."""
    shape, adapters = case.shape, case.adapters
    if adapters is None or not adapters.first_layer:
        return 0.0
    of_all = _layer_tokens(case.padded, (shape.n_layers, shape.n_decoder_layers))
    return 1 - _layer_tokens(case.padded, shape.n_above(adapters.first_layer)) / max(1.0, of_all)


def _layer_tokens(padded: Padded, n_layers: tuple[int, int]) -> float:
    """Tokens times layers; a decoder's attend twice."""
    return padded.tokens * n_layers[0] + 1.4 * padded.targets * n_layers[1]


# ---- bytes of a pass ----


def _traffic(case: Case, recompute: float) -> float:
    """Bytes that one padded example moves outside of matrix products, forward and backward.

    A forward pass reads and writes, for each token and layer: each norm in fp32 (36 bytes a feature
    where kernels are not fused, 8 where they are), two residual sums, rotations of queries and
    keys, and the activation; a backward pass twice as much.
    """
    shape, recipe, padded = case.shape, case.recipe, case.padded
    block, stack, c = case.block, recipe.stack, recipe.compute_bytes
    h, r, (q, k) = shape.hidden, recipe.residual_bytes, case.width
    is_fused = stack.has_liger or not block.has_norm_copies  # LayerNorm is one kernel in torch
    norms = block.n_norms * h * (4.0 * r if is_fused else 28.0 + 4.0 * r)
    rotations = (3.0 if is_fused else 10.0) * c * (q + k)
    of_gated = 3.0 if stack.has_liger else 5.0
    activation = c * shape.ffn * (of_gated if block.is_gated else 2.0 * block.activation)
    layer = norms + 6.0 * r * h + rotations + activation
    adapted = _adapter_traffic(case)
    below = _share_below(case)
    tokens = _layer_tokens(padded, (shape.n_layers, shape.n_decoder_layers))
    if stack.reads_first:
        tokens -= padded.tokens - 1.0
    passes = 1 + (1 - below) * (2.0 + recompute)
    # adapters are all above
    body = tokens * (layer + adapted) * passes + tokens * adapted * (3.0 + recompute - passes)
    # two stacks that are laid end to end add a bias by distance: a fused kernel reads it and writes
    # its gradient; else product, bias, softmax in fp32, cast and the second product, of all scores
    if shape.n_decoder_layers and stack.is_packed:
        pairs = shape.n_layers * padded.token_pairs
        pairs += shape.n_decoder_layers * (padded.target_pairs + padded.cross_pairs)
        of_score = 3.0 * c if case.is_cuda else 6.0 * c + 8.0
        body += pairs * shape.n_heads * of_score * passes
    n_scored = (padded.targets or padded.tokens) if shape.scores_tokens else 0.0
    # for each word eight passes in fp32; of positions two in fp32 and five in the run's precision
    of_word = (8.0 + 5.0 * c) if stack.scores_positions else 32.0
    whole = 0.0 if stack.scores_positions else c
    return body + n_scored * shape.vocab * (whole + of_word * case.labelled_share)


def _adapter_traffic(case: Case) -> float:
    """Bytes that adapters move for a token of a layer."""
    recipe, adapters, c = case.recipe, case.adapters, case.recipe.compute_bytes
    if adapters is None:
        return 0.0
    linear = [(w, n / case.n_layers) for w, n in adapters.adapted if w.kind == "linear"]
    width_in, width_out = sum(n * w.n_in for w, n in linear), sum(n * w.n_out for w, n in linear)
    is_cast = recipe.trained_bytes > c  # what adapters of the precision of the run read is not
    casts = (4.0 if recipe.has_autocast else 6.0) if is_cast else 0.0
    # fused, the thin product reads the input once more, and what comes of it is added in place
    of_in, of_out = (c, 2.0 * c) if recipe.stack.fuses_adapters else (casts + c, 4.0 * c)
    found = of_in * width_in + of_out * width_out
    if adapters.keeps_start:
        found *= 2.0
    if recipe.lora_dropout > 0:
        found += (10.0 if is_cast else 2.0 * c + 1.0) * width_in
    return found + (6.0 * c * (width_in + width_out) if recipe.use_dora else 0.0)


class _WholeExperts(NamedTuple):
    """What experts that are trained whole ask of a GPU beside what any weight does."""

    is_fp32: bool = False  # products are in the precision of their weights: autocast skips them
    more_bytes: float = 0.0  # read in a pass, for that
    moved_bytes: float = 0.0  # in a step: gradients of all experts, and casts


def _whole_experts(case: Case) -> _WholeExperts:
    """Each micro-batch writes a gradient for every expert, whether tokens were sent to it or not,
    and adds it to those before. Spread ones are gathered in the precision of the run: rows are cast
    before each gather, and gradients for their sum.
    """
    recipe, n = case.recipe, sum(w.copies * w.n_weights for w in case.shape.experts)
    c, b, n_micro = recipe.compute_bytes, recipe.trained_bytes, recipe.n_micro_batches
    if case.adapters is not None or not n:
        return _WholeExperts()
    own = n / recipe.n_shards
    added = 3.0 * b * own * (n_micro - 1)
    if recipe.sharding == FSDP:
        moved = n_micro * (own * 2.0 * (b + c) + n * (2.0 * c + 4.0))
        return _WholeExperts(moved_bytes=moved + added)
    return _WholeExperts(b > c, float(n * (b - c)), n_micro * n * b + added)


# ---- bytes of an update ----


def _updates_there(case: Case) -> bool:
    """Whether the host updates trained weights, which it keeps."""
    return case.recipe.offloads_weights and case.adapters is None


def _update_bytes(case: Case) -> float:
    recipe = case.recipe
    return recipe.optimizer.update_bytes(recipe.trained_bytes) * _n_stepped(case)


def _host_update_bytes(case: Case) -> float:
    """In main memory, for each GPU; micro-batches after the first add to the gradients there."""
    if not _updates_there(case):
        return 0.0
    return _update_bytes(case) + 12.0 * (case.recipe.n_micro_batches - 1) * _n_stepped(case)


def _n_stepped(case: Case) -> int:
    """Trained weights that one GPU's optimizer has."""
    return case.n_trained // (case.recipe.n_shards if case.adapters is None else 1)


# ---- bytes of links ----


def _hauled_bytes(case: Case) -> float:
    """Rows of a GPU that come from main memory for every micro-batch, as they are kept there: of
    layers forward and backward, of embeddings and head once (FSDP2's `CPUOffloadPolicy`); and the
    gradients of trained ones, which go there. Counted beside the computing.
    """
    recipe, n = case.recipe, case.shape.n_parameters
    if not recipe.offloads_weights:
        return 0.0
    is_full = case.adapters is None
    of_weight = recipe.trained_bytes if is_full else recipe.compute_bytes
    rows = of_weight * (n + (case.in_layers if recipe.reshards else 0))
    gradients = recipe.trained_bytes * n if is_full else 0.0
    return recipe.n_micro_batches * (rows + gradients) / recipe.n_gpus


def _sent_bytes(case: Case) -> float:
    """Gradients (ddp), or weights and gradients (fsdp), that a GPU sends to others.

    A ring moves 2 (n - 1) / n of the gradients (Patarasuk and Yuan 2009). With fsdp, for every
    micro-batch, layers are gathered twice, recomputed or not, or once where they are kept,
    embeddings and head once, and gradients are scattered; whole adapters are added up once a step.
    """
    recipe, n = case.recipe, case.recipe.n_gpus
    if n == 1:
        return 0.0
    share, gradients = (n - 1) / n, float(case.n_trained * recipe.trained_bytes)
    if recipe.sharding != FSDP:
        return 2 * share * gradients
    of_weight = NF4_BYTES if recipe.method == "qlora" else float(recipe.gathered_bytes)
    gathered = of_weight * (case.shape.n_parameters + (case.in_layers if recipe.reshards else 0))
    if case.adapters is not None:
        return share * (recipe.n_micro_batches * gathered + 2 * gradients)
    return share * recipe.n_micro_batches * (gathered + gradients)
