"""How good a winner a search finds, and for how much of a grid's compute: three real tasks whose
grid is trained in full.

    FARTHING_DATA=... python bench/search.py --seeds 10 --first-seed 0 --json result.json

A seed is that of training and of the search; each has a grid of its own. Trials resume to the bit,
so the grid's curves say what a search of it would have seen: the search is replayed on them. That
of the first seed is run, killed five times, and must have the trials, the winner and the weights of
the replay and of the grid's own run. Compute is training in trials of full length. Beside it, at
equal compute: Optuna's TPE with separate full runs, and random search.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
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

VARY = {
    "train.learning_rate": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "train.global_batch_size": [16, 32],
}
N_TRIALS, N_KILLS = 12, 5


class Objective(NamedTuple):
    """A real task, small enough for a CPU."""

    name: str
    family: str
    kind: str
    metric: str
    rows: Callable[[Path], list[dict[str, str]]]


def complaints(data: Path) -> list[dict[str, str]]:
    """Complaints of the four most frequent products."""
    rows = _read(data / "complaints_narratives.jsonl")
    frequent = [name for name, _ in Counter(row["product"] for row in rows).most_common(4)]
    chosen = [row for name in frequent for row in rows if row["product"] == name]
    found = [{"text": row["text"][:400], "label": row["product"]} for row in chosen]
    return _some([row for row in found if row["text"]], 280)


def restaurants(data: Path) -> list[dict[str, str]]:
    """Facts about restaurants, and a sentence that says them."""
    rows = _read(data / "e2e_nlg_dev_test.jsonl")
    return _some([{"prompt": row["input"], "completion": " " + row["target"]} for row in rows], 240)


def prompts(data: Path) -> list[dict[str, str]]:
    """Short prompts of many tasks, and their answers."""
    rows = _read(data / "p3_open_license_sample.jsonl")
    short = [row for row in rows if len(row["prompt"]) < 400 and 0 < len(row["completion"]) < 100]
    return _some([{"input": row["prompt"], "target": row["completion"]} for row in short], 240)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _some(rows: list[dict[str, str]], n: int) -> list[dict[str, str]]:
    return random.Random(0).sample(rows, min(n, len(rows)))


TASKS = (
    Objective("complaints", "bert", "classification", "accuracy", complaints),
    Objective("restaurants", "llama", "causal-lm", "loss", restaurants),
    Objective("prompts", "t5", "seq2seq", "loss", prompts),
)


def job_file(folder: Path, task: Objective, data: Path, seed: int) -> Path:
    """The search's job."""
    folder.mkdir(parents=True)
    rows = task.rows(data)
    make_model_folder(
        folder / "model", (" ".join(row.values()) for row in rows), task.family, hidden=32
    )
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
        "where": {"device": "cpu", "usd_per_hour": 0.36},
        "limits": {"max_usd": 10},
        "output_dir": "./search",
        "cache_dir": "./cache",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def grid(folder: Path, path: Path) -> dict[str, Any]:
    """Every setting trained in full: its curve, and the hash of its weights."""
    job = load_job(path)
    found = {}
    for number, settings in enumerate(every_setting()):
        values = values_with(job, settings)
        run = folder / "grid" / f"{number:02d}"
        values |= {"output_dir": str(run), "limits": {}}
        task = {
            "values": values,
            "place": str(path),
            "n_steps": None,
            "first_fraction": rungs_of(3, 0.1, N_TRIALS).fractions[0],
            "times": None,
        }
        answer = train_segment(task, lambda row: None)
        found[json.dumps(settings, sort_keys=True)] = {
            "curve": answer["evaluations"],
            "n_steps": answer["n_steps"],
            "weights": sha256_of(run),
        }
    return found


def every_setting() -> Iterator[dict[str, Any]]:
    """All settings of the grid."""
    for rate in VARY["train.learning_rate"]:
        for batch in VARY["train.global_batch_size"]:
            yield {"train.learning_rate": rate, "train.global_batch_size": batch}


def sha256_of(run: Path) -> str:
    """Of a run's exported weights; empty where it has none."""
    path = run / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class Curves:
    """What a search sees of the grid."""

    def __init__(self, task: Objective, of_grid: dict[str, Any]) -> None:
        self.greater = objective_of(task.kind).metrics[task.metric]
        self._metric, self._grid = task.metric, of_grid

    def score(self, settings: dict[str, Any], step_share: float) -> float | None:
        """The score of settings after a share of their steps."""
        row = self._grid[json.dumps(settings, sort_keys=True)]
        rows = [each for each in row["curve"] if each["step"] <= step_share * row["n_steps"] + 1]
        if step_share < 1:
            first = row["curve"][0]["step"]
            rows = [each for each in rows if each["step"] <= first * round(step_share * 9)]
        return best_score(rows, self._metric, greater_is_better=self.greater, best=True)

    def loss_of(self, settings: dict[str, Any]) -> float:
        """By how much the settings' score is worse than the grid's best, as a share of that."""
        scores = {key: self.score(json.loads(key), 1.0) for key in self._grid}
        known = [score for score in scores.values() if score is not None]
        best = max(known) if self.greater else min(known)
        mine = scores[json.dumps(settings, sort_keys=True)]
        return 1.0 if mine is None else abs(mine - best) / abs(best)


def replayed(curves: Curves, seed: int) -> tuple[list[dict[str, Any]], int, float]:
    """(settings of the trials, the winner, compute in full trainings) of our search."""
    section = SearchSection.model_validate({"vary": VARY, "seed": seed})
    rungs = rungs_of(3, 0.1, N_TRIALS)
    drawn: list[tuple[dict[str, Any], float | None]] = []
    for number in range(N_TRIALS):
        settings = draw(section, number, drawn, greater_is_better=curves.greater)
        assert settings is not None
        drawn.append((settings, curves.score(settings, rungs.fractions[0])))
    left = list(range(N_TRIALS))
    for rung in range(rungs.n):
        scores = {trial: curves.score(drawn[trial][0], rungs.fractions[rung]) for trial in left}
        order = ranked(scores, greater_is_better=curves.greater)
        left = order[: rungs.n_trials(N_TRIALS)[rung + 1]] if rung + 1 < rungs.n else order
    return [settings for settings, _ in drawn], left[0], rungs.full_runs(N_TRIALS)


def separate(curves: Curves, seed: int, sampler: str, n_full: int) -> float:
    """What the best of so many full runs loses against the grid's best."""
    section = SearchSection.model_validate({"vary": VARY, "seed": seed, "sampler": sampler})
    drawn: list[tuple[dict[str, Any], float | None]] = []
    for number in range(n_full):
        settings = draw(section, number, drawn, greater_is_better=curves.greater)
        assert settings is not None
        drawn.append((settings, curves.score(settings, 1.0)))
    return min(curves.loss_of(settings) for settings, _ in drawn)


def killed(path: Path, n_kills: int) -> int:
    """Run the search as a command, killed so often and resumed; how often it was."""
    n, chance = 0, random.Random(0)
    log = path.parent / "search" / "search.jsonl"
    while True:
        with open(path.parent / "said.txt", "ab") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", "farthing", "search", str(path)],
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        wait_s = chance.uniform(0, 1.5)
        while child.poll() is None and n < n_kills:
            if log.exists() and log.read_bytes().count(b"\n") >= before + 3:
                time.sleep(wait_s)
                os.kill(child.pid, signal.SIGKILL)
                n += 1
                break
            time.sleep(0.01)
        if child.wait() == 0:
            return n
        if n >= n_kills and child.returncode not in (0, -signal.SIGKILL):
            raise SystemExit((path.parent / "said.txt").read_text())


def measured(task: Objective, data: Path, folder: Path, seeds: range) -> dict[str, Any]:
    """All figures of one task; of the first seed a search is run as well."""
    rows: list[dict[str, Any]] = []
    of_search: dict[str, Any] = {}
    for seed in seeds:
        place = folder / str(seed)
        path = job_file(place, task, data, seed)
        of_grid = grid(place, path)
        curves, n_grid = Curves(task, of_grid), len(of_grid)
        trials, winner, compute = replayed(curves, seed)
        n_full = max(1, round(compute))
        rows.append(
            {
                "seed": seed,
                "loss": curves.loss_of(trials[winner]),
                "compute_share": compute / n_grid,
                "optuna_loss": separate(curves, seed, "tpe", n_full),
                "random_loss": separate(curves, seed, "random", n_full),
            }
        )
        if not of_search:
            bill = priced(load_job(path), str(path))
            n_kills = killed(path, N_KILLS)
            receipt = read_receipt(place / "search")
            won = receipt["winner"]
            weights = sha256_of(folder_of(place / "search", won["trial"]))
            of_search = {
                "n_kills": n_kills,
                "same_trials": [each["settings"] for each in receipt["trials"]] == trials,
                "same_winner": won["trial"] == winner,
                "same_weights": weights
                == of_grid[json.dumps(trials[winner], sort_keys=True)]["weights"],
                "usd": receipt["usd"],
                "planned_usd": None if bill is None else bill.of(N_TRIALS)["here"]["usd"],
                "max_usd": receipt["max_usd"],
            }
    return {
        "task": task.name,
        "n_grid": n_grid,
        "n_seeds": len(rows),
        "seeds": rows,
        "within_1_percent": sum(row["loss"] <= 0.01 for row in rows),
        "optuna_within_1_percent": sum(row["optuna_loss"] <= 0.01 for row in rows),
        "random_within_1_percent": sum(row["random_loss"] <= 0.01 for row in rows),
        "compute_share": max(row["compute_share"] for row in rows),
        **of_search,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="*", choices=[task.name for task in TASKS])
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    data = Path(os.environ["FARTHING_DATA"])
    found = []
    for task in TASKS:
        if arguments.tasks and task.name not in arguments.tasks:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found.append(measured(task, data, Path(folder), seeds))
        print(json.dumps(found[-1]), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
