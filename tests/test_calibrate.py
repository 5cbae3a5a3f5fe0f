"""Calibration: a run that took a known multiple of what the formulas say gives that multiple back."""  # noqa: E501

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from farthing.config.job import Job
from farthing.data.lengths import Largest, Padded, from_arrays
from farthing.local.machine import Cpu, LocalMachine
from farthing.local.measurements import Measurement
from farthing.model.attention_choice import AttentionHardware, AttentionTask, choose
from farthing.models.shapes import Shape
from farthing.planner.calibration import as_run, past_errors
from farthing.planner.calibration import calibrate as calibrate_case
from farthing.planner.inputs import plan_here
from farthing.planner.machines import machine_here, machine_of, takes_flex
from farthing.planner.memory import estimate_memory
from farthing.planner.ranges import memory_spread, speed_spread
from farthing.planner.recipe import Case, Recipe, stack_for
from farthing.planner.search import RecipeBase, recipe_of
from farthing.planner.speed import Calibration, cpu_device, step_time
from farthing.planner.types import JobSpec
from farthing.planner.work import forward_work, work_of
from farthing.prices.gpus import find_gpu
from farthing.prices.gpus import gpus as known_gpus
from farthing.report.receipt import Bill, against_estimate
from farthing.settings import Settings
from offers import TODAY
from planned import shape_of
from workshop import ESTIMATE

HERE = "a processor, 2 threads"
STARTS_ONLY = Calibration(start_s=4.0)
DEVICE = cpu_device("a processor", 1e11, 2)
STACK = stack_for("llama", "causal-lm", "fp32", "full")
RECIPE = Recipe("full", Settings(512, precision="fp32"), "adamw_torch_fused", 16, stack=STACK)


SMALL = shape_of("HuggingFaceTB/SmolLM2-135M")


def wanted_of(shape: Shape, method: str = "full", **changes) -> JobSpec:
    """64 examples of 200 tokens."""
    lengths = from_arrays(np.full(64, 200), source="made")
    usual = {"optim": "adamw_torch_fused", "global_batch": 16, "n_epochs": 1.0}
    return JobSpec(shape=shape, method=method, lengths=lengths, **(usual | changes))


def with_gpus(name: str, n: int, gib: int) -> LocalMachine:
    old = Cpu("Old CPU", 8, 2.0, frozenset())
    return LocalMachine("cuda", name, n, gib << 30, 8, old)


def job_with(**sections) -> Job:
    values = {"model": "m", "data": "d", "task": "causal-lm", "output_dir": "run"}
    return Job.model_validate(values | sections)


def case_of(shape: Shape = SMALL) -> Case:
    """Full training on a processor; how long its examples are a run says."""
    padded = Padded(50.0, 0.0, 3200.0, 0.0, 0.0)
    return Case(shape, RECIPE, None, Largest(1, 500, 0), padded, 50.0, is_cuda=False)


def calibrate(runs: list[Measurement], mean: float | None = None) -> Calibration:
    return calibrate_case(runs, HERE, case_of(), DEVICE, mean)


def run_of(compute: float, optimizer: float = 1.0, shape: Shape = SMALL, **changes) -> Measurement:
    """Ten steps that took so many times what the formulas say, and 100 MiB more."""
    blank = dict.fromkeys((one.name for one in fields(Measurement)), 0)
    known = {
        "when": "2026-11-21T10:00:00+00:00",
        "hardware": HERE,
        "device": "cpu",
        "precision": "fp32",
        "model_type": shape.model_type,
        "hidden": shape.hidden,
        "n_layers": shape.n_layers,
        "vocab": shape.vocab,
        "task": "causal-lm",
        "method": "full",
        "optim": "adamw_torch_fused",
        "n_devices": 1,
        "micro_batch_tokens": 512,
        "is_packed": True,
        "has_liger": False,
        "global_batch_size": 16,
        "n_steps": 10,
        "n_micro_batches": 25,
        "n_tokens": 10 * 16 * 50,
        "n_padded_tokens": 10 * 16 * 50,
        "lengths": {"mean": 50.0, "mean_of_squares": 3200.0, "mean_target": 50.0},
        "largest_examples": 8,
        "largest_tokens": 500,
        "n_saves": 4,
        "spans": {"start_up": 4.0, "load_model": 1.0, "checkpoint": 2.0},
        "data_wait_s": 0.3,
        "host_to_device_s": 0.2,
        "promised": {},
    }
    run = Measurement(**{**blank, **known, **changes})
    ran = as_run(run, case_of(shape))
    parts = step_time(work_of(ran), DEVICE).parts
    computed = sum(seconds for name, seconds in parts.items() if name != "optimizer")
    needed = estimate_memory(ran).allocated.n_bytes
    return replace(
        run,
        compute_s=10 * compute * computed,
        optimizer_s=10 * optimizer * parts["optimizer"],
        peak_bytes=needed + (100 << 20),
    )


def test_an_evaluation_that_wrote_texts_says_nothing_of_forward_passes():
    read = run_of(1.0, n_evaluations=2, n_eval_padded_tokens=8000, evaluation_s=1e6)
    wrote = replace(read, has_generated=True)
    assert calibrate([read]).evaluation > 1000
    assert calibrate([wrote]).evaluation == 1.0
    assert calibrate([wrote, read]).evaluation == calibrate([read]).evaluation


NEVER = "no run was measured on this processor"


@pytest.mark.parametrize(
    ("is_cuda", "extra_bytes", "error", "known"),
    [(True, 0, 0.05, "3 runs"), (False, 0, 0.08, "3 runs"), (False, None, 0.2, NEVER)],
)
def test_memory_that_was_measured_has_a_narrow_range(is_cuda, extra_bytes, error, known):
    calibration = Calibration(extra_bytes=extra_bytes, source="3 runs")
    found = memory_spread(SimpleNamespace(calibration=calibration, is_cuda=is_cuda), SMALL)
    assert (found.low, found.high, found.known) == (1 - error, 1 + error, known)


def test_runs_of_the_same_model_give_their_factors_back():
    found = calibrate([run_of(2.0, 3.0)])
    assert found.compute == pytest.approx(2.0)
    assert found.optimizer == pytest.approx(3.0)
    assert found.waiting_s == pytest.approx(0.05)
    assert (found.start_s, found.load_s, found.save_s, found.export_s) == (4.0, 1.0, 0.5, 0.5)
    assert found.extra_bytes == 100 << 20
    assert (found.spread, found.n_runs) == (0.3, 1)
    assert found.source == "1 run of this model here, the last on 2026-11-21 (too few to agree)"


@pytest.mark.parametrize(
    ("changes", "load_s", "save_s", "export_s"),
    [
        ({"spans": {}}, 0.0, 0.0, 0.5),
        ({"spans": {}, "n_saves": 0}, 0.0, 0.1, 0.5),
        ({"spans": {"load_model": 3.0, "checkpoint": 8.0, "export": 7.0}}, 3.0, 2.0, 7.0),
    ],
)
def test_parts_of_a_run_that_were_not_measured_are_supposed(changes, load_s, save_s, export_s):
    found = calibrate([run_of(1.0, **changes)])
    assert (found.load_s, found.save_s, found.export_s) == (load_s, save_s, export_s)
    assert found.start_s is None


@pytest.mark.parametrize(("more", "extra"), [((0, 200), 300 << 20), ((-150, -200), -50 << 20)])
def test_room_is_kept_for_the_run_that_needed_most(more, extra):
    run = run_of(1.0)
    runs = [replace(run, peak_bytes=run.peak_bytes + (mib << 20)) for mib in more]
    assert calibrate(runs).extra_bytes == extra


def promised(run: Measurement, off_s: float, off_bytes: float) -> Measurement:
    """The run, with an estimate before it that was so far off."""
    known = {"step_s": run.step_s / (1 + off_s), "peak_bytes": run.peak_bytes / (1 + off_bytes)}
    return replace(run, promised=known)


def test_past_errors_are_medians_of_what_was_promised_here():
    run = run_of(1.0)
    assert past_errors([run, replace(run, promised={"step_s": 0.0, "peak_bytes": 0})], HERE) == ""
    one = promised(run, 0.25, -0.1)
    assert past_errors([one], "elsewhere") == ""
    said = "earlier estimate here: off by 25% in time and 10% in memory, median"
    assert past_errors([one], HERE) == f"1 {said}"
    others = [promised(run, -0.5, 0.02), promised(run, 0.05, 0.6)]
    assert past_errors([one, *others], HERE) == f"3 {said.replace('estimate', 'estimates')}"


def test_an_evaluation_takes_what_it_took():
    evaluated = {"n_evaluations": 1, "n_eval_padded_tokens": 10 * 16 * 50, "evaluation_s": 6.0}
    run = run_of(20.0, **evaluated)
    found = calibrate([run])
    steps = forward_work(work_of(as_run(run, case_of())), 10)
    formula_s = step_time(steps, DEVICE).seconds
    assert found.compute == pytest.approx(20.0)
    assert formula_s * found.compute * found.evaluation == pytest.approx(6.0)


def test_a_run_is_taken_as_it_was_cut():
    run = run_of(1.0)
    case = case_of()
    flat = as_run(run, case)
    assert flat.recipe.settings.micro_batch_tokens == 512
    assert (flat.recipe.n_micro_batches, flat.recipe.stack.is_packed) == (2.5, True)
    padded = flat.padded
    assert (padded.tokens, padded.token_pairs, flat.mean_tokens) == (50.0, 3200.0, 50.0)
    assert flat.largest == (1, 500, 0, 500 * 64)
    rows = replace(run, is_packed=False, n_padded_tokens=10 * 16 * 60, largest_examples=5)
    ran = as_run(rows, case)
    assert not ran.recipe.stack.is_packed
    assert not ran.recipe.stack.is_flash
    assert (ran.padded.tokens, ran.mean_tokens, ran.largest) == (60.0, 50.0, (5, 100, 0, 0))


def test_a_run_of_pairs_is_taken_as_it_was_cut():
    """Of inputs with 60 tokens and targets with 20 in the mean; of 50 padded ones a quarter."""
    lengths = {"mean": 60.0, "mean_of_squares": 1.25 * 60**2, "mean_target": 20.0}
    pairs = replace(run_of(1.0), task="seq2seq", lengths=lengths)
    flat = as_run(pairs, case_of())
    squares = (1.25 * 37.5**2, 1.25 * 12.5**2, 1.25 * 37.5 * 12.5)
    assert tuple(flat.padded) == pytest.approx((37.5, 12.5, *squares))
    assert flat.largest == (1, 375, 125, 375 * 75)
    rows = as_run(replace(pairs, is_packed=False, largest_examples=5), case_of())
    assert rows.largest == (5, 75, 25, 0)


def test_a_run_with_ligers_kernels_is_compared_as_one():
    fused, plain = run_of(2.0, has_liger=True), run_of(2.0)
    assert fused.peak_bytes < plain.peak_bytes
    found = calibrate([fused])
    assert found.compute == pytest.approx(2.0)
    assert found.extra_bytes == 100 << 20


@pytest.mark.parametrize(
    ("factors", "compute", "spread", "says"),
    [
        (
            [2.0, 2.0],
            2.0,
            0.3,
            "2 runs of this model here, the last on 2026-11-20 (too few to agree)",
        ),
        ([2.0, 2.1, 1.9], 2.0, 0.08, "3 runs of this model here, the last on 2026-11-20"),
        (
            [2, 2.2, 2.1, 9, 1.9, 50],
            2.1,
            0.3,
            "5 runs of this model here, the last on 2026-11-20 (they differ)",
        ),
    ],
)
def test_the_median_of_the_newest_counts_and_only_runs_that_agree_narrow_the_range(
    factors, compute, spread, says
):
    runs = [run_of(factor, when=f"2026-11-{20 - n}T10:00") for n, factor in enumerate(factors)]
    found = calibrate(runs)
    assert (found.compute, found.spread, found.source) == (pytest.approx(compute), spread, says)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hardware": "another"}, Calibration()),
        ({"precision": "bf16"}, STARTS_ONLY),
        ({"n_devices": 2}, STARTS_ONLY),
        ({"first_layer": 15}, STARTS_ONLY),
        ({"method": "lora"}, STARTS_ONLY),
        ({"n_steps": 5}, STARTS_ONLY),
        ({"hidden": 960}, STARTS_ONLY),
        ({"spans": {"start_up": 0.49}, "n_devices": 2}, Calibration()),  # no new process
        ({"spans": {"start_up": 0.5}, "n_devices": 2}, Calibration(start_s=0.5)),
    ],
)
def test_runs_that_are_not_alike_set_no_pace(changes, found):
    assert calibrate([replace(run_of(3.5), **changes)]) == found


def test_examples_of_other_lengths_set_no_pace():
    run = run_of(2.0)  # of 50 tokens in the mean

    def with_mean(mean_tokens):
        return calibrate([run], mean=mean_tokens).n_runs

    assert [with_mean(mean) for mean in (10, 20, 50, 140, 500)] == [0, 1, 1, 1, 0]


def test_restarts_and_work_done_again_are_not_the_estimates_error():
    seconds = {"training": 80.0, "start-up": 20.0}
    estimate = replace(ESTIMATE, wall_s=100.0, seconds=seconds)
    bill = Bill("finished", {"compute": 160.0, "start_up": 40.0, "ranks": 10.0}, {}, 210.0, 2.1, 1)
    attempts = [SimpleNamespace(spans={"start_up": 20.0}, redone_s=n) for n in (0.0, 80.0)]
    killed = against_estimate(estimate, bill, attempts)
    whole = against_estimate(estimate, replace(bill, spans={}), attempts[:1])
    assert (killed.wall_s.happened, killed.wall_s.ratio) == (210.0, pytest.approx(1.0))
    apart = "restarts and waiting, left out of the ratio"
    assert (killed.seconds[apart].promised, killed.seconds[apart].happened) == (0.0, 110.0)
    assert (whole.wall_s.ratio, apart in whole.seconds) == (pytest.approx(2.1), False)


def test_links_that_runs_have_measured_here_are_what_a_plan_for_this_machine_sends_over(
    tmp_path, monkeypatch
):
    """Two cards without peer access reach a fraction of their bus, or, on a better board, twice
    what is supposed.
    """
    monkeypatch.setattr("farthing.planner.machines.installed_torch", lambda: ("2.13.0", "cu126"))
    monkeypatch.setattr("farthing.planner.machines.free_memory_bytes", lambda: 256 << 30)
    name, shape = "NVIDIA GeForce RTX 4090", shape_of("meta-llama/Llama-3.2-1B")
    machine = with_gpus(name, 4, 24)
    wanted = wanted_of(shape, optim="adamw_torch_offload", global_batch=32)
    how = {"hardware": name, "device": "cuda", "shape": shape}
    measured = [
        run_of(1.0, n_devices=n, link_bytes_per_s=link, when=f"2026-11-{day}", **how)
        for n, link, day in ((2, 3e9, 19), (2, 12e9, 20), (4, 2e9, 21), (2, 0.0, 22))
    ]

    def planned(gpus, runs=measured):
        job = job_with(where={"gpus": gpus, "usd_per_hour": 1.0})
        found = plan_here(wanted, machine, job, runs, TODAY)
        spread = speed_spread(found.on.machine, shape, found.on.step)
        sending_s = found.on.step.parts.get("communication", 0.0)
        links = found.offer.n_gpus, found.on.machine.device.link_bytes_per_s
        return links, sending_s, spread.high - spread.low

    guessed, told = planned(2, []), planned(2)
    assert told[0] == (2, 12e9), "the newest of two GPUs that has one"
    assert planned("all")[0] == (4, 2e9)
    assert told[1] < guessed[1]
    assert told[2] < guessed[2]
    assert [planned(gpus)[0][0] for gpus in (9, None)] == [4, 1]


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("2.10.0a0", "b4e4ee81d3.nv25.12"),
        ("2.12.0.dev20260114", "cu130"),
        ("2.13.0rc2", ""),
        ("2.13.0", "git1a2b3c4"),
    ],
)
def test_a_machine_whose_torch_is_no_release_is_planned_on(version, build, monkeypatch):
    monkeypatch.setattr("farthing.planner.machines.installed_torch", lambda: (version, build))
    name = "Tesla V100-SXM2-16GB"  # in no wheel of 2.13 that PyPI has
    wanted, here = wanted_of(SMALL, "lora"), with_gpus(name, 1, 16)
    found = machine_here(wanted, here, job_with(), [], TODAY)
    assert found[0].gpu == "V100-16GB"


def test_kernels_that_are_installed_here_are_counted_in_what_a_gpu_here_needs(monkeypatch):
    monkeypatch.setattr("farthing.planner.machines.installed_torch", lambda: ("2.13.0", "cu126"))
    cut = {"global_batch": 64, "checkpoint_every": 0, "micro_batch_tokens": 8192}
    wanted = wanted_of(shape_of("meta-llama/Llama-3.2-1B"), **cut)

    def planned(is_there=True, wants="auto"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: is_there or None)
        job = job_with(train={"use_liger_kernel": wants})
        here = with_gpus("NVIDIA H100 80GB HBM3", 1, 80)
        on = plan_here(wanted, here, job, [], TODAY).on
        return on.machine.kernels.has_liger, on.memory.parts["activations"]

    fused, plain = planned(), planned(is_there=False)
    assert (fused[0], plain[0], planned(wants=False)) == (True, False, plain)
    # of a layer, for each token: fp32 copies of two norms' inputs, and one number as wide as the
    # feed-forward
    saved_bytes = 16 * 8192 * (2 * 4 * 2048 + 2 * 8192)
    assert plain[1] - fused[1] == pytest.approx(saved_bytes, rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256, 512])
def test_a_soft_cap_is_planned_as_the_attention_of_each_gpu_computes_it(precision, head_dim):
    for gpu in known_gpus().values():
        if gpu.vendor == "nvidia":
            major, minor = map(int, gpu.compute_capability.split("."))
            asked = AttentionTask(precision, head_dim, has_softcap=True)
            chosen = choose(asked, AttentionHardware((major, minor), has_flex=True))
            assert takes_flex(gpu, precision, head_dim) == (chosen == "flex"), gpu.name


def test_scores_under_a_soft_cap_are_kept_where_no_one_kernel_takes_its_heads():
    asked = wanted_of(shape_of("google/gemma-2-2b"), checkpoint_every=0)
    kept = {}
    for name in ("A100-80GB", "A40"):
        machine = machine_of(find_gpu(name), 1, asked)
        recipe = recipe_of(asked, RecipeBase("bf16", kernels=machine.kernels), 2048, 0)
        kept[name] = estimate_memory(asked.case(recipe)).parts["activations"]
    assert kept["A100-80GB"] < 0.95 * kept["A40"]
