"""shape x recipe x GPU x lengths -> seconds of a step by component, and what measurements make of
them.

A micro-batch takes the time of its matrix products, of its attention, and of everything that only
moves memory (norms, casts, activations, the loss); or the time the host needs to launch its
kernels, if that is longer. A step adds the optimizer and what the GPUs tell each other.

Physics: FLOPs (Kaplan et al. 2020), with 3 products for a trained weight, 2 for a frozen one, 1
below the first trained layer and one more where a layer is recomputed; bytes that are moved,
operation by operation.

Fitted, with published runs in view (docs/plan.md has how far off they were): the shares of the peak
of A100, H100 (mosaicml/llm-foundry, 8 GPUs), L40S (PEFT's method comparison) and RTX 4090
(torchtune),
`HALF_WIDTH`, `EXPOSED`, `WAITING` and `LAUNCH_TAIL`. By assumption: the shares of all other GPUs,
of links and of CPUs,
`HALF_TOKENS`, `BUS_BYTES_PER_S`, and `NO_PEER_SHARE`, which stands for about 5 GB/s.
`BANDWIDTH_SHARE` is a tenth less than copies on an H200 reached (4.3 of 4.8 TB/s);
`DEQUANTIZATION_SHARE` makes 8 ms of 1e9 weights on an A100, where LitGPT's tables have 10 to 15.

Refuses to import torch and to measure: `calibrate` makes factors of measurements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from farthing.data.lengths import Padded
from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.models.shapes import Shape
from farthing.models.weights import Adapters
from farthing.planner import moved_bytes
from farthing.planner.blocks import block_of
from farthing.planner.recipe import CHUNKED, FUSED, POSITIONS, TILED, UNCAST, Recipe
from farthing.prices.gpus import Gpu, facts

MATMUL_SHARE = {  # of the dense peak that wide products of a training step reach
    "Pascal": 0.86,
    "Volta": 0.67,
    "Turing": 0.54,
    "Ampere": 0.82,
    "Ada": 0.84,
    "Hopper": 0.67,  # 0.80 for one large product alone
    "Blackwell": 0.60,
}
GPU_SHARE = {
    **{"A100-80GB": 0.84, "A100-40GB": 0.84, "RTX 4090": 1.00, "L40S": 0.70},
    **{"L4": 0.49, "L40": 0.70, "RTX 6000 Ada": 0.65, "A10": 0.54},
}
OTHER_ATTENTION = (
    0.60  # of what products reach, on GPUs that `facts/attention_shares.csv` does not name
)
BANDWIDTH_SHARE = 0.80
DEQUANTIZATION_SHARE = 0.30
HALF_TOKENS = 220  # tokens at which products reach half of that share
HALF_WIDTH = 260  # and the width of the stream: narrow products end in tiles that are not full
LINK_SHARE = {"nvlink": 0.7, "infinity-fabric": 0.7, "pcie": 0.4}  # of the link's rate
# of GeForce cards: their driver has no way from GPU to GPU, all goes through the host's memory
NO_PEER_SHARE = 0.15
# seconds that a step is longer for each second of sending: little hides behind computing, which it
# slows
EXPOSED = 0.96
WAITING = 0.023  # of the computing: GPUs wait for the slowest
# the kernels of a layer with experts, in those of one without: sorting, sums and two grouped
# products
EXPERTS_LAUNCHES = 2.0
EXPERTS_SHARE = (
    0.7  # of the rate of one large product that products of experts reach: by assumption
)
# as long as in this precision: TF32 on GPUs that compute in bf16, fp32 on older ones
FP32_TIMES = {"bf16": 2.0, "fp16": 8.0}
# of the host's time: kernels that are too short to keep a GPU busy until the next one begins
LAUNCH_TAIL = 0.039
BUS_BYTES_PER_S = 20e9  # PCIe 4.0 x16 one way; with 5.0 it is twice that, in a small machine half
# of main memory, for each GPU of a machine: about what 8 A100 had (torchtune, 70B off-loaded)
HOST_BYTES_PER_S = 20e9
CPU_MATMUL_SHARE = (
    0.7  # whole steps of a Llama and a T5 on one thread of an EPYC of family 25 (docs/log.md)
)
CPU_BANDWIDTH_BYTES_PER_S = 10e9  # of a thread
CPU_LAUNCH_SHARE = (
    0.5  # of what the host needs to launch a layer's kernels on a GPU: nothing is launched
)


_COMPUTED = (
    *(
        "matmul_flops",
        "attention_flops",
        "read_bytes",
        "traffic_bytes",
        "dequantization_bytes",
        "host_s",
    ),
    "hauled_bytes",
)


class Device(NamedTuple):
    """What computes, in plain numbers."""

    name: str
    flops_per_s: float  # that products of a training step reach, in the precision of the run
    bandwidth_bytes_per_s: float  # that is reached
    link_bytes_per_s: float  # of one GPU, one direction; 0 alone
    is_cuda: bool
    attention_share: float = OTHER_ATTENTION  # of `flops_per_s`
    knows_link: bool = False  # `link_bytes_per_s` was measured on this machine


def device_of(gpu: Gpu, precision: str) -> Device | None:
    """A GPU as it computes in `precision`; None when it has no such peak."""
    peak = gpu.flops.get(precision) or (gpu.flops.get("tf32") if precision == "fp32" else None)
    if peak is None:
        return None
    share = GPU_SHARE.get(gpu.name, MATMUL_SHARE.get(gpu.architecture, 0.5))
    of_attention = _attention_shares().get(gpu.compute_capability)
    attention = OTHER_ATTENTION if of_attention is None else of_attention / share
    is_geforce = gpu.link == "pcie" and re.match(r"RTX \d{4}( Ti| Super|$)", gpu.name) is not None
    link = gpu.link_bytes_per_s * (NO_PEER_SHARE if is_geforce else LINK_SHARE[gpu.link])
    return Device(
        gpu.name, peak * share, gpu.bandwidth_bytes_per_s * BANDWIDTH_SHARE, link, True, attention
    )


@cache
def _attention_shares() -> dict[str, float]:
    """Of the dense peak, what fused attention reaches in both passes of causal rows, by compute
    capability.
    """
    return {row["compute_capability"]: float(row["share"]) for row in facts("attention_shares")}


def cpu_device(name: str, peak_flops: float, n_threads: int) -> Device:
    """A processor, from a rough guess of its peak."""
    return Device(
        name, peak_flops * CPU_MATMUL_SHARE, n_threads * CPU_BANDWIDTH_BYTES_PER_S, 0.0, False
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by component."""

    parts: dict[str, float]
    """matmul, attention, memory traffic, dequantization, launch, optimizer, communication, data."""
    n_tokens: float
    """Useful tokens of a step; seq2seq: sources and targets."""
    n_padded_tokens: float
    flops: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens a second, over all GPUs."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True)
class Calibration:
    """What measurements on a device say about its predictions; without any, that they are taken as
    they are.
    """

    compute: float = 1.0
    """Factor on the seconds of forward and backward."""
    optimizer: float = 1.0
    evaluation: float = 1.0
    waiting_s: float = 0.0
    """Seconds of each step that go to waiting for data and to copying it."""
    start_s: float | None = None
    """Imports, checks and loading the model."""
    save_s: float | None = None
    """For which training stands still, each time."""
    export_s: float | None = None
    extra_bytes: int | None = None
    """Memory beside what the formula counts: of a CPU, the process itself."""
    spread: float = 0.0
    """Relative half-width that is left of the estimate's own error."""
    n_runs: int = 0
    source: str = ""


class Work(NamedTuple):
    """What a step asks of each GPU, whatever the GPU: a plan makes it once for all that could do
    it.
    """

    matmul_flops: float
    attention_flops: float
    read_bytes: float  # weights that come out of memory for every micro-batch
    traffic_bytes: float  # outside of matrix products
    dequantization_bytes: float
    optimizer_bytes: float
    sent_bytes: float  # to other GPUs
    host_s: float
    tokens_per_micro_batch: float
    n_tokens: float  # of all GPUs, from here on: useful
    n_padded_tokens: float
    flops: float
    forward_share: float  # of those FLOPs that a forward pass alone takes
    bus_bytes: float = 0.0  # between each GPU and its host, for the optimizer
    width: float = 4096.0  # of the stream
    hauled_bytes: float = (
        0.0  # weights that come from the host and gradients that go there, for every micro-batch
    )
    host_bytes: float = 0.0  # that the host moves in its own memory to update what it keeps


def work_of(
    shape: Shape,
    recipe: Recipe,
    padded: Padded,
    mean_tokens: float,
    adapters: Adapters | None = None,
    *,
    labelled_share: float = 1.0,
) -> Work:
    """A step of `recipe.global_batch` examples, each `padded` as it is computed, `mean_tokens`
    without padding.

    `padded` is what `Lengths.cut` has for the trainer, and `bench/plan_padding.py` for others.
    """
    n_each, n_micro = recipe.global_batch * recipe.share_of_gpu, recipe.n_micro_batches
    all_tokens = recipe.global_batch * (padded.tokens + padded.targets)
    recompute = 1.0 / recipe.settings.checkpoint_every if recipe.settings.checkpoint_every else 0.0
    flops, c = (
        _flops(shape, recipe, padded, adapters, recompute, labelled_share),
        recipe.compute_bytes,
    )
    n_layers = shape.n_layers + shape.n_decoder_layers
    below = _share_below(shape, padded, adapters)
    passes = 1 + (1 - below) * (1 + recompute)
    of_experts = (
        sum(w.copies * w.n_weights * w.share for w in shape.products if w.kind == "experts")
        / shape.n_met()
    )
    whole = moved_bytes.whole_experts(shape, recipe, adapters)
    longer = (FP32_TIMES.get(recipe.precision, 1.0) if whole.is_fp32 else 1.0) / EXPERTS_SHARE
    n_merged = adapters.n_merged if adapters is not None else 0
    of_layer = recipe.stack.host_s_per_layer * (EXPERTS_LAUNCHES if shape.n_active else 1.0)
    if adapters is not None:
        of_layer += recipe.stack.host_s_per_adapted_layer * (2.0 if adapters.keeps_start else 1.0)
    return Work(
        matmul_flops=n_each
        * (flops.body * (1 + of_experts * (longer - 1)) + flops.head + flops.adapters),
        attention_flops=n_each * flops.attention,
        read_bytes=n_micro
        * passes
        * (c * (shape.n_matmul + shape.n_head_matmul + 2 * n_merged) + whole.more_bytes),
        traffic_bytes=n_each * _traffic(shape, recipe, padded, adapters, recompute, labelled_share)
        + whole.moved_bytes,
        dequantization_bytes=n_micro * passes * moved_bytes.packed_bytes(shape, recipe),
        optimizer_bytes=moved_bytes.optimizer_bytes(shape, recipe, adapters),
        sent_bytes=moved_bytes.sent_bytes(shape, recipe, adapters),
        host_s=n_micro * n_layers * of_layer * (1 + recompute / 3 - below * (2 + recompute) / 3),
        tokens_per_micro_batch=max(1.0, all_tokens * recipe.share_of_gpu / n_micro),
        n_tokens=recipe.global_batch * mean_tokens,
        n_padded_tokens=all_tokens,
        flops=recipe.global_batch * flops.total,
        forward_share=flops.forward / flops.total,
        bus_bytes=moved_bytes.bus_bytes(shape, recipe, adapters),
        width=float(shape.hidden),
        hauled_bytes=moved_bytes.hauled_bytes(shape, recipe, adapters),
        host_bytes=moved_bytes.host_bytes(shape, recipe, adapters),
    )


class _Busy(NamedTuple):
    """Seconds that a device computes for a step, waiting aside."""

    matmul: float
    attention: float
    traffic: float
    dequantization: float


def _busy(work: Work, device: Device, reached: float) -> _Busy:
    """`reached` is the share of its usual rate that products of so few tokens reach."""
    bandwidth = device.bandwidth_bytes_per_s
    if device.is_cuda:
        reached *= work.width / (work.width + HALF_WIDTH)
    return _Busy(
        max(work.matmul_flops / (device.flops_per_s * reached), work.read_bytes / bandwidth),
        work.attention_flops / (device.flops_per_s * device.attention_share),
        work.traffic_bytes / bandwidth,
        work.dequantization_bytes / (bandwidth / BANDWIDTH_SHARE * DEQUANTIZATION_SHARE),
    )


def micro_batch_cost(work: Work, device: Device) -> MicroBatchCost:
    """What a micro-batch costs on a device beside its tokens: what trainer and plan cut padded work
    by.

    `work` is that of a step of one micro-batch. The host launches its kernels, and the weights are
    read, however few tokens there are; products of few tokens are slower, as if there were more;
    quantized weights are unpacked once. In powers of the root of two, so that GPUs that hardly
    differ cut alike.
    """
    if not device.is_cuda:
        return ON_CPU
    busy = _busy(work._replace(read_bytes=0.0), device, 1.0)
    token_s = (busy.matmul + busy.attention + busy.traffic) / max(1.0, work.n_padded_tokens)
    least_s = max(work.host_s, work.read_bytes / device.bandwidth_bytes_per_s + busy.dequantization)
    more_s = busy.dequantization + token_s * HALF_TOKENS
    return MicroBatchCost(
        *(round(2 ** (round(2 * math.log2(max(1.0, s / token_s))) / 2)) for s in (least_s, more_s))
    )


def step_time(work: Work, device: Device, calibration: Calibration | None = None) -> StepTime:
    """Seconds of a step on a device."""
    known = calibration or Calibration()
    reached = 1.0
    if device.is_cuda:
        reached = work.tokens_per_micro_batch / (work.tokens_per_micro_batch + HALF_TOKENS)
    bandwidth = device.bandwidth_bytes_per_s
    busy = _busy(work, device, reached)
    busy_s = sum(busy)
    sending_s = (
        work.sent_bytes / device.link_bytes_per_s
        if work.sent_bytes and device.link_bytes_per_s
        else 0.0
    )
    parts = {
        "matmul": known.compute * busy.matmul,
        "attention": known.compute * busy.attention,
        "memory traffic": known.compute * busy.traffic,
        "dequantization": known.compute * busy.dequantization,
        "launch": known.compute * _launch_s(work.host_s, busy_s, device),
        "optimizer": known.optimizer
        * (
            work.optimizer_bytes / bandwidth
            + work.bus_bytes / (BUS_BYTES_PER_S if device.is_cuda else bandwidth)
            + work.host_bytes / HOST_BYTES_PER_S
        ),
        "weights from the host": work.hauled_bytes / BUS_BYTES_PER_S,
        "data": known.waiting_s,
        "communication": EXPOSED * sending_s + WAITING * busy_s if sending_s else 0.0,
    }
    kept = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return StepTime(kept, work.n_tokens, work.n_padded_tokens, work.flops)


def _launch_s(host_s: float, busy_s: float, device: Device) -> float:
    """A GPU computes while the host launches what comes next, but for what is too short; a CPU does
    one after the other.
    """
    if not device.is_cuda:
        return CPU_LAUNCH_SHARE * host_s
    return max(LAUNCH_TAIL * host_s, host_s - busy_s)


def forward_work(work: Work, n_steps: float) -> Work:
    """The forward pass alone of `n_steps` times the examples of a step: no optimizer."""
    share = n_steps * work.forward_share
    scaled = {name: getattr(work, name) * share for name in _COMPUTED}
    return work._replace(
        **scaled, optimizer_bytes=0.0, sent_bytes=0.0, bus_bytes=0.0, host_bytes=0.0
    )


class _Flops(NamedTuple):
    body: float
    attention: float
    head: float
    adapters: float
    forward: float  # of all of them, what a forward pass alone takes

    @property
    def total(self) -> float:
        """All of them."""
        return self.body + self.attention + self.head + self.adapters


def _flops(
    shape: Shape,
    recipe: Recipe,
    padded: Padded,
    adapters: Adapters | None,
    recompute: float,
    labelled_share: float,
) -> _Flops:
    """FLOPs of one padded example, forward, backward and recomputed."""
    tokens, targets = max(1, round(padded.tokens)), round(padded.targets)
    scale = padded.tokens / tokens
    n_read = recipe.stack.n_read
    once = shape.forward_flops(tokens, targets, n_read=n_read)
    both = shape.training_flops(tokens, targets, adapters=adapters, n_read=n_read)
    first = 0 if adapters is None else adapters.first_layer
    above = (
        shape.forward_flops(tokens, targets, first_layer=first, n_read=n_read) if first else once
    )
    spread = padded.token_pairs / max(
        1.0, padded.tokens**2
    )  # long examples attend more than the mean squared
    low_rank = both.adapters / 3 * recompute
    scored = labelled_share if recipe.stack.loss == POSITIONS and shape.scores_tokens else 1.0
    return _Flops(
        scale * (both.body + recompute * above.body),
        # flash recomputes the scores in the backward pass
        scale
        * spread
        * (
            (both.attention + recompute * above.attention) * 3.5 / 3
            - (once.attention - above.attention) / 6
        ),
        scale * both.head * scored,
        scale * (both.adapters + low_rank),
        scale * (once.body + spread * once.attention + scored * once.head + both.adapters / 3),
    )


def _share_below(shape: Shape, padded: Padded, adapters: Adapters | None) -> float:
    """Share of the work in layers that stands below the first trained one, and has no backward
    pass.
    """
    if adapters is None or not adapters.first_layer:
        return 0.0
    above = shape.n_above(adapters.first_layer)
    of_all = _layer_tokens(padded, (shape.n_layers, shape.n_decoder_layers))
    return 1 - _layer_tokens(padded, above) / max(1.0, of_all)


def _layer_tokens(padded: Padded, n_layers: tuple[int, int]) -> float:
    """Tokens times layers; a decoder's attend twice."""
    return padded.tokens * n_layers[0] + 1.4 * padded.targets * n_layers[1]


def _traffic(
    shape: Shape,
    recipe: Recipe,
    padded: Padded,
    adapters: Adapters | None,
    recompute: float,
    labelled_share: float,
) -> float:
    """Bytes that one padded example moves outside of matrix products, forward and backward.

    A forward pass reads and writes, for each token and layer: each norm in fp32 (36 bytes a feature
    where kernels are not fused, 8 where they are), two residual sums, rotations of queries and
    keys, and the activation; a backward pass twice as much. The loss passes over the logits about
    eight times in fp32; over those of positions twice in fp32, and five times in the precision of
    the run: product, softmax, gradients, and both products with those.
    """
    block, stack, c = block_of(shape), recipe.stack, recipe.compute_bytes
    h, f, r = shape.hidden, shape.ffn, recipe.residual_bytes
    q, k = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    is_fused = (
        stack.fused_norms or stack.is_compiled or not block.has_norm_copies
    )  # LayerNorm is one kernel in torch
    norms = block.n_norms * h * (4.0 * r if is_fused else 28.0 + 4.0 * r)
    rotations = (3.0 if is_fused else 10.0) * c * (q + k)
    activation = (
        c
        * f
        * (
            (3.0 if stack.fused_mlp or stack.lean_mlp or stack.is_compiled else 5.0)
            if block.is_gated
            else 2.0 * block.activation
        )
    )
    layer = norms + 6.0 * r * h + rotations + activation
    adapted = 0.0
    if adapters is not None and not stack.is_compiled:
        n_layers = max(1, shape.n_layers + shape.n_decoder_layers)
        width_in = sum(n / n_layers * w.n_in for w, n in adapters.adapted if w.kind == "linear")
        width_out = sum(n / n_layers * w.n_out for w, n in adapters.adapted if w.kind == "linear")
        is_cast = recipe.trained_bytes > c  # what adapters of the precision of the run read is not
        casts = (4.0 if stack.has_autocast else 6.0) if is_cast else 0.0
        # fused, the thin product reads the input once more, and what comes of it is added in place
        of_in, of_out = (c, 2.0 * c) if stack.fuses_adapters else (casts + c, 4.0 * c)
        adapted = of_in * width_in + of_out * width_out
        if adapters.keeps_start:
            adapted *= 2.0
        if recipe.lora_dropout > 0:
            adapted += (10.0 if is_cast else 2.0 * c + 1.0) * width_in
        if recipe.use_dora:
            adapted += 6.0 * c * (width_in + width_out)
    below = _share_below(shape, padded, adapters)
    tokens = _layer_tokens(padded, (shape.n_layers, shape.n_decoder_layers))
    if (n_read := stack.n_read) is not None:
        tokens -= padded.tokens - n_read
    passes = 1 + (1 - below) * (2.0 + recompute)
    body = tokens * (layer + adapted) * passes + tokens * adapted * (
        3.0 + recompute - passes
    )  # adapters are all above
    # product, mask or bias, softmax in fp32, cast and the second product, each over all scores; two
    # stacks that are laid end to end add a bias by distance, which no fused kernel takes
    if stack.is_eager or (stack.is_packed and shape.n_decoder_layers):
        pairs = shape.n_layers * padded.token_pairs
        pairs += shape.n_decoder_layers * (padded.target_pairs + padded.cross_pairs)
        body += pairs * shape.n_heads * (6.0 * c + 8.0) * passes
    n_scored = (padded.targets or padded.tokens) if shape.scores_tokens else 0.0
    of_loss = {TILED: 8.0, FUSED: 16.0, CHUNKED: 24.0, UNCAST: 8.0 * c}.get(
        stack.loss, c + 32.0 * labelled_share
    )
    if stack.loss == POSITIONS:
        of_loss = (8.0 + 5.0 * c) * labelled_share
    return body + n_scored * shape.vocab * of_loss
