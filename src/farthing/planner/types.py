"""The planner's nouns: what is wanted, where it could run, a plan, a rejection, an answer.

`JobSpec` is a job in the planner's terms, `Place` an offer as a device with memory and a price.
Search makes plans and rejections of them, ranking puts the plans in order. Refuses to decide
anything but what a value itself says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, cached_property
from typing import NamedTuple

from farthing.data.lengths import Cut, Largest, Lengths
from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.models.shapes import Shape
from farthing.models.tiles import WRITES_MORE
from farthing.models.weights import Adapters
from farthing.objectives.registry import objective_of
from farthing.planner.memory import Memory
from farthing.planner.recipe import BF16_WEIGHTS, Recipe, Stack, stack_for
from farthing.planner.software import Torch, host_note, why_no_code
from farthing.planner.speed import Calibration, Device, StepTime, device_of
from farthing.planner.spot import Expected
from farthing.prices.gpus import Gpu, gpus
from farthing.prices.offers import (
    ASSUMED_EGRESS_USD_PER_GB,
    ASSUMED_STORAGE_USD_PER_GB_MONTH,
    Offer,
    up_front_usd,
)
from farthing.units import say_seconds

UNCALIBRATED = Calibration()
AGED_PRICE_DAYS = 30  # from here on a price is shown with its age
OLD_PRICE_DAYS = 90  # an older price may have changed


class Assumptions(NamedTuple):
    """What a plan supposes where nothing was measured. All are printed with it."""

    # of a rented machine: boot, drivers, installation; facts/boot.csv knows some providers'
    setup_s: float = 240.0
    download_bytes_per_s: float = 100e6
    load_bytes_per_s: float = 1e9  # from disk to the device
    import_s: float = 10.0
    tokenize_tokens_per_s: float = 0.4e6  # two cores, measured
    snapshot_bytes_per_s: float = (
        5e9  # checkpoint from the device to host memory; written in the background
    )
    disk_bytes_per_s: float = 500e6
    process_bytes: int = 420 << 20  # of a CPU run: the interpreter with its libraries

    def in_words(self) -> list[str]:
        """One line each."""
        return [
            (
                f"a rented machine needs {say_seconds(self.setup_s)} before it can begin where its"
                " provider's time is not known (facts/boot.csv), and downloads at"
                f" {self.download_bytes_per_s / 1e6:.0f} MB/s"
            ),
            (
                f"imports take {self.import_s:.0f} s, weights load at"
                f" {self.load_bytes_per_s / 1e9:g} GB/s"
            ),
            (
                "where terms do not say, a GB kept for a month costs"
                f" ${ASSUMED_STORAGE_USD_PER_GB_MONTH:.2f} and a GB that leaves"
                f" ${ASSUMED_EGRESS_USD_PER_GB:.2f}: the model, and each checkpoint that goes to a"
                " store elsewhere"
            ),
            f"tokenizing runs at {self.tokenize_tokens_per_s / 1e6:g} M tokens/s",
            (
                f"a checkpoint halts training while {self.snapshot_bytes_per_s / 1e9:g} GB/s go to"
                f" host memory, or {self.disk_bytes_per_s / 1e6:.0f} MB/s to the disk where it"
                " takes more than half of that memory"
            ),
        ]


@dataclass(frozen=True)
class JobSpec:
    """A job in the planner's terms."""

    shape: Shape
    method: str
    optim: str
    global_batch: int
    lengths: Lengths
    n_epochs: float = 1.0
    max_steps: int | None = None
    micro_batch_tokens: int | None = None
    """Most computed tokens of a micro-batch; None: the planner's choice."""
    spreads: bool | None = None
    """Whether the job asks for weights that are spread over GPUs, or for whole ones on each; None:
    it leaves that open.
    """
    may_spread: bool = True
    """Whether they can be, as far as the job says beside its method and optimizer."""
    reshards: bool = True
    """Whether spread layers are gathered again for the backward pass (ZeRO-3), or kept (ZeRO-2)."""
    offloads_weights: bool = False
    """Whether the job asks for rows of spread weights in main memory."""
    may_go_packed: bool = True
    """Whether documents may be laid end to end: not where the job names an attention of its own."""
    checkpoint_every: int | None = None
    """Activation checkpointing; None: as little as memory needs."""
    precision: str | None = None
    """What the job says; None: what the GPU computes best that the model can bear."""
    fp16_risk: str = ""
    """Why the model should not be computed in fp16; empty where nothing speaks against it."""
    attention: str = ""
    """The job's own `model.attn_implementation`."""
    lora_r: int = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    keeps_start: bool = False
    """Whether what the adapter began as is kept, frozen, and taken away from it
    (`model/adapter_start.py`).
    """
    eval_lengths: Lengths | None = None
    eval_steps: int | None = None
    """Optimizer steps between evaluations; None: once an epoch. 0: only at the end."""
    eval_batch: int = 16
    max_new_tokens: int = 0
    """Above 0: evaluation generates as many tokens at most."""
    save_every_s: float | None = None
    """None: the planner's choice."""
    save_steps: int | None = None
    """Or optimizer steps between checkpoints."""
    store: str = ""
    """Where checkpoints are copied to, as an address; empty: nowhere."""
    is_tokenized: bool = False
    max_usd: float | None = None
    max_hours: float | None = None
    max_gpu_hours: float | None = None
    deadline_s: float | None = None
    """Seconds from now."""
    confidence: float = 0.9
    """Chance that a spot plan must have to meet the deadline."""

    @cached_property
    def adapters(self) -> Adapters | None:
        """What is trained of the model; None: all of it."""
        return _adapters(self)

    @cached_property
    def n_trainable(self) -> int:
        """Trained weights."""
        return self.shape.n_parameters if self.adapters is None else self.adapters.n_trainable

    @property
    def is_packed(self) -> bool:
        """Whether the trainer lays documents end to end."""
        return self.stack("fp32").is_packed

    def stack(self, precision: str) -> Stack:
        """How the trainer computes it."""
        changed = () if self.adapters is None else (*self.adapters.adapted, *self.adapters.saved)
        return stack_for(
            self.shape.model_type,
            self.shape.task,
            precision,
            self.method,
            may_go_packed=self.may_go_packed,
            has_plain_head=not any(weight.part == "head" for weight, _ in changed),
            has_plain_adapters=self.lora_dropout == 0
            and not self.use_dora
            and not self.keeps_start,
        )

    def cut(self, micro_batch_tokens: int, n_gpus: int = 1, cost: MicroBatchCost = ON_CPU) -> Cut:
        """The part of a step that one GPU takes, in micro-batches of at most so many tokens."""
        batch = -(-self.global_batch // n_gpus)
        return self.lengths.cut(micro_batch_tokens, batch, is_packed=self.is_packed, cost=cost)

    def largest(
        self, micro_batch_tokens: int, n_gpus: int = 1, cost: MicroBatchCost = ON_CPU
    ) -> Largest:
        """The largest micro-batch that one GPU takes."""
        batch = -(-self.global_batch // n_gpus)
        return self.lengths.largest(micro_batch_tokens, batch, is_packed=self.is_packed, cost=cost)

    def eval_cut(self, micro_batch_tokens: int, cost: MicroBatchCost = ON_CPU) -> Cut:
        """The evaluation examples as they are cut where training takes so many tokens at once."""
        assert self.eval_lengths is not None
        most = min(micro_batch_tokens, self.eval_batch * self.eval_lengths.longest_example)
        return self.eval_lengths.cut(
            most, self.eval_lengths.n_examples, is_packed=self.is_packed, cost=cost
        )

    def written_at_once(self, micro_batch_tokens: int) -> Largest:
        """The largest batch of sources that the model writes for in an evaluation, and the tokens
        that it writes.
        """
        assert self.eval_lengths is not None
        longest, n_new = self.eval_lengths.longest, self.max_new_tokens
        n_rows = max(1, WRITES_MORE * micro_batch_tokens // (longest + n_new))
        return Largest(min(n_rows, self.eval_lengths.n_examples), longest, n_new)

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole job."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.n_epochs * -(-self.lengths.n_examples // self.global_batch))

    @property
    def n_evaluations(self) -> int:
        """Evaluations, the last one included."""
        if self.eval_lengths is None:
            return 0
        if self.eval_steps == 0:
            return 1
        each = self.eval_steps or -(-self.lengths.n_examples // self.global_batch)
        return max(1, math.ceil(self.n_steps / each))

    @property
    def labelled_share(self) -> float:
        """Share of the tokens that go through the loss."""
        if not objective_of(self.shape.task).predicts_next:
            return 1.0
        return min(1.0, self.lengths.n_target_tokens / max(1.0, self.lengths.n_tokens))

    @property
    def tokens_per_example(self) -> float:
        """Mean tokens without padding; seq2seq: source and target."""
        return objective_of(self.shape.task).n_tokens(self.lengths.mean, self.lengths.mean_target)

    @property
    def save_bytes(self) -> float:
        """Of a checkpoint: trained weights and the optimizer's state, as they are kept."""
        return self.n_trainable * (
            2.0 + 4.0
            if self.optim == BF16_WEIGHTS
            else 4.0
            + {"sgd": 0.0, "adagrad": 4.0, "rmsprop": 4.0, "adafactor": 0.0}.get(
                self.optim, 2.0 if "8bit" in self.optim else 8.0
            )
        )


def open_ended(wanted: JobSpec) -> JobSpec:
    """The same job without limits."""
    return replace(wanted, max_usd=None, max_hours=None, max_gpu_hours=None, deadline_s=None)


@cache
def _adapters_of(
    shape: Shape,
    r: int,
    targets: tuple[str, ...],
    saved: tuple[str, ...],
    dora: bool,
    keeps_start: bool,
) -> Adapters:
    return shape.with_lora(r, targets, saved, use_dora=dora)._replace(keeps_start=keeps_start)


def _adapters(wanted: JobSpec) -> Adapters | None:
    if wanted.method == "full":
        return None
    asked = (
        wanted.lora_r,
        wanted.target_modules,
        wanted.modules_to_save,
        wanted.use_dora,
        wanted.keeps_start,
    )
    return _adapters_of(wanted.shape, *asked)


@dataclass(frozen=True)
class Place:
    """Somewhere to run: an offer, or a machine of one's own, as a device with memory and a price."""  # noqa: E501

    offer: Offer
    device: Device
    precision: str
    memory_bytes: int
    calibration: Calibration = UNCALIBRATED
    is_local: bool = False
    """This machine: nothing is set up or downloaded, and nobody takes it away."""
    is_cuda: bool = True
    precision_note: str = ""
    """What is to be said of the precision; empty where nothing is."""
    price_age_days: int = 0
    """Since the price was read."""
    is_given_price: bool = False
    """Whether the user gave the price, which is then taken as it is, however old."""
    is_part: bool = False
    """Whether the machine has more GPUs than these."""
    has_liger: bool = False
    """Whether Liger's kernels are there, and the trainer takes them."""
    host_note: str = ""
    """What has to be installed by hand; empty where nothing has."""

    @property
    def is_priced(self) -> bool:
        """Whether its dollars mean anything: this machine may have no price."""
        return not (self.is_local and not self.offer.usd_per_hour)

    @property
    def is_from_price(self) -> bool:
        """Whether the price is the lowest of many hosts', who may have nothing left."""
        return self.offer.billing.prices_are == "from" and not self.offer.is_spot

    @property
    def has_firm_price(self) -> bool:
        """Whether the price can be had: not a marketplace's lowest, and not too old."""
        return not self.is_from_price and not self.has_old_price

    @property
    def has_old_price(self) -> bool:
        """Whether the price may have changed since it was read."""
        return self.price_age_days > OLD_PRICE_DAYS and not self.is_given_price


@dataclass(frozen=True)
class Range:
    """A figure and where it will probably be: 80 % of cases by the errors that were seen."""

    low: float
    likely: float
    high: float

    def as_list(self) -> list[float]:
        """[low, likely, high]."""
        return [self.low, self.likely, self.high]


@dataclass(frozen=True)
class Plan:
    """One way to run the job: where, how, and what it comes to."""

    place: Place
    recipe: Recipe
    memory: Memory
    memory_range: Range
    step: StepTime
    seconds: dict[str, float]
    """By what they go to; they add up to `wall_s`."""
    usd: dict[str, float]
    """By what they go to; they add up to `total_usd`."""
    hours_range: Range
    usd_range: Range
    interval_s: float
    """Between checkpoints."""
    spot: Expected | None = None
    chance: float | None = None
    """To meet the deadline."""
    host_bytes: int = 0
    """Of main memory: rows of weights, or an optimizer's state, that are kept there."""
    mixture: str = ""
    """Why the same machine on demand steps in when spot falls behind the deadline; empty where it
    does not.
    """
    why: str = ""
    on_front: bool = False

    @property
    def offer(self) -> Offer:
        """What is bought."""
        return self.place.offer

    @cached_property
    def wall_s(self) -> float:
        """From the moment the job is wanted to its end."""
        return sum(self.seconds.values())

    @cached_property
    def total_usd(self) -> float:
        """The bill."""
        return sum(self.usd.values())

    @property
    def to_set(self) -> tuple[str, ...]:
        """What the job has to say for it, beside what it says by itself."""
        gpus = f"where.gpus: {self.recipe.n_gpus if self.place.is_part else 'all'}"
        return tuple(gpus if key == "where.gpus: all" else key for key in self.recipe.to_set)

    @property
    def is_tight(self) -> bool:
        """Whether it may not fit after all: the range of its memory passes what is there."""
        return self.memory_range.high > self.place.memory_bytes


@dataclass(frozen=True)
class Rejected:
    """An offer that will not do."""

    offer: Offer
    reason: str
    change: str
    """The nearest change that would let it in."""
    distance: float = math.inf
    """How far off it is, to name the nearest first: the factor that is missing."""


@dataclass(frozen=True)
class Answer:
    """All plans, the best first, and everything that was rejected."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    managed: tuple[tuple[Offer, float], ...]
    """Services that train for a fee, with their dollars; another's recipe, and often another's
    models.
    """
    n_steps: int

    @property
    def best(self) -> Plan | None:
        """The first."""
        return self.plans[0] if self.plans else None


def place_of(
    offer: Offer,
    wanted: JobSpec | None = None,
    calibration: Calibration | None = None,
    torch: Torch | None = None,
    today: date | None = None,
) -> Place | Rejected:
    """An offer as a place for a job; a rejection where the software or the GPU can't do what it
    takes.

    The precision is the job's; else bf16 where the GPU has it, else fp16 where the model can bear
    that, else fp32.
    """
    gpu: Gpu = gpus()[offer.gpu]
    asked = wanted.precision if wanted is not None else None
    risk = wanted.fp16_risk if wanted is not None else ""
    if torch is not None and wanted is not None:
        needs_bitsandbytes = (
            wanted.method == "qlora" or "8bit" in wanted.optim or "paged" in wanted.optim
        )
        no_code = why_no_code(
            gpu, torch, needs_bitsandbytes=needs_bitsandbytes, attention=wanted.attention
        )
        if no_code is not None:
            return Rejected(offer, *no_code, 2.0 if no_code[1].startswith("pip") else 20.0)
    precision = asked or best_precision(gpu, risk)
    device = device_of(gpu, precision)
    if device is None or (precision == "bf16" and not gpu.has_bf16):
        setting = {"bf16": "train.bf16", "fp16": "train.fp16"}.get(precision, "the precision")
        found = best_precision(gpu, risk)
        return Rejected(
            offer,
            f"{gpu.name} does not compute in {precision}",
            f"leave {setting} out: {found} is used",
            1.5,
        )
    if wanted is not None and wanted.optim == BF16_WEIGHTS and precision != "bf16":
        why = f"train.optim: {wanted.optim} computes in bf16, and {gpu.name} in {precision}"
        return Rejected(offer, why, "train.optim: adamw_torch_fused", 3.0)
    note = ""
    if risk and not gpu.has_bf16:
        note = f"fp32, because {risk}" if precision == "fp32" else ""
    if risk and precision == "fp16":
        note = f"fp16 was asked for, but {risk}: a run that overflows has to be done again"
    age = max(0, (today - offer.date).days) if today is not None else 0
    return Place(
        offer,
        device,
        precision,
        gpu.usable_bytes,
        calibration or UNCALIBRATED,
        precision_note=note,
        price_age_days=age,
        host_note=host_note(gpu, torch) if torch is not None else "",
    )


def best_precision(gpu: Gpu, fp16_risk: str = "") -> str:
    """What a GPU computes best that the model can bear."""
    if gpu.has_bf16:
        return "bf16"
    return "fp16" if "fp16" in gpu.flops and not fp16_risk else "fp32"


def up_front(plan: Plan) -> float:
    """What has to be paid before: whole packs of credits, where those are sold."""
    return up_front_usd(plan.offer, plan.total_usd)
