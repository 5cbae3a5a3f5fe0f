"""Measurements of a device -> what to make of its predictions.

A run of the same model and method is computed again with the formulas, as it was run; what it took,
divided by that, is the factor. A run of another model or method, or of a few steps, sets no pace.
Until several runs agree the range stays wide.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from farthing.data.lengths import Largest, Padded
from farthing.local.measurements import Measurement, matching
from farthing.objectives.registry import objective_of
from farthing.planner.memory import estimate_memory
from farthing.planner.ranges import NARROWEST
from farthing.planner.recipe import Case
from farthing.planner.speed import Calibration, Device, step_time
from farthing.planner.work import forward_work, work_of
from farthing.settings import Settings
from farthing.units import plural

N_NEWEST = 5
ENOUGH_STEPS = 10  # of a run that sets a pace; the first ones of a process are unlike the rest
LEAST_START_S = 0.5  # of a new process, which imports torch
ALIKE_LENGTHS = 3.0  # longest over shortest mean of examples that say something of each other
N_AGREE, AGREE = 3, 0.10  # so many runs whose pace differs by less than this, either way, agree
SPREAD_SAME = 0.08  # what is left of the error once runs of the same model agree


def calibrate(
    measurements: Sequence[Measurement],
    hardware: str,
    case: Case,
    device: Device,
    mean_tokens: float | None = None,
) -> Calibration:
    """The medians of the newest runs of this model and method on `hardware` that had enough steps,
    and examples that are not far longer or shorter than `mean_tokens`; else nothing.
    """
    recipe, adapters = case.recipe, case.adapters
    of_device = matching(
        measurements, hardware=hardware, precision=recipe.precision, n_devices=recipe.n_gpus
    )
    first = adapters.first_layer if adapters is not None else 0
    same = [m for m in of_device if _is_same(m, case) and m.first_layer == first]
    same = [m for m in same if m.n_steps >= ENOUGH_STEPS and _is_alike(m, mean_tokens)][:N_NEWEST]
    # a process that has trained before starts in no time
    starts = [m.spans.get("start_up", 0.0) for m in matching(measurements, hardware=hardware)]
    starts = [seconds for seconds in starts if seconds >= LEAST_START_S][:N_NEWEST]
    start_s = statistics.median(starts) if starts else None
    if not same:
        return Calibration(start_s=start_s)
    found = [_compare(m, case, device) for m in same]

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    is_agreed = _agree([one.compute for one in found])
    runs = f"{plural(len(same), 'run')} of this model here, the last on {same[0].when[:10]}"
    if not is_agreed:
        runs += f" ({'too few to agree' if len(same) < N_AGREE else 'they differ'})"
    evaluations = [one.evaluation for one in found if one.evaluation > 0]
    saves = [m.spans.get("checkpoint", 0.0) / m.n_saves for m in same if m.n_saves]
    exports = [m.spans["export"] for m in same if m.spans.get("export")]
    return Calibration(
        compute=median("compute"),
        optimizer=median("optimizer"),
        evaluation=statistics.median(evaluations or [1.0]),
        waiting_s=median("waiting_s"),
        start_s=start_s,
        load_s=statistics.median(m.spans.get("load_model", 0.0) for m in same),
        save_s=statistics.median(saves or [0.1]),
        export_s=statistics.median(exports or [0.5]),
        extra_bytes=int(max(one.extra_bytes or 0 for one in found)),
        spread=SPREAD_SAME if is_agreed else NARROWEST,
        n_runs=len(same),
        source=runs,
    )


def past_errors(measurements: Sequence[Measurement], hardware: str) -> str:
    """How far off earlier estimates were on `hardware`; empty where there were none."""
    steps, peaks = [], []
    for m in matching(measurements, hardware=hardware):
        step_s, peak = (m.promised.get(name) for name in ("step_s", "peak_bytes"))
        if isinstance(step_s, int | float) and isinstance(peak, int | float) and step_s * peak > 0:
            steps.append(abs(m.step_s / step_s - 1))
            peaks.append(abs(m.peak_bytes / peak - 1))
    if not steps:
        return ""
    time, memory = (f"{statistics.median(errors):.0%}" for errors in (steps, peaks))
    n = plural(len(steps), "earlier estimate")
    return f"{n} here: off by {time} in time and {memory} in memory, median"


def _agree(paces: Sequence[float]) -> bool:
    middle = statistics.median(paces)
    return len(paces) >= N_AGREE and all(abs(pace - middle) <= AGREE * middle for pace in paces)


def _is_alike(m: Measurement, mean_tokens: float | None) -> bool:
    if mean_tokens is None:
        return True
    return mean_tokens / ALIKE_LENGTHS <= m.lengths["mean"] <= mean_tokens * ALIKE_LENGTHS


def _is_same(m: Measurement, case: Case) -> bool:
    shape = case.shape
    of_model = m.model_type, m.hidden, m.n_layers, m.vocab, m.task, m.method
    asked = shape.model_type, shape.hidden, shape.n_layers, shape.vocab, shape.task
    return of_model == (*asked, case.recipe.method)


def as_run(m: Measurement, case: Case) -> Case:
    """A measured run in the formulas' terms."""
    recipe = case.recipe
    is_flash = m.is_packed and m.precision != "fp16"
    ran = replace(
        recipe,
        settings=Settings(m.micro_batch_tokens, m.checkpoint_every, precision=recipe.precision),
        optim=m.optim,
        global_batch=m.global_batch_size,
        n_micro_batches=m.n_micro_batches / m.n_steps,
        lora_r=m.lora_r,
        stack=replace(
            recipe.stack, is_packed=m.is_packed, is_flash=is_flash, has_liger=m.has_liger
        ),
    )
    n_examples = m.n_steps * m.global_batch_size
    mean, is_pair = m.lengths["mean"], objective_of(m.task).is_pair
    target = m.lengths["mean_target"] if is_pair else 0.0
    each, share = m.n_padded_tokens / n_examples, target / (mean + target)
    tokens, targets = each * (1 - share), each * share
    spread = m.lengths["mean_of_squares"] / mean**2  # that of targets is taken to be the same
    padded = Padded(
        tokens, targets, *(spread * x for x in (tokens**2, targets**2, tokens * targets))
    )
    if m.is_packed:
        of_targets = round(m.largest_tokens * share)
        of_inputs = m.largest_tokens - of_targets
        pairs = round(of_inputs * m.lengths["mean_of_squares"] / mean)
        largest = Largest(1, of_inputs, of_targets, pairs)
    else:
        longest = m.largest_tokens / max(1, m.largest_examples)
        largest = Largest(m.largest_examples, round(longest * (1 - share)), round(longest * share))
    mean_tokens = m.n_tokens / n_examples
    return replace(case, recipe=ran, largest=largest, padded=padded, mean_tokens=mean_tokens)


def _compare(m: Measurement, case: Case, device: Device) -> Calibration:
    ran = as_run(m, case)
    work = work_of(ran)
    parts = step_time(work, device).parts
    computed = sum(seconds for name, seconds in parts.items() if name != "optimizer")
    compute, evaluation = m.compute_s / m.n_steps / computed, 0.0
    if m.n_evaluations and m.n_eval_padded_tokens and not m.has_generated:
        n_steps = m.n_eval_padded_tokens / max(1.0, work.n_padded_tokens)
        predicted = sum(step_time(forward_work(work, n_steps), device).parts.values())
        evaluation = m.evaluation_s / predicted / compute
    return Calibration(
        compute=compute,
        optimizer=m.optimizer_s / m.n_steps / max(parts.get("optimizer", 0.0), 1e-9),
        evaluation=evaluation,
        waiting_s=(m.data_wait_s + m.host_to_device_s) / m.n_steps,
        extra_bytes=m.peak_bytes - estimate_memory(ran).allocated.n_bytes,
    )
