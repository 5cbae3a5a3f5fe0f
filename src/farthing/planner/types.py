"""The planner's nouns: what is wanted, a machine, a plan, a rejection, an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from farthing.data.lengths import Cut, Largest, Lengths
from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.models.shapes import Shape
from farthing.models.tiles import WRITES_MORE
from farthing.models.weights import Adapters
from farthing.objectives.registry import objective_of
from farthing.planner.memory import Memory, OnDevice
from farthing.planner.optimizers import Optimizer, optimizer
from farthing.planner.recipe import PLAIN, Case, Kernels, ModelSupport, Recipe, stack_for
from farthing.planner.speed import Calibration, Device, StepTime
from farthing.planner.spot import Expected
from farthing.prices.offers import Offer, up_front_usd

HERE, OWN = "this machine", "own"
UNCALIBRATED = Calibration()
AGED_PRICE_DAYS = 30  # from here on a price is shown with its age
OLD_PRICE_DAYS = 90  # an older price may have changed


class Assumptions(NamedTuple):
    """What a plan supposes where nothing was measured. All are printed with it."""

    setup_s: float = 240.0  # of a rented machine; facts/boot.csv knows some providers'
    download_bytes_per_s: float = 100e6
    load_bytes_per_s: float = 1e9  # from disk to the device
    import_s: float = 10.0
    import_on_cpu_s: float = 4.5  # two cores, measured
    tokenize_tokens_per_s: float = 0.4e6  # two cores, measured
    snapshot_bytes_per_s: float = 5e9  # a checkpoint to host memory; written in the background
    disk_bytes_per_s: float = 500e6
    process_bytes: int = 420 << 20  # of a CPU run: the interpreter with its libraries


@dataclass(frozen=True)
class JobSpec:
    """A job in the planner's terms. None leaves a choice to the planner."""

    shape: Shape
    method: str
    optim: str
    global_batch: int
    lengths: Lengths
    n_epochs: float = 1.0
    max_steps: int | None = None
    micro_batch_tokens: int | None = None
    spreads: bool | None = None
    """The job asks for weights that are spread over GPUs, or for whole ones on each."""
    may_spread: bool = True  # they can be, as far as the job says beside its method and optimizer
    reshards: bool = True
    """Spread layers are gathered again for the backward pass (ZeRO-3), or kept (ZeRO-2)."""
    offloads_weights: bool = False  # the job asks for rows of spread weights in main memory
    may_go_packed: bool = True
    """Documents may be laid end to end: not where the job names an attention of its own."""
    checkpoint_every: int | None = None
    precision: str | None = None
    tf32: bool = True
    fp16_risk: str = ""  # why the model should not be computed in fp16
    attention: str = ""  # the job's own `model.attn_implementation`
    lora_r: int = 16
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    keeps_start: bool = False  # what the adapter began as is kept, frozen, and taken away from it
    eval_lengths: Lengths | None = None
    eval_steps: int | None = None
    """Optimizer steps between evaluations; None: once an epoch. 0: only at the end."""
    eval_batch: int = 16
    max_new_tokens: int = 0  # above 0: evaluation generates as many tokens at most
    save_every_s: float | None = None
    save_steps: int | None = None
    store: str = ""  # where checkpoints are copied to, as an address
    is_tokenized: bool = False
    max_usd: float | None = None
    max_hours: float | None = None
    max_gpu_hours: float | None = None
    deadline_s: float | None = None  # from now
    confidence: float = 0.9  # chance to meet the deadline that a plan must have

    @cached_property
    def adapters(self) -> Adapters | None:
        """What is trained of the model; None: all of it."""
        if self.method == "full":
            return None
        asked = self.lora_r, self.target_modules, self.modules_to_save
        return _adapters(self.shape, *asked, self.use_dora, self.keeps_start)

    @property
    def optimizer(self) -> Optimizer:
        return optimizer(self.optim)

    @cached_property
    def n_trainable(self) -> int:
        return self.shape.n_parameters if self.adapters is None else self.adapters.n_trainable

    @cached_property
    def is_packed(self) -> bool:
        return self.stack("fp32").is_packed

    def stack(self, precision: str) -> ModelSupport:
        changed = () if self.adapters is None else (*self.adapters.adapted, *self.adapters.saved)
        return stack_for(
            *(self.shape.model_type, self.shape.task, precision, self.method),
            may_go_packed=self.may_go_packed,
            has_plain_head=not any(weight.part == "head" for weight, _ in changed),
            has_plain_adapters=not (self.use_dora or self.keeps_start),
        )

    def cut(self, most: int, n_gpus: int = 1, cost: MicroBatchCost = ON_CPU) -> Cut:
        batch = -(-self.global_batch // n_gpus)
        return self.lengths.cut(most, batch, is_packed=self.is_packed, cost=cost)

    def eval_cut(self, micro_batch_tokens: int, cost: MicroBatchCost = ON_CPU) -> Cut:
        """The evaluation examples as they are cut where training takes so many tokens at once."""
        assert self.eval_lengths is not None
        most = min(micro_batch_tokens, self.eval_batch * self.eval_lengths.longest_example)
        n = self.eval_lengths.n_examples
        return self.eval_lengths.cut(most, n, is_packed=self.is_packed, cost=cost)

    def written_at_once(self, micro_batch_tokens: int) -> Largest:
        """The largest batch of sources that the model writes for, and the tokens that it writes."""
        assert self.eval_lengths is not None
        longest, n_new = self.eval_lengths.longest, self.max_new_tokens
        n_rows = max(1, WRITES_MORE * micro_batch_tokens // (longest + n_new))
        return Largest(min(n_rows, self.eval_lengths.n_examples), longest, n_new)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.lengths.n_examples // self.global_batch)

    @property
    def n_steps(self) -> int:
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.n_epochs * self.steps_per_epoch)

    @property
    def n_taken(self) -> int:
        """Examples of all steps: the last step of a pass takes what is left."""
        n_passes, n_more = divmod(self.n_steps, self.steps_per_epoch)
        return n_passes * self.lengths.n_examples + n_more * self.global_batch

    @property
    def n_evaluations(self) -> int:
        """The last one included."""
        if self.eval_lengths is None:
            return 0
        if self.eval_steps == 0:
            return 1
        return max(1, math.ceil(self.n_steps / (self.eval_steps or self.steps_per_epoch)))

    @property
    def labelled_share(self) -> float:
        """Of the tokens, that go through the loss."""
        if not objective_of(self.shape.task).predicts_next:
            return 1.0
        return min(1.0, self.lengths.n_target_tokens / max(1.0, self.lengths.n_tokens))

    @property
    def tokens_per_example(self) -> float:
        """Mean tokens without padding; seq2seq: source and target."""
        return objective_of(self.shape.task).n_tokens(self.lengths.mean, self.lengths.mean_target)

    @property
    def n_tokens(self) -> float:
        return self.n_taken * self.tokens_per_example

    @property
    def save_bytes(self) -> float:
        of_weight = 2.0 if self.optimizer.has_bf16_weights else 4.0
        return self.n_trainable * (of_weight + self.optimizer.saved_bytes)

    def case(self, recipe: Recipe, *, is_cuda: bool = True) -> Case:
        cut = self.cut(recipe.settings.micro_batch_tokens, recipe.n_gpus, recipe.cost)
        lengths = cut.largest, cut.example, self.tokens_per_example, self.labelled_share
        return Case(self.shape, recipe, self.adapters, *lengths, is_cuda)


def open_ended(wanted: JobSpec) -> JobSpec:
    return replace(wanted, max_usd=None, max_hours=None, max_gpu_hours=None, deadline_s=None)


@cache
def _adapters(
    shape: Shape, r: int, targets: tuple[str, ...], saved: tuple[str, ...], dora: bool, start: bool
) -> Adapters:
    return shape.with_lora(r, targets, saved, use_dora=dora)._replace(keeps_start=start)


@dataclass(frozen=True)
class Machine:
    """A kind of machine to run on, whoever sells it."""

    gpu: str  # a name of the catalog; of a CPU, the processor's
    n_gpus: int
    device: Device
    precision: str
    memory: OnDevice  # that one GPU has for a run
    calibration: Calibration = UNCALIBRATED
    architecture: str = ""
    is_local: bool = False  # this machine, or one of one's own: nothing is set up or downloaded
    is_cuda: bool = True
    is_part: bool = False  # the machine has more GPUs than these
    kernels: Kernels = PLAIN
    precision_note: str = ""
    host_note: str = ""  # what has to be installed by hand


class Range(NamedTuple):
    """A figure and where it will be in 80 % of cases, by the errors that were seen."""

    low: float
    likely: float
    high: float


class Spread(NamedTuple):
    """What a predicted figure is multiplied with to be the low and the high end of its range."""

    low: float
    high: float
    known: str  # what it rests on
    is_own: bool = False  # on farthing's own runs

    def of(self, likely: float, certain: float = 0.0) -> Range:
        """`certain` is a part of it that has no error."""
        rest = likely - certain
        return Range(certain + self.low * rest, likely, certain + self.high * rest)


@dataclass(frozen=True)
class MachinePlan:
    """The quickest recipe that fits a machine, and the seconds of the whole job there."""

    machine: Machine
    recipe: Recipe
    memory: Memory
    step: StepTime
    seconds: dict[str, float]
    """By what they go to; boot, interruptions and checkpoints are an offer's."""
    speed_spread: Spread
    memory_spread: Spread
    is_tight: bool = False  # it may not fit after all
    host_bytes: int = 0
    """Of main memory: rows of weights, or an optimizer's state, that are kept there."""

    @cached_property
    def memory_range(self) -> Range:
        """On the device: of all but what is certain."""
        return self.memory_spread.of(
            self.memory.on_device.n_bytes, self.memory.certain_on_device.n_bytes
        )


def is_from_price(offer: Offer) -> bool:
    """The price is the lowest of many hosts', who may have nothing left."""
    return offer.billing.prices_are == "from" and not offer.is_spot


class OfferPlan(NamedTuple):
    """One way to run the job: where, how, and what it comes to."""

    offer: Offer
    on: MachinePlan
    seconds: dict[str, float]  # by what they go to; they add up to `wall_s`
    wall_s: float  # from the moment the job is wanted to its end
    usd: dict[str, float]  # by what they go to; they add up to `total_usd`
    total_usd: float
    hours_range: Range
    usd_range: Range
    interval_s: float  # between checkpoints
    price_age_days: int
    spot: Expected | None = None
    chance: float | None = None  # to meet the deadline
    mixture: str = ""  # why the same machine on demand steps in when spot falls behind the deadline
    on_front: bool = False
    is_users_price: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.on.recipe

    def seconds_of(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    @property
    def is_priced(self) -> bool:
        """Whether its dollars mean anything: this machine may have no price."""
        return not (self.offer.provider == HERE and not self.offer.usd_per_hour)

    @property
    def is_rented(self) -> bool:
        return self.offer.provider not in (HERE, OWN)

    @property
    def is_from_price(self) -> bool:
        return is_from_price(self.offer)

    @property
    def has_old_price(self) -> bool:
        return self.price_age_days > OLD_PRICE_DAYS and not self.is_users_price

    @property
    def up_front_usd(self) -> float:
        return up_front_usd(self.offer, self.total_usd)

    @property
    def to_set(self) -> tuple[str, ...]:
        gpus = f"where.gpus: {self.recipe.n_gpus if self.on.machine.is_part else 'all'}"
        return tuple(gpus if key == "where.gpus: all" else key for key in self.recipe.to_set)


class Rejected(NamedTuple):
    offer: Offer
    kind: str
    """memory, main memory, software, precision, batch, dollars, hours, gpu-hours, deadline, spot.
    """
    reason: str
    change: str  # the nearest change that would let it in; empty where nothing would
    change_kind: str  # what is changed: changes of a kind differ in their numbers alone
    distance: float = math.inf  # the factor that is missing, to name the nearest first
    detail: str = ""  # the recipe that came nearest


class Answer(NamedTuple):
    """All plans, the best first, and everything that was rejected."""

    plans: tuple[OfferPlan, ...]
    rejected: tuple[Rejected, ...]
    n_steps: int

    @property
    def best(self) -> OfferPlan | None:
        return self.plans[0] if self.plans else None
