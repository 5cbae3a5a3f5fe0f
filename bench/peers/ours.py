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
from unittest import mock

import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import lines_of
from farthing.events import Decided, Event
from peers.assignment import ADAM, MAX_GRAD_NORM, USD_PER_HOUR, Assignment
from peers.clock import Clock


def write_job(assignment: Assignment, **data: Any) -> Path:
    """The job as a person would write it, with more keys of `data`."""
    folder, out = Path(assignment.folder), Path(assignment.out)
    lora = {"name": "lora", "lora_r": assignment.lora_r, "target_modules": assignment.targets}
    lora["lora_alpha"] = 2 * assignment.lora_r
    values = {
        "task": assignment.task,
        "model": {"model_name_or_path": str(assignment.model)},
        "data": {
            "train": f"{folder}/train.jsonl",
            "columns": assignment.columns,
            "max_length": assignment.max_length,
            "max_target_length": assignment.max_target_length,
            "max_train_samples": sum(map(len, assignment.order)),
            "max_bad_rows": 0.2,
            **data,
        },
        "method": "full" if assignment.method == "full" else lora,
        "train": {
            "num_train_epochs": 1,
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
        "where": {"usd_per_hour": USD_PER_HOUR},
        "output_dir": f"{out}/run",
        "cache_dir": f"{out}/cache",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return out / "job.yaml"


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """`farthing train job.yaml` in this process, with the keys of `settings` set on top."""
    import farthing.train.run
    from farthing.config.load import load_job

    # tokenized before, as for everyone; measurements of other runs are not there to learn from
    out = Path(assignment.out)
    cache = Path(assignment.folder) / "cache" / "tokens"
    shutil.copytree(cache, out / "cache" / "tokens", dirs_exist_ok=True)
    more = [f"{key}={json.dumps(value)}" for key, value in assignment.settings.items()]
    job, lengths = load_job(write_job(assignment), more), assignment.examples("train").lengths

    with embedded() as computed:

        def step_taken(*_: Any) -> None:
            clock.count(int(lengths[assignment.order[clock.n_steps]].sum()), sum(computed))
            computed.clear()
            clock.step_done()

        def tell(event: Event) -> None:
            if isinstance(event, Decided):  # the last that is said before the first step
                computed.clear()
                clock.begin()

        # not when a step is told of: on a GPU that is some steps later
        hook = register_optimizer_step_post_hook(step_taken)
        try:
            outcome = farthing.train.run.train(job, tell)
        finally:
            hook.remove()
    if outcome.state != "finished":
        raise SystemExit(f"farthing stopped: {outcome.reason}")
    taken = [sorted(row["examples"]) for row in lines_of(out / "run" / "log.jsonl", "examples")]
    if taken != [sorted(step) for step in assignment.order]:
        raise SystemExit(
            "farthing took other examples than the order says: the rows can't be compared"
        )
    return {"model": f"{out}/run/model"}


@contextmanager
def embedded() -> Iterator[list[int]]:
    """Counts what the model is given: the ids that go through its largest embedding, a number for
    each forward pass.
    """
    counted, largest, forward = list[int](), [0], torch.nn.Embedding.forward

    def counting(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if self.num_embeddings > largest[0]:
            largest[0] = self.num_embeddings
            counted.clear()
        if self.num_embeddings == largest[0]:
            counted.append(ids.numel())
        return forward(self, ids)

    with mock.patch.object(torch.nn.Embedding, "forward", counting):
        yield counted
