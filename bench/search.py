"""How good a winner a search finds, for how much of a grid's compute, and whether its cap holds.

    FARTHING_DATA=... python bench/search.py --seeds 10 --first-seed 0 [--caps 50] > out.json

The settings of three real tasks are trained in full for each seed, and a search is replayed on
their curves. That of the first seed is run too: killed five times it must have the same trials,
winner and weights. Beside it, at equal compute: full runs drawn by Optuna's TPE and at random.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import yaml

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

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
VARY, TASKS = TABLE["vary"], TABLE["tasks"]
GRID = [dict(zip(VARY, values, strict=True)) for values in product(*VARY.values())]
N_TRIALS, N_KILLS, USD_PER_HOUR = len(GRID), 5, 0.36
RUNGS, WEIGHTS = rungs_of(3, 0.1, N_TRIALS), "model/model.safetensors"
SAMPLERS = {"optuna": "tpe", "random": "random"}  # of full runs


def job_file(folder: Path, name: str, data: Path, seed: int, usd: float, **keys: Any) -> Path:
    task, lines = TASKS[name], lines_of(data / f"{name}.jsonl")
    rows = [{to: row[of][:400] for to, of in task["columns"].items()} for row in lines]
    rows = [row for row in rows if all(row.values())]
    most = dict(Counter(row.get("label") for row in rows).most_common(4))
    rows = random.Random(0).sample([row for row in rows if row.get("label") in most], 260)
    texts = (" ".join(row.values()) for row in rows)
    make_model_folder(folder / "model", texts, task["family"], hidden=32)
    write_jsonl(folder / "data.jsonl", rows)
    keys["train"] = {"metric_for_best_model": task["metric"], "seed": seed}
    keys["search"] = {"vary": VARY, "trials": N_TRIALS, "seed": seed}
    keys |= {"task": task["task"], "where": {"usd_per_hour": usd}}
    return write_job(folder, TABLE["job"], **keys)


class Grid:
    """Every setting trained in full: what a search sees of it."""

    def __init__(self, name: str, path: Path) -> None:
        self._metric = TASKS[name]["metric"]
        self.greater = objective_of(TASKS[name]["task"]).metrics[self._metric]
        self._answers, job = list[Any](), load_job(path)
        asked = {"n_steps": None, "times": None, "is_close": False, "place": str(path)}
        asked["first_fraction"] = RUNGS.fractions[0]
        for number, settings in enumerate(GRID):
            out = {"output_dir": str(path.parent / "grid" / str(number)), "limits": {}}
            asked["values"] = values_with(job, settings) | out
            self._answers.append(train_segment(asked, lambda row: None))

    def score(self, settings: dict[str, Any], fraction: float) -> float | None:
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
            found.append((settings, self.score(settings, fraction)))
        return [settings for settings, _ in found]

    def searched(self, seed: int) -> tuple[list[dict[str, Any]], int]:
        trials = self.drawn("tpe", seed, N_TRIALS, RUNGS.fractions[0])
        left = list(range(N_TRIALS))
        for fraction, n in zip(RUNGS.fractions, RUNGS.n_trials(N_TRIALS), strict=True):
            scores = {trial: self.score(trials[trial], fraction) for trial in left[:n]}
            left = ranked(scores, greater_is_better=self.greater)
        return trials, left[0]


def run(path: Path, n_kills: int = 0) -> int:
    """Run the search as a command, killed so often and resumed; its exit code."""
    chance, log = random.Random(0), path.parent / "search" / "search.jsonl"

    def n_lines() -> int:
        return log.read_bytes().count(b"\n") if log.exists() else 0

    words = [sys.executable, "-m", "farthing", "search", str(path)]
    with open(path.parent / "said.txt", "ab") as said:
        while True:
            enough = n_lines() + 3
            child = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
            while n_kills and child.poll() is None and n_lines() < enough:
                time.sleep(0.01)
            if n_kills and child.poll() is None:
                time.sleep(chance.uniform(0, 1.5))
                child.kill()
                n_kills -= 1
            if child.wait() != -signal.SIGKILL:
                return child.returncode


def ran(path: Path, trials: list[dict[str, Any]], winner: int) -> dict[str, Any]:
    folder = path.parent / "search"
    assert run(path, N_KILLS) == 0, (path.parent / "said.txt").read_text()
    receipt, bill = read_receipt(folder), priced(load_job(path), str(path))
    won, at = receipt["winner"]["trial"], GRID.index(trials[winner])
    folders = folder_of(folder, won), path.parent / "grid" / str(at)
    weights = [(each / WEIGHTS).read_bytes() for each in folders]
    folder.rename(path.parent / "killed")
    assert run(path) == 0, (path.parent / "said.txt").read_text()
    return {
        "n_kills": N_KILLS,
        "same_trials": [each["settings"] for each in receipt["trials"]] == trials,
        "same_winner": won == winner,
        "same_weights": weights[0] == weights[1],
        "planned_usd": bill and bill.of(N_TRIALS)["here"]["usd"],
        "usd": read_receipt(folder)["usd"],
    }


def measured(name: str, data: Path, folder: Path, seeds: range) -> dict[str, Any]:
    rows, of_first = list[dict[str, Any]](), dict[str, Any]()
    n_full = max(1, round(RUNGS.full_runs(N_TRIALS)))
    for seed in seeds:
        path = job_file(folder / str(seed), name, data, seed, USD_PER_HOUR)
        grid = Grid(name, path)
        trials, winner = grid.searched(seed)
        row = {"seed": seed, "search": grid.loss_of(trials[winner])}
        full = {way: grid.drawn(each, seed, n_full, 1.0) for way, each in SAMPLERS.items()}
        rows.append(row | {way: min(map(grid.loss_of, drawn)) for way, drawn in full.items()})
        of_first = of_first or ran(path, trials, winner)
    within = {way: sum(row[way] <= 0.01 for row in rows) for way in ("search", *SAMPLERS)}
    found = {"task": name, "within_1_percent": within, "seeds": rows}
    return found | {"compute_share": RUNGS.full_runs(N_TRIALS) / N_TRIALS} | of_first


def capped(data: Path, folder: Path, seeds: range) -> dict[str, Any]:
    late, codes = dict[int, float](), Counter[int]()
    for seed in seeds:
        chance = random.Random(seed)
        price, seconds = 10 ** chance.uniform(-1, 1.6), chance.uniform(8, 40)
        cap = {"limits": {"max_usd": price * seconds / 3600}}
        path = job_file(folder / str(seed), [*TASKS][seed % 3], data, seed, price, **cap)
        began = time.monotonic()
        codes[run(path)] += 1
        if (over_s := time.monotonic() - began - seconds) > 0:
            late[seed] = over_s
    return {"task": "caps", "n": len(seeds), "over_s": late, "exit_codes": dict(codes)}


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--caps", type=int, default=0)
    asked = parser.parse_args()
    data, first, found = Path(os.environ["FARTHING_DATA"]), asked.first_seed, list[Any]()
    with tempfile.TemporaryDirectory() as top:
        for name in TASKS if asked.n else ():
            found.append(measured(name, data, Path(top) / name, seeds_of(asked)))
        if asked.caps:
            found.append(capped(data, Path(top) / "caps", range(first, first + asked.caps)))
    print(json.dumps(found, indent=1))
