"""Runs that are asked to leave or killed at a moment of their own."""

import signal
from collections.abc import Callable
from pathlib import Path

import yaml

from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.events import Emit, Event, StepTaken
from farthing.tiny import demo_rows, make_model_folder, write_jsonl
from workshop import Heard, make_job, train


def quiet(event: Event):
    """Listens to nothing."""


def job_in(folder: Path, name: str, **train_keys) -> Job:
    if not (folder / "model").exists():
        rows = demo_rows(60, seed=1)
        make_model_folder(
            folder / "model", (r["prompt"] + r["completion"] for r in rows), hidden=32, dropout=0.1
        )
        write_jsonl(folder / "data.jsonl", rows)
    job = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "model", "init": "random"},
        "data": {"train": "data.jsonl", "eval_fraction": 0.1},
        "method": "full",
        "train": {
            "max_steps": 12,
            "global_batch_size": 8,
            "save_steps": 2,
            "eval_steps": 4,
            "learning_rate": 3e-3,
        }
        | train_keys,
        "where": {"usd_per_hour": 3.6},
        "output_dir": name,
        "cache_dir": "cache",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(job))
    return load_job(folder / f"{name}.yaml")


def when(kind: type[Event], step: int | None, action: Callable[[], None]) -> Emit:
    """Do something once, at the first event of `kind` (of `step`)."""
    done = []

    def tell(event):
        if isinstance(event, kind) and not done and (step is None or vars(event)["step"] == step):
            done.append(True)
            action()

    return tell


def terminate():
    signal.raise_signal(signal.SIGTERM)


def stopped_and_resumed(folder: Path, **keys):
    """A job that left after step 3 of 6, as if a notice had come, and was started again."""
    job = make_job(folder, max_steps=6, n_rows=24, **keys)

    assert train(job, LeavesAt(step=3)).state == "interrupted"
    assert train(job).state == "finished"
    return job


class LeavesAt(Heard):
    """A listener that has the run asked to leave after a step, or at an event of `kind`."""

    def __init__(self, kind: type[Event] = StepTaken, step: int | None = None):
        super().__init__()
        self.leave = when(kind, step, terminate)

    def __call__(self, event: Event):
        super().__call__(event)
        self.leave(event)
