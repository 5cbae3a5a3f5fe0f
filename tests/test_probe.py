"""The probe: it finds the cheapest setting, moves no weight, leaves what plans and runs use, and
knows when to keep out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import farthing.train.autotune
from farthing.errors import RunInterruptedError
from farthing.events import Decided, Probed
from farthing.local.measurements import append_measurement, read_measurements
from farthing.settings import Settings
from farthing.train.autotune import Prober, Trial, is_worth_it
from farthing.train.resolve import open_examples, resolve
from farthing.train.run_settings import lengths_of, probed_settings
from workshop import (
    ESTIMATE,
    Heard,
    are_same,
    job_file,
    losses_of,
    make_job,
    opened,
    read_json,
    room_for,
    steps_of,
    train,
    weights_in,
)


class Bench(Prober):
    """A prober on a machine whose seconds and bytes are given by a formula."""

    def __init__(self, run, seconds_of, budget_s=60.0):
        super().__init__(run.steps, Heard(), budget_s, clock=self._now)
        self._seconds_of, self.now_s = seconds_of, 0.0

    def _now(self):
        return getattr(self, "now_s", 0.0)

    def measure(self, setting):
        self.steps.use(setting)
        self.now_s += 1.0
        seconds = self._seconds_of(setting)
        return Trial(setting, seconds, 1.0, 0)


@pytest.fixture
def run(tmp_path):
    job = make_job(tmp_path, n_rows=200, global_batch_size=128, max_steps=2, micro_batch_tokens=256)
    with opened(job) as run:
        yield run


@pytest.mark.parametrize(
    ("seconds_of", "best"),
    [
        (lambda n: 1.0 + abs(n - 1024) / 1024, 1024),
        (lambda n: 1000 / n if n <= 512 else float("inf"), 512),
    ],
)
def test_it_climbs_to_the_best_size(run, seconds_of, best):
    bench = Bench(run, lambda setting: seconds_of(setting.micro_batch_tokens))
    found = bench.find()
    assert [len(step) for step in bench.sample] == [128, 72]
    assert found.settings.micro_batch_tokens == run.feed.settings.micro_batch_tokens == best


def test_smaller_is_found_too_and_noise_is_not_believed(run):
    smaller = Bench(run, lambda setting: setting.micro_batch_tokens).find()
    assert smaller.settings.micro_batch_tokens < 256
    run.steps.use(Settings(256))
    waves = itertools.cycle([1.0, 1.015])
    assert Bench(run, lambda _: next(waves)).find().settings.micro_batch_tokens == 256


def test_less_checkpointing_is_tried_where_there_is_some(run):
    run.steps.use(replace(run.feed.settings, checkpoint_every=1))
    found = Bench(run, lambda setting: 1.0 + 0.1 * bool(setting.checkpoint_every)).find()
    assert found.settings.checkpoint_every == run.feed.settings.checkpoint_every == 0


def test_it_keeps_to_its_time(run):
    bench = Bench(run, lambda setting: 1000 / setting.micro_batch_tokens)
    bench.deadline = 5.0
    bench.find()
    assert bench.now_s <= 8
    (bench := Bench(run, lambda _: 1.0, 20.0)).find()
    assert len(bench.sample[0]) == 2, "a trial of a second is long enough"


def test_real_trials_move_no_weight_and_leave_no_gradient(run):
    before = weights_in(run.model)
    prober = Prober(run.steps, Heard(), 4.0)
    best = prober.find()
    assert are_same(before, weights_in(run.model))
    assert all(p.grad is None for p in run.model.parameters())
    assert not any(
        state["step"].any() or state["exp_avg"].any()
        for state in run.steps.step.optimizer.state.values()
    )
    assert best.settings in [trial.settings for trial in prober.trials]
    assert best.computed_share == 1.0


def test_memory_that_runs_out_in_a_trial_is_an_answer(run, monkeypatch):
    room_for(300, monkeypatch)
    prober = Prober(run.steps, Heard(), 4.0)
    found = prober.measure(Settings(100_000)), prober.measure(Settings(128))
    assert [one.seconds_per_token == float("inf") for one in found] == [
        len(prober.sample[0]) > 9,
        False,
    ]
    prober.sample = [run.feed.batches.examples_of(0)]
    assert prober.measure(Settings(100_000)).seconds_per_token == float("inf")


def test_a_stop_in_a_trial_leaves_the_settings_as_they_were(run):
    run.context.notice.reason = "SIGTERM"
    with pytest.raises(RunInterruptedError):
        Prober(run.steps, Heard(), 4.0).find()
    assert run.feed.settings.micro_batch_tokens == 256


# ---- what it leaves ----


def test_what_was_found_holds_for_the_like_and_not_for_others(tmp_path):
    job = make_job(tmp_path, max_steps=8, global_batch_size=4)
    path = tmp_path / "cache" / "measurements.jsonl"
    train(job)
    (measured,) = read_measurements(path)
    spec = resolve(job)
    lengths = lengths_of(spec, open_examples(spec, Heard())[0])
    assert probed_settings(spec, lengths) is None, "nobody has probed"
    found = replace(measured, probed=True, micro_batch_tokens=4096, checkpoint_every=2)
    append_measurement(path, found)
    longer = {name: 1.15 * value for name, value in lengths.items()}
    for of_run in (lengths, longer):
        assert probed_settings(spec, of_run) == Settings(4096, 2)
    assert probed_settings(spec, {**lengths, "mean": 1.5 * lengths["mean"]}) is None
    path.unlink()
    for name, value in (("method", "lora"), ("precision", "bf16"), ("hardware", "A100")):
        append_measurement(path, replace(found, **{name: value}))
    assert probed_settings(spec, lengths) is None
    append_measurement(path, replace(found, micro_batch_tokens=8192, when="3000-01-01"))
    append_measurement(path, found)
    assert probed_settings(spec, lengths) == Settings(8192, 2), "the last one"


@pytest.mark.slow
def test_a_probe_leaves_a_setting_and_a_measurement_and_a_run_uses_them(tmp_path, monkeypatch, cli):
    path = job_file(tmp_path, n_rows=96, max_steps=3)
    found = cli.json("probe", path, "--seconds", "5")
    assert not (tmp_path / "run").exists()
    assert found["trials"][0] | found["settings"] == found["trials"][0]
    assert found["usd_per_million_tokens"] == pytest.approx(
        1e6 / found["tokens_per_s"] / 3600 * 3.6
    )
    measurements = tmp_path / "cache" / "measurements.jsonl"
    (measured,) = read_measurements(measurements)
    assert measured.n_steps >= 5
    assert measured.n_tokens > 0

    job = make_job(tmp_path, n_rows=96, max_steps=3)
    # what is used is what was found, whatever that is
    measurements.unlink()
    append_measurement(measurements, replace(measured, micro_batch_tokens=77, checkpoint_every=0))
    heard = Heard()
    train(job, heard)
    assert "up to 77 tokens at a time" in heard.of(Decided)[0].batch
    kept, planned = (
        read_json(Path(job.output_dir) / f"{name}.json") for name in ("settings", "plan")
    )
    assert (kept["micro_batch_tokens"], kept["probed"]) == (77, True)
    assert planned["settings"]["micro_batch_tokens"] > 77, "as planned"
    assert "chosen:" in cli.out("probe", path, "--seconds", "5")


# ---- when a run probes by itself ----


@pytest.mark.parametrize(
    ("keys", "training_s", "probed", "pays"),
    [
        ({}, 7200.0, False, True),
        ({}, 300.0, False, False),
        ({"full_determinism": True}, 7200.0, False, False),
        ({}, 7200.0, True, False),
        ({}, None, False, False),
        ({"probe": True}, 300.0, False, True),
        ({"probe": False}, 7200.0, False, False),
        ({"micro_batch_tokens": 100}, 7200.0, False, False),
    ],
)
def test_a_run_probes_only_where_that_pays(keys, training_s, probed, pays, tmp_path):
    estimate = training_s and replace(ESTIMATE, seconds={"training": training_s})
    assert is_worth_it(make_job(tmp_path, **keys), estimate, Settings(512, probed=probed)) is pays


@pytest.mark.slow
def test_a_run_that_probes_ends_like_one_that_does_not_and_probes_once(tmp_path, monkeypatch):
    monkeypatch.setattr(farthing.train.autotune.probe_run, "__defaults__", (3.0,))
    plain, job = (
        make_job(tmp_path / name, max_steps=4, probe=name == "probing")
        for name in ("plain", "probing")
    )
    train(plain)
    heard, again = Heard(), Heard()
    outcome = train(job, heard)
    assert heard.of(Probed)
    assert next(span for span in outcome.receipt.spans if span.name == "probe").seconds > 0
    ours, theirs = steps_of(job), steps_of(plain)
    assert [row["examples"] for row in ours] == [row["examples"] for row in theirs]
    assert losses_of(job) == pytest.approx(losses_of(plain), rel=1e-4)
    train(job, again)
    assert not again.of(Probed)
