"""How long a run takes to its next step when it is resumed late in a large data set.

    python bench/late_resume.py [--rows 10000000] [--done 0.99] [--json]

A run of a tiny model is begun and stopped after two steps; its checkpoint is then made to say that
`--done` of the epoch is behind it, and the same command resumes in a fresh process, from a token
set of that many rows, every byte checked. Trainers that replay their data loader take hours here.
Exits with 1 when the first step is not done within five seconds of the checkpoint's being loaded.
The rows repeat each other and are tokenized once: only how many there are matters.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from farthing.config.load import load_job
from farthing.data.token_set import DTYPES, set_key, tokenizer_sha256
from farthing.data.tokens import tokenize
from farthing.events import Event, Restored, StepTaken
from farthing.run.checkpoint import Checkpoints, State
from farthing.run.ledger import seconds_since_process_start
from farthing.run.parts import read_part
from farthing.storage.files import commit_folder
from farthing.tiny import demo_rows, make_model_folder, write_jsonl
from farthing.train.resolve import resolve

BLOCK = 1000  # rows that are repeated
BATCH = 16
LIMIT_S = 5.0


class Kept:
    """A part of a checkpoint as it was read."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state(self) -> State:
        """See `farthing.run.checkpoint.Part`."""
        return self._state

    def restore(self, tensors: Any, values: Any) -> None:
        """Not asked for."""
        raise NotImplementedError


def prepare(folder: Path, n_rows: int, done: float) -> tuple[Path, int]:
    """The data, its token set and the job; returns the job file and the step to resume at."""
    rows = demo_rows(BLOCK, seed=1)
    make_model_folder(
        folder / "model", (row["prompt"] + row["completion"] for row in rows), hidden=32
    )
    write_jsonl(folder / "block.jsonl", rows)
    n_blocks = math.ceil(n_rows / BLOCK)
    with open(folder / "data.jsonl", "wb") as file:
        block = (folder / "block.jsonl").read_bytes()
        for _ in range(n_blocks):
            file.write(block)
    late = int(done * math.ceil(n_blocks * BLOCK / BATCH))
    job = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "model", "init": "random"},
        "data": {"train": "data.jsonl", "eval_fraction": 0.0},
        "method": "full",
        "train": {"max_steps": late + 3, "global_batch_size": BATCH, "save_minutes": 60},
        "output_dir": "run",
        "cache_dir": "cache",
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    write_token_set(folder, n_blocks)
    return folder / "job.yaml", late


def write_token_set(folder: Path, n_blocks: int) -> None:
    """What tokenizing all rows would leave in the cache."""
    inputs = resolve(load_job(folder / "job.yaml"))
    one = resolve(load_job(folder / "job.yaml", [f"data.train={folder / 'block.jsonl'}"]))
    tokens = tokenize(one.train_sources, one.tokenizer, one.recipe, folder / "block")
    facts = {
        key: tokens.facts[key] * n_blocks
        for key in ("n_rows", "n_examples", "n_tokens", "n_targets")
    }
    name = inputs.train_sources[0].name
    facts |= {"sources": [{"name": name, "sha256": inputs.train_sources[0].sha256}]}
    at = np.arange(n_blocks)[:, None]

    def fill(draft: Path) -> None:
        lengths = np.tile(tokens.lengths, n_blocks)
        arrays: dict[str, Any] = {
            "ids": np.tile(tokens.ids, n_blocks),
            "targets": np.tile(tokens.targets, n_blocks),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]),
            "lines": (tokens.lines[None] + at * BLOCK).reshape(-1),
            "target_lengths": np.tile(tokens.target_lengths, n_blocks),
            "groups": np.tile(tokens.groups, n_blocks),
        }
        for name, array in arrays.items():
            array.astype(DTYPES[name]).tofile(draft / f"{name}.bin")

    key = set_key(inputs.train_sources, tokenizer_sha256(inputs.tokenizer), inputs.recipe)
    kept = {key: value for key, value in tokens.facts.items() if key not in ("files", "sha256")}
    commit_folder(folder / "cache" / "tokens" / key, fill, kept | facts)


def move_on(run: Path, late: int) -> None:
    """Make the newest checkpoint one of step `late`."""
    run_id = json.loads((run / "run.json").read_text("utf-8"))["run_id"]
    checkpoints = Checkpoints(run / "checkpoints", run_id, 2, warn=print)
    step = checkpoints.newest_valid()
    assert step is not None
    folder = checkpoints.folder_of(step)
    values = json.loads((folder / "state.json").read_text("utf-8"))
    parts = {name: Kept((read_part(folder, name), values[name])) for name in values}
    parts["progress"].state()[1].update(step=late, evaluated_step=0)
    checkpoints.save(late, parts, None)
    checkpoints.wait()


def attempt(job: Path, told: Connection, stop_after: int | None) -> None:
    """In a process of its own: run the job; tells at which age of the process the checkpoint was
    there, and each step.
    """
    import torch

    from farthing.train.run import train

    torch.set_num_threads(1)
    n_steps = 0

    def tell(event: Event) -> None:
        nonlocal n_steps
        if isinstance(event, Restored | StepTaken):
            kind = "step" if isinstance(event, StepTaken) else "restored"
            told.send((kind, event.step, seconds_since_process_start(), time.process_time()))
        n_steps += isinstance(event, StepTaken)
        if isinstance(event, StepTaken) and n_steps == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    train(load_job(job), tell)
    told.close()


def events_of(job: Path, stop_after: int | None = None) -> list[tuple[str, int, float, float]]:
    """What an attempt told."""
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=attempt, args=(job, its, stop_after)
    )
    process.start()
    its.close()
    events = []
    while True:
        try:
            events.append(mine.recv())
        except EOFError:
            break
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the run ended with {process.exitcode}")
    return events


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--done", type=float, default=0.99)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="farthing-late-") as folder:
        job, late = prepare(Path(folder), arguments.rows, arguments.done)
        events_of(job, stop_after=2)
        move_on(Path(folder) / "run", late)
        events = events_of(job)
    (_, step, loaded_s, loaded_cpu_s), (_, first, first_s, first_cpu_s), *_ = events
    assert (step, first) == (late, late + 1)
    figures = {
        "rows": arguments.rows,
        "resumed_at_step": late,
        "start_to_checkpoint_loaded_s": round(loaded_s, 2),
        "loaded_to_first_step_done_s": round(first_s - loaded_s, 2),
        "start_to_checkpoint_loaded_cpu_s": round(loaded_cpu_s, 2),
        "loaded_to_first_step_done_cpu_s": round(first_cpu_s - loaded_cpu_s, 2),
    }
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in figures.items()))
    return 0 if figures["loaded_to_first_step_done_s"] < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
