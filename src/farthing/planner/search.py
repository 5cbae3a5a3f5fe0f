"""Every recipe x every offer: what fits is handed to pricing and limits, what does not is rejected
with what would let it in.

For each kind of machine the quickest recipe that fits is taken: an hour costs the same whatever is
computed in it.

Pure: values in, values out. Refuses to import torch, and to ask a clock, a file or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from farthing.data.lengths import Padded
from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.errors import InputError
from farthing.planner.confidence import link_error, memory_error, speed_error
from farthing.planner.limits import meet_deadline, within_limits
from farthing.planner.memory import (
    Memory,
    estimate_memory,
    evaluation_memory,
    host_bytes,
    writing_memory,
)
from farthing.planner.pricing import Chosen, Pricing
from farthing.planner.ranking import ranked
from farthing.planner.recipe import BF16_WEIGHTS, DDP, FSDP, NONE, Recipe
from farthing.planner.speed import StepTime, Work, micro_batch_cost, step_time, work_of
from farthing.planner.spot import Interruptions, prior
from farthing.planner.types import UNCALIBRATED, Answer, Assumptions, JobSpec, Place, Plan, Rejected
from farthing.prices.offers import Offer, bill
from farthing.settings import Settings
from farthing.units import said_apart, say_bytes

# of a micro-batch on a GPU: smaller ones leave it idle, but for longer examples
FEWEST_TOKENS, MOST_TOKENS = 1024, 65_536
HOST_SHARE = (
    0.9  # of main memory, that rows of weights and an off-loaded optimizer may take: by assumption
)
UNDECIDED = Settings()
# what a setting costs in quality, by its source
QUALITY = {
    BF16_WEIGHTS: (
        " (in pre-training up to 6.7B no worse than fp32 masters: Ozkara et al. 2025, arXiv"
        " 2502.20566; in fine-tuning not measured)"
    )
}
# of a micro-batch on a CPU: more is quicker by a hundredth at most, for more memory (docs/log.md)
CPU_TOKENS = 2048


def decide(
    wanted: JobSpec,
    places: Iterable[Place],
    *,
    assumptions: Assumptions | None = None,
    managed: Iterable[Offer] = (),
    hazard: Callable[[Offer], Interruptions] | None = None,
    explains: bool = True,
) -> Answer:
    """Plans for every place, ranked. `hazard` says how long spot capacity lasts; by default the
    measured prior does.
    `explains` is whether rejections say what would let them in, which takes as long as the plans.

    Raises `InputError` for a job that no place can do at all.
    """
    if wanted.lengths.n_examples < 1:
        raise InputError("there is no data to train on", where="data", to_do="check the data set")
    search = _Search(
        wanted,
        assumptions or Assumptions(),
        hazard or (lambda offer: prior(offer.n_gpus)),
        explains,
    )
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for place in places:
        found = search.judge(place)
        if isinstance(found, Plan):
            plans.append(found)
        else:
            rejected.append(found)
    plans = ranked(plans)
    if wanted.deadline_s is not None:
        plans, late = meet_deadline(plans, wanted, search.hazard)
        rejected += late
        plans = ranked(plans)
    tokens = wanted.n_steps * wanted.global_batch * wanted.tokens_per_example
    fees = [(offer, sum(bill(offer, n_tokens=tokens).values())) for offer in managed]
    return Answer(
        tuple(plans), tuple(rejected), tuple(sorted(fees, key=lambda fee: fee[1])), wanted.n_steps
    )


class _Search:
    """What is worked out once for many offers: recipes by precision and number of GPUs, times by
    machine.
    """

    def __init__(
        self,
        wanted: JobSpec,
        assumptions: Assumptions,
        hazard: Callable[[Offer], Interruptions],
        explains: bool,
    ) -> None:
        self.wanted, self.explains = wanted, explains
        self.assumptions = assumptions
        self.hazard = hazard
        self._candidates: dict[
            tuple[str, int, bool, MicroBatchCost, bool, bool], list[tuple[Recipe, Memory, Work]]
        ] = {}
        self._chosen: dict[Any, Chosen | Rejected] = {}
        self._pricing = Pricing(wanted, assumptions, hazard)
        self._changes: dict[Any, tuple[list[tuple[str, int]], Iterator[JobSpec]]] = {}

    def judge(self, place: Place) -> Plan | Rejected:
        """The plan for a place, or why there is none. Where nothing else fits, and main memory is
        known to be enough, with weights that are kept there."""
        offer, wanted = place.offer, self.wanted
        chosen = self._chosen_for(place, wanted.offloads_weights and place.is_cuda)
        if (
            isinstance(chosen, Rejected)
            and self.explains
            and place.is_cuda
            and offer.ram_gib is not None
        ):
            other = self._chosen_for(place, True) if may_be_spread(wanted) else chosen
            if isinstance(other, Chosen) and self._lacks_main_memory(place, other) is None:
                chosen = other
        if isinstance(chosen, Rejected):
            return replace(chosen, offer=offer)
        if lacks := self._lacks_main_memory(place, chosen):
            return lacks
        plan = self._pricing.price(place, chosen, self.needed_bytes(place, chosen.memory))
        return within_limits(plan, self.wanted) if isinstance(plan, Plan) else plan

    def _lacks_main_memory(self, place: Place, chosen: Chosen) -> Rejected | None:
        """Why a recipe does not fit the main memory of a place; None where it does, and where that
        is not known.
        """
        ram_gib, needed_gib = place.offer.ram_gib, chosen.host_bytes / 2**30
        if ram_gib is None or not place.is_cuda or needed_gib <= HOST_SHARE * ram_gib:
            return None
        says = said_apart(needed_gib, ram_gib, lambda n: say_bytes(n * 2**30), "{} GiB")
        what = "needs {} of main memory, has {}".format(*says)
        return Rejected(place.offer, what, "a machine with more main memory", needed_gib / ram_gib)

    def _chosen_for(self, place: Place, offloads: bool) -> Chosen | Rejected:
        """What is worked out once for places that are alike."""
        offer = place.offer
        key = (
            offloads,
            place.device,
            offer.n_gpus,
            place.precision,
            place.is_local,
            place.is_cuda,
            place.has_liger,
            place.memory_bytes,
            None if place.calibration is UNCALIBRATED else place.calibration,  # quicker to look up
        )
        if key not in self._chosen:
            self._chosen[key] = self._choose(place, offloads)
        return self._chosen[key]

    # ---- recipes ----

    def candidates(
        self,
        precision: str,
        n_gpus: int,
        is_cuda: bool,
        cost: MicroBatchCost = ON_CPU,
        offloads: bool = False,
        has_liger: bool = False,
    ) -> list[tuple[Recipe, Memory, Work]]:
        """Every recipe that is worth a look where micro-batches `cost` that, with its memory and
        its work.
        """
        key = precision, n_gpus, is_cuda, cost, offloads, has_liger
        if key not in self._candidates:
            self._candidates[key] = list(self._make_candidates(*key))
        return self._candidates[key]

    def _make_candidates(
        self,
        precision: str,
        n_gpus: int,
        is_cuda: bool,
        cost: MicroBatchCost,
        offloads: bool,
        has_liger: bool,
    ) -> Iterable[tuple[Recipe, Memory, Work]]:
        wanted = self.wanted
        if n_gpus > wanted.global_batch:
            return
        everies = [wanted.checkpoint_every] if wanted.checkpoint_every is not None else [0, 2, 1]
        shardings = shardings_of(wanted, n_gpus, offloads and precision != "fp16")
        for most in budgets(wanted, n_gpus, is_cuda):
            example = wanted.cut(most, n_gpus, cost).example
            for every in everies:
                for sharding in shardings:
                    recipe = recipe_of(wanted, precision, most, every, n_gpus, sharding, cost)
                    recipe = replace(recipe, offloads_weights=offloads)
                    if has_liger:
                        recipe = replace(
                            recipe, stack=replace(recipe.stack, fused_norms=True, lean_mlp=True)
                        )
                    yield (
                        recipe,
                        self.memory_of(wanted, recipe, is_cuda),
                        self.work_of(recipe, example),
                    )

    def cost_on(self, place: Place) -> MicroBatchCost:
        """What a micro-batch costs on a device. Where nothing is padded it does not matter."""
        wanted, lengths = self.wanted, self.wanted.lengths
        if wanted.is_packed or not place.is_cuda:
            return ON_CPU
        targets = lengths.mean_target if lengths.targets is not None else 0.0
        one = Padded(lengths.mean, targets, lengths.mean**2, targets**2, lengths.mean * targets)
        return micro_batch_cost(self.work_of(_one_pass(wanted, place.precision), one), place.device)

    def memory_of(self, wanted: JobSpec, recipe: Recipe, is_cuda: bool) -> Memory:
        """Peak memory of a recipe, in training or evaluation."""
        share = wanted.labelled_share
        largest = wanted.largest(recipe.settings.micro_batch_tokens, recipe.n_gpus, recipe.cost)
        memory = estimate_memory(
            wanted.shape, recipe, largest, wanted.adapters, labelled_share=share, is_cuda=is_cuda
        )
        if (
            wanted.eval_lengths is not None
        ):  # an evaluation takes as many tokens at once as training does
            largest = wanted.eval_cut(recipe.settings.micro_batch_tokens, recipe.cost).largest
            other = evaluation_memory(
                wanted.shape,
                recipe,
                largest,
                wanted.adapters,
                labelled_share=share,
                is_cuda=is_cuda,
            )
            ways = [memory, other]
            if wanted.max_new_tokens:
                written = wanted.written_at_once(recipe.settings.micro_batch_tokens)
                ways.append(
                    writing_memory(wanted.shape, recipe, written, wanted.adapters, is_cuda=is_cuda)
                )
            memory = max(ways, key=lambda one: one.allocated_bytes)
        return memory

    def work_of(self, recipe: Recipe, padded: Padded) -> Work:
        """Work of a step of a recipe."""
        wanted = self.wanted
        return work_of(
            wanted.shape,
            recipe,
            padded,
            wanted.tokens_per_example,
            wanted.adapters,
            labelled_share=wanted.labelled_share,
        )

    def needed_bytes(self, place: Place, memory: Memory) -> int:
        """What a place must have for it: what was measured beside the formula included."""
        extra = place.calibration.extra_bytes
        if place.is_cuda:  # measured is what torch allocated: context and slack come on top
            return memory.total_bytes + (extra or 0)
        return memory.allocated_bytes + (self.assumptions.process_bytes if extra is None else extra)

    def _choose(self, place: Place, offloads: bool) -> Chosen | Rejected:
        n_gpus = max(1, place.offer.n_gpus)
        if offloads and (place.precision == "fp16" or not may_be_spread(self.wanted)):
            what = "weights can't be kept in main memory: " + (
                "gradients in fp16 are not scaled there"
                if place.precision == "fp16"
                else "they can't be spread"
            )
            return Rejected(place.offer, what, "leave where.offload_weights out", 3.0)
        found = self.candidates(
            place.precision, n_gpus, place.is_cuda, self.cost_on(place), offloads, place.has_liger
        )
        if not found:
            what = (
                f"a step of {self.wanted.global_batch} examples can't be divided by {n_gpus} GPUs"
            )
            return Rejected(
                place.offer,
                what,
                f"train.global_batch_size: {n_gpus}",
                n_gpus / self.wanted.global_batch,
            )
        fitting = [one for one in found if self.needed_bytes(place, one[1]) <= place.memory_bytes]
        # a run that dies of memory has cost its dollars: what fits with its error comes before what
        # may not
        most = place.memory_bytes / (1 + memory_error(place, self.wanted.shape.model_type))
        sure = [one for one in fitting if self.needed_bytes(place, one[1]) <= most]
        if fitting and not sure:
            sure = [min(fitting, key=lambda one: self.needed_bytes(place, one[1]))]
        if fitting:

            def cheapness(one: tuple[StepTime, tuple[Recipe, Memory, Work]]) -> tuple[float, ...]:
                step, (recipe, _, _) = one
                if (
                    not place.is_cuda
                ):  # what a micro-batch costs by itself is not in the seconds of a CPU
                    return recipe.settings.checkpoint_every, -recipe.settings.micro_batch_tokens
                return (
                    step.seconds,
                    recipe.settings.checkpoint_every,
                    recipe.settings.micro_batch_tokens,
                )

            timed = [(step_time(one[2], place.device, place.calibration), one) for one in sure]
            step, (recipe, memory, work) = min(timed, key=cheapness)
            family = self.wanted.shape.model_type
            seconds = self._pricing.seconds_of(place, recipe, step, work)
            error = speed_error(place, family) + link_error(step, place.device)
            kept_bytes = host_bytes(self.wanted.shape, recipe, self.wanted.adapters)
            return Chosen(
                recipe, memory, step, seconds, error, memory_error(place, family), kept_bytes
            )
        least = min(
            (self.needed_bytes(place, memory), recipe.in_words()) for recipe, memory, _ in found
        )
        gib = said_apart(
            least[0] / 2**30, place.memory_bytes / 2**30, lambda n: say_bytes(n * 2**30), "{} GiB"
        )
        reason = f"needs {gib[0]} at least, has {gib[1]} ({least[1]})"
        distance = least[0] / place.memory_bytes
        if not self.explains:
            return Rejected(place.offer, reason, "", distance)
        in_fp16 = self._fp16_instead(place, n_gpus)
        for change, n_bytes in self.changes(place.precision, n_gpus, place.is_cuda):
            if (
                n_bytes + self.needed_bytes(place, Memory({}, "loss", place.is_cuda))
                <= place.memory_bytes
            ):
                return Rejected(
                    place.offer, reason, f"{change}, or {in_fp16}" if in_fp16 else change, distance
                )
        if in_fp16:
            return Rejected(place.offer, reason, in_fp16, distance * 3)
        return Rejected(
            place.offer, reason, "a smaller model, or a GPU with more memory", distance * 4
        )

    def _fp16_instead(self, place: Place, n_gpus: int) -> str:
        """Where only the risk of fp16 made it fp32: the setting, when the job would fit with it."""
        if (
            place.precision != "fp32"
            or not place.is_cuda
            or self.wanted.precision
            or not self.wanted.fp16_risk
        ):
            return ""
        in_fp16 = self.candidates("fp16", n_gpus, True)
        if not in_fp16:
            return ""
        if min(self.needed_bytes(place, memory) for _, memory, _ in in_fp16) > place.memory_bytes:
            return ""
        return f"train.fp16: true at a risk: {self.wanted.fp16_risk}"

    def changes(self, precision: str, n_gpus: int, is_cuda: bool) -> Iterator[tuple[str, int]]:
        """Changes of the job that save memory, with the least they need: the mildest first, each
        worked out when asked for.
        """
        key = precision, n_gpus, is_cuda
        known, rest = self._changes.setdefault(
            key, ([], _memory_savers(self.wanted, is_cuda, bf16=precision == "bf16"))
        )
        yield from known
        for other in rest:
            most = min(budgets(other, n_gpus, is_cuda))
            every = other.checkpoint_every if other.checkpoint_every is not None else 1
            accumulates = _one_pass(other, precision, Settings(most, every))
            sharding = shardings_of(other, n_gpus)[-1]
            recipe = replace(accumulates, n_gpus=n_gpus, sharding=sharding, mean_passes=2.0)
            known.append(
                (_said(other, self.wanted), self.memory_of(other, recipe, is_cuda).reserved_bytes)
            )
            yield known[-1]


def budgets(wanted: JobSpec, n_gpus: int, is_cuda: bool) -> list[int]:
    """Tokens of a micro-batch that are worth a look: the job's own, or as few as can be and powers
    of two above that.
    """
    if wanted.micro_batch_tokens is not None:
        return [wanted.micro_batch_tokens]
    longest = wanted.lengths.longest_example
    if not is_cuda:
        return sorted({longest, max(longest, FEWEST_TOKENS), max(longest, CPU_TOKENS)})
    found, most = [longest], FEWEST_TOKENS
    n_each = -(-wanted.global_batch // n_gpus)
    of_step = (
        wanted.lengths.largest_step(n_each) if wanted.is_packed else n_each * longest
    )  # padding counts
    while most <= MOST_TOKENS and found[-1] < of_step:
        if most > longest:
            found.append(most)
        most *= 2
    return found


def may_be_spread(wanted: JobSpec) -> bool:
    """Whether the job lets weights be spread over GPUs, or kept in main memory, and they can be
    (`train.strategy` has the reasons): 4-bit weights lose their quantization when they are
    gathered, and blocks of 8-bit state are none of rows."""
    merges = (
        wanted.adapters is not None and wanted.adapters.n_merged
    )  # peft was not tried on experts that are spread
    in_blocks = wanted.method == "full" and any(
        word in wanted.optim for word in ("8bit", "paged", "adafactor")
    )
    return (
        wanted.may_spread
        and wanted.spreads is not False
        and not (wanted.method == "qlora" or merges or in_blocks)
    )


def shardings_of(wanted: JobSpec, n_gpus: int, offloads: bool = False) -> list[str]:
    """How so many GPUs can share the weights, what takes least memory last; `offloads`: rows stay
    in main memory.
    """
    if not may_be_spread(wanted):
        return [] if offloads else [DDP if n_gpus > 1 else NONE]
    if offloads:
        return [FSDP]
    if n_gpus == 1:
        return [NONE]
    return [FSDP] if wanted.spreads else [DDP, FSDP]


def _memory_savers(wanted: JobSpec, is_cuda: bool, *, bf16: bool) -> Iterator[JobSpec]:
    """The job with settings that save memory: the mildest first, each with those before."""
    longest, milder = wanted.lengths.longest, wanted
    if (
        wanted.micro_batch_tokens is not None
        and wanted.micro_batch_tokens > wanted.lengths.longest_example
    ):
        milder = replace(milder, micro_batch_tokens=wanted.lengths.longest_example)
        yield milder
    if wanted.checkpoint_every not in (None, 1):
        milder = replace(milder, checkpoint_every=1)
        yield milder
    if wanted.method == "full" and is_cuda and "8bit" not in wanted.optim:
        if bf16:
            yield replace(milder, optim=BF16_WEIGHTS)
        yield replace(milder, optim="adamw_8bit")
    methods = [
        name for name in (["lora", "qlora"] if is_cuda else ["lora"]) if name != wanted.method
    ]
    if wanted.method == "qlora":
        methods = []
    for name in methods:
        yield replace(milder, method=name)
    for n in (longest // 2, longest // 4):
        if n >= 64:
            yield _truncated(milder, n)
    if methods and longest // 4 >= 64:
        yield replace(_truncated(milder, longest // 4), method=methods[-1])


def _truncated(wanted: JobSpec, most: int) -> JobSpec:
    """The job with inputs of at most so many tokens, and micro-batches that are no larger than the
    longest.
    """
    held_out, shorter, at_once = (
        wanted.eval_lengths,
        wanted.lengths.truncated(most),
        wanted.micro_batch_tokens,
    )
    return replace(
        wanted,
        lengths=shorter,
        eval_lengths=held_out and held_out.truncated(most),
        micro_batch_tokens=None if at_once is None else min(at_once, shorter.longest_example),
    )


def _said(other: JobSpec, wanted: JobSpec) -> str:
    """What a job has to say to become the other, as a job file has it."""
    says = {
        f"method: {other.method}": other.method != wanted.method,
        f"train.optim: {other.optim}{QUALITY.get(other.optim, '')}": other.optim != wanted.optim,
        "train.gradient_checkpointing: true": other.checkpoint_every != wanted.checkpoint_every,
        f"train.micro_batch_tokens: {other.micro_batch_tokens}": other.micro_batch_tokens
        != wanted.micro_batch_tokens,
        f"data.max_length: {other.lengths.longest}": other.lengths is not wanted.lengths,
    }
    return " with ".join(words for words, is_said in says.items() if is_said)


def recipe_of(
    wanted: JobSpec,
    precision: str,
    micro_batch_tokens: int,
    every: int,
    n_gpus: int = 1,
    sharding: str = NONE,
    cost: MicroBatchCost = ON_CPU,
) -> Recipe:
    """The recipe that the trainer would run with these choices."""
    once = _one_pass(wanted, precision, Settings(micro_batch_tokens, every, **cost._asdict()))
    return replace(
        once,
        n_gpus=n_gpus,
        sharding=sharding,
        mean_passes=wanted.cut(micro_batch_tokens, n_gpus, cost).n_micro_batches,
    )


def _one_pass(wanted: JobSpec, precision: str, settings: Settings = UNDECIDED) -> Recipe:
    """What does not depend on how a step is cut: the whole of it in one pass."""
    is_full = wanted.method == "full"
    return Recipe(
        method=wanted.method,
        settings=replace(settings, precision=precision),
        optim=wanted.optim,
        global_batch=wanted.global_batch,
        lora_r=0 if is_full else wanted.lora_r,
        lora_dropout=0.0 if is_full else wanted.lora_dropout,
        target_modules=() if is_full else wanted.target_modules,
        modules_to_save=() if is_full else wanted.modules_to_save,
        use_dora=not is_full and wanted.use_dora,
        stack=wanted.stack(precision),
        reshards=wanted.reshards,
    )
