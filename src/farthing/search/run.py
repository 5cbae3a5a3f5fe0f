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
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from farthing.config.job import Job, SearchSection
from farthing.config.load import is_mean_of_tokens, other_metric
from farthing.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    FarthingError,
    InputError,
    RunInterruptedError,
    RunTakenError,
)
from farthing.objectives.registry import objective_of
from farthing.run.accounts import read_ledger
from farthing.run.folder import LEDGER, MODEL, SEARCH_LOG, claim
from farthing.run.ledger import Ledger
from farthing.run.mirror import Mirror, open_mirror
from farthing.run.opening import Opened, opened
from farthing.run.signals import handled
from farthing.search.bill import Bill, priced
from farthing.search.halving import Rungs, best_score, interval, ranked, rungs_of, shares_of
from farthing.search.pool import Worker, WorkerDiedError, environs
from farthing.search.receipt import bring_trial, is_search, leave_receipt, read_receipt
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
from farthing.train.budget import (
    limits_left,
    refuse_cap_without_price,
    refuse_limits,
    seconds_left,
)

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
        """What the process should tell its caller."""
        return {"finished": EXIT_FINISHED, "limit": EXIT_LIMIT, "interrupted": EXIT_INTERRUPTED}[
            self.state
        ]


class _LimitError(Exception):
    """The limits leave no room for more."""


def search(
    job: Job, place: Path, tell: Tell = lambda row: None, *, n_at_a_time: int = 1
) -> SearchOutcome:
    """Begin a search, or resume it, in the job's `output_dir`.

    `place` is the job file, for messages. `n_at_a_time` trials run side by side, each on a GPU of
    its own. Raises `FarthingError`; what was done stays done.
    """
    check(job)
    folder = Path(job.output_dir)
    if (done := _finished(job, folder)) is not None:
        return done
    if not (folder / SEARCH_LOG).exists():
        refuse_limits(job, 0.0, 0.0)
    with opened(folder, job.usd_per_hour) as begun, contextlib.ExitStack() as stack:
        closing_s = min(LONGEST_CLOSING_S, max(CLOSING_S, begun.meter.wall_s))
        mirror = stack.enter_context(_mirrored(job, begun, tell, closing_s))
        record = SearchRecord(folder)
        with contextlib.closing(record):
            found = _Search(
                job, str(place), folder, record, begun.ledger, mirror, tell, n_at_a_time, closing_s
            )
            stack.callback(found.end)
            found.begin()
            begun.is_accepted = True
            state, reason = found.run()
            record.add("ended", state=state, reason=reason)
            begun.ledger.end(state)
            receipt = leave_receipt(job, record, begun.ledger.spent_usd)
            if state == "finished":
                _drop_partial_models(folder, receipt)
            found.copy()
    return SearchOutcome(state, reason, receipt)


@contextlib.contextmanager
def _mirrored(job: Job, begun: Opened, tell: Tell, closing_s: float) -> Iterator[Mirror | None]:
    """The copy of record and ledger in the job's store, and the hold of the search there; what the
    store knows is here first. None without a store.
    """

    def warn(text: str) -> None:
        tell({"trial": None, "warning": text})

    def is_over() -> bool:
        return seconds_left(job, begun.ledger) <= closing_s

    mirror = open_mirror(job.output_store, begun.folder, N_COPIES, warn)
    if mirror is not None:
        mirror.on_bills = begun.ledger.take_in
        mirror.bring_back(should_stop=is_over)
        begun.ledger.write()
    try:
        yield mirror
    finally:
        if mirror is not None:
            mirror.close(min(STORE_S, max(1.0, seconds_left(job, begun.ledger))))


def _drop_partial_models(folder: Path, receipt: Json) -> None:
    """Remove models that a limit made a trial export before its end: which ones there are depends
    on when the limit was reached.
    """
    for trial in receipt["trials"]:
        if trial["fraction"] != 1.0:
            shutil.rmtree(folder / "trials" / f"{trial['trial']:03d}" / MODEL, ignore_errors=True)


def _finished(job: Job, folder: Path) -> SearchOutcome | None:
    """The outcome of a search that has come to its end; asking again costs nothing."""
    if not is_search(folder):
        return None
    with contextlib.closing(SearchRecord(folder)) as record:
        record.must_be(asked_of(job))
        if record.ended.get("state") != "finished":
            return None
        return SearchOutcome("finished", record.ended["reason"], read_receipt(folder))


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
    problems = [
        (
            not section.is_asked,
            ("the job names nothing to vary", "search.vary"),
            "add search: {vary: {train.learning_rate: [1.0e-4, 3.0e-4]}}",
        ),
        (
            not job.data.eval and not job.data.eval_fraction,
            ("a search compares trials on evaluation data, and the job has none", "data.eval"),
            "set data.eval, or data.eval_fraction: 0.1",
        ),
        (
            not {*section.stop_at} <= {*known},
            (f"{', '.join(section.stop_at)} is no metric of {job.task}", "search.stop_at"),
            f"use one of {', '.join(known)}",
        ),
        (
            job.train.push_to_hub,
            ("every trial would be published", "train.push_to_hub"),
            "leave it out, and publish the winner with `farthing export`",
        ),
        (
            job.train.fit_schedule_to_budget,
            ("the limits are those of the whole search", "train.fit_schedule_to_budget"),
            "leave it out: every trial has the schedule of its full length",
        ),
    ]
    refuse_cap_without_price(job)
    for is_wrong, (what, where), to_do in problems:
        if is_wrong:
            raise InputError(what, where=where, to_do=to_do)


class _Search:
    def __init__(
        self,
        job: Job,
        place: str,
        folder: Path,
        record: SearchRecord,
        ledger: Ledger,
        mirror: Mirror | None,
        tell: Tell,
        n_at_a_time: int,
        closing_s: float,
    ) -> None:
        self.job, self.place, self.folder, self.record = job, place, folder, record
        self.ledger, self.mirror, self.tell = ledger, mirror, tell
        self.closing_s = closing_s
        self.metric = (job.train.metric_for_best_model or "loss").removeprefix("eval_")
        greater = job.train.greater_is_better
        known = objective_of(job.task).metrics
        self.greater = known[self.metric] if greater is None else greater
        self.workers = [
            Worker(folder / f"worker-{number}.log", environ)
            for number, environ in enumerate(environs(n_at_a_time, job.where.device, folder.name))
        ]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self.workers))
        self._asked = self._over = ""
        self._has_ended = threading.Event()
        self._writing = threading.Lock()

    # ---- the search ----

    def begin(self) -> None:
        """Settle once what the search depends on. Raises `RunChangedError`."""
        section = self.job.search
        asked = asked_of(self.job)
        self.record.must_be(asked)
        if not self.record.header:
            refuse_choices(self.job, self.place)
        for worker in self.workers:
            worker.start()  # they import while this process plans
        if self.record.header:
            return
        bill = self._priced()
        most = n_choices(section) if section.vary else 1
        n_trials = min(section.trials or MOST_TRIALS, most or MOST_TRIALS)
        n_trials = n_trials if bill is None else bill.n_trials(MOST_TRIALS)
        if n_trials < 2 < (most or MOST_TRIALS) and section.trials is None:
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

    def _priced(self) -> Bill | None:
        """The bill of the search, while the limits leave time to plan. Raises `InputError`."""
        found: Future[Bill | None] = Future()

        def plan() -> None:
            try:
                found.set_result(priced(self.job, self.place))
            except BaseException as error:
                found.set_exception(error)

        thread = threading.Thread(target=plan, daemon=True)
        thread.start()
        thread.join(min(threading.TIMEOUT_MAX, max(0.0, self._left()[0] - self.closing_s)))
        if thread.is_alive():
            raise InputError(
                f"{self._left()[1]} leaves no time for a trial", where="limits", to_do="raise it"
            )
        return found.result()

    def copy(self) -> None:
        """Bring what was decided and came out to the store."""
        n_done = len(self.record.results) + len(self.record.confirmed)
        if not self.ledger.has_ended:
            self.ledger.committed(n_done)
        if self.mirror is not None:
            self.mirror.offer(n_done)

    def _count(self) -> None:
        """How many examples there are, where parts of them are taken."""
        section = self.job.search
        if (section.stop_at or section.data_fraction) and not self.record.counts:
            found = self._ask({"do": "count", "values": values_with(self.job, {})})
            self.record.add("counts", n_train=found["n_train"], n_eval=found["n_eval"])

    def _refuse_other_tokens(self) -> None:
        """Raises `InputError` where the metric is a mean over tokens, and models have others."""
        section, key = self.job.search, model_key(self.job.search)
        if key is None or not is_mean_of_tokens(self.job):
            return
        found = {
            self._ask({"do": "identify", "values": values_with(self.job, {key: model})})["sha256"]
            for model in section.vary[key]
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
                self._count()
                return "finished", self._run()
        except _LimitError as error:
            return "limit", str(error)
        except (RunInterruptedError, RunTakenError) as error:
            return "interrupted", self._asked or error.what
        finally:
            self.end()

    def end(self) -> None:
        """End the workers, which are idle. A search that did not begin leaves nothing of them."""
        self._has_ended.set()
        self._threads.shutdown()
        for worker in self.workers:
            worker.end()
            if not self.record.header:
                worker.log.unlink(missing_ok=True)

    def _run(self) -> str:
        section, n_all, first = self.job.search, self.record.header["n_trials"], 0
        parts = self._brackets()
        finalists: list[int] = []
        for part, n in zip(parts, shares_of(n_all, len(parts)), strict=True):
            trials = self._halve(part, first, n)
            first, finalists = first + n, [*finalists, *trials]
            if section.stop_at and trials and (said := self._good_enough(self._rank(trials)[0])):
                return said
        if not finalists:
            reasons = sorted({row["reason"] for row in self.record.results.values()})
            raise InputError(
                f"no trial was trained to its end with a score: {'; '.join(reasons)[:500]}",
                where=str(self.folder),
                to_do="change what varies, and give the search another output_dir",
            )
        if section.data_fraction:
            self._vary_data(self._rank(finalists)[0], first, n)
        return "no model reached stop_at" if section.stop_at else "all trials done"

    def _brackets(self) -> list[SearchSection]:
        """One bracket; with `stop_at` one for each model, the cheapest to serve first, else the
        smallest.
        """
        section = self.job.search
        parts = by_model(section) if section.stop_at else [section]
        plan = self.record.header["plan"] or {}
        usd, sizes = plan.get("usd_per_million_tokens", {}), plan.get("n_parameters", {})
        return sorted(
            parts,
            key=lambda part: (usd.get(model_in(part), math.inf), sizes.get(model_in(part), 0)),
        )

    def _halve(self, section: SearchSection, first: int, n: int) -> list[int]:
        """Successive halving over `n` trials from number `first`; those trained in full."""
        rungs = rungs_of(section.reduction_factor, section.min_fraction, n)
        trials: list[int] = []
        while len(trials) < n:
            before = [(self.record.settings[each], self._score(each, 0)) for each in trials]
            batch = range(first + len(trials), first + min(n, len(trials) + self._at_a_time))
            drawn: list[int] = []
            for trial in batch:
                known = [*before, *((self.record.settings[each], None) for each in drawn)]
                if self._draw(section, trial, known):
                    drawn.append(trial)
            if not drawn:
                break
            self._train_all(drawn, 0, rungs)
            trials += drawn
        for rung, keep in list(enumerate(rungs.n_trials(n)))[1:]:
            scores = {trial: self._score(trial, rung - 1) for trial in trials}
            trials = ranked(scores, greater_is_better=self.greater)[:keep]
            self._train_all(sorted(trials), rung, rungs)
        last = {trial: self._score(trial, rungs.n - 1) for trial in trials}
        return ranked(last, greater_is_better=self.greater)

    @property
    def _at_a_time(self) -> int:
        """Trials drawn at a time: as when the search began, on whatever machine it is now."""
        return int(self.record.header["at_a_time"])

    def _draw(self, section: SearchSection, trial: int, known: Any) -> bool:
        """Whether there are settings for a trial: drawn once, then those of the record."""
        if trial not in self.record.settings:
            settings = (
                draw(section, trial, known, greater_is_better=self.greater) if section.vary else {}
            )
            if settings is None:
                return False
            self.record.add("trial", trial=trial, settings=settings)
        return True

    def _good_enough(self, trial: int) -> str:
        """That a model holds `stop_at` on examples that no choice was made on; empty if not."""
        ((metric, wanted),) = self.job.search.stop_at.items()
        better = objective_of(self.job.task).metrics[metric]
        found = self.record.confirmed.get(trial)
        if found is None:
            values = self._values(trial)
            values["data"].pop("max_eval_samples", None)
            asked = {"do": "confirm", "values": values, "skip": self._n_chosen_on}
            bring_trial(self.job, trial)
            answer = self._ask(asked)
            score, n_examples = answer["metrics"].get(metric), answer["n_examples"]
            found = self.record.add(
                "confirmed",
                trial=trial,
                metric=metric,
                score=score,
                n_examples=n_examples,
                interval=interval(metric, {**answer["metrics"], "n_examples": n_examples}),
                is_greater_better=better,
            )
            self.copy()
        score = found["score"]
        if score is None or (score < wanted if better else score > wanted):
            return ""
        return f"trial {trial} has {metric} {score:.4g} on {found['n_examples']:,} new examples"

    @property
    def _n_chosen_on(self) -> int:
        """Evaluation examples that choices are made on; the others confirm them."""
        return max(1, int(self.record.counts["n_eval"]) // 2)

    def _vary_data(self, best: int, first: int, n: int) -> None:
        """Train the winner's settings on parts of the data, each in full and evaluated as often."""
        n_train = int(self.record.counts["n_train"])
        shares = sorted({share for share in self.job.search.data_fraction if share < 1})
        for trial, share in enumerate(shares, first):
            if trial not in self.record.settings:
                part = {"data.max_train_samples": max(2, round(share * n_train))}
                settings = self.record.settings[best] | part
                self.record.add("trial", trial=trial, settings=settings, part_of=best)
        rungs = rungs_of(self.job.search.reduction_factor, self.job.search.min_fraction, n)
        self._train_all(range(first, first + len(shares)), rungs.n - 1, rungs)

    def _rank(self, trials: Sequence[int]) -> list[int]:
        scores = {trial: self.record.newest(trial)["score"] for trial in trials}
        return ranked(scores, greater_is_better=self.greater)

    def _score(self, trial: int, rung: int) -> float | None:
        score: float | None = self.record.results[trial, rung]["score"]
        return score

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
        before = self.record.newest(trial)
        if before.get("state") == "finished":  # it has stopped early
            self._note(trial, {**before, "rung": rung})
            return
        values = self._values(trial)
        values["limits"] = self._limits()
        task = {
            "do": "train",
            "values": values,
            "first_fraction": rungs.fractions[0],
            "times": None if rung == rungs.n - 1 else rungs.factor**rung,
            "n_steps": before.get("n_steps"),
            "is_close": rung >= rungs.n - 2,  # to the end: few trials, each of which may win
        }
        self.tell({"trial": trial, "rung": rung, "n_rungs": rungs.n})
        answer = self._ask(task, trial)
        if answer["state"] == "limit" or answer.get("kind") == "LimitError":
            raise _LimitError(self._left()[1])
        rows = answer.get("evaluations", [])
        keeps_best = self.job.train.load_best_model_at_end
        score = best_score(rows, self.metric, greater_is_better=self.greater, best=keeps_best)
        state = "diverged" if rows and score is None else answer["state"]
        reason = answer.get("reason") or answer.get("error", "")
        scored = next((each for each in rows if each.get(self.metric) == score), None)
        row = {
            "rung": rung,
            "fraction": rungs.fractions[rung] if rows else 0.0,
            "state": state,
            "reason": f"its {self.metric} is not a number" if state == "diverged" else reason,
            "score": score,
            "metrics": scored or {},
            "interval": scored and interval(self.metric, scored),
            "each": answer["each"].get(str(scored["step"])) if scored else None,
            "curve": [[each["step"], each.get(self.metric)] for each in rows],
            "usd": usd_of(folder_of(self.folder, trial)),
        }
        names = ("step", "n_steps", "spans", "epochs")
        self._note(trial, row | {name: answer.get(name) for name in names})

    def _note(self, trial: int, row: Json) -> None:
        with self._writing:
            self.record.add("rung", **{**row, "trial": trial})
            self.tell({"done": trial, **row})
            self.copy()

    def _ask(self, task: Json, trial: int | None = None) -> Json:
        """The answer of a worker. One that dies is begun again. Raises what is not the trial's."""
        task = {**task, "place": self.place}
        for n_deaths in range(1, MOST_DEATHS + 1):
            self._refuse_to_begin()
            worker = self._idle.get()
            try:
                answer = worker.call(task, lambda row: self.tell({"trial": trial, **row}))
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
        if self._asked:
            raise RunInterruptedError(self._asked)
        if self._over:
            raise _LimitError(self._over)

    def _values(self, trial: int) -> Json:
        """The job of a trial, as plain values."""
        values: Json = values_with(self.job, self.record.settings[trial])
        values["output_dir"] = str(folder_of(self.folder, trial))
        if self.job.output_store:
            values["output_store"] = store_of(self.job.output_store, trial)
        where = self.job.where.model_dump(
            exclude_unset=True, exclude={"gpus", "power_watts", "usd_per_kwh"}
        )
        each_usd = self.job.usd_per_hour / self._at_a_time
        values["where"] = {**where, "usd_per_hour": each_usd}
        if self.job.search.stop_at:
            values["data"]["max_eval_samples"] = self._n_chosen_on
        return values

    def _limits(self) -> Json:
        """The limits of a trial: what those of the search leave."""
        left_s, limit = self._left()
        if left_s <= self.closing_s:
            raise _LimitError(limit)
        if math.isinf(left_s):
            return {}
        # a moment: what another machine has spent on the trial is known only once it begins
        until = datetime.fromtimestamp(self.ledger.now + left_s - self.closing_s, UTC)
        return {"deadline": until.isoformat(timespec="milliseconds")}

    def _left(self) -> tuple[float, str]:
        """Seconds until the first limit of the search, and that limit."""
        first = min(limits_left(self.job, self.ledger), default=None, key=lambda each: each.seconds)
        return (math.inf, "") if first is None else (first.seconds, first.limit)

    def _keep_limits(self) -> None:
        """Kill the trials when a limit is reached, however slow they start or save: what they have
        committed is whole.
        """
        killed_s = self.closing_s / 2
        while not self._has_ended.wait(min(60.0, max(0.05, self._left()[0] - killed_s))):
            if self._left()[0] <= killed_s:
                self._over = self._left()[1]
                for worker in self.workers:
                    worker.kill()
                return

    def _leave(self, number: int, frame: Any) -> None:
        self._asked = signal.Signals(number).name
        for worker in self.workers:
            worker.leave()


def model_in(section: SearchSection) -> str:
    """The model of a section with one choice of it; empty where it does not vary."""
    values = model_of(section.vary)
    return str(values[0]) if isinstance(values, tuple) else ""


def usd_of(folder: Path) -> float:
    """Dollars that the run in a folder has taken so far."""
    return sum(each.usd for each in read_ledger(folder / LEDGER).ordered)
