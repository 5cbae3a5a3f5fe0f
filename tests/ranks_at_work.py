"""Jobs and processes of several ranks."""

import os
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

import farthing.train.run
from farthing.config.job import Job
from farthing.dist.ranks import NoRoomLeft
from farthing.model.forward import Forward
from farthing.train.step import Step
from together import on_ranks
from workshop import Heard, make_job, rows_of

SMALL = {"eval_strategy": "steps", "eval_steps": 3, "micro_batch_tokens": 90}
SMALL |= {"save_total_limit": 20, "pretrained": True}


def lora_job(folder: Path, **keys) -> Job:
    method = {"name": "lora", "lora_r": 2, "lora_dropout": 0.1}
    where = {"gpus": 1, "patience_s": 60, "same_bits": True, **keys.pop("where", {})}
    settings = {
        "n_rows": 29,
        "eval_rows": rows_of("llama", 9, 5),
        "max_steps": 6,
        "global_batch_size": 11,
        "save_steps": 2,
        "size": {"hidden": 32, "layers": 1},
    }
    return make_job(folder, method=method, where=where, **(SMALL | settings | keys))


def child(code: str) -> Popen[bytes]:
    return Popen([sys.executable, "-S", "-c", f"import os,sys,time,signal\n{code}"])


def no_room(method: str, n_times: int):
    """This method of `Forward` or `Step` runs out of memory so many times."""
    owner: Any = Forward if hasattr(Forward, method) else Step
    honest, left = getattr(owner, method), [n_times]

    def full(forward, *arguments):
        left[0] -= 1
        if left[0] < 0:
            return honest(forward, *arguments)
        raise torch.OutOfMemoryError("made up")

    setattr(owner, method, full)


def run(
    rank: int, job: dict[str, Any], mishap: list[Any] | None = None, n_local: int = 0
) -> dict[str, Any]:
    """Train the job on this rank; `mishap` is (rank, step, what): a signal, or a method and
    how often it has no room.
    """
    take, loop, held, heard = Step.take, farthing.train.run.loop, [0, 0], Heard()
    if n_local:
        os.environ |= {"LOCAL_RANK": str(rank % n_local), "LOCAL_WORLD_SIZE": str(n_local)}

    def mishap_in(steps, step):
        nonlocal mishap
        if mishap and mishap[:2] == [rank, step]:
            (_, _, *what), mishap = mishap, None
            os.kill(os.getpid(), what[0]) if len(what) == 1 else no_room(*what)
        return take(steps, step)

    def looked_at(attempt):
        named = attempt.model.named_parameters()
        weights = [w for name, w in named if ".layers." in name and not w.requires_grad]
        weights = weights or [*attempt.model.parameters()]
        own = [getattr(weight, "_local_tensor", weight) for weight in weights]
        held[:] = [sum(weight.numel() for weight in each) for each in (own, weights)]
        ranks = attempt.context.ranks
        for name, weight in ranks.trained_of(attempt.model).items():
            first, end = ranks.rows_of(name) or (0, len(weight))
            assert end - first == len(weight), "as its rows are saved"
        return loop(attempt)

    Step.take, farthing.train.run.loop = mishap_in, looked_at  # type: ignore[method-assign]
    try:
        outcome = farthing.train.run.train(Job.model_validate(job), heard)
    except NoRoomLeft as error:
        return {"code": error.exit_code, "why": str(error)}
    return {
        "held": held,  # of the layers' frozen weights, where there are any: own rows, and all
        "code": outcome.exit_code,
        "receipt": outcome.receipt and outcome.receipt.to_json(),
        "warnings": heard.warnings,
        "said": [str(each) for each in heard],
    }


def train_on(n: int, folder: Path, job: Job, *more) -> list[Any]:
    return on_ranks(n, folder / "meetings", run, job.model_dump(mode="json"), *more)


def finish_on(n: int, folder: Path, job: Job, *more) -> list[Any]:
    found = train_on(n, folder, job, *more)
    assert [each["code"] for each in found] == [0] * n
    return found
