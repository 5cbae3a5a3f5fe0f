"""Work on a device -> seconds of a step by component, and what measurements make of them.

A micro-batch takes the time of its matrix products, of its attention, and of everything that only
moves memory; or the time the host needs to launch its kernels, if that is longer. A step adds the
optimizer and what the GPUs tell each other.

Fitted, with published runs in view (docs/explanation/estimates.md has how far off they were):
shares of the peak in `facts/gpu_shares.csv` that say so, `HALF_WIDTH`, `EXPOSED`, `WAITING` and
`LAUNCH_TAIL`. The shares of CPUs but for products: 74 small Berts, Llamas and T5s of 1 to 6 layers
on one and two threads of a Xeon of family 6, model 207 (2026-11-23; half of the steps within 18 %);
the host of an EPYC of family 25 was nearly twice as fast. By assumption: `HALF_TOKENS`,
`BUS_BYTES_PER_S`. `BANDWIDTH_SHARE` is a tenth less than copies on an H200 reached (4.3 of 4.8
TB/s); `DEQUANTIZATION_SHARE` makes 8 ms of 1e9 weights on an A100, where LitGPT's tables have 10
to 15."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.planner.work import Work
from farthing.prices.gpus import Gpu
from farthing.tables import facts, numbers

OTHER_ATTENTION = 0.60  # of what products reach, on GPUs that `facts/attention_shares.csv` lacks
BANDWIDTH_SHARE = 0.80
DEQUANTIZATION_SHARE = 0.30
HALF_TOKENS = 220  # tokens at which products reach half of their share of the peak
HALF_WIDTH = 260  # width of the stream: narrow products of tensor cores end in tiles not full
EXPOSED = 0.96  # seconds that a step is longer for each second of sending
WAITING = 0.023  # of the computing: GPUs wait for the slowest
LAUNCH_TAIL = 0.039  # of the host's time: kernels too short to keep a GPU busy until the next
BUS_BYTES_PER_S = 20e9  # PCIe 4.0 x16 one way; with 5.0 it is twice that, in a small machine half
HOST_BYTES_PER_S = 20e9  # of main memory, for each GPU: about what 8 A100 had (torchtune, 70B)
CPU_MATMUL_SHARE = 0.7  # whole steps of a Llama and a T5 on one thread of an EPYC of family 25
CPU_BANDWIDTH_BYTES_PER_S = 10e9  # of a thread
LINK_ERROR, GEFORCE_LINK_ERROR, KNOWN_LINK_ERROR = 0.5, 2.0, 0.2  # by assumption
CPU_LAUNCH_SHARE = 1.7  # of what a GPU's host needs to launch kernels
CPU_ATTENTION_SHARE = 0.3  # of what products reach
CPU_UPDATE_SHARE = 0.5  # of the bandwidth of a thread that the optimizer reaches
CPU_STEP_S = 2.3e-3  # of a step whatever the model: its batch, the update of its tensors, the log


class Device(NamedTuple):
    name: str
    flops_per_s: float  # that products of a training step reach, in the precision of the run
    bandwidth_bytes_per_s: float  # that is reached
    link_bytes_per_s: float  # of one GPU, one direction; 0 alone
    is_cuda: bool
    attention_share: float = OTHER_ATTENTION  # of `flops_per_s`
    link_error: float = LINK_ERROR  # by which seconds of sending may be more
    has_tiles: bool = True  # tensor cores, which narrow products do not fill


@cache
def _share(what: str, *names: str) -> float:
    """The first row of `facts/gpu_shares.csv` for `name/precision`, the most special first."""
    rows = {
        f"{r['of']}/{r['precision']}": r["share"] for r in facts("gpu_shares") if r["what"] == what
    }
    return next(float(rows[name]) for name in names if name in rows)


def device_of(gpu: Gpu, precision: str, *, tf32: bool = True) -> Device | None:
    """A GPU as it computes in `precision`; None when it has no such peak. With `tf32` products of
    fp32 numbers are computed in TF32 where the GPU can.
    """
    peak, kind = gpu.flops.get(precision), "16"
    if precision == "fp32":
        has_tf32 = tf32 and "tf32" in gpu.flops
        kind = "tf32" if has_tf32 else "fp32"
        peak = gpu.flops.get(kind)
    if peak is None:
        return None
    places = (gpu.name, gpu.architecture, "")
    names = [f"{place}/{kind}" for place in places] + [f"{place}/" for place in places]
    share = _share("matmul", *names)
    # what causal attention reaches of the dense peak, both passes
    shares = numbers("attention_shares", "compute_capability", "share")
    of_attention = shares.get(gpu.compute_capability)
    attention = OTHER_ATTENTION if of_attention is None else of_attention / share
    is_geforce = gpu.link == "pcie" and re.match(r"RTX \d{4}( Ti| Super|$)", gpu.name) is not None
    link = _share("link", f"{'geforce' if is_geforce else gpu.link}/") * gpu.link_bytes_per_s
    bandwidth = gpu.bandwidth_bytes_per_s * BANDWIDTH_SHARE
    error = GEFORCE_LINK_ERROR if is_geforce else LINK_ERROR
    rates = peak * share, bandwidth, link
    return Device(gpu.name, *rates, True, attention, error, has_tiles=kind != "fp32")


def cpu_device(name: str, peak_flops: float, n_threads: int) -> Device:
    """A processor, from a rough guess of its peak."""
    bandwidth = n_threads * CPU_BANDWIDTH_BYTES_PER_S
    rates = peak_flops * CPU_MATMUL_SHARE, bandwidth, 0.0
    return Device(name, *rates, False, CPU_ATTENTION_SHARE, has_tiles=False)


@dataclass(frozen=True)
class StepTime:
    parts: dict[str, float]
    """matmul, attention, memory traffic, dequantization, launch, optimizer, communication, data."""
    n_tokens: float  # useful tokens of a step; seq2seq: sources and targets
    n_padded_tokens: float
    flops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens a second, over all GPUs."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True)
class Calibration:
    """What measurements on a device say about its predictions; without any, nothing."""

    compute: float = 1.0  # factor on the seconds of forward and backward
    optimizer: float = 1.0
    evaluation: float = 1.0  # on those of an evaluation, beside `compute`
    waiting_s: float = 0.0  # of each step, for data and copying it
    start_s: float | None = None
    load_s: float | None = None  # of the model
    """Imports and checks of a new process."""
    save_s: float | None = None  # for which training stands still, each time
    export_s: float | None = None
    extra_bytes: int | None = None
    """That torch allocates beside what the formula counts; of a CPU, the process with it."""
    spread: float = 0.0  # relative half-width that is left of the estimate's own error
    n_runs: int = 0
    source: str = ""


class _Busy(NamedTuple):
    """Seconds that a device computes for a step, waiting aside."""

    matmul: float
    attention: float
    traffic: float
    dequantization: float


def _busy(work: Work, device: Device, reached: float) -> _Busy:
    """`reached` is the share of its usual rate that products of so few tokens reach."""
    bandwidth = device.bandwidth_bytes_per_s
    if device.has_tiles:
        reached *= work.width / (work.width + HALF_WIDTH)
    unpacked = bandwidth / BANDWIDTH_SHARE * DEQUANTIZATION_SHARE
    return _Busy(
        max(work.matmul_flops / (device.flops_per_s * reached), work.read_bytes / bandwidth),
        work.attention_flops / (device.flops_per_s * device.attention_share),
        work.traffic_bytes / bandwidth,
        work.dequantization_bytes / unpacked,
    )


def micro_batch_cost(work: Work, device: Device) -> MicroBatchCost:
    """What a micro-batch costs on a device beside its tokens: what trainer and plan cut padded work
    by. `work` is that of a step of one micro-batch.

    The host launches its kernels, and the weights are read, however few tokens there are; products
    of few tokens are slower, as if there were more; quantized weights are unpacked once. In powers
    of the root of two, so that GPUs that hardly differ cut alike.
    """
    if not device.is_cuda:
        return ON_CPU
    busy = _busy(work._replace(read_bytes=0.0), device, 1.0)
    token_s = (busy.matmul + busy.attention + busy.traffic) / max(1.0, work.n_padded_tokens)
    read_s = work.read_bytes / device.bandwidth_bytes_per_s
    least_s = max(work.host_s, read_s + busy.dequantization)
    more_s = busy.dequantization + token_s * HALF_TOKENS
    tokens = [max(1.0, seconds / token_s) for seconds in (least_s, more_s)]
    return MicroBatchCost(*(round(2 ** (round(2 * math.log2(n)) / 2)) for n in tokens))


def step_time(work: Work, device: Device, calibration: Calibration | None = None) -> StepTime:
    """Seconds of a step on a device."""
    known = calibration or Calibration()
    n, bandwidth = work.tokens_per_micro_batch, device.bandwidth_bytes_per_s
    busy = _busy(work, device, n / (n + HALF_TOKENS) if device.is_cuda else 1.0)
    busy_s = sum(busy)
    sending_s = work.sent_bytes / device.link_bytes_per_s if device.link_bytes_per_s else 0.0
    of_update = bandwidth * (1.0 if device.is_cuda else CPU_UPDATE_SHARE)
    update_s = work.optimizer_bytes / of_update + work.host_bytes / HOST_BYTES_PER_S
    update_s += work.bus_bytes / (BUS_BYTES_PER_S if device.is_cuda else bandwidth)
    parts = {
        "matmul": known.compute * busy.matmul,
        "attention": known.compute * busy.attention,
        "memory traffic": known.compute * busy.traffic,
        "dequantization": known.compute * busy.dequantization,
        "launch": known.compute * _launch_s(work, busy_s, device),
        "optimizer": known.optimizer * update_s,
        "weights from the host": work.hauled_bytes / BUS_BYTES_PER_S,
        "data": known.waiting_s,
        "communication": EXPOSED * sending_s + WAITING * busy_s if sending_s else 0.0,
    }
    kept = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return StepTime(kept, work.n_tokens, work.n_padded_tokens, work.flops)


def _launch_s(work: Work, busy_s: float, device: Device) -> float:
    """A GPU computes while the host launches what comes next; a CPU does one after the other."""
    host_s = work.host_s + work.step_host_s
    if not device.is_cuda:
        of_step = CPU_STEP_S if work.step_host_s else 0.0
        return CPU_LAUNCH_SHARE * host_s + of_step
    return max(LAUNCH_TAIL * host_s, host_s - busy_s)
