"""How good a winner a search finds, for how much of a grid's compute, and whether its cap holds.

    FARTHING_DATA=... python bench/search.py --seeds 10 --first-seed 0 [--caps 50] --json out.json

Three real tasks have a grid that is trained in full, for each seed of training and search. Trials
resume to the bit, so the grid's curves say what a search would have seen: it is replayed on them.
That of the first seed is run too: once for its bill, and once killed five times, which must have
the trials, the winner and the weights of the replay and the grid. Beside it, at equal compute:
Optuna's TPE with separate full runs, and random search. --caps: searches at drawn prices whose caps
are too small for them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from farthing.config.job import SearchSection
from farthing.config.load import load_job
from farthing.objectives.registry import objective_of
from farthing.search.bill import priced
from farthing.search.halving import best_score, ranked, rungs_of
from farthing.search.receipt import read_receipt
from farthing.search.record import folder_of
from farthing.search.space import draw, values_with
from farthing.search.worker import train_segment
from farthing.tiny import write_jsonl
from small_models import make_model_folder

RATES, BATCHES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2], [16, 32]
VARY = {"train.learning_rate": RATES, "train.global_batch_size": BATCHES}
GRID = [dict(zip(VARY, values, strict=True)) for values in product(RATES, BATCHES)]
N_TRIALS, N_KILLS, USD_PER_HOUR = len(GRID), 5, 0.36
RUNGS = rungs_of(3, 0.1, N_TRIALS)


class Task(NamedTuple):
    """A real task, small enough for a CPU."""

    name: str
    family: str
    kind: str
    metric: str
    rows: Callable[[Path], Iterable[dict[str, str]]]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def complaints(data: Path) -> Iterable[dict[str, str]]:
    """Complaints of the four most frequent products."""
    rows = [row for row in _read(data / "complaints_narratives.jsonl") if row["text"]]
    frequent = [name for name, _ in Counter(row["product"] for row in rows).most_common(4)]
    of_name = (row for name in frequent for row in rows if row["product"] == name)
    return ({"text": row["text"][:400], "label": row["product"]} for row in of_name)


def restaurants(data: Path) -> Iterable[dict[str, str]]:
    """Facts about restaurants, and a sentence that says them."""
    rows = _read(data / "e2e_nlg_dev_test.jsonl")
    return ({"prompt": row["input"], "completion": " " + row["target"]} for row in rows)


def prompts(data: Path) -> Iterable[dict[str, str]]:
    """Short prompts of many tasks, and their answers."""
    for row in _read(data / "p3_open_license_sample.jsonl"):
        if len(row["prompt"]) < 400 and 0 < len(row["completion"]) < 100:
            yield {"input": row["prompt"], "target": row["completion"]}


TASKS = (
    Task("complaints", "bert", "classification", "accuracy", complaints),
    Task("restaurants", "llama", "causal-lm", "loss", restaurants),
    Task("prompts", "t5", "seq2seq", "loss", prompts),
)


def job_file(folder: Path, task: Task, data: Path, seed: int, **keys: Any) -> Path:
    """The search's job."""
    folder.mkdir(parents=True)
    rows = random.Random(0).sample(list(task.rows(data)), 260)
    texts = (" ".join(row.values()) for row in rows)
    make_model_folder(folder / "model", texts, task.family, hidden=32)
    write_jsonl(folder / "data.jsonl", rows)
    job = {
        "task": task.kind,
        "model": {"model_name_or_path": "./model", "init": "random"},
        "data": {"train": "./data.jsonl", "eval_fraction": 0.25, "max_length": 64},
        "method": "full",
        "train": {
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine",
            "metric_for_best_model": task.metric,
            "predict_with_generate": False,
            "probe": False,
            "seed": seed,
        },
        "search": {"vary": VARY, "trials": N_TRIALS, "seed": seed},
        "where": {"device": "cpu", "usd_per_hour": USD_PER_HOUR},
        "limits": {"max_usd": 10},
        "output_dir": "./search",
        "cache_dir": "./cache",
        **keys,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def key_of(settings: dict[str, Any]) -> str:
    """Settings as a key."""
    return json.dumps(settings, sort_keys=True)


def sha256_of(run: Path) -> str:
    """Of a run's exported weights; empty where it has none."""
    path = run / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class Grid:
    """Every setting trained in full: what a search sees of it."""

    def __init__(self, task: Task, folder: Path, path: Path) -> None:
        self.greater = objective_of(task.kind).metrics[task.metric]
        self._metric, self._answers, self.weights = task.metric, {}, {}
        job, ways = load_job(path), {"n_steps": None, "times": None, "is_close": False}
        for number, settings in enumerate(GRID):
            run = folder / "grid" / f"{number:02d}"
            values = values_with(job, settings) | {"output_dir": str(run), "limits": {}}
            asked = {"values": values, "place": str(path), "first_fraction": RUNGS.fractions[0]}
            self._answers[key_of(settings)] = train_segment(asked | ways, lambda row: None)
            self.weights[key_of(settings)] = sha256_of(run)

    def score(self, settings: dict[str, Any], fraction: float) -> float | None:
        """The score of settings after a share of their steps."""
        rows = self._answers[key_of(settings)]["evaluations"]
        n = len(rows) if fraction == 1 else round(fraction / RUNGS.fractions[0])
        return best_score(rows[:n], self._metric, greater_is_better=self.greater, best=True)

    def loss_of(self, settings: dict[str, Any]) -> float:
        """By how much the settings' score is worse than the grid's best, as a share of that."""
        known = [score for each in GRID if (score := self.score(each, 1.0)) is not None]
        best, mine = max(known) if self.greater else min(known), self.score(settings, 1.0)
        return 1.0 if mine is None else abs(mine - best) / abs(best)

    def drawn(self, sampler: str, seed: int, n: int, fraction: float) -> list[dict[str, Any]]:
        """Settings as Optuna draws them after such scores."""
        section = SearchSection.model_validate({"vary": VARY, "seed": seed, "sampler": sampler})
        found: list[tuple[dict[str, Any], float | None]] = []
        for number in range(n):
            settings = draw(section, number, found, greater_is_better=self.greater)
            assert settings is not None
            found.append((settings, self.score(settings, fraction)))
        return [settings for settings, _ in found]

    def searched(self, seed: int) -> tuple[list[dict[str, Any]], int]:
        """(settings of the trials, the winner) of our search."""
        trials = self.drawn("tpe", seed, N_TRIALS, RUNGS.fractions[0])
        left = list(range(N_TRIALS))
        for fraction, n in zip(RUNGS.fractions, RUNGS.n_trials(N_TRIALS), strict=True):
            scores = {trial: self.score(trials[trial], fraction) for trial in left[:n]}
            left = ranked(scores, greater_is_better=self.greater)
        return trials, left[0]


def run(path: Path, n_kills: int = 0) -> int:
    """Run the search as a command, killed so often and resumed; its exit code."""
    chance, log = random.Random(0), path.parent / "search" / "search.jsonl"
    while True:
        n_before = log.read_bytes().count(b"\n") if log.exists() else 0
        with open(path.parent / "said.txt", "ab") as said:
            words = [sys.executable, "-m", "farthing", "search", str(path)]
            child = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        while n_kills and child.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") >= n_before + 3:
                time.sleep(chance.uniform(0, 1.5))
                os.kill(child.pid, signal.SIGKILL)
                n_kills -= 1
                break
            time.sleep(0.01)
        if child.wait() != -signal.SIGKILL:
            return child.returncode


def measured(task: Task, data: Path, folder: Path, seeds: range) -> dict[str, Any]:
    """All figures of one task."""
    rows, of_first = list[dict[str, Any]](), dict[str, Any]()
    n_full = max(1, round(RUNGS.full_runs(N_TRIALS)))
    for seed in seeds:
        path = job_file(folder / str(seed), task, data, seed)
        grid = Grid(task, path.parent, path)
        trials, winner = grid.searched(seed)
        row = {"seed": seed, "search": grid.loss_of(trials[winner])}
        for name, sampler in (("optuna", "tpe"), ("random", "random")):
            row[name] = min(map(grid.loss_of, grid.drawn(sampler, seed, n_full, 1.0)))
        rows.append(row)
        if not of_first:
            of_first = ran(path, grid, trials, winner)
    return {
        "task": task.name,
        "compute_share": RUNGS.full_runs(N_TRIALS) / N_TRIALS,
        "within_1_percent": {
            name: sum(row[name] <= 0.01 for row in rows) for name in ("search", "optuna", "random")
        },
        **of_first,
        "seeds": rows,
    }


def ran(path: Path, grid: Grid, trials: list[dict[str, Any]], winner: int) -> dict[str, Any]:
    """What a search that is killed comes to, and what one costs that is not."""
    assert run(path, N_KILLS) == 0, (path.parent / "said.txt").read_text()
    receipt, folder = read_receipt(path.parent / "search"), path.parent / "search"
    won = receipt["winner"]["trial"]
    folder.rename(path.parent / "killed")
    bill = priced(load_job(path), str(path))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(path) == 0, (path.parent / "said.txt").read_text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "n_kills": N_KILLS,
        "same_trials": [each["settings"] for each in receipt["trials"]] == trials,
        "same_winner": won == winner,
        "same_weights": sha256_of(folder_of(path.parent / "killed", won))
        == grid.weights[key_of(trials[winner])],
        "planned_usd": bill and bill.of(N_TRIALS)["here"]["usd"],
        "usd": read_receipt(folder)["usd"],
        "usd_of_cpu_time": cpu_s / 3600 * USD_PER_HOUR,
    }


def capped(data: Path, folder: Path, seeds: range) -> dict[str, Any]:
    """Searches at drawn prices, with caps that buy too little."""
    over, codes = dict[int, float](), Counter[int]()
    for seed in seeds:
        chance = random.Random(seed)
        price, seconds = 10 ** chance.uniform(-1, 1.6), chance.uniform(8, 40)
        cap = {"limits": {"max_usd": price * seconds / 3600}}
        where = {"where": {"device": "cpu", "usd_per_hour": price}}
        path = job_file(folder / str(seed), TASKS[seed % 3], data, seed, **cap, **where)
        began = time.monotonic()
        codes[run(path)] += 1
        over_s = time.monotonic() - began - seconds
        if over_s > 0:
            over[seed] = over_s
    return {"task": "caps", "n": len(seeds), "over_s": over, "exit_codes": dict(codes)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--caps", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    data, first, found = Path(os.environ["FARTHING_DATA"]), arguments.first_seed, []
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS if arguments.seeds else ():
            seeds = range(first, first + arguments.seeds)
            found.append(measured(task, data, Path(folder) / task.name, seeds))
            print(json.dumps(found[-1]), flush=True)
        if arguments.caps:
            seeds = range(first, first + arguments.caps)
            found.append(capped(data, Path(folder) / "caps", seeds))
            print(json.dumps(found[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
