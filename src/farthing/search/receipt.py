"""What a search has cost and found, from its record: `search.json`, its page, the winner's job."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import farthing
from farthing.config.job import Job
from farthing.errors import InputError
from farthing.run.accounts import WORK
from farthing.run.commits import list_commits, take_newest
from farthing.run.folder import RUN, kept_job
from farthing.search.curve import Gain, gain
from farthing.search.halving import SHARES, Z_95, paired, ranked
from farthing.search.page import search_page
from farthing.search.record import SearchRecord, folder_of, store_of
from farthing.search.space import model_of
from farthing.storage.files import Json, make_private, read_json, write_json, write_text
from farthing.storage.lease import newest_words
from farthing.storage.objects import Retrying, open_store

SEARCH = "search.json"
PAGE = "search.html"
WINNER = "winner.yaml"
KIND = "farthing search"
NEXT_ROWS = 1000
PART = "data.max_train_samples"
STORE_S = 120.0


def is_search(folder: Path) -> bool:
    """Whether a folder is that of a search."""
    return (folder / SEARCH).is_file()


def read_receipt(folder: Path) -> Json:
    """The receipt of a search. Raises `InputError` where it is damaged."""
    try:
        return dict(read_json(folder / SEARCH))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            "the receipt of this search can't be read",
            where=str(folder / SEARCH),
            to_do="remove it and run `farthing search` again: it is written anew from search.jsonl",
        ) from error


def leave_receipt(job: Job, record: SearchRecord, usd: float) -> Json:
    """Write the receipt, the page and the winner's job; returns the receipt. Raises
    `FarthingError`.
    """
    folder = Path(job.output_dir)
    receipt = {**build(folder, record, usd), "max_usd": job.limits.max_usd}
    if receipt["winner"] is not None:
        bring_trial(job, receipt["winner"]["trial"])
        leave_winner(folder, receipt["winner"]["trial"])
    write_json(folder / SEARCH, receipt)
    write_text(folder / PAGE, search_page(receipt))
    return receipt


def bring_trial(job: Job, trial: int) -> None:
    """Bring a trial that another machine has trained from the store into the search's folder.
    Raises `FarthingError`, `StoreError`.
    """
    run = folder_of(Path(job.output_dir), trial)
    if job.output_store is None or (run / RUN).exists():
        return
    store = Retrying(open_store(store_of(job.output_store, trial)), STORE_S)
    commits = list_commits(store)
    take_newest(store, make_private(run), commits, newest_words(store), lambda text: None)


def leave_winner(folder: Path, trial: int) -> None:
    """The winner's job: it resumes the trial, or trains it for longer."""
    values = kept_job(folder_of(folder, trial))
    values = {key: value for key, value in values.items() if key not in ("limits", "search")}
    text = f"# Trial {trial} of the search in {folder}.\n" + yaml.safe_dump(values, sort_keys=False)
    write_text(folder / WINNER, text)


def build(folder: Path, record: SearchRecord, usd: float) -> Json:
    """The receipt as plain values; `usd` is what the search has cost in all."""
    header, metric = record.header, record.header["metric"]
    greater = header["greater_is_better"]
    trials = [_trial(record, trial) for trial in sorted(record.settings)]
    known = [each for each in trials if each["score"] is not None and each["part_of"] is None]
    order = _order(known, greater)
    held = [trial for trial, row in record.confirmed.items() if _holds(row, record)]
    if held:
        order = [*held, *(trial for trial in order if trial not in held)]
    by_number = {each["trial"]: each for each in trials}
    winner = by_number[order[0]] if order else None
    rungs = _by_rung(record)
    in_trials_usd = sum(each["usd"] for each in trials)
    plan = header["plan"] or {}
    machine = plan.get("here") or plan.get("best") or {}
    receipt: Json = {
        "kind": KIND,
        "version": farthing.__version__,
        "folder": str(folder),
        "state": record.ended.get("state", "running"),
        "reason": record.ended.get("reason", ""),
        "metric": metric,
        "greater_is_better": greater,
        "usd": usd,
        "usd_in_trials": in_trials_usd,
        "usd_besides_trials": max(0.0, usd - in_trials_usd),
        "planned_usd": machine.get("usd"),
        "planned_usd_range": machine.get("usd_range"),
        "n_trials": header["n_trials"],
        "varied": sorted(
            {key for each in trials if not each["n_rows"] for key in each["settings"]}
        ),
        "trials": trials,
        "rungs": rungs,
        "winner": winner,
        "margin": _margin(record, [by_number[trial] for trial in order[:2]], greater),
        "front": _front(known, greater),
        "saved": _saved(record, trials),
        "confirmed": list(record.confirmed.values()),
        "models": _models(record, order, by_number),
        "gains": _gains(record, winner, greater),
        "is_trained_in_full": winner is not None and winner["fraction"] == 1.0,
        "next": _next(folder, winner),
    }
    return receipt


def _trial(record: SearchRecord, trial: int) -> Json:
    row = record.newest(trial)
    return {
        "trial": trial,
        "settings": record.settings[trial],
        "part_of": record.parts.get(trial),
        "n_rows": record.settings[trial].get(PART) if trial in record.parts else None,
        "state": row.get("state", "not begun"),
        "reason": row.get("reason", "") if row.get("state") in ("failed", "diverged") else "",
        "fraction": row.get("fraction", 0.0),
        "score": row.get("score"),
        "interval": row.get("interval"),
        "n_examples": row.get("metrics", {}).get("n_examples", 0),
        "usd": row.get("usd", 0.0),
        "step": row.get("step"),
        "n_steps": row.get("n_steps"),
        "epochs": row.get("epochs"),
        "curve": row.get("curve", []),
    }


def _order(trials: Sequence[Json], greater: bool) -> list[int]:
    """Trials from the best on: those that were trained further come first."""
    found: list[int] = []
    for fraction in sorted({each["fraction"] for each in trials}, reverse=True):
        scores = {each["trial"]: each["score"] for each in trials if each["fraction"] == fraction}
        found += ranked(scores, greater_is_better=greater)
    return found


def _holds(row: Mapping[str, Any], record: SearchRecord) -> bool:
    wanted = record.header["asked"]["search.stop_at"].get(row["metric"])
    if wanted is None or row["score"] is None:
        return False
    return bool(row["score"] >= wanted if row["is_greater_better"] else row["score"] <= wanted)


def _by_rung(record: SearchRecord) -> list[Json]:
    """What each rung has cost: of every trial what it added to its bill there."""
    found: dict[int, Json] = {}
    for (trial, rung), row in sorted(record.results.items()):
        before = record.results.get((trial, rung - 1), {}).get("usd", 0.0)
        at = found.setdefault(
            rung, {"rung": rung, "fraction": row["fraction"], "n_trials": 0, "usd": 0.0}
        )
        at["fraction"] = max(at["fraction"], row["fraction"])  # 0 of one that failed at once
        at["n_trials"] += 1
        at["usd"] += row["usd"] - before
    return [found[rung] for rung in sorted(found)]


def _margin(record: SearchRecord, best: Sequence[Json], greater: bool) -> Json | None:
    """By how much the winner is better than the next one at the last rung that both have reached,
    and whether that is within noise: by the differences of the same examples where those are known,
    else by both intervals.
    """
    if len(best) < 2:
        return None
    (winner, second), sign = (each["trial"] for each in best), 1 if greater else -1
    rung = max(at for trial, at in record.results if trial == second)
    one, other = record.results.get((winner, rung)), record.results[second, rung]
    if one is None or one["score"] is None:  # held on other examples, though it was trained less
        return None
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
    """The best trial of each model that is a choice, and what answering with it costs; those that
    were not tried too.
    """
    plan = record.header["plan"] or {}
    usd = plan.get("usd_per_million_tokens", {})
    best = {model_of(trials[trial]["settings"]): trial for trial in reversed(order)}
    found = []
    for model, n_parameters in plan.get("n_parameters", {}).items():
        trial = best.get(model)
        row = {} if trial is None else record.confirmed.get(trial) or trials[trial]
        found.append(
            {
                "model": model,
                "n_parameters": n_parameters,
                "usd_per_million_tokens": usd.get(model),
                "trial": trial,
                "score": row.get("score"),
                "interval": row.get("interval"),
            }
        )
    return sorted(found, key=lambda one: one["n_parameters"])


def _front(trials: Sequence[Json], greater: bool) -> list[int]:
    """Trials that no other beats in score for as few dollars."""
    sign = -1 if greater else 1
    found: list[int] = []
    best = math.inf
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
    rate = record.header["usd_per_hour"] / 3600
    own = [each for each in trials if each["part_of"] is None and each["fraction"] > 0]
    stopping = sum(
        each["usd"] / each["fraction"] - each["usd"] for each in own if each["state"] == "paused"
    )
    promotion = sum(
        record.results[trial, rung - 1]["usd"]
        for trial, rung in record.results
        if rung > 0 and (trial, rung - 1) in record.results
    )
    tokenizing = [
        (row.get("spans") or {}).get("tokenize", 0.0)
        for (_, rung), row in sorted(record.results.items())
        if rung == 0
    ]
    sharing = sum(max(tokenizing) - each for each in tokenizing) * rate if tokenizing else 0.0
    return {"stopping_usd": stopping, "promotion_usd": promotion, "sharing_usd": sharing}


def _gains(record: SearchRecord, winner: Json | None, greater: bool) -> list[Json]:
    """What more rows, and another epoch, should add to the winner."""
    parts = {trial for trial, of in record.parts.items() if winner and of == winner["trial"]}
    if winner is None or not parts:
        return []
    n_train = record.counts["n_train"]
    points = [
        (record.settings[trial][PART], row["score"], _error(row))
        for trial in sorted(parts)
        if (row := record.newest(trial)) and row["score"] is not None
    ]
    own = _error(winner)
    points.append((n_train, winner["score"], own))
    found = []
    epochs = winner["epochs"] or 0.0
    spans = record.newest(winner["trial"]).get("spans") or {}
    training_s = sum(spans.get(name, 0.0) for name in WORK)
    training_usd = training_s / 3600 * record.header["usd_per_hour"]
    best = (1.0 if record.header["metric"] in SHARES else math.inf) if greater else 0.0
    most = abs(best - winner["score"])
    with contextlib.suppress(InputError):
        more = min(NEXT_ROWS, n_train)
        rows = gain(
            [point[:2] for point in points],
            n_train + more,
            [error for _, _, error in points],
            greater_is_better=greater,
        )
        usd = training_usd * more / n_train
        found.append({"of": "rows", "more": more, "usd": usd, **_json(rows, most)})
    curve = [(step, score) for step, score in winner["curve"] if score is not None]
    with contextlib.suppress(InputError):
        if epochs >= 1 and curve:
            each = epochs / winner["n_steps"]
            rows = gain(
                [(step * each, score) for step, score in curve],
                epochs + 1,
                [own] * len(curve),
                greater_is_better=greater,
            )
            found.append(
                {"of": "epochs", "more": 1, "usd": training_usd / epochs, **_json(rows, most)}
            )
    return found


def _error(row: Mapping[str, Any]) -> float:
    """Standard error of a score; 0 where it is not known."""
    bounds = row["interval"]
    return 0.0 if bounds is None else (bounds[1] - bounds[0]) / (2 * Z_95)


def _json(found: Gain, most: float) -> Json:
    """A gain; no score is better than the best there is."""
    return {name: min(most, getattr(found, name)) for name in ("likely", "low", "high")}


def _next(folder: Path, winner: Json | None) -> list[str]:
    """Commands for the winner."""
    if winner is None:
        return []
    if winner["fraction"] < 1.0:
        return [f"farthing train {folder / WINNER}"]
    run = folder_of(folder, winner["trial"])
    return [
        f"farthing eval {run}",
        f"farthing export {run}",
        f"farthing train NEW_JOB.yaml --from {run}",
    ]
