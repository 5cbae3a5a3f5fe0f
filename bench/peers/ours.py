"""farthing itself, by its job file and its front door; only what it tells and what it leaves on the
disk is looked at.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook

from farthing.events import Decided, Event, StepTaken
from peers.assignment import ADAM, MAX_GRAD_NORM, Assignment
from peers.clock import Clock


def job_values(assignment: Assignment, **more: Any) -> dict[str, Any]:
    """The job as a person would write it."""
    method: Any = "full"
    if assignment.method != "full":
        method = {
            "name": "lora",
            "lora_r": assignment.lora_r,
            "lora_alpha": assignment.lora_alpha,
            "target_modules": list(assignment.targets),
        }
    return {
        "task": assignment.task,
        "model": f"{assignment.folder}/model",
        "data": {
            "train": f"{assignment.folder}/train.jsonl",
            "columns": assignment.columns,
            "max_length": assignment.max_length,
            "max_target_length": assignment.max_target_length,
            "max_train_samples": assignment.n_steps * assignment.batch // assignment.epochs,
            "max_bad_rows": 0.2,
        },
        "method": method,
        "train": {
            "num_train_epochs": assignment.epochs,
            "global_batch_size": assignment.batch,
            "learning_rate": assignment.learning_rate,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "seed": assignment.seed,
            "bf16": assignment.precision == "bf16",
            "eval_strategy": "no",
            **ADAM,
        },
        "where": {"usd_per_hour": assignment.usd_per_hour},
        "output_dir": f"{assignment.out}/run",
        "cache_dir": f"{assignment.out}/cache",
        **more,
    }


def write_job(folder: Path, values: dict[str, Any]) -> Path:
    """As `job.yaml` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """`farthing train job.yaml` in this process, with the keys of `settings` set on top."""
    import farthing.train.run
    from farthing.config.load import load_job

    # tokenized before, as for everyone; measurements of other runs are not there to learn from
    shutil.copytree(
        f"{assignment.folder}/cache/tokens", f"{assignment.out}/cache/tokens", dirs_exist_ok=True
    )
    path = write_job(Path(assignment.out), job_values(assignment))
    job = load_job(
        path, [f"{key}={json.dumps(value)}" for key, value in assignment.settings.items()]
    )
    lengths = assignment.examples("train").lengths
    losses: list[float] = []
    said: dict[str, Any] = {}

    with embedded() as computed:

        def step_taken(*_: Any) -> None:
            clock.count(int(lengths[assignment.order[clock.n_steps]].sum()), sum(computed))
            computed.clear()
            clock.step_done()

        def tell(event: Event) -> None:
            if isinstance(event, Decided):  # the last that is said before the first step
                said.update(vars(event))
                computed.clear()
                clock.begin()
            elif isinstance(event, StepTaken) and event.loss is not None:
                losses.append(event.loss)

        # not when a step is told of: on a GPU that is some steps later
        hook = register_optimizer_step_post_hook(step_taken)
        try:
            outcome = farthing.train.run.train(job, tell)
        finally:
            hook.remove()
    if outcome.state != "finished":
        raise SystemExit(f"farthing stopped: {outcome.reason}")
    _same_examples(assignment)
    return {"model": f"{assignment.out}/run/model", "first_loss": losses[0], "said": said}


def _same_examples(assignment: Assignment) -> None:
    """The steps must have had the examples that the other contestants had."""
    lines = (Path(assignment.out) / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    taken = [sorted(row["examples"]) for row in map(json.loads, lines) if "examples" in row]
    if taken != [sorted(step) for step in assignment.order]:
        raise SystemExit(
            "farthing took other examples than the order says: the rows can't be compared"
        )


@contextmanager
def embedded() -> Iterator[list[int]]:
    """Counts what the model is given: the ids that go through its largest embedding, a number for
    each forward pass.
    """
    counted: list[int] = []
    largest: dict[str, int] = {"rows": 0}
    forward = torch.nn.Embedding.forward

    def counting(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if self.num_embeddings > largest["rows"]:
            largest["rows"] = self.num_embeddings
            counted.clear()
        if self.num_embeddings == largest["rows"]:
            counted.append(ids.numel())
        return forward(self, ids)

    torch.nn.Embedding.forward = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        torch.nn.Embedding.forward = forward  # type: ignore[method-assign]
