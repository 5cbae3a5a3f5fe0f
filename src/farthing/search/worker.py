"""The process that trains trials: segments of runs, one after another, so that libraries are
imported once.

It reads a task a line and answers in lines. It ends when its parent does. A trial is stopped at its
rung by interrupting it there: it saves, and the next segment resumes it to the bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from farthing.clock import seconds_since_boot
from farthing.config.job import Job
from farthing.errors import EXIT_INTERRUPTED, FarthingError, RunInterruptedError
from farthing.events import Evaluated, Event, Restored, Warned, ignore
from farthing.report.training_log import read_log
from farthing.run.folder import LOG
from farthing.run.opening import uncounted_age_s
from farthing.search.space import job_of
from farthing.storage.files import Json

Tell = Callable[[Json], None]


def serve() -> None:
    """Do tasks until there are no more. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tasks: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, tasks), daemon=True).start()
    _prepare()

    def tell(row: Json) -> None:
        answers.write(json.dumps(row, default=str) + "\n")
        answers.flush()

    while True:
        task = json.loads(tasks.get())
        try:
            done = _DO[task["do"]](task, tell)
        except FarthingError as error:
            said = {"state": "failed", "kind": type(error).__name__, **error.as_dict()}
            done = {**said, "error": str(error).splitlines()[0]}
        except Exception as error:  # of a model's code, a library: the trial's own
            done = {"state": "failed", "kind": "crash", "error": f"{type(error).__name__}: {error}"}
        tell({"done": done})


def _listen(lines: IO[str], tasks: queue.Queue[str]) -> None:
    for line in lines:
        tasks.put(line)
    os._exit(EXIT_INTERRUPTED)  # nobody waits for the answer; what was committed is whole


def _prepare() -> None:
    """Import what trials need, while the search still plans; its bill has these seconds."""
    import gc

    import farthing.train.run  # noqa: F401

    uncounted_age_s()
    gc.collect()
    gc.freeze()  # libraries are not looked through again by each trial


def train_segment(task: Json, tell: Tell) -> Json:
    """Train a trial until its rung, and how it stands there."""
    from farthing.train.run import train

    job = job_of(task["values"] | {"limits": _limits(task["ends_at"])}, task["place"])
    n_steps = task["n_steps"] or _n_steps(job)
    every = max(1, math.ceil(n_steps * task["first_fraction"]))
    until = n_steps if task["times"] is None else min(n_steps, every * task["times"])
    scored = job.train.model_copy(update={"eval_strategy": "steps", "eval_steps": every})
    job = job.model_copy(update={"train": scored})
    log, is_paused, each = Path(job.output_dir) / LOG, False, dict[int, Any]()

    def on_event(event: Event) -> None:
        nonlocal is_paused
        if isinstance(event, Warned):
            tell({"warning": event.text})
        if isinstance(event, Evaluated):
            each[event.step] = event.each
            tell({"step": event.step, "n_steps": n_steps, "metrics": event.log_row()})
        elif not isinstance(event, Restored) or event.step not in _evaluations(log):
            return
        if until <= event.step < n_steps:
            is_paused = True
            raise RunInterruptedError("paused")

    outcome = train(job, on_event)
    receipt = outcome.receipt
    _free_memory()
    return {
        "state": "paused" if is_paused else outcome.state,
        "reason": f"paused at step {receipt.steps}" if is_paused else outcome.reason,
        "step": receipt.steps,
        "n_steps": n_steps,
        "evaluations": [row for step, row in _evaluations(log).items() if step <= until],
        "each": each if task["is_close"] else {},
        "spans": {span.name: span.seconds for span in receipt.spans},
        "epochs": receipt.epochs,
    }


def _limits(ends_at: float) -> Json:
    """Of a trial that ends then: a moment, since what another machine has spent on it is known only
    once it begins."""
    if math.isinf(ends_at):
        return {}
    until = datetime.fromtimestamp(time.time() + ends_at - seconds_since_boot(), UTC)
    return {"deadline": until.isoformat(timespec="milliseconds")}


def _evaluations(log: Path) -> dict[int, Json]:
    """The numbers of each evaluation, by its step."""
    return {
        row["step"]: {"step": row["step"]}
        | {
            name: value
            for name, value in row["metrics"].items()
            if isinstance(value, int | float | None) or name == "confusion"
        }
        for row in read_log(log).evaluations
    }


def _n_steps(job: Job) -> int:
    """Steps of the whole job, by its examples."""
    from farthing.data.batches import Batches
    from farthing.train.resolve import open_examples, resolve

    train, _ = open_examples(resolve(job), ignore)
    batches = Batches(train.indices, job.global_batch_size, job.train.seed, train.weights)
    return job.train.max_steps or math.ceil(job.train.num_train_epochs * batches.steps_per_epoch)


def count_examples(task: Json, tell: Tell) -> Json:
    """How many examples a job trains on and evaluates with."""
    from farthing.train.resolve import open_examples, resolve

    train, held_out = open_examples(resolve(job_of(task["values"], task["place"])), ignore)
    n_held_out = 0 if held_out is None else len(held_out.indices)
    return {"state": "finished", "n_train": len(train.indices), "n_eval": n_held_out}


def identify_vocabulary(task: Json, tell: Tell) -> Json:
    """Which tokens a job's model has."""
    from farthing.train.resolve import resolve

    tokens = resolve(job_of(task["values"], task["place"])).tokenizer.get_vocab()
    text = json.dumps(sorted(tokens.items()))
    return {"state": "finished", "sha256": hashlib.sha256(text.encode()).hexdigest()}


def confirm(task: Json, tell: Tell) -> Json:
    """Metrics of a trial's model on the evaluation examples that no choice was made on: those
    behind the first `skip`.
    """
    from farthing.after.evaluation import evaluate_run, on_examples
    from farthing.after.held_out import HeldOut
    from farthing.train.resolve import open_examples, resolve

    job = job_of(task["values"], task["place"])
    spec, run = resolve(job), Path(job.output_dir)
    _, held_out = open_examples(spec, ignore)
    assert held_out is not None
    rest = replace(held_out, indices=held_out.indices[task["skip"] :])
    by = on_examples(HeldOut(spec, rest, "examples no choice was made on", run))
    found = evaluate_run(run, by, with_base=False)
    return {"state": "finished", "metrics": found["tuned"], "n_examples": len(rest)}


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_DO: dict[str, Callable[[Json, Tell], Json]] = {
    "train": train_segment,
    "count": count_examples,
    "identify": identify_vocabulary,
    "confirm": confirm,
}

if __name__ == "__main__":
    serve()
