"""What a search has cost and found, from its record: `search.json`, its page, the winner's job."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

import farthing
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.launch.machines import bill_of
from farthing.run.accounts import WORK, read_ledger
from farthing.run.commits import take_run
from farthing.run.folder import LEDGER, RUN, SEARCH_LOG, keep, kept, kept_job
from farthing.search.curve import gain
from farthing.search.halving import SHARES, Z_95, paired, ranked
from farthing.search.record import SearchRecord, folder_of, store_of
from farthing.search.report import search_page
from farthing.search.space import model_of
from farthing.storage.files import DamagedFileError, Json, write_text
from farthing.storage.objects import Retrying, open_store

SEARCH = "search.json"
PAGE = "search.html"
WINNER = "winner.yaml"
NEXT_ROWS = 1000
PART = "data.max_train_samples"
STORE_S = 120.0
NOT_BEGUN: Json = {
    "state": "not begun",
    "fraction": 0.0,
    "score": None,
    "interval": None,
    "usd": 0.0,
    "step": None,
    "n_steps": None,
    "epochs": None,
    "curve": [],
}


def is_search(folder: Path) -> bool:
    return (folder / SEARCH).is_file()


def read_receipt(folder: Path) -> Json:
    """The receipt of a search, with the seconds since it was written; made anew of one that goes on
    or was killed. Raises `InputError` where it is damaged.
    """
    try:
        if not is_search(folder):
            again = ["# not ended: `farthing search` with its job continues it"]
            found = build(folder, SearchRecord(folder), usd_of(folder))
            return found | {"max_usd": None, "next": again}
        found = kept(folder / SEARCH) or {}
        usd = max(found["usd"], usd_of(folder))
        return found | _costs(usd, found["usd_in_trials"])
    except (DamagedFileError, TypeError, KeyError) as error:
        raise InputError(
            "the receipt of this search can't be read",
            where=str(folder / SEARCH),
            to_do="remove it and run `farthing search` again: it is written anew from search.jsonl",
        ) from error


def winner_of(folder: Path) -> Path | None:
    """The run of the best trial of a search; None where none has a score. Raises `InputError`."""
    winner = read_receipt(folder)["winner"]
    return winner and folder_of(folder, winner["trial"])


def leave_receipt(job: Job, record: SearchRecord, usd: float) -> Json:
    """Write the receipt, the page and the winner's job; returns the receipt. `usd` is the cost of
    the whole search. Raises `FarthingError`.
    """
    folder = Path(job.output_dir)
    receipt = {**build(folder, record, usd), "max_usd": job.limits.max_usd}
    if receipt["winner"] is not None:
        trial = receipt["winner"]["trial"]
        bring_trial(job, trial)
        values = kept_job(folder_of(folder, trial))
        values = {key: value for key, value in values.items() if key not in ("limits", "search")}
        text = yaml.safe_dump(values, sort_keys=False)
        write_text(folder / WINNER, f"# Trial {trial} of the search in {folder}.\n{text}")
    keep(folder / SEARCH, receipt)
    write_text(folder / PAGE, search_page(receipt))
    return receipt


def leave_receipt_of_copy(job: Job) -> None:
    """The receipt of a search that came back from its store, if there is one, with its winner."""
    folder = Path(job.output_dir)
    if (folder / SEARCH_LOG).exists():
        with contextlib.closing(SearchRecord(folder)) as record:
            leave_receipt(job, record, usd_of(folder))


def usd_of(folder: Path) -> float:
    """Dollars that the run or search in a folder has cost so far."""
    return sum(each.usd for each in read_ledger(folder / LEDGER).accounts)


def bring_trial(job: Job, trial: int) -> None:
    """Bring a trial that another machine has trained from the store into the search's folder.
    Raises `FarthingError`, `StoreError`.
    """
    run = folder_of(Path(job.output_dir), trial)
    if job.output_store is None or (run / RUN).exists():
        return
    store = Retrying(open_store(store_of(job.output_store, trial)), STORE_S)
    take_run(store, run, lambda text: None)


def _costs(usd: float, in_trials_usd: float) -> Json:
    return {
        "usd": usd,
        "usd_in_trials": in_trials_usd,
        "usd_besides_trials": max(0.0, usd - in_trials_usd),
    }


def build(folder: Path, record: SearchRecord, usd: float) -> Json:
    """The receipt as plain values."""
    header, greater = record.header, record.header["greater_is_better"]
    spent = {
        trial: max(record.newest(trial).get("usd", 0.0), usd_of(folder_of(folder, trial)))
        for trial in sorted(record.settings)
    }
    trials = [_trial(record, trial, usd) for trial, usd in spent.items()]
    known = [each for each in trials if each["score"] is not None and each["part_of"] is None]
    order = _order(known, record)
    by_number = {each["trial"]: each for each in trials}
    winner = by_number[order[0]] if order else None
    plan = header["plan"] or {}
    machine = plan.get("here") or plan.get("best") or {}
    return {
        "kind": "farthing search",
        "version": farthing.__version__,
        "folder": str(folder),
        "state": record.ended.get("state", "running"),
        "reason": record.ended.get("reason", ""),
        "metric": header["metric"],
        "greater_is_better": greater,
        **_costs(usd, sum(each["usd"] for each in trials)),
        "machines": bill_of(folder, read_ledger(folder / LEDGER).accounts, time.time(), []),
        "planned_usd": machine.get("usd"),
        "planned_usd_range": machine.get("usd_range"),
        "n_trials": header["n_trials"],
        "varied": sorted({key for one in trials if not one["n_rows"] for key in one["settings"]}),
        "trials": trials,
        "rungs": _by_rung(record, spent),
        "winner": winner,
        "margin": _margin(record, order) if len(order) > 1 else None,
        "front": _front(known, greater),
        "saved": _saved(record, trials),
        "confirmed": list(record.confirmed.values()),
        "models": _models(record, order, by_number),
        "gains": [] if winner is None else _gains(record, winner),
        "is_trained_in_full": winner is not None and winner["fraction"] == 1.0,
        "next": [] if winner is None else _next(folder, winner),
    }


def _trial(record: SearchRecord, trial: int, usd: float) -> Json:
    """`usd`: also of a segment that a limit has stopped."""
    row, settings = record.newest(trial), record.settings[trial]
    figures = {key: row.get(key, otherwise) for key, otherwise in NOT_BEGUN.items()}
    figures |= {"usd": usd, "state": "paused" if usd and not row else figures["state"]}
    is_lost = figures["state"] in ("failed", "diverged")
    return {
        "trial": trial,
        "settings": settings,
        "part_of": record.parts.get(trial),
        "n_rows": settings.get(PART) if trial in record.parts else None,
        **figures,
        "reason": row["reason"] if is_lost else "",
        "n_examples": row.get("metrics", {}).get("n_examples", 0),
    }


def _order(trials: Sequence[Json], record: SearchRecord) -> list[int]:
    """Trials from the best on: first those that reached `stop_at` on new examples, then those that
    were trained further.
    """
    wanted = record.header["asked"]["search.stop_at"]
    found = [
        trial
        for trial, row in record.confirmed.items()
        if reaches(row["score"], wanted.get(row["metric"]), row["is_greater_better"])
    ]
    for fraction in sorted({each["fraction"] for each in trials}, reverse=True):
        scores = {each["trial"]: each["score"] for each in trials if each["fraction"] == fraction}
        found += ranked(scores, greater_is_better=record.header["greater_is_better"])
    return list(dict.fromkeys(found))


def reaches(score: float | None, wanted: float | None, is_greater_better: bool) -> bool:
    if score is None or wanted is None:
        return False
    return score >= wanted if is_greater_better else score <= wanted


def _by_rung(record: SearchRecord, spent: Mapping[int, float]) -> list[Json]:
    """The cost of each rung: what each trial added to its bill there, and what it has spent since
    the last one it reached.
    """
    found: dict[int, Json] = {}

    def at(rung: int) -> Json:
        return found.setdefault(rung, {"rung": rung, "fraction": 0.0, "n_trials": 0, "usd": 0.0})

    left = dict(spent)
    for (trial, rung), row in record.results.items():
        usd = row["usd"] - record.results.get((trial, rung - 1), {}).get("usd", 0.0)
        left[trial] -= usd
        at(rung)["fraction"] = max(at(rung)["fraction"], row["fraction"])  # 0: failed at once
        at(rung)["n_trials"] += 1
        at(rung)["usd"] += usd
    for trial, usd in left.items():
        if usd > 0:
            at(max((rung for of, rung in record.results if of == trial), default=0))["usd"] += usd
    return [found[rung] for rung in sorted(found)]


def _margin(record: SearchRecord, order: Sequence[int]) -> Json | None:
    """By how much the winner is better than the next one at the last rung that both have reached,
    and whether that is within noise: by the differences of the same examples where those are known,
    else by both intervals.
    """
    winner, second = order[:2]
    rung = max(at for trial, at in record.results if trial == second)
    one, other = record.results.get((winner, rung)), record.results[second, rung]
    if one is None or one["score"] is None:  # held on other examples, though it was trained less
        return None
    sign = 1 if record.header["greater_is_better"] else -1
    better_by, bounds = (one["score"] - other["score"]) * sign, None
    found = paired(one["each"], other["each"]) if one["each"] and other["each"] else None
    if found is not None:
        bounds = sorted(sign * bound for bound in found)
    elif one["interval"] and other["interval"]:
        half = Z_95 * math.hypot(_error(one), _error(other))
        bounds = [better_by - half, better_by + half]
    return {
        "second": second,
        "better_by": better_by,
        "interval": bounds,
        "at_fraction": other["fraction"],
        "is_within_noise": None if bounds is None else bounds[0] <= 0,
    }


def _models(record: SearchRecord, order: Sequence[int], trials: Mapping[int, Json]) -> list[Json]:
    """The best trial of each model that is a choice, and the dollars of its answers; those that
    were not tried too.
    """
    plan = record.header["plan"] or {}
    best = {model_of(trials[trial]["settings"]): trial for trial in reversed(order)}
    found = []
    for model, n_parameters in plan.get("n_parameters", {}).items():
        trial = best.get(model)
        row = {} if trial is None else record.confirmed.get(trial) or trials[trial]
        one = {
            "model": model,
            "n_parameters": n_parameters,
            "usd_per_million_tokens": plan["usd_per_million_tokens"].get(model),
            "trial": trial,
        }
        found.append({**one, "score": row.get("score"), "interval": row.get("interval")})
    return sorted(found, key=lambda one: one["n_parameters"])


def _front(trials: Sequence[Json], greater: bool) -> list[int]:
    """Trials that no other beats in score for as few dollars."""
    sign, found, best = -1 if greater else 1, list[int](), math.inf
    for each in sorted(trials, key=lambda one: (one["usd"], sign * one["score"])):
        if sign * each["score"] < best:
            best = sign * each["score"]
            found.append(each["trial"])
    return found


def _saved(record: SearchRecord, trials: Sequence[Json]) -> Json:
    """Against the same trials as separate runs, in dollars.

    stopping: training the others in full, at their own pace. promotion: training again, up to its
    last rung, what was promoted. sharing: tokenizing once more for every trial.
    """
    results = record.results
    stopping = sum(
        row["usd"] / row["fraction"] - row["usd"]
        for each in trials
        if each["part_of"] is None and each["fraction"] > 0 and each["state"] == "paused"
        for row in (record.newest(each["trial"]),)
    )
    promotion = sum(
        before["usd"]
        for (trial, rung), row in results.items()
        if (before := results.get((trial, rung - 1))) and before["step"] != row["step"]
    )
    seconds = [
        (row.get("spans") or {}).get("tokenize", 0.0)
        for (_, rung), row in sorted(results.items())
        if rung == 0
    ]
    shared_s = sum(max(seconds) - each for each in seconds)
    sharing = shared_s / 3600 * record.header["usd_per_hour"] / record.header["at_a_time"]
    return {"stopping_usd": stopping, "promotion_usd": promotion, "sharing_usd": sharing}


def _gains(record: SearchRecord, winner: Json) -> list[Json]:
    """What more rows, and another epoch, should add to the winner, and their dollars."""
    parts = [record.newest(trial) for trial, of in record.parts.items() if of == winner["trial"]]
    if not parts:
        return []
    header, n_train, own = record.header, record.counts["n_train"], _error(winner)
    greater = header["greater_is_better"]
    spans = record.newest(winner["trial"]).get("spans") or {}
    training_s = sum(spans.get(name, 0.0) for name in WORK)
    training_usd = training_s / 3600 * header["usd_per_hour"]
    best = (1.0 if header["metric"] in SHARES else math.inf) if greater else 0.0
    most, more = abs(best - winner["score"]), min(NEXT_ROWS, n_train)
    of_rows = [
        (record.settings[row["trial"]][PART], row["score"], _error(row))
        for row in parts
        if row and row["score"] is not None
    ]
    epochs, n_steps = winner["epochs"] or 0.0, winner["n_steps"]
    of_epochs = [
        (step * epochs / n_steps, score, own)
        for step, score in winner["curve"]
        if score is not None
    ]
    found = []
    for of, points, now, further, whole in (
        ("rows", [*of_rows, (n_train, winner["score"], own)], n_train, more, n_train),
        ("epochs", of_epochs if epochs >= 1 else [], epochs, 1, epochs),
    ):
        if points and (
            gained := gain(
                [point[:2] for point in points],
                now + further,
                [error for *_, error in points],
                greater_is_better=greater,
            )
        ):
            usd = training_usd * further / whole
            bounded = {name: min(most, value) for name, value in gained._asdict().items()}
            found.append({"of": of, "more": further, "usd": usd, **bounded})
    return found


def _error(row: Mapping[str, object]) -> float:
    """Standard error of a score; 0 where it is not known."""
    bounds = row["interval"]
    return (bounds[1] - bounds[0]) / (2 * Z_95) if isinstance(bounds, list | tuple) else 0.0


def _next(folder: Path, winner: Json) -> list[str]:
    """Commands for the winner."""
    if winner["fraction"] < 1.0:
        return [f"farthing train {shlex.quote(str(folder / WINNER))}"]
    run = shlex.quote(str(folder_of(folder, winner["trial"])))
    verbs = "eval {}", "export {} --output NEW_FOLDER", "train NEW_JOB.yaml --from {}"
    return [f"farthing {verb.format(run)}" for verb in verbs]
