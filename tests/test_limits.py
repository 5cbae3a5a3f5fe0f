"""Caps that hold: dollars, hours and deadlines over kills, restarts and clocks that jump; a model
is always left.

Most of it runs the real loop over a simulated machine: steps, saves and exports only pass time,
kills come at any moment.
"""

import dataclasses
import random
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import workshop
from farthing.clock import steady_clock
from farthing.config.job import Job
from farthing.errors import RunDamagedError, RunInterruptedError
from farthing.report.receipt import build_receipt
from farthing.run.accounts import read_ledger
from farthing.run.exported import seal_export
from farthing.run.ledger import Ledger, Meter
from farthing.run.signals import Notice
from farthing.train.budget import RunLimits
from farthing.train.context import Context, Progress
from farthing.train.evaluate import Evaluator
from farthing.train.forecast import Forecaster
from farthing.train.loop import loop, what_is_due
from farthing.train.saver import Saver
from farthing.train.schedule import (
    Fit,
    first_fit,
    first_schedule,
    fitted_schedule,
    keep_fit,
    kept_fit,
    schedule,
    settled_fit,
)
from thinned import thinned

STARTED_AT = 1_800_000_000.0  # a moment of the year 2027


class Killed(BaseException):
    """SIGKILL: nothing runs after it but the simulation."""


class Machine:
    """Time that passes as it is told to, until a kill; a wall clock that others may set."""

    def __init__(self):
        self.now = self.alive_s = self.clock_error_s = 0.0
        self.kill_at = float("inf")
        self.ledger, self.is_in_step = None, False

    def passes(self, seconds):
        """Pass time in pieces of a second, after each of which the ledger may be written."""
        while seconds > 0:
            piece = min(seconds, 1.0)
            if self.now + piece >= self.kill_at:
                self.alive_s += self.kill_at - self.now
                self.now = self.kill_at
                raise Killed
            self.now += piece
            self.alive_s += piece
            seconds -= piece
            if self.ledger is not None:
                self.ledger.beat()

    def wall(self):
        """The time of day as this machine has it."""
        return STARTED_AT + self.now + self.clock_error_s


class TimedSaver(Saver):
    """Saves and exports of a machine on which work is only time."""

    def __init__(self, run, disk):
        self.training, self.context, self.progress = run, run.context, run.progress
        self.machine, self.costs, self.disk = run.machine, run.costs, disk
        self.save_steps, self.every_s, self.trained_bytes = None, run.costs.save_every_s, 8
        self.mark, self.saved_at_s = run.progress.mark, run.context.meter.wall_s
        self.is_due_now = self.wrote_model_early = False
        self.took_s = self.write_s = self.export_s = 0.0

    def save(self):
        """Take the time of it."""
        with self.context.meter.span("checkpoint"):
            self.machine.passes(self.costs.save_s)
        self.took_s, self.saved_at_s = self.costs.save_s, self.context.meter.wall_s
        self.mark = self.progress.mark
        self.disk["progress"] = self.progress.state()[1]
        self.context.ledger.write(committed=self.progress.step)

    def save_last(self):
        """The same, where that is not saved."""
        if self.progress.step > 0 and self.mark != self.progress.mark:
            self.save()

    def export(self):
        """Take the time of it."""
        context, step = self.context, self.progress.step
        context.ledger.write(exported=step)
        self.machine.passes(self.costs.export_s)
        self.export_s = self.costs.export_s
        (context.folder / "model").mkdir(exist_ok=True)
        seal_export(context.folder / "model")
        self.disk["model"] = step

    def trained(self):
        """Nothing."""
        return {}


class TimedEvaluator(SimpleNamespace):
    """Evaluations of that machine, every 7 steps."""

    every_steps, n_steps_like = 7, 1 / 8
    is_at = Evaluator.is_at

    def run(self):
        """Take the time of it."""
        with self.run_of.context.meter.span("evaluation"):
            passes_or_leaves(self.run_of, self.costs.evaluation_s)
        self.run_of.progress.evaluated_step = self.run_of.progress.step
        self.took_s = self.costs.evaluation_s
        return False


def take_step(run):
    """A step of that machine."""
    seconds = run.costs.step_s(run.progress.step)
    run.machine.is_in_step = True
    with run.context.meter.span("compute"):
        passes_or_leaves(run, seconds)
    run.machine.is_in_step = False
    run.progress.step += 1
    run.pace.longest_step_s = max(run.pace.longest_step_s, seconds)
    run.pace.most_tokens = max(run.pace.most_tokens, run.costs.lengths[run.progress.step - 1])
    run.pace.n_steps += 1
    run.pace.step_s = run.costs.mean_step_s if run.pace.n_steps > 1 else None
    run.context.ledger.at_step(run.progress.step, {"takes": run.forecast.takes()})


def passes_or_leaves(run, seconds: float):
    """Work that asks now and then whether to leave, as the watchdog has it leave."""
    while seconds > 0:
        run.machine.passes(min(seconds, 0.5))
        seconds -= 0.5
        if limit := run.context.limits.over(run.forecast.leaving_s):
            run.context.notice.reach(limit)
            raise RunInterruptedError("stopped")


class Costs:
    """What things take on a machine, drawn once; steps differ from one to the next by a little."""

    def __init__(self, dice):
        self.dice = dice
        self.mean_step_s = dice.choice([0.05, 1.0, 9.0])
        self.evaluation_s = dice.choice([0.0, 0.3, 6.0]) * self.mean_step_s
        self.save_s, self.export_s = dice.uniform(0.0, 0.5), dice.uniform(0.1, 0.45)
        self.start_s, self.save_every_s = dice.uniform(1.0, 60.0), dice.uniform(5, 60)
        spread = dice.choice([0.0, 0.3, 1.0])
        self.lengths = np.array([round(200 * dice.lognormvariate(0, spread)) for _ in range(400)])
        """Tokens of each step."""

    def step_s(self, step):
        """A step: as long as its tokens ask for, and some noise."""
        return self._even_s(int(self.lengths[step])) * self.dice.uniform(0.95, 1.05)

    def _even_s(self, n_tokens):
        return self.mean_step_s * n_tokens / float(self.lengths.mean())

    @property
    def longest_step_s(self):
        """The longest step that there is."""
        return self._even_s(int(self.lengths.max())) * 1.05


@pytest.fixture(autouse=True)
def simulation(monkeypatch):
    """Work is time; and looking for garbage in a process of many tests takes longer than a
    simulated run.
    """
    monkeypatch.setattr("farthing.train.loop.rare_collections", nullcontext)
    monkeypatch.setattr("farthing.train.loop.take_step", take_step)
    monkeypatch.setattr("farthing.train.loop.rehearse", lambda *_: None)


def attempt(job: Job, folder: Path, machine: Machine, costs: Costs, disk, estimate=None) -> str:
    """One process, as `train` does it: the state it ends in. Raises `Killed`."""
    clock = lambda: machine.now  # noqa: E731
    meter = Meter(clock=clock, now=steady_clock(machine.wall, clock))
    machine.ledger = None
    job = job.model_copy(update={"output_dir": str(folder)})
    ledger = Ledger(folder / "ledger.jsonl", meter, job.usd_per_hour)
    limits = RunLimits(job, ledger)
    if limits.why_not_start():
        return "limit"
    ledger.write()
    machine.ledger = ledger
    machine.passes(costs.start_s * 0.4)
    if limits.why_not_start():
        ledger.end("limit")
        return "limit"
    meter.enter("load_model")
    machine.passes(costs.start_s * 0.6)
    context = Context(folder, meter, ledger, limits, Notice(), lambda *_: None)
    progress = Progress()
    if "progress" in disk:
        progress.restore({}, disk["progress"])
    nothing = {"longest_step_s": 0.0, "longest_rest_s": 0.0, "n_steps": 0, "most_tokens": 0}
    run = SimpleNamespace(
        machine=machine,
        costs=costs,
        context=context,
        progress=progress,
        pace=SimpleNamespace(**nothing, step_s=None, turn_done=lambda seconds: None),
        schedule=first_schedule(job.train, job.learning_rate, folder, limits.left_s, estimate, 7),
        steps=None,
        estimate=estimate,
        feed=SimpleNamespace(
            close=lambda: None,
            batches=SimpleNamespace(steps_per_epoch=7, examples_of=lambda step: [step]),
            n_tokens=lambda examples: int(costs.lengths[examples].sum()),
        ),
        log=SimpleNamespace(settle=lambda: None),
    )
    run.saver = TimedSaver(run, disk)
    run.evaluator = None
    if costs.evaluation_s:
        run.evaluator = TimedEvaluator(run_of=run, costs=costs, took_s=0.0)
    run.forecast = Forecaster(run, run.saver, run.evaluator)
    ledger.begin_at(run.progress.step)
    meter.enter("idle")
    state, _ = loop(run)  # type: ignore[arg-type]
    ledger.end(state)
    return state


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    keys = {"max_steps": 400, "eval_steps": 7, "eval_strategy": "steps"}
    return workshop.make_job(tmp_path_factory.mktemp("job"), where={"usd_per_hour": 7.2}, **keys)


def under(plain: Job, **limits) -> Job:
    """The job with these limits."""
    return plain.model_copy(update={"limits": plain.limits.model_copy(update=limits)})


def limited(plain: Job, dice: random.Random, budget_s: float, *, fits: bool = False) -> Job:
    """The job with one or more limits, of which the first to bind buys `budget_s`."""
    hours = budget_s / 3600
    choices = {"max_usd": hours * 7.2}, {"max_hours": hours}
    job = under(plain, **dice.choice([*choices, choices[0] | {"max_hours": hours * 1.2}]))
    train = job.train.model_copy(update={"fit_schedule_to_budget": fits})
    return job.model_copy(update={"train": train})


def play(job: Job, folder: Path, dice: random.Random, costs: Costs, budget_s: float):
    """Attempts until one ends by itself, each killed after a random spell, often when hardly
    anything is left of the budget; the clock is set now and then."""
    machine, disk, n_kills = Machine(), {}, 0
    folder.mkdir()
    for _ in range(60):
        spell_s = dice.expovariate(3 / budget_s)
        if dice.random() < 0.5:
            spell_s = max(0.1, budget_s - machine.alive_s - dice.uniform(0, costs.start_s + 5))
        machine.kill_at = machine.now + spell_s
        if n_kills >= 8:
            machine.kill_at = float("inf")
        machine.clock_error_s = dice.choice([0, 0, -172800, 172800])
        try:
            return machine, (attempt(job, folder, machine, costs, disk), disk), n_kills
        except Killed:
            n_kills += 1
            machine.now += dice.uniform(0, 5000)  # away: another machine's time
    raise AssertionError("it never ended")


@pytest.mark.parametrize("seed", thinned(range(50), 34))
def test_a_cap_is_passed_by_no_more_than_a_step_and_a_model_is_left(seed, plain, tmp_path):
    dice = random.Random(seed)
    costs = Costs(dice)
    # enough for a start and the first save: below that there is nothing to be lost
    budget_s = 2 * costs.start_s + 8 * costs.longest_step_s + costs.evaluation_s
    budget_s += dice.uniform(60, 660)
    job = limited(plain, dice, budget_s, fits=dice.random() < 0.5)
    folder = tmp_path / "run"
    machine, (state, disk), n_kills = play(job, folder, dice, costs, budget_s)
    assert state in ("limit", "finished")
    slack_s = 2.0 * (n_kills + 1)  # what the ledger had not yet written
    assert machine.alive_s <= budget_s + costs.longest_step_s + slack_s
    spent_s = sum(account.wall_s for account in read_ledger(folder / "ledger.jsonl").accounts)
    assert spent_s <= budget_s + costs.longest_step_s
    assert spent_s == pytest.approx(machine.alive_s, abs=slack_s)
    assert (folder / "model").is_dir()
    assert disk["model"] > 0
    receipt = build_receipt(folder)
    assert receipt.usd == pytest.approx(spent_s / 3600 * 7.2, rel=0.01)
    started_again = [attempt for attempt in receipt.attempts[1:] if attempt["began"]]
    assert receipt.restart_s >= 0.99 * len(started_again) * costs.start_s


@pytest.mark.parametrize("seed", thinned(range(1001, 1201), 89))
def test_a_run_stops_before_the_step_that_would_pass_its_cap(seed, plain, tmp_path):
    """Jobs of drawn lengths and speeds, from caps of no step to caps of all."""
    dice = random.Random(seed)
    costs, machine, disk = Costs(dice), Machine(), {}
    budget_s = dice.choice([0.1, 0.5, 1.0, 3.0, 100.0]) * (costs.start_s + 5 * costs.longest_step_s)
    job = limited(plain, dice, budget_s)
    state = attempt(job, tmp_path, machine, costs, disk)
    first_s = costs.start_s + costs.longest_step_s + costs.evaluation_s + 2  # nothing is known yet
    if budget_s > first_s:
        assert machine.alive_s <= budget_s
        assert not machine.is_in_step, "what is begun is paid for in vain"
        assert state == "finished" or machine.alive_s >= budget_s - 3 * costs.longest_step_s - 2 * (
            costs.evaluation_s + costs.save_s + 1
        )
    assert disk.get("model") != 0, "what was not trained is not exported"


def test_what_is_kept_back_is_all_that_may_come():
    """A step of more tokens than any before, an evaluation, two saves and an export; what was not
    measured is what earlier attempts took.
    """
    run = SimpleNamespace(
        schedule=SimpleNamespace(n_steps=100),
        progress=Progress(step=10, evaluated_step=7),
        pace=SimpleNamespace(step_s=2.0, longest_step_s=4.0, longest_rest_s=0.5, most_tokens=100),
        feed=SimpleNamespace(
            n_tokens=lambda step: 15 * step, batches=SimpleNamespace(examples_of=lambda step: step)
        ),
        context=SimpleNamespace(ledger=SimpleNamespace(takes={}), replica=None),
        estimate=SimpleNamespace(wall_range_s=[6.0, 12.0, 20.0], step_s=3.0),
    )
    saver = SimpleNamespace(took_s=1.0, write_s=3.0, export_s=5.0, trained_bytes=10**8)
    saver.save_steps, saver.every_s = None, 79.0
    evaluator = SimpleNamespace(took_s=7.0, every_steps=11, n_steps_like=3.0)
    evaluator.is_at = lambda step, n_steps: step in (11, 100)
    forecast = Forecaster(run, saver, evaluator, start_s=20.0)  # type: ignore[arg-type]
    next_s, leaving_s = 1.15 * (4 * 1.5 + 0.5) + 7, 1.15 * (2 * 3 + 5) + 0.3
    with_rest_s = 2 + 7 / 11
    with_rest_s += 1 / (79 / with_rest_s)

    def found():
        return [forecast.next_s, forecast.leaving_s, forecast.reserve_s, forecast.remaining_s]

    assert found() == pytest.approx([next_s, leaving_s, next_s + leaving_s, 90 * with_rest_s])
    assert forecast.reserve_with_start_s == pytest.approx(next_s + 2 * leaving_s + 40)
    run.forecast, run.saver, run.schedule.fit = forecast, saver, None
    saver.wrote_model_early = saver.is_due = False
    early = []
    for left_s in (
        next_s + 2 * leaving_s + 41,
        next_s + 2 * leaving_s + 39,
        next_s + 2 * leaving_s,
    ):
        over = lambda s, left_s=left_s: "the cap" if s >= left_s else None  # noqa: E731
        run.context.limits = SimpleNamespace(over=over)
        early.append(what_is_due(run).write_early)  # type: ignore[arg-type]
    assert early == [0, 1, 0], "where that pays for a start, and the model is not written anyway"
    assert forecast.takes() == {"start_s": 20.0, "step_s": 4.0, "save_s": 3.0, "export_s": 5.0} | {
        "evaluation_s": 7.0
    }
    for save_steps, every_s, share in ((4, 79.0, 1 / 4), (None, 0.5, 1.0)):
        saver.save_steps, saver.every_s = save_steps, every_s
        assert forecast.step_with_rest_s == pytest.approx(2 + 7 / 11 + share)
    run.context.replica, run.progress.step = SimpleNamespace(delivery_s=10.0), 11
    assert found()[:2] == pytest.approx([1.15 * 7, leaving_s + 11.5]), "an evaluation is due"
    run.progress.step = run.progress.evaluated_step = 100
    assert (forecast.is_done, forecast.reserve_s) == (True, 0.0)
    run.progress.step, run.context.replica = 10, None
    run.pace.longest_step_s = saver.took_s = saver.write_s = saver.export_s = evaluator.took_s = 0.0
    guessed = 1.15 * 3 * 6 / 12 + 2 * 3 / 3, 1.15 * (2 * 3 + 0.5 + 1) + 0.3
    assert found()[:2] == pytest.approx(guessed), "of the plan, and of a slow disk"
    known = {"step_s": 1.0, "evaluation_s": 8.0, "save_s": 4.0, "export_s": 6.0}
    run.context.ledger.takes = known
    assert found()[:2] == pytest.approx([1.15 + 8, 1.15 * (2 * 4 + 6) + 0.3])
    run.pace.step_s = None
    assert (forecast.remaining_s, forecast.step_with_rest_s) == (None, pytest.approx(1 + 8 / 11))


def test_killed_in_its_last_seconds_a_run_has_its_model_and_does_not_start_again(plain, tmp_path):
    dice = random.Random(1)
    costs = Costs(dice)
    costs.start_s, costs.mean_step_s, costs.evaluation_s = 20.0, 1.0, 0.0
    job = under(plain, max_hours=100 / 3600)
    machine, disk = Machine(), {}
    machine.kill_at = 97.0
    with pytest.raises(Killed):
        attempt(job, tmp_path, machine, costs, disk)
    assert disk["model"] > 30, "written while what was left paid for a start"
    assert attempt(job, tmp_path, machine, costs, disk) == "limit"
    assert machine.alive_s == 97.0, "asking costs nothing"


def test_gpu_hours_are_those_of_the_gpus_that_each_attempt_has_had(plain, tmp_path):
    """Resumed on fewer, a run went on for longer than its cap; on more, it was refused."""
    job = under(plain, max_gpu_hours=1)
    for n_gpus, left_s in ((3, 1100.0), (1, 3200.0), (8, 300.0)):
        ledger = Ledger(tmp_path / "l", Meter(already_s=100.0, clock=lambda: 0.0), 1.0, (), n_gpus)
        ledger.write()
        (left,) = RunLimits(job, ledger).left()
        assert left.seconds == pytest.approx(left_s)
    assert left.why == "the cap of 1 GPU-hours: 0.3333 GPU-hours are spent"


def test_a_clock_that_is_set_within_an_attempt_neither_ends_nor_extends_it(plain, tmp_path):
    deadline = datetime.fromtimestamp(STARTED_AT + 120).astimezone()
    job = under(plain, deadline=deadline)

    class SetClock(Costs):
        """The clock is set in each step."""

        def step_s(self, step):
            machine.clock_error_s = error_s
            return super().step_s(step)

    ends = set()
    for error_s in (0, 172800, -172800):
        costs, machine, folder = SetClock(random.Random(3)), Machine(), tmp_path / str(error_s)
        costs.mean_step_s = 1.0
        folder.mkdir()
        assert attempt(job, folder, machine, costs, {}) == "limit"
        ends.add(machine.now)
    assert len(ends) == 1
    assert 100 <= ends.pop() <= 120


# ---- a schedule that fits ----


def test_the_first_fit_buys_what_is_promised_and_never_more_than_asked():
    warmup = lambda n: n // 20  # noqa: E731
    fit = first_fit(1000, warmup, 500.0, 1.0, 10.0)
    assert (fit.n_steps, fit.settles_at, fit.settled) == (475, 23, False)
    assert first_fit(100, warmup, 500.0, 1.0, 10.0).n_steps == 100
    assert first_fit(100, warmup, 5.0, 1.0, 10.0).n_steps == 3, "however little it buys"
    unknown = first_fit(1000, warmup, 500.0, None, 10.0)
    assert (unknown.n_steps, unknown.settles_at, unknown.n_warmup_steps) == (1000, 10, 10)
    short = [first_fit(24, warmup, 500.0, step_s, 10.0).settles_at for step_s in (1.0, None)]
    assert short == [6, 6], "a quarter of a short run"
    assert first_fit(4, warmup, 500.0, 1.0, 10.0).settles_at == 2


@pytest.mark.parametrize(
    ("changes", "n_steps", "n_warmup_steps"),
    [
        ({"warmup_ratio": 0.03}, 18, 1),
        ({"warmup_epochs": 0.5}, 18, 4),
        ({"max_steps": 1}, 1, 0),
        ({"warmup_steps": 5, "max_steps": 40}, 40, 5),
    ],
)
def test_epochs_are_steps_and_a_part_of_a_step_is_one(
    changes, n_steps, n_warmup_steps, plain, tmp_path
):
    """Two and a half epochs of seven steps."""
    known = {"max_steps": None, "num_train_epochs": 2.5, "lr_scheduler_type": "linear"}
    train = plain.train.model_copy(update=known | changes)
    found = first_schedule(train, 0.1, tmp_path, 500.0, None, 7)
    assert (found.n_steps, found.n_warmup_steps, found.fit) == (n_steps, n_warmup_steps, None)
    assert found.learning_rate(n_warmup_steps) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seconds", "n_steps"),
    [({}, 484), ({"evaluation": 60.0, "checkpoints": 40.0, "export": 20.0}, 422)],
)
def test_a_step_of_the_plan_has_its_share_of_evaluations_and_saves(
    seconds, n_steps, plain, tmp_path
):
    """Of 500 s 3 % are kept back, and what the export takes."""
    asked = {"max_steps": 1000, "fit_schedule_to_budget": True, "warmup_steps": 4}
    train = plain.train.model_copy(update=asked)
    estimate = dataclasses.replace(workshop.ESTIMATE, step_s=1.0, seconds=seconds)
    found = first_schedule(train, 0.1, tmp_path, 500.0, estimate, 7)
    assert (found.n_steps, found.fit) == (n_steps, kept_fit(tmp_path / "schedule.json"))


def test_the_number_is_settled_once_by_the_pace():
    fit = first_fit(1000, lambda n: 20, 500.0, 1.0, 0.0)
    slower = settled_fit(fit, 400.0, 4.0, 12.0)
    assert slower.n_steps == 20 + 94
    assert slower.settled
    assert settled_fit(fit, 400.0, 0.001, 0.0).n_steps == 1000
    assert settled_fit(fit, 0.0, 1.0, 10.0).n_steps == 21
    assert settled_fit(fit, 400.0, None, 0.0).n_steps == fit.n_steps


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_rate_before_it_is_settled_does_not_depend_on_the_number(name):
    few, many = (
        list(map(fitted_schedule(name, n_warmup_steps=4, holds_until=10, n_steps=n), range(n)))
        for n in (40, 400)
    )
    assert few[:11] == many[:11]
    assert few[9] == few[10] == 1
    assert few[:4] == list(map(schedule(name, n_warmup_steps=4, n_steps=40), range(4)))
    assert few[39] < 0.05
    assert few[10:] == sorted(few[10:], reverse=True)


@pytest.mark.parametrize(("n_steps", "falls_at"), [(14, 10), (40, 32)])
def test_a_rate_that_falls_over_a_number_of_steps_has_no_more_than_are_left(n_steps, falls_at):
    kwargs = {"num_decay_steps": 8, "decay_type": "linear"}
    how = {"n_warmup_steps": 4, "holds_until": 10, "n_steps": n_steps, "kwargs": kwargs}
    rates = list(map(fitted_schedule("warmup_stable_decay", **how), range(n_steps + 1)))
    assert rates[:4] == [0, 0.25, 0.5, 0.75]
    assert set(rates[4 : falls_at + 1]) == {1}
    n_falling = n_steps - falls_at
    assert rates[falls_at:] == pytest.approx([n / n_falling for n in range(n_falling, -1, -1)])


def test_a_fit_that_was_kept_is_read_back_and_a_torn_one_is_refused(tmp_path):
    fit = Fit(100, 50, 3, 10, True, 0.25)
    assert kept_fit(tmp_path / "s") is None
    keep_fit(tmp_path / "s", fit)
    assert kept_fit(tmp_path / "s") == fit
    (tmp_path / "s").write_text("{")
    assert kept_fit(tmp_path / "s") is None, "while nothing was saved by it, it is made again"
    (tmp_path / "checkpoints/step-00000005-0001").mkdir(parents=True)
    with pytest.raises(RunDamagedError, match="s can't be read"):
        kept_fit(tmp_path / "s")
    (tmp_path / "s").unlink()
    with pytest.raises(RunDamagedError, match="s is gone, which has the schedule"):
        kept_fit(tmp_path / "s")


@pytest.mark.parametrize("seed", thinned(range(10), 5))
def test_a_fitted_run_uses_its_budget_and_ends_annealed(seed, plain, tmp_path):
    dice = random.Random(seed)
    costs = Costs(dice)
    costs.mean_step_s = 1.0
    costs.evaluation_s = 3.0
    costs.lengths = np.full(400, 200)
    both = {"max_usd": 320.0 / 3600 * 7.2, "max_hours": 320.0 / 3600 * 1.2}
    job = under(limited(plain, dice, 320.0, fits=True), **both)
    estimate = dataclasses.replace(workshop.ESTIMATE, step_s=dice.choice([0.3, 1.0, 3.0]))
    machine, disk = Machine(), {}
    assert attempt(job, tmp_path, machine, costs, disk, estimate) == "finished"
    fit = kept_fit(tmp_path / "schedule.json")
    assert fit.settled
    assert disk["model"] == fit.n_steps < 400
    assert 0.85 * 320 <= machine.alive_s <= 320
