"""Do a contestant's documents stay apart? The same first step twice, with other words in every
second document.

The documents have different lengths, falling: whoever takes them in order, or by length, has
touched ones before untouched ones. The first weights are larger than usual, so that the loss of a
document would depend on what is before it.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from peers import judge, models, workloads
from peers.race import Failed, Piece, Race

N = 8
TOUCHED = list(range(0, N, 2))
SIZE = workloads.Size(hidden=64, layers=2, words=512, spread=0.15)
SHAPE = workloads.Workload("leak", "causal-lm", mean=40, spread=0.0, max_length=512)


def folders(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Two workloads of one step: as it was, and with the documents `TOUCHED` of other content."""
    return [
        workloads.prepare(root, SHAPE, SIZE, N, 1, rows=(_rows(is_second), _rows(False)[:1]))
        for is_second in (False, True)
    ]


def _rows(is_second: bool) -> list[dict[str, str]]:
    rows = []
    for index in range(N):
        seed = index + 100 * (is_second and index in TOUCHED)
        words = workloads.sentence(
            np.random.Generator(np.random.PCG64(seed)), 60 - 5 * index, SIZE.words
        )
        rows.append({"prompt": " ".join(words[:-10]), "completion": " " + " ".join(words[-10:])})
    return rows


def check(race: Race, contestant: str) -> dict[str, Any] | None:
    """What `judge.leak` finds, kept as records are; None when there is no time left."""
    both = [
        Piece(
            folder,
            facts,
            "full",
            "fp32",
            epochs=1,
            batch=N,
            threads=race.threads,
            usd_per_hour=0.0,
            out=race.root / "runs" / f"leaks-{number}",
        ).entry(contestant, seed=0)
        for number, (folder, facts) in enumerate(folders(race.root / "workloads"))
    ]
    path = race.root / "records" / f"leak-{race.key(both[0])}.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    if not race.has_time("leaks"):
        return None
    started = time.monotonic()
    try:
        results = race.spawn(both)
    except Failed as error:
        return {"failed": str(error), "passes": False}
    race.took_s["leaks"] = time.monotonic() - started
    initial = models.load_trained(both[0].model, both[0].model, "causal-lm")
    before, after = (one.examples("train") for one in both)
    losses = (results[0]["first_loss"], results[1]["first_loss"])
    found = judge.leak(initial, before, after, both[0].order[0], TOUCHED, losses).as_dict()
    path.write_text(json.dumps(found), encoding="utf-8")
    for one in both:
        shutil.rmtree(one.out, ignore_errors=True)
    return found
