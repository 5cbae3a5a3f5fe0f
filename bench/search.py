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

import filecmp
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

from common import command, lines_of, seeds_of, write_job
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
WAYS, WEIGHTS = ("search", "optuna", "random"), "model/model.safetensors"
RUNGS = rungs_of(3, 0.1, N_TRIALS)
JOB = """
model: {model_name_or_path: ./model, init: random}
data: {train: ./data.jsonl, eval_fraction: 0.25, max_length: 64}
method: full
train: {num_train_epochs: 3, lr_scheduler_type: cosine, predict_with_generate: false, probe: false}
where: {device: cpu}
limits: {max_usd: 10}
output_dir: ./search
cache_dir: ./cache
"""


class Task(NamedTuple):
    name: str
    family: str
    kind: str
    metric: str
    rows: Callable[[Path], Iterable[dict[str, str]]]


def complaints(data: Path) -> Iterable[dict[str, str]]:
    rows = [row for row in lines_of(data / "complaints_narratives.jsonl") if row["text"]]
    frequent = [name for name, _ in Counter(row["product"] for row in rows).most_common(4)]
    of_name = (row for name in frequent for row in rows if row["product"] == name)
    return ({"text": row["text"][:400], "label": row["product"]} for row in of_name)


def restaurants(data: Path) -> Iterable[dict[str, str]]:
    rows = lines_of(data / "e2e_nlg_dev_test.jsonl")
    return ({"prompt": row["input"], "completion": " " + row["target"]} for row in rows)


def prompts(data: Path) -> Iterable[dict[str, str]]:
    for row in lines_of(data / "p3_open_license_sample.jsonl"):
        if len(row["prompt"]) < 400 and 0 < len(row["completion"]) < 100:
            yield {"input": row["prompt"], "target": row["completion"]}


TASKS = (
    Task("complaints", "bert", "classification", "accuracy", complaints),
    Task("restaurants", "llama", "causal-lm", "loss", restaurants),
    Task("prompts", "t5", "seq2seq", "loss", prompts),
)


def job_file(folder: Path, task: Task, data: Path, seed: int, usd: float, **keys: Any) -> Path:
    folder.mkdir(parents=True)
    rows = random.Random(0).sample(list(task.rows(data)), 260)
    texts = (" ".join(row.values()) for row in rows)
    make_model_folder(folder / "model", texts, task.family, hidden=32)
    write_jsonl(folder / "data.jsonl", rows)
    train = {"metric_for_best_model": task.metric, "seed": seed}
    search = {"vary": VARY, "trials": N_TRIALS, "seed": seed}
    keys |= {"task": task.kind, "train": train, "search": search, "where": {"usd_per_hour": usd}}
    return write_job(folder, JOB, **keys)


class Grid:
    """Every setting trained in full: what a search sees of it."""

    def __init__(self, task: Task, folder: Path, path: Path) -> None:
        self.greater = objective_of(task.kind).metrics[task.metric]
        self._metric, self._answers, self._folder = task.metric, list[Any](), folder / "grid"
        job, ways = load_job(path), {"n_steps": None, "times": None, "is_close": False}
        for number, settings in enumerate(GRID):
            run = str(self._folder / str(number))
            values = values_with(job, settings) | {"output_dir": run, "limits": {}}
            asked = {"values": values, "place": str(path), "first_fraction": RUNGS.fractions[0]}
            self._answers.append(train_segment(asked | ways, lambda row: None))

    def weights(self, settings: dict[str, Any]) -> Path:
        return self._folder / str(GRID.index(settings)) / WEIGHTS

    def score(self, settings: dict[str, Any], fraction: float) -> float | None:
        """The score of settings after a share of their steps."""
        rows = self._answers[GRID.index(settings)]["evaluations"]
        n = len(rows) if fraction == 1 else round(fraction / RUNGS.fractions[0])
        return best_score(rows[:n], self._metric, greater_is_better=self.greater, best=True)

    def loss_of(self, settings: dict[str, Any]) -> float:
        """By how much the settings' score is worse than the grid's best, as a share of that."""
        known = [score for each in GRID if (score := self.score(each, 1.0)) is not None]
        best, mine = max(known) if self.greater else min(known), self.score(settings, 1.0)
        return 1.0 if mine is None else abs(mine - best) / abs(best)

    def drawn(self, sampler: str, seed: int, n: int, fraction: float) -> list[dict[str, Any]]:
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
    rows, of_first = list[dict[str, Any]](), dict[str, Any]()
    n_full = max(1, round(RUNGS.full_runs(N_TRIALS)))
    for seed in seeds:
        path = job_file(folder / str(seed), task, data, seed, USD_PER_HOUR)
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
        "within_1_percent": {way: sum(row[way] <= 0.01 for row in rows) for way in WAYS},
        **of_first,
        "seeds": rows,
    }


def ran(path: Path, grid: Grid, trials: list[dict[str, Any]], winner: int) -> dict[str, Any]:
    """What a search that is killed comes to, and what one costs that is not."""
    assert run(path, N_KILLS) == 0, (path.parent / "said.txt").read_text()
    receipt, folder = read_receipt(path.parent / "search"), path.parent / "search"
    won = receipt["winner"]["trial"]
    folder.rename(path.parent / "killed")
    weights = folder_of(path.parent / "killed", won) / WEIGHTS
    bill = priced(load_job(path), str(path))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(path) == 0, (path.parent / "said.txt").read_text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "n_kills": N_KILLS,
        "same_trials": [each["settings"] for each in receipt["trials"]] == trials,
        "same_winner": won == winner,
        "same_weights": filecmp.cmp(weights, grid.weights(trials[winner]), shallow=False),
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
        path = job_file(folder / str(seed), TASKS[seed % 3], data, seed, price, **cap)
        began = time.monotonic()
        codes[run(path)] += 1
        over[seed] = time.monotonic() - began - seconds
    late = {seed: over_s for seed, over_s in over.items() if over_s > 0}
    return {"task": "caps", "n": len(seeds), "over_s": late, "exit_codes": dict(codes)}


def main() -> None:
    parser = command(__doc__, metavar="FILE", type=Path)
    parser.add_argument("--caps", type=int, default=0)
    arguments = parser.parse_args()
    data, first, found = Path(os.environ["FARTHING_DATA"]), arguments.first_seed, []
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS if arguments.n else ():
            found.append(measured(task, data, Path(folder) / task.name, seeds_of(arguments)))
            print(json.dumps(found[-1]), flush=True)
        if arguments.caps:
            found.append(capped(data, Path(folder) / "caps", range(first, first + arguments.caps)))
            print(json.dumps(found[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
