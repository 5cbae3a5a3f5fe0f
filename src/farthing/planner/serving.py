"""A model and its traffic -> what answering it takes on a GPU: memory, streams, tokens a second,
dollars.

A decoding step reads all weights and the cache of every stream, or computes, whichever takes
longer; a prompt is computed once. An engine keeps as many streams as its cache has room for. The
constants are those of a fit on 54 published rows (`bench/serving.py` has them, with their errors):
engines on NVIDIA GPUs, 2023 to 2026.

Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from farthing.errors import InputError
from farthing.models.shapes import Shape
from farthing.prices.gpus import Gpu, gpus
from farthing.prices.offers import HOURS_PER_MONTH, Offer, cheapest_firm
from farthing.units import parse_hours

# bytes of a weight that is multiplied with, of a number in the cache, and what computes
PRECISIONS = {
    "bf16": (2.0, 2.0, "bf16"),
    "fp8": (1.0, 1.0, "fp8"),
    "int8": (1.0, 2.0, "bf16"),
    "int4": (0.516, 2.0, "bf16"),  # groups of 128 with a scale each
}
OLDEST_CAPABILITY = 8.0  # what today's engines have all kernels for: Ampere and later
MEMORY_SHARE = 0.9  # of a GPU, as engines take it
BESIDE_BYTES = 3e9  # activations, graphs, context
MOST_STREAMS = 1024
BANDWIDTH_REACHED, DECODE_REACHED, PREFILL_REACHED = 0.9, 0.4, 0.6
STEP_S, STREAM_S = 1e-3, 16e-6  # of the host: for each decoding step, and for each stream in it
PARALLEL_REACHED = 0.7  # of several GPUs' rates together
ERROR, ERROR_UNSEEN = 0.25, 0.40  # of tokens a second: held-out rows; GPUs without a row
SEEN = ("H100-80GB", "H200", "L40S", "A100-80GB", "A100-40GB", "L4")
SERVERLESS_TIMES = 1.6  # dearer than the machine by the hour: by assumption
WARM_S, STARTING_S = 60.0, 30.0  # kept after an answer; an engine's start
READ_BYTES_PER_S = 1e9  # of weights from a disk


class Traffic(NamedTuple):
    """What has to be answered."""

    requests_per_day: float = 1000.0
    input_tokens: float = 800.0
    output_tokens: float = 200.0
    latency_s: float | None = None  # most seconds until an answer is whole

    @property
    def requests_per_s(self) -> float:
        """Mean arrivals."""
        return self.requests_per_day / 86_400


@dataclass(frozen=True)
class Server:
    """A model on so many GPUs of a kind, in a precision."""

    shape: Shape
    gpu: Gpu
    n_gpus: int
    precision: str

    @property
    def weights_bytes(self) -> float:
        """Embeddings and head stay in 16 bits."""
        n_multiplied = self.shape.n_matmul
        kept = 2.0 * (self.shape.n_parameters - n_multiplied)
        return kept + n_multiplied * PRECISIONS[self.precision][0]

    @property
    def cache_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        of_number = PRECISIONS[self.precision][1]
        return 2.0 * self.shape.n_layers * self.shape.n_kv_heads * self.shape.head_dim * of_number

    @property
    def room_bytes(self) -> float:
        """For the caches of all streams, over all GPUs; below 0 where the weights are too much."""
        taken = MEMORY_SHARE * self.gpu.usable_bytes - BESIDE_BYTES
        return self.n_gpus * taken - self.weights_bytes

    def streams(self, traffic: Traffic) -> int:
        """The most requests at once that the cache has room for and the latency allows; 0: none."""
        held = self.cache_bytes(traffic)
        most = min(MOST_STREAMS, int(max(0.0, self.room_bytes) // held))
        if traffic.latency_s is None:
            return most
        # an answer takes longer with every stream beside it
        return bisect_right(
            range(1, most + 1), traffic.latency_s, key=lambda n: self.answer_s(traffic, n)
        )

    def cache_bytes(self, traffic: Traffic) -> float:
        """Mean cache of a request: its input, and half of its answer. A window ends it."""
        n_tokens = traffic.input_tokens + traffic.output_tokens / 2
        windows = self.shape.windows or (None,)
        kept = [n_tokens if window is None else min(n_tokens, window) for window in windows]
        return sum(kept) / len(kept) * self.cache_bytes_per_token

    @property
    def _together(self) -> float:
        return PARALLEL_REACHED * self.n_gpus if self.n_gpus > 1 else 1.0

    @property
    def _peak(self) -> float:
        asked = PRECISIONS[self.precision][2]
        return self._together * self.gpu.flops.get(asked, self.gpu.flops.get("fp16", 0.0))

    @property
    def _flops(self) -> float:
        """Of a token, attention aside."""
        return 2.0 * (self.shape.n_met() + self.shape.n_head_matmul)

    def decode_s(self, traffic: Traffic, n_streams: int) -> float:
        # experts that no stream's token goes to are not read
        n_unmet = self.shape.n_matmul - self.shape.n_met(n_streams)
        read = self.weights_bytes - n_unmet * PRECISIONS[self.precision][0]
        read += n_streams * self.cache_bytes(traffic)
        reading_s = read / (self._together * self.gpu.bandwidth_bytes_per_s * BANDWIDTH_REACHED)
        computing_s = n_streams * self._flops / (self._peak * DECODE_REACHED)
        return max(reading_s, computing_s) + STEP_S + STREAM_S * n_streams

    def prefill_s(self, traffic: Traffic) -> float:
        n = traffic.input_tokens
        flops = n * self._flops + 2.0 * self.shape.n_layers * self.shape.hidden * n * n
        return flops / (self._peak * PREFILL_REACHED)

    def answer_s(self, traffic: Traffic, n_streams: int) -> float:
        """Of one answer with so many streams at once, prompts of the others in between."""
        decoding_s = traffic.output_tokens * self.decode_s(traffic, n_streams)
        return decoding_s + n_streams * self.prefill_s(traffic)

    def tokens_per_s(self, traffic: Traffic, n_streams: int) -> float:
        return n_streams * traffic.output_tokens / self.answer_s(traffic, n_streams)


@dataclass(frozen=True)
class Served:
    """A traffic on an offer: what it takes and costs."""

    server: Server
    offer: Offer
    traffic: Traffic
    n_streams: int  # the most at once

    @property
    def capacity_tokens_per_s(self) -> float:
        """Output tokens a second of one machine at full load."""
        return self.server.tokens_per_s(self.traffic, self.n_streams)

    @property
    def load(self) -> float:
        return self.traffic.requests_per_s * self.traffic.output_tokens / self.capacity_tokens_per_s

    @property
    def n_machines(self) -> int:
        return max(1, math.ceil(self.load - 1e-9))

    @property
    def usd_per_hour(self) -> float:
        return self.offer.usd_per_hour or 0.0

    @property
    def always_on_usd(self) -> float:
        return self.n_machines * self.usd_per_hour * HOURS_PER_MONTH

    @property
    def cold_start_s(self) -> float:
        return STARTING_S + self.server.weights_bytes / READ_BYTES_PER_S

    @property
    def alone_s(self) -> float:
        """Seconds of an answer that has the machine for itself."""
        return self.server.answer_s(self.traffic, 1)

    def to_zero_usd(self) -> float:
        """A month of a machine that is on while it answers and `WARM_S` after."""
        per_s = self.traffic.requests_per_s / self.n_machines
        on = on_share(per_s, self.alone_s, WARM_S, self.cold_start_s)
        return self.n_machines * self.usd_per_hour * SERVERLESS_TIMES * on * HOURS_PER_MONTH

    def usd_per_million(self, load: float) -> tuple[float, float]:
        """Dollars for a million tokens (in, out) at a load, each by its share of the time."""
        streams, traffic = self.n_streams, self.traffic
        reading_s = streams * self.server.prefill_s(traffic)
        share = reading_s / self.server.answer_s(traffic, streams)
        usd_per_s = self.usd_per_hour / 3600 / max(load, 1e-9)
        per_s = self.capacity_tokens_per_s
        read_per_s = per_s * traffic.input_tokens / traffic.output_tokens
        return share * usd_per_s / read_per_s * 1e6, (1 - share) * usd_per_s / per_s * 1e6

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars for a million tokens, in and out, of a machine that is never idle."""
        usd_in, usd_out = self.usd_per_million(load=1.0)
        n_in, n_out = self.traffic.input_tokens, self.traffic.output_tokens
        return (usd_in * n_in + usd_out * n_out) / (n_in + n_out)

    @property
    def break_even_requests_per_hour(self) -> float:
        """Above them a machine that is always on is cheaper than one that goes to zero."""
        return break_even_per_s(SERVERLESS_TIMES, self.alone_s, WARM_S, self.cold_start_s) * 3600


def on_share(per_s: float, busy_s: float, warm_s: float, cold_start_s: float) -> float:
    """Share of the time that is paid for where a machine goes to zero: Poisson arrivals, each
    holding it for `busy_s`.

    It is on where one arrived within the last `busy_s + warm_s`; each arrival after a longer
    silence pays for a start.
    """
    silent = math.exp(-per_s * (busy_s + warm_s))
    return 1.0 - silent + per_s * silent * cold_start_s


def break_even_per_s(times: float, busy_s: float, warm_s: float, cold_start_s: float) -> float:
    """Arrivals a second at which going to zero at `times` the price costs as much as staying on; to
    a ten-thousandth.
    """

    def is_dearer(power: int) -> bool:
        return times * on_share(1.0001**power, busy_s, warm_s, cold_start_s) >= 1.0

    powers = range(-200_000, 138_000)
    return 1.0001 ** powers[bisect_left(powers, True, key=is_dearer)]


class NotServed(NamedTuple):
    """A GPU that can't, and why."""

    gpu: str
    n_gpus: int
    precision: str
    why: str


def serve(
    shape: Shape, traffic: Traffic, offers: list[Offer]
) -> tuple[list[Served], list[NotServed]]:
    """The traffic on the cheapest on-demand offer of each machine and in each precision that it
    has, the cheapest first.

    Raises `InputError` for a model that does not write token by token.
    """
    if shape.attention != "causal" or not shape.scores_tokens:
        what = f"farthing prices serving for models that write one text, not for {shape.task}"
        to_do = "leave it out, or time the exported model on the machine you mean"
        raise InputError(what, where="--serve", to_do=to_do)
    found: list[Served] = []
    refused: list[NotServed] = []
    # packs are of notebooks, which nobody can call from outside
    for (name, n_gpus), offer in cheapest_firm(one for one in offers if one.gpu).items():
        gpu = gpus()[name]
        if gpu.vendor == "nvidia" and float(gpu.compute_capability) < OLDEST_CAPABILITY:
            old = f"{gpu.architecture} is older than today's engines"
            refused.append(NotServed(name, n_gpus, "any", old))
            continue
        for precision, (_, _, computes) in PRECISIONS.items():
            server = Server(shape, gpu, n_gpus, precision)
            why, n_streams = "", 0
            if computes not in gpu.flops and (computes == "fp8" or "fp16" not in gpu.flops):
                why = f"{name} does not compute in {computes}"
            elif not (n_streams := server.streams(traffic)):
                why = _why_not(server, traffic)
            if why:
                refused.append(NotServed(name, n_gpus, precision, why))
            else:
                found.append(Served(server, offer, traffic, n_streams))
    order = list(PRECISIONS)  # where dollars are equal, what loses less

    def dearness(one: Served) -> tuple[float, float, int]:
        usd = round(min(one.always_on_usd, one.to_zero_usd()), 2)
        return usd, one.usd_per_hour, order.index(one.server.precision)

    return sorted(found, key=dearness), refused


def _why_not(server: Server, traffic: Traffic) -> str:
    held = server.cache_bytes(traffic)
    if server.room_bytes < held:
        needed = f"{(server.weights_bytes + held) / 1e9:.1f} GB for weights and one request"
        return f"needs {needed}, besides the engine's own memory"
    return f"one answer alone takes {server.answer_s(traffic, 1):.1f} s"


_PER_DAY = {"": 1.0, "day": 1.0, "d": 1.0, "hour": 24.0, "h": 24.0, "min": 1440.0, "s": 86_400.0}


def _per_day(text: str) -> float:
    number, _, unit = text.partition("/")
    return float(number) * _PER_DAY[unit.strip()]


def _seconds(text: str) -> float:
    """Of a number alone too."""
    return 3600 * parse_hours(text if text[-1:].isalpha() else f"{text}s")


_TRAFFIC: dict[str, tuple[str, Callable[[str], float]]] = {
    "requests": ("requests_per_day", _per_day),
    "input": ("input_tokens", float),
    "output": ("output_tokens", float),
    "latency": ("latency_s", _seconds),
}


def parse_traffic(text: str) -> Traffic:
    """`requests=2000/day,input=800,output=200,latency=2s`. Raises `InputError`."""
    says: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            field, parse = _TRAFFIC[name]
            says[field] = parse(value.lower())
            if not 0 < says[field] < math.inf:
                raise ValueError("not above 0")
        except (KeyError, ValueError):
            to_do = 'e.g. --serve "requests=2000/day,input=800,output=200,latency=2s"'
            what = f"`{part}` is not understood; figures are above 0"
            raise InputError(what, where="--serve", to_do=to_do) from None
    return Traffic(**says)
