"""A search from its first trial to its winner.

It reads as if it were never interrupted: what an earlier process has done is in the record and is
not done again, and a trial under way resumes from its checkpoint. The ledger of the search's own
folder has every second of the machine; trials run within what the cap leaves.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from farthing.clock import seconds_since_boot
from farthing.config.job import Job, SearchSection
from farthing.config.load import is_mean_of_tokens, other_metric
from farthing.errors import (
    EXIT_CODES,
    FarthingError,
    InputError,
    LimitError,
    RunDamagedError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.objectives.registry import objective_of
from farthing.run.folder import LEDGER, MODEL, SEARCH_LOG, claim
from farthing.run.ledger import Ledger
from farthing.run.mirror import Mirror, open_mirror
from farthing.run.opening import Opened, opened
from farthing.run.signals import handled
from farthing.search.bill import SearchBill, priced
from farthing.search.halving import SHARES, Rungs, best_score, interval, ranked, rungs_of, shares_of
from farthing.search.pool import Worker, WorkerDiedError, environs
from farthing.search.receipt import (
    PART,
    bring_trial,
    is_search,
    leave_receipt,
    reaches,
    read_receipt,
    usd_of,
)
from farthing.search.record import SearchRecord, folder_of, store_of
from farthing.search.space import (
    by_model,
    draw,
    model_key,
    model_of,
    n_choices,
    refuse_choices,
    values_with,
)
from farthing.storage.files import Json
from farthing.train.budget import RunLimits, refuse_cap_without_price, refuse_limits
from farthing.units import plural

MOST_TRIALS = 27
"""Where neither the job, the choices nor the cap says how many."""
CLOSING_S, LONGEST_CLOSING_S = 4.0, 30.0
"""So long before a limit is reached trials save and leave, or as long as this process took to
start; halfway they are killed. What is left is for the receipt of the search.
"""
MOST_DEATHS = 3
OF_THE_MACHINE = {
    *("DiskFullError", "StoreUnavailableError", "RunBusyError", "SaveError", "DeviceError"),
    *("RunDamagedError", "RunChangedError"),
}
"""Failures that say nothing about settings: the search stops, and can be resumed."""
N_COPIES, STORE_S = 2, 60.0
"""Copies of the record that a store keeps; seconds in which the last one gets there."""
Tell = Callable[[Json], None]


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended, with its receipt."""

    state: str
    """finished, limit or interrupted"""
    reason: str
    receipt: Json

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def search(
    job: Job, place: Path, tell: Tell = lambda row: None, *, n_at_a_time: int = 1
) -> SearchOutcome:
    """Begin a search, or resume it, in the job's `output_dir`.

    `place` is the job file, for messages. `n_at_a_time` trials run side by side, each on a GPU of
    its own. Raises `FarthingError`; what was done stays done.
    """
    check(job)
    folder = Path(job.output_dir)
    if is_search(folder):
        with contextlib.closing(SearchRecord(folder)) as record:
            record.must_be(asked_of(job))
            if record.ended.get("state") == "finished":
                tell_of_trials(job, record, tell)
                return SearchOutcome("finished", record.ended["reason"], read_receipt(folder))
    if not (folder / SEARCH_LOG).exists():
        refuse_limits(job)
    with opened(folder, job.usd_per_hour, n_at_a_time) as begun:
        closing_s = min(LONGEST_CLOSING_S, max(CLOSING_S, begun.meter.wall_s))
        with (
            _mirrored(job, begun, tell, closing_s) as mirror,
            contextlib.closing(SearchRecord(folder)) as record,
        ):
            if record.header and not any(each.wall_s for each in begun.ledger.past):
                raise RunDamagedError(
                    "the ledger of this search is gone: its cost so far is unknown",
                    where=str(folder / LEDGER),
                    to_do="restore it from a copy, or give the search another output_dir",
                )
            if damage := begun.damage_in_words():
                tell({"trial": None, "warning": damage})
            environments = environs(n_at_a_time, job.where.device, folder.name)
            workers = [
                Worker(folder / f"worker-{number}.log", environ)
                for number, environ in enumerate(environments)
            ]
            found = _Search(job, str(place), record, begun.ledger, mirror, tell, closing_s, workers)
            try:
                found.begin()
                begun.is_accepted = True
                state, reason = found.run()
            finally:
                found.end()
            record.add("ended", state=state, reason=reason)
            begun.ledger.end(state)
            receipt = leave_receipt(job, record, begun.ledger.spent_usd)
            for trial in receipt["trials"] if state == "finished" else ():
                # which partial models a limit had exported depends on the moment it was reached
                if trial["fraction"] != 1.0:
                    model = folder_of(folder, trial["trial"]) / MODEL
                    shutil.rmtree(model, ignore_errors=True)
            found.copy()
    return SearchOutcome(state, reason, read_receipt(folder))


def tell_of_trials(job: Job, record: SearchRecord, tell: Tell) -> None:
    """Warn where the job asks for another number of trials than the search began with."""
    asked, n = job.search.trials, record.header["n_trials"]
    if asked is not None and min(asked, n_choices(job.search) or asked) != n:
        words = (
            f"this search began with {plural(n, 'trial')} and keeps them, whatever search.trials"
        )
        tell({"trial": None, "warning": f"{words} says now; for {asked} set another output_dir"})


@contextlib.contextmanager
def _mirrored(job: Job, begun: Opened, tell: Tell, closing_s: float) -> Iterator[Mirror | None]:
    """The copy of record and ledger in the job's store, and the lease of the search there; what the
    store knows is here first. None without a store.
    """

    def warn(text: str) -> None:
        tell({"trial": None, "warning": text})

    limits = RunLimits(job, begun.ledger)
    limits.tell_guard()
    mirror = open_mirror(job.output_store, begun.folder, N_COPIES, warn)
    if mirror is None:
        yield None
        return
    try:
        mirror.on_bills = begun.ledger.take_in
        mirror.bring_back(should_stop=lambda: limits.left_s <= closing_s)
        begun.ledger.write()
        limits.tell_guard()
        yield mirror
    finally:
        mirror.close(min(STORE_S, max(1.0, limits.left_s)))


def asked_of(job: Job) -> Json:
    """What makes a search this one: other limits, price and number of trials are the same search.

    Data and model are identified by content, by every trial.
    """
    section = job.search.model_dump(mode="json", exclude={"trials"})
    of_search = {f"search.{key}": value for key, value in section.items()}
    model = job.model.model_name_or_path
    return {**of_search, **job.identity(), "model": "" if model.startswith("/") else model}


def check(job: Job) -> None:
    """Raises `InputError` where a job is no search that can be run."""
    section, known = job.search, objective_of(job.task).metrics
    refuse_cap_without_price(job)
    for is_wrong, where, what, to_do in (
        (
            not section.is_asked,
            "search.vary",
            "the job names nothing to vary",
            "add search: {vary: {train.learning_rate: [1.0e-4, 3.0e-4]}}",
        ),
        (
            not job.data.eval and not job.data.eval_fraction,
            "data.eval",
            "a search compares trials on evaluation data, and the job has none",
            "set data.eval, or data.eval_fraction: 0.1",
        ),
        (
            not {*section.stop_at} <= {*known},
            "search.stop_at",
            f"{', '.join(section.stop_at)} is no metric of {job.task}",
            f"use one of {', '.join(known)}",
        ),
        (
            any(name in SHARES and least > 1 for name, least in section.stop_at.items()),
            "search.stop_at",
            "its metric is at most 1",
            "85 % is 0.85",
        ),
        (
            job.train.push_to_hub,
            "train.push_to_hub",
            "every trial would be published",
            "leave it out, and publish the winner with `farthing export`",
        ),
        (
            job.train.fit_schedule_to_budget,
            "train.fit_schedule_to_budget",
            "the limits are those of the whole search",
            "leave it out: every trial has the schedule of its full length",
        ),
    ):
        if is_wrong:
            raise InputError(what, where=where, to_do=to_do)


@dataclass
class _Search:
    job: Job
    place: str
    record: SearchRecord
    ledger: Ledger
    mirror: Mirror | None
    tell: Tell
    closing_s: float
    workers: list[Worker]

    def __post_init__(self) -> None:
        self.metric, greater = self.job.metric, self.job.train.greater_is_better
        known = objective_of(self.job.task).metrics
        self.greater = known[self.metric] if greater is None else greater
        self.folder, self.section = Path(self.job.output_dir), self.job.search
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self.workers))
        self._signal = self._limit = ""
        self._has_ended, self._writing = threading.Event(), threading.Lock()

    # ---- the search ----

    def begin(self) -> None:
        """Settle once what the search depends on. Raises `RunChangedError`, `InputError`."""
        asked = asked_of(self.job)
        self.record.must_be(asked)
        is_new = not self.record.header
        if is_new:
            refuse_choices(self.job, self.place)
        for worker in self.workers:
            worker.start()  # they import while this process plans
        if not is_new:
            tell_of_trials(self.job, self.record, self.tell)
            return
        bill, most = self._priced(), n_choices(self.section) or MOST_TRIALS
        n_trials = min(self.section.trials or MOST_TRIALS, most)
        n_trials = n_trials if bill is None else bill.n_trials(MOST_TRIALS)
        if n_trials < 2 < most and self.section.trials is None:
            raise InputError(
                "the cap pays for one trial: there is nothing to compare",
                where="limits.max_usd",
                to_do="raise it, or say how many with search.trials; `farthing plan` has the bill",
            )
        self._refuse_other_tokens()
        claim(self.folder, asked, {}, lambda text: None)
        self.record.add(
            "search",
            asked=asked,
            n_trials=n_trials,
            at_a_time=len(self.workers),
            metric=self.metric,
            greater_is_better=self.greater,
            usd_per_hour=self.job.usd_per_hour,
            plan=bill and bill.of(n_trials),
        )
        self.copy()
        if self.mirror is not None:
            self.mirror.wait(STORE_S)  # another machine has as many trials and rungs

    def _priced(self) -> SearchBill | None:
        """The bill of the search, while the limits leave time to plan. Raises `InputError`."""
        found: SimpleQueue[SearchBill | Exception | None] = SimpleQueue()

        def plan() -> None:
            try:
                found.put(priced(self.job, self.place))
            except Exception as error:
                found.put(error)

        thread = threading.Thread(target=plan, daemon=True)  # one that is late is left behind
        thread.start()
        thread.join(min(threading.TIMEOUT_MAX, max(0.0, self._left()[0] - self.closing_s)))
        if found.empty():
            what = f"{self._left()[1]} leaves no time for a trial"
            raise InputError(what, where="limits", to_do="raise it")
        bill = found.get()
        if isinstance(bill, Exception):
            raise bill
        return bill

    def _refuse_other_tokens(self) -> None:
        """Raises `InputError` where the metric is a mean over tokens, and models have others."""
        key = model_key(self.section)
        if key is None or not is_mean_of_tokens(self.job):
            return
        found = {
            self._ask({"do": "identify", "values": values_with(self.job, {key: model})})["sha256"]
            for model in self.section.vary[key]
        }
        if len(found) > 1:
            other = other_metric(self.job)
            raise InputError(
                f"these models have other tokens, so their {self.metric} can't be compared",
                where=f"search.vary.{key}",
                to_do="choose models of one tokenizer"
                + (f", or set train.metric_for_best_model: {other}" if other else ""),
            )

    def run(self) -> tuple[str, str]:
        """(state, reason) of the search."""
        threading.Thread(target=self._keep_limits, daemon=True).start()
        try:
            with handled(self._leave):
                return "finished", self._run()
        except LimitError as error:
            return "limit", error.what
        except (RunInterruptedError, RunTakenError) as error:
            return "interrupted", self._signal or error.what

    def end(self) -> None:
        """End the workers, which are idle. A search that did not begin leaves nothing of them."""
        self._has_ended.set()
        self._threads.shutdown()
        for worker in self.workers:
            worker.end()
            if not self.record.header:
                worker.log.unlink(missing_ok=True)

    def copy(self) -> None:
        """Bring decisions and results to the store."""
        n_done = len(self.record.results) + len(self.record.confirmed)
        self.ledger.write(committed=n_done)
        if self.mirror is not None:
            self.mirror.offer(n_done)

    def _run(self) -> str:
        section, record = self.section, self.record
        if section.stop_at:
            self._count({})
        parts, first, finalists = self._brackets(), 0, list[int]()
        for part, n in zip(parts, shares_of(record.header["n_trials"], len(parts)), strict=True):
            trials = self._halve(part, first, n)
            first, finalists = first + n, [*finalists, *trials]
            if section.stop_at and trials and (said := self._good_enough(self._rank(trials)[0])):
                return said
        if not finalists:
            reasons = sorted({row["reason"] for row in record.results.values()})
            raise InputError(
                f"no trial was trained to its end with a score: {'; '.join(reasons)[:500]}",
                where=str(self.folder),
                to_do="change what varies, and give the search another output_dir",
            )
        if section.data_fraction:
            self._vary_data(self._rank(finalists)[0], first, n)
        return "no model reached stop_at" if section.stop_at else "all trials done"

    def _count(self, settings: Json) -> None:
        """Count the examples of the job with these settings, once."""
        if not self.record.counts:
            found = self._ask({"do": "count", "values": values_with(self.job, settings)})
            self.record.add("counts", n_train=found["n_train"], n_eval=found["n_eval"])

    def _brackets(self) -> list[SearchSection]:
        """One bracket; with `stop_at` one for each model, the cheapest to serve first, else the
        smallest.
        """
        if not self.section.stop_at:
            return [self.section]
        plan = self.record.header["plan"] or {}
        usd, sizes = plan.get("usd_per_million_tokens", {}), plan.get("n_parameters", {})

        def price(part: SearchSection) -> tuple[float, int]:
            values = model_of(part.vary)
            model = str(values[0]) if isinstance(values, tuple) else ""
            return usd.get(model, math.inf), sizes.get(model, 0)

        return sorted(by_model(self.section), key=price)

    def _halve(self, section: SearchSection, first: int, n: int) -> list[int]:
        """Successive halving over `n` trials from number `first`; those trained in full."""
        rungs = rungs_of(section.reduction_factor, section.min_fraction, n)
        settings, results, trials = self.record.settings, self.record.results, list[int]()
        at_a_time = self.record.header["at_a_time"]  # as the search began, on whatever machine
        while len(trials) < n:
            known = [(settings[each], results[each, 0]["score"]) for each in trials]
            drawn: list[int] = []
            for trial in range(first + len(trials), first + min(n, len(trials) + at_a_time)):
                if trial not in settings:
                    before = [*known, *((settings[each], None) for each in drawn)]
                    found = draw(section, trial, before, greater_is_better=self.greater)
                    if found is None:
                        break
                    self.record.add("trial", trial=trial, settings=found)
                drawn.append(trial)
            if not drawn:
                break
            self._train_all(drawn, 0, rungs)
            trials += drawn
        for rung, keep in list(enumerate(rungs.n_trials(n)))[1:]:
            trials = self._rank(trials, rung - 1)[:keep]
            self._train_all(sorted(trials), rung, rungs)
        return self._rank(trials, len(rungs.fractions) - 1)

    def _good_enough(self, trial: int) -> str:
        """That a model holds `stop_at` on examples that no choice was made on; empty if not."""
        ((metric, wanted),) = self.section.stop_at.items()
        better = objective_of(self.job.task).metrics[metric]
        found = self.record.confirmed.get(trial)
        if found is None:
            values = self._values(trial)
            values["data"].pop("max_eval_samples", None)
            bring_trial(self.job, trial)
            answer = self._ask({"do": "confirm", "values": values, "skip": self._n_chosen_on})
            metrics = answer["metrics"] | {"n_examples": answer["n_examples"]}
            found = self.record.add(
                "confirmed",
                trial=trial,
                metric=metric,
                score=metrics.get(metric),
                n_examples=metrics["n_examples"],
                interval=interval(metric, metrics),
                is_greater_better=better,
            )
            self.copy()
        if not reaches(found["score"], wanted, better):
            return ""
        score, n_examples = found["score"], found["n_examples"]
        return f"trial {trial} has {metric} {score:.4g} on {n_examples:,} new examples"

    @property
    def _n_chosen_on(self) -> int:
        """Evaluation examples that choices are made on; the others confirm them."""
        return max(1, int(self.record.counts["n_eval"]) // 2)

    def _vary_data(self, best: int, first: int, n: int) -> None:
        """Train the winner's settings on parts of the data, each in full and evaluated as often."""
        self._count(self.record.settings[best])
        n_train = int(self.record.counts["n_train"])
        shares = sorted({share for share in self.section.data_fraction if share < 1})
        for trial, share in enumerate(shares, first):
            if trial not in self.record.settings:
                settings = self.record.settings[best] | {PART: max(2, round(share * n_train))}
                self.record.add("trial", trial=trial, settings=settings, part_of=best)
        rungs = rungs_of(self.section.reduction_factor, self.section.min_fraction, n)
        self._train_all(range(first, first + len(shares)), len(rungs.fractions) - 1, rungs)

    def _rank(self, trials: Sequence[int], rung: int | None = None) -> list[int]:
        """By the scores at a rung, or by the newest."""
        rows = {
            trial: self.record.newest(trial) if rung is None else self.record.results[trial, rung]
            for trial in trials
        }
        scores = {trial: row["score"] for trial, row in rows.items()}
        return ranked(scores, greater_is_better=self.greater)

    # ---- a segment of a trial ----

    def _train_all(self, trials: Sequence[int], rung: int, rungs: Rungs) -> None:
        """Bring trials to a rung. Raises the first error, when the others have saved and left."""
        left = [trial for trial in trials if (trial, rung) not in self.record.results]
        futures = [self._threads.submit(self._train, trial, rung, rungs) for trial in left]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if errors := [error for each in done if (error := each.exception())]:
            for each in futures:
                each.cancel()
            for worker in self.workers:
                worker.leave()
            wait(futures)
            raise errors[0]

    def _train(self, trial: int, rung: int, rungs: Rungs) -> None:
        before, n_rungs = self.record.newest(trial), len(rungs.fractions)
        if before.get("state") == "finished":  # it has stopped early
            self._note({**before, "rung": rung, "fraction": rungs.fractions[rung]})
            return
        task = {
            "do": "train",
            "values": self._values(trial),
            "ends_at": self._ends_at(),
            "first_fraction": rungs.fractions[0],
            "times": None if rung == n_rungs - 1 else rungs.factor**rung,
            "n_steps": before.get("n_steps"),
            "is_close": rung >= n_rungs - 2,  # to the end: few trials, each of which may win
        }
        self.tell({"trial": trial, "rung": rung, "n_rungs": n_rungs})
        answer = self._ask(task, trial)
        is_late = answer.get("where") == "limits"  # they ended before it had begun
        if answer["state"] == "limit" or answer.get("kind") == "LimitError" or is_late:
            raise LimitError(self._left()[1])
        rows, keeps_best = answer.get("evaluations", []), self.job.train.load_best_model_at_end
        score = best_score(rows, self.metric, greater_is_better=self.greater, best=keeps_best)
        state, reason = answer["state"], answer.get("reason") or answer.get("error", "")
        if rows and score is None:
            state, reason = "diverged", f"its {self.metric} is not a number"
        scored = next((each for each in rows if each.get(self.metric) == score), None)
        row = {
            "trial": trial,
            "rung": rung,
            "fraction": rungs.fractions[rung] if rows else 0.0,
            "state": state,
            "reason": reason,
            "score": score,
            "metrics": scored or {},
            "interval": scored and interval(self.metric, scored),
            "each": answer["each"].get(str(scored["step"])) if scored else None,
            "curve": [[each["step"], each.get(self.metric)] for each in rows],
            "usd": usd_of(folder_of(self.folder, trial)),
        }
        names = ("step", "n_steps", "spans", "epochs")
        self._note(row | {name: answer.get(name) for name in names})

    def _note(self, row: Json) -> None:
        with self._writing:
            self.record.add("rung", **row)
            self.tell({**row, "done": row["trial"]})
            self.copy()

    def _ask(self, task: Json, trial: int | None = None) -> Json:
        """The answer of a worker. One that dies is begun again. Raises what is not the trial's."""
        for n_deaths in range(1, MOST_DEATHS + 1):
            self._refuse_to_begin()
            worker = self._idle.get()
            try:
                answer = worker.call(
                    {**task, "place": self.place}, lambda row: self.tell({"trial": trial, **row})
                )
                break
            except WorkerDiedError as error:
                answer = {"state": "failed", "kind": "killed", "error": str(error)}
                if trial is not None and n_deaths < MOST_DEATHS:
                    self.tell({"trial": trial, "warning": f"{error}; begun again"})
            finally:
                self._idle.put(worker)
        self._refuse_to_begin()
        if answer["state"] == "interrupted":
            raise RunInterruptedError(answer["reason"])
        if answer["state"] == "failed" and (trial is None or answer["kind"] in OF_THE_MACHINE):
            raise FarthingError(
                answer["error"],
                where=answer.get("where", ""),
                to_do=answer.get("to_do") or "run the same command again",
            )
        return answer

    def _refuse_to_begin(self) -> None:
        """Raises what ends the search, where something does."""
        if self.mirror is not None:
            self.mirror.check()
        if self._signal:
            raise RunInterruptedError(self._signal)
        if self._limit:
            raise LimitError(self._limit)

    def _values(self, trial: int) -> Json:
        """The job of a trial, as plain values."""
        job, values = self.job, values_with(self.job, self.record.settings[trial])
        values["output_dir"] = str(folder_of(self.folder, trial))
        if job.output_store:
            values["output_store"] = store_of(job.output_store, trial)
        of_machine = {"gpus", "power_watts", "usd_per_kwh"}
        each_usd = job.usd_per_hour / self.record.header["at_a_time"]
        where = job.where.model_dump(exclude_unset=True, exclude=of_machine)
        values["where"] = {**where, "usd_per_hour": each_usd}
        if self.section.stop_at:
            values["data"]["max_eval_samples"] = self._n_chosen_on
        return values

    # ---- limits and signals ----

    def _ends_at(self) -> float:
        """When a trial has to end, by the clock since boot. Raises `LimitError`."""
        left_s, limit = self._left()
        if left_s <= self.closing_s:
            raise LimitError(limit)
        return seconds_since_boot() + left_s - self.closing_s

    def _left(self) -> tuple[float, str]:
        """Seconds until the first limit of the search, and that limit."""
        first = min(RunLimits(self.job, self.ledger).left(), default=None)
        return (math.inf, "") if first is None else (first.seconds, first.limit)

    def _keep_limits(self) -> None:
        """Kill the trials when a limit is reached, however slow they start or save: what they have
        committed is whole.
        """
        killed_s = self.closing_s / 2
        while not self._has_ended.wait(min(60.0, max(0.05, self._left()[0] - killed_s))):
            if self._left()[0] <= killed_s:
                self._limit = self._left()[1]
                for worker in self.workers:
                    worker.kill()
                return

    def _leave(self, number: int, frame: Any) -> None:
        self._signal = signal.Signals(number).name
        for worker in self.workers:
            worker.leave()
