"""A job on a kind of machine -> the quickest recipe that fits, or why none does and what would.

Pure: values in, values out. An hour of a machine costs the same whatever is computed in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from farthing.data.lengths import Padded
from farthing.data.packing import ON_CPU, MicroBatchCost
from farthing.objectives.registry import objective_of
from farthing.planner.memory import (
    Memory,
    OnDevice,
    estimate_memory,
    evaluation_memory,
    host_bytes,
    writing_memory,
)
from farthing.planner.optimizers import BF16_WEIGHTS
from farthing.planner.ranges import memory_spread, speed_spread, surely_high
from farthing.planner.recipe import DDP, FSDP, NONE, PLAIN, Case, Kernels, Recipe
from farthing.planner.speed import StepTime, micro_batch_cost, step_time
from farthing.planner.types import Assumptions, JobSpec, Machine, MachinePlan, Rejected
from farthing.planner.work import Work, forward_work, work_of
from farthing.prices.offers import Offer
from farthing.settings import Settings
from farthing.units import said_apart, say_bytes

# of a micro-batch on a GPU: smaller ones leave it idle, but for longer examples
FEWEST_TOKENS, MOST_TOKENS = 1024, 65_536
HOST_SHARE = 0.9  # of main memory, that rows of weights and an off-loaded optimizer may take
CPU_TOKENS = 2048  # of a micro-batch on a CPU: more is quicker by a hundredth at most
GENERATED_S_PER_LAYER = 0.4e-3  # host time of one layer for one generated token


class Refusal(NamedTuple):
    """Why a machine will not do, whoever offers it."""

    kind: str
    reason: str
    change: str
    change_kind: str
    distance: float
    detail: str = ""

    def of(self, offer: Offer) -> Rejected:
        return Rejected(offer, *self)


class RecipeBase(NamedTuple):
    """What recipes have in common for all machines that compute alike."""

    precision: str
    n_gpus: int = 1
    is_cuda: bool = True
    cost: MicroBatchCost = ON_CPU
    offloads: bool = False
    kernels: Kernels = PLAIN


class Candidate(NamedTuple):
    """A recipe that is worth a look."""

    case: Case
    memory: Memory
    work: Work

    @property
    def recipe(self) -> Recipe:
        return self.case.recipe


def _within(found: Sequence[Candidate], there: OnDevice, high: float) -> list[Candidate]:
    """Those that fit although all that is not certain takes `high` times as much."""

    def most_bytes(memory: Memory) -> float:
        certain = memory.certain_on_device.n_bytes
        return certain + high * (memory.on_device.n_bytes - certain)

    return [one for one in found if most_bytes(one.memory) <= there.n_bytes]


class Search:
    """Plans machines for one job. Recipes are worked out once for all that compute alike."""

    def __init__(self, wanted: JobSpec, assumptions: Assumptions, *, explains: bool = True) -> None:
        self.wanted, self.assumptions, self.explains = wanted, assumptions, explains
        self.candidates, self._savers = cache(self._candidates), cache(self._memory_savers)

    def plan(self, machine: Machine, *, offloads: bool | None = None) -> MachinePlan | Refusal:
        """`offloads`: weights stay in main memory; None: as the job asks."""
        wanted, spread = self.wanted, memory_spread(machine, self.wanted.shape)
        offloads = wanted.offloads_weights and machine.is_cuda if offloads is None else offloads
        if offloads and (why := self._why_not_offloaded(machine)):
            return why
        n_gpus, is_cuda, precision = machine.n_gpus, machine.is_cuda, machine.precision
        how = RecipeBase(
            precision, n_gpus, is_cuda, self.cost_on(machine), offloads, machine.kernels
        )
        found = [x._replace(memory=self._on(machine, x.memory)) for x in self.candidates(how)]
        if not found:
            what = f"a step of {wanted.global_batch} examples can't be divided by {n_gpus} GPUs"
            change = f"train.global_batch_size: {n_gpus}"
            return Refusal("batch", what, change, "batch", n_gpus / wanted.global_batch)
        fitting = [one for one in found if one.memory.on_device <= machine.memory]
        if not fitting:
            return self._too_large(machine, found)
        # a run that dies of memory has cost its dollars: what surely fits comes first
        sure = _within(fitting, machine.memory, surely_high(machine, wanted.shape, spread))
        is_tight = not sure
        sure = sure or [min(fitting, key=lambda one: one.memory.on_device)]
        timed = [(step_time(one.work, machine.device, machine.calibration), one) for one in sure]

        def cheapness(pair: tuple[StepTime, Candidate]) -> tuple[float, ...]:
            settings = pair[1].recipe.settings
            if not is_cuda:  # what a micro-batch costs by itself is not in the seconds of a CPU
                return settings.checkpoint_every, -settings.micro_batch_tokens
            return pair[0].seconds, settings.checkpoint_every, settings.micro_batch_tokens

        step, best = min(timed, key=cheapness)
        chosen = machine, best.recipe, best.memory, step, self.seconds_of(machine, best, step)
        spreads = speed_spread(machine, wanted.shape, step), spread
        return MachinePlan(*chosen, *spreads, is_tight, host_bytes(best.case))

    def _on(self, machine: Machine, memory: Memory) -> Memory:
        """With what was measured beside the formula, or a CPU's process."""
        extra = machine.calibration.extra_bytes
        if extra is not None:
            return memory.with_measured(extra)
        if machine.is_cuda:
            return memory
        beside = memory.beside_bytes + self.assumptions.process_bytes
        return replace(memory, beside_bytes=beside)

    # ---- recipes ----

    def _candidates(self, how: RecipeBase) -> list[Candidate]:
        wanted, found, n_gpus = self.wanted, list[Candidate](), how.n_gpus
        if n_gpus > wanted.global_batch:
            return found
        everies = [wanted.checkpoint_every] if wanted.checkpoint_every is not None else [0, 2, 1]
        shardings = shardings_of(wanted, n_gpus, how.offloads and how.precision != "fp16")
        most = budgets(wanted, n_gpus, how.is_cuda)
        for choices in itertools.product(most, everies, shardings):
            case = wanted.case(recipe_of(wanted, how, *choices), is_cuda=how.is_cuda)
            found.append(Candidate(case, peak_memory(wanted, case), work_of(case)))
        return found

    def cost_on(self, machine: Machine) -> MicroBatchCost:
        """What a micro-batch costs on a device. Where nothing is padded it does not matter."""
        wanted, lengths = self.wanted, self.wanted.lengths
        if wanted.is_packed or not machine.is_cuda:
            return ON_CPU
        targets = lengths.mean_target if lengths.targets is not None else 0.0
        one = Padded(lengths.mean, targets, lengths.mean**2, targets**2, lengths.mean * targets)
        case = wanted.case(_one_pass(wanted, machine.precision, Settings(lengths.longest_example)))
        return micro_batch_cost(work_of(replace(case, padded=one)), machine.device)

    # ---- seconds ----

    def seconds_of(self, machine: Machine, best: Candidate, step: StepTime) -> dict[str, float]:
        """Of the whole job by what they go to, an offer's own aside."""
        wanted, a, known = self.wanted, self.assumptions, machine.calibration
        weights_bytes = wanted.shape.n_parameters * 2.0
        start_s, load_s, export_s = known.start_s, known.load_s, known.export_s
        if start_s is None:
            start_s = a.import_s if machine.is_cuda else a.import_on_cpu_s
        if load_s is None:
            load_s = weights_bytes / a.load_bytes_per_s
        if export_s is None:
            export_s = 0.5 + wanted.n_trainable * 4 / a.disk_bytes_per_s
        objective, lengths = objective_of(wanted.shape.task), wanted.lengths
        tokens = objective.n_tokens(lengths.n_tokens, lengths.n_target_tokens)
        is_tokenized = wanted.is_tokenized and machine.is_local
        forward_s = 0.0
        if objective.needs_reference:
            n = lengths.n_tokens + (wanted.eval_lengths.n_tokens if wanted.eval_lengths else 0)
            forward_s = self._forward_s(machine, best, n * (1 + objective.is_mismatched))
        n_full, update_s = wanted.n_taken / wanted.global_batch, step.parts.get("optimizer", 0.0)
        training_s = wanted.n_steps * update_s + n_full * (step.seconds - update_s)
        if objective.is_mismatched:  # a pass over the other answers comes before each step
            n_computed = n_full * best.work.n_padded_tokens
            training_s += self._forward_s(machine, best, n_computed)
        return {
            "download": 0.0 if machine.is_local else weights_bytes / a.download_bytes_per_s,
            "start-up": start_s + load_s,
            "tokenizing": 0.0 if is_tokenized else tokens / a.tokenize_tokens_per_s,
            "reference": forward_s,
            "training": training_s,
            "evaluation": wanted.n_evaluations * self._evaluation_s(machine, best),
            "export": export_s,
        }

    def _forward_s(self, machine: Machine, best: Candidate, n_tokens: float) -> float:
        """Of a forward pass over so many tokens."""
        known = machine.calibration
        work = forward_work(best.work, n_tokens / max(1.0, best.work.n_padded_tokens))
        return step_time(work, machine.device).seconds * known.compute * known.evaluation

    def _evaluation_s(self, machine: Machine, best: Candidate) -> float:
        wanted, held_out = self.wanted, self.wanted.eval_lengths
        if held_out is None:
            return 0.0
        shape, most = wanted.shape, best.recipe.settings.micro_batch_tokens
        example = wanted.eval_cut(most, best.recipe.cost).example
        n_computed = held_out.n_examples * (example.tokens + example.targets)
        once = self._forward_s(machine, best, n_computed)
        if wanted.max_new_tokens:
            n_words = min(wanted.max_new_tokens, max(1.0, held_out.longest_target))
            of_word = 2.0 * shape.n_parameters / machine.device.bandwidth_bytes_per_s
            host = GENERATED_S_PER_LAYER * (shape.n_decoder_layers or shape.n_layers)
            n_batches = -(-held_out.n_examples // wanted.written_at_once(most).n_rows)
            once += n_batches * n_words * max(of_word, host)
        return once

    # ---- why not ----

    def _why_not_offloaded(self, machine: Machine) -> Refusal | None:
        if may_be_spread(self.wanted) and machine.precision != "fp16":
            return None
        is_fp16 = machine.precision == "fp16"
        why = "gradients in fp16 are not scaled there" if is_fp16 else "they can't be spread"
        change = "leave where.offload_weights out"
        what = f"weights can't be kept in main memory: {why}"
        return Refusal("main memory", what, change, "offload", 3.0)

    def _too_large(self, machine: Machine, found: Sequence[Candidate]) -> Refusal:
        least, is_cuda = min(found, key=lambda one: one.memory.on_device), machine.is_cuda
        needed, there = least.memory.on_device.n_bytes, machine.memory.n_bytes
        reason = "needs {} at least, has {}".format(*_gib_apart(needed, there))
        distance = needed / there
        no = Refusal("memory", reason, "", "", distance, least.recipe.in_words())
        if not self.explains:
            return no
        in_fp16 = self._fp16_instead(machine)
        for change, kind, memory in self._savers(machine.precision, machine.n_gpus, is_cuda):
            if self._on(machine, memory).on_device <= machine.memory:
                change = f"{change}, or {in_fp16}" if in_fp16 else change
                return no._replace(change=change, change_kind=kind)
        if in_fp16:
            return no._replace(change=in_fp16, change_kind="precision", distance=3 * distance)
        change = "a smaller model, or a GPU with more memory"
        return no._replace(change=change, change_kind="model", distance=4 * distance)

    def _fp16_instead(self, machine: Machine) -> str:
        """Where only the risk of fp16 made it fp32: the setting, when the job would fit with it."""
        wanted = self.wanted
        is_safe = wanted.precision or not wanted.fp16_risk
        if machine.precision != "fp32" or not machine.is_cuda or is_safe:
            return ""
        found = self.candidates(RecipeBase("fp16", machine.n_gpus))
        fits = any(self._on(machine, one.memory).on_device <= machine.memory for one in found)
        return f"train.fp16: true at a risk: {wanted.fp16_risk}" if fits else ""

    def _memory_savers(
        self, precision: str, n_gpus: int, is_cuda: bool
    ) -> list[tuple[str, str, Memory]]:
        """Changes of the job that save memory, the mildest first, with what it then needs."""
        found = []
        for kind, other in _milder(self.wanted, is_cuda, has_bf16=precision == "bf16"):
            most = other.micro_batch_tokens or other.lengths.longest_example
            every = other.checkpoint_every if other.checkpoint_every is not None else 1
            once, sharding = (
                _one_pass(other, precision, Settings(most, every)),
                shardings_of(other, n_gpus),
            )
            recipe = replace(once, n_gpus=n_gpus, sharding=sharding[-1], n_micro_batches=2.0)
            memory = peak_memory(other, other.case(recipe, is_cuda=is_cuda))
            found.append((_said(other, self.wanted), kind, memory))
        return found


def lacks_main_memory(offer: Offer, plan: MachinePlan) -> Rejected | None:
    """None where it fits, and where the main memory of the offer is not known."""
    if offer.ram_gib is None or not plan.machine.is_cuda:
        return None
    needed, there = plan.host_bytes, offer.ram_gib * 2**30
    if needed <= HOST_SHARE * there:
        return None
    what = "needs {} of main memory, has {}".format(*_gib_apart(needed, there))
    change = "a machine with more main memory"
    return Rejected(offer, "main memory", what, change, "machine", needed / there)


def _gib_apart(needed: float, there: float) -> tuple[str, str]:
    return said_apart(needed / 2**30, there / 2**30, lambda n: say_bytes(n * 2**30), "{} GiB")


def peak_memory(wanted: JobSpec, case: Case) -> Memory:
    """In training or evaluation, which takes as many tokens at once."""
    ways, most = [estimate_memory(case)], case.recipe.settings.micro_batch_tokens
    if wanted.eval_lengths is not None:
        largest = wanted.eval_cut(most, case.recipe.cost).largest
        ways.append(evaluation_memory(replace(case, largest=largest)))
        if wanted.max_new_tokens:
            ways.append(writing_memory(case, wanted.written_at_once(most)))
    return max(ways, key=lambda one: one.allocated)


def budgets(wanted: JobSpec, n_gpus: int, is_cuda: bool) -> list[int]:
    """Tokens of a micro-batch to look at: the job's own, or the fewest and powers of two above."""
    if wanted.micro_batch_tokens is not None:
        return [wanted.micro_batch_tokens]
    longest = wanted.lengths.longest_example
    if not is_cuda:
        return sorted({longest, max(longest, FEWEST_TOKENS), max(longest, CPU_TOKENS)})
    found, most = [longest], FEWEST_TOKENS
    n_each = -(-wanted.global_batch // n_gpus)
    of_step = wanted.lengths.largest_step(n_each) if wanted.is_packed else n_each * longest
    while most <= MOST_TOKENS and found[-1] < of_step:
        if most > longest:
            found.append(most)
        most *= 2
    return found


def may_be_spread(wanted: JobSpec) -> bool:
    """Whether the job lets weights be spread over GPUs, or kept in main memory, and they can be:
    4-bit weights lose their quantization when they are gathered, and blocks of 8-bit state are none
    of rows. peft was not tried on experts that are spread.
    """
    merges = wanted.adapters is not None and wanted.adapters.n_merged
    in_blocks = wanted.method == "full" and not wanted.optimizer.has_rows
    can = not (wanted.method == "qlora" or merges or in_blocks)
    return wanted.may_spread and wanted.spreads is not False and can


def shardings_of(wanted: JobSpec, n_gpus: int, offloads: bool = False) -> list[str]:
    """How so many GPUs can share the weights, what takes least memory last."""
    if not may_be_spread(wanted):
        return [] if offloads else [DDP if n_gpus > 1 else NONE]
    if offloads:
        return [FSDP]
    if n_gpus == 1:
        return [NONE]
    return [FSDP] if wanted.spreads else [DDP, FSDP]


def _milder(wanted: JobSpec, is_cuda: bool, *, has_bf16: bool) -> Iterator[tuple[str, JobSpec]]:
    """The job with settings that save memory: the mildest first, each with those before."""
    longest, milder = wanted.lengths.longest, wanted
    if (wanted.micro_batch_tokens or 0) > wanted.lengths.longest_example:
        milder = replace(milder, micro_batch_tokens=wanted.lengths.longest_example)
        yield "micro-batch", milder
    if wanted.checkpoint_every not in (None, 1):
        milder = replace(milder, checkpoint_every=1)
        yield "checkpointing", milder
    if wanted.max_new_tokens and not wanted.may_spread:  # weights can then be spread
        milder = replace(milder, max_new_tokens=0, may_spread=True)
        yield "generation", milder
    if wanted.method == "full" and is_cuda and not wanted.optimizer.needs_bitsandbytes:
        if has_bf16:
            yield "optimizer", replace(milder, optim=BF16_WEIGHTS)
        yield "optimizer", replace(milder, optim="adamw_8bit")
    smaller = {"full": ["lora", "qlora"], "lora": ["qlora"], "qlora": []}[wanted.method]
    methods = smaller if is_cuda else [name for name in smaller if name != "qlora"]
    for name in methods:
        yield name, replace(milder, method=name)
    for n in (longest // 2, longest // 4):
        if n >= 64:
            yield "length", _truncated(milder, n)
    if methods and longest // 4 >= 64:
        yield "method and length", replace(_truncated(milder, longest // 4), method=methods[-1])


def _truncated(wanted: JobSpec, most: int) -> JobSpec:
    """The job with inputs of at most so many tokens; micro-batches no larger than the longest."""
    held_out, shorter = wanted.eval_lengths, wanted.lengths.truncated(most)
    at_once = wanted.micro_batch_tokens
    return replace(
        wanted,
        lengths=shorter,
        eval_lengths=held_out and held_out.truncated(most),
        micro_batch_tokens=None if at_once is None else min(at_once, shorter.longest_example),
    )


def _said(other: JobSpec, wanted: JobSpec) -> str:
    """What a job has to say to become the other, as a job file has it."""
    tokens = other.micro_batch_tokens
    quality = f" ({other.optimizer.quality})" if other.optimizer.quality else ""
    says = {
        f"method: {other.method}": other.method != wanted.method,
        f"train.optim: {other.optim}{quality}": other.optim != wanted.optim,
        "train.gradient_checkpointing: true": other.checkpoint_every != wanted.checkpoint_every,
        f"train.micro_batch_tokens: {tokens}": tokens != wanted.micro_batch_tokens,
        "train.predict_with_generate: false": other.max_new_tokens != wanted.max_new_tokens,
        f"data.max_length: {other.lengths.longest}": other.lengths is not wanted.lengths,
    }
    return " with ".join(words for words, is_said in says.items() if is_said)


def recipe_of(
    wanted: JobSpec, how: RecipeBase, most: int, every: int, sharding: str = NONE
) -> Recipe:
    """The recipe that the trainer would run, with micro-batches of `most` tokens."""
    once = _one_pass(wanted, how.precision, Settings(most, every, **how.cost._asdict()))
    return replace(
        once,
        n_gpus=how.n_gpus,
        sharding=sharding,
        n_micro_batches=wanted.cut(most, how.n_gpus, how.cost).n_micro_batches,
        stack=replace(once.stack, **how.kernels._asdict()),
        offloads_weights=how.offloads,
    )


def _one_pass(wanted: JobSpec, precision: str, settings: Settings) -> Recipe:
    """What does not depend on how a step is cut: the whole of it in one pass."""
    of_adapter = () if wanted.method == "full" else ("lora_r", "lora_dropout", "use_dora")
    return Recipe(
        wanted.method,
        replace(settings, precision=precision),
        wanted.optim,
        wanted.global_batch,
        stack=wanted.stack(precision),
        reshards=wanted.reshards,
        **{name: getattr(wanted, name) for name in of_adapter},
    )
