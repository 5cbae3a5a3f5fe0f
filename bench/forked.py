"""Small runs on several processes for benchmarks: forks of a server that has imported torch,
started and ended as `farthing train` starts and ends its ranks. Refuses GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import lines_of, write_job

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FARTHING_METADATA"] = "http://127.0.0.1:9"  # where nobody listens

from farthing.run.group import Elastic, Seat, environ_of
from farthing.tiny import demo_rows, write_jsonl
from small_models import make_model_folder

server = multiprocessing.get_context("forkserver")


class Forked:
    """A process of `farthing train`, as `subprocess.Popen` shows one."""

    def __init__(
        self, words: list[str], environ: dict[str, str], before: Callable[..., None], *given: Any
    ) -> None:
        server.set_forkserver_preload(["farthing.train.run", "farthing.cli.train", "forked"])
        self._process = server.Process(target=_train, args=(words, environ, before, given))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def send_signal(self, number: int) -> None:
        """Hand on a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _train(
    words: list[str], environ: dict[str, str], before: Callable[..., None], given: tuple[Any, ...]
) -> None:
    os.environ |= environ
    log = os.open(environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    before(*given)
    from farthing.cli.command import main

    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def nothing() -> None:
    """Before a process that nothing happens to."""


def start_of(
    folder: Path, before: Callable[..., None] = nothing, *given: Any
) -> Callable[[Seat, int, int], Any]:
    """What starts a rank of the job in `folder`; `before(*given, seat index, attempt)` runs in the
    process first.
    """

    nonce = os.urandom(4).hex()

    def start(seat: Seat, slot: int, attempt: int) -> Any:
        environ = environ_of(
            seat, slot, folder / f"meeting-{nonce}-{attempt}", {"CUDA_VISIBLE_DEVICES": ""}
        )
        environ |= {"LOG": str(folder / "out.txt")}
        more = (*given, seat.index, attempt) if before is not nothing else ()
        return Forked(["train", str(folder / "job.yaml")], environ, before, *more)

    return start


JOB = """
model: {init: random}
data: {train: data.jsonl, eval: eval.jsonl}
method: {name: lora, lora_r: 2, lora_dropout: 0.1}
where: {device: cpu, usd_per_hour: 1.0, gpus: 1, patience_s: 6}
train:
  {max_steps: 9, global_batch_size: 11, learning_rate: 0.01, micro_batch_tokens: 120, save_steps: 2,
  eval_strategy: steps, eval_steps: 4, save_total_limit: 3}
output_dir: run
cache_dir: cache
"""
TASKS = {"llama": "causal-lm", "t5": "seq2seq", "bert": "classification"}
FULL = {"name": "full", "lora_r": None, "lora_dropout": None}


def rows_for(family: str, seed: int) -> list[dict[str, str]]:
    """Rows of a task, of very uneven lengths."""
    drawn, rows = random.Random(seed), demo_rows(60, seed)
    for row in rows:
        row["completion"] = " ".join([row["completion"]] * drawn.choice((1, 1, 1, 2, 5)))
    if family == "t5":
        return [{"input": row["prompt"], "target": row["completion"]} for row in rows]
    if family == "bert":
        return [
            {"text": "".join(row.values()), "label": row["prompt"].split(";")[0]} for row in rows
        ]
    return rows


def make_job(folder: Path, base: Path, seed: int = 0, family: str = "llama", **keys: Any) -> None:
    """A job of a small model in a folder of its own; the model folder `base` is made if need be."""
    rows = rows_for(family, seed)
    if not base.exists():
        texts = (" ".join(row.values()) for row in rows)
        make_model_folder(base, texts, family, hidden=32, layers=2)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "data.jsonl", rows[:45])
    write_jsonl(folder / "eval.jsonl", rows[45:])
    keys["train"] = {"seed": seed, **keys.get("train", {})}
    model = {"model_name_or_path": str(base)}
    write_job(folder, JOB, task=TASKS[family], model=model, **keys)


def run_on(n: int, folder: Path, before: Callable[..., None] = nothing, *given: Any) -> None:
    """The job in `folder` on `n` processes, to its end."""
    code = Elastic(n, start_of(folder, before, *given), lambda text: None).wait()
    assert code == 0, (folder / "out.txt").read_text()[-2000:]


def apart(run: Path, alone: Path, n_steps: int) -> float:
    """How far the weights of two runs are from each other, relative to the largest of a tensor."""
    from farthing.run.parts import read_part

    folders = [
        sorted((each / "checkpoints").glob(f"step-{n_steps:08d}-*[0-9]"))[-1]
        for each in (alone, run)
    ]
    one, other = (read_part(folder, "model") for folder in folders)
    # below are sums that should be 0: biases of keys
    least = 1e-3 * max(float(each.abs().max()) for each in one.values())
    return max(
        float((each - other[name]).abs().max()) / max(float(each.abs().max()), least)
        for name, each in one.items()
    )


def sha256_of(run: Path, step: int) -> str:
    """Of weights, moments and progress as they were saved at a step, and of the losses on the way."""  # noqa: E501
    saves = sorted((run / "checkpoints").glob(f"step-{step:08d}-*[0-9]"))
    digest = hashlib.sha256()
    for path in sorted(saves[-1].iterdir()):
        if path.suffix == ".safetensors" or path.name == "state.json":
            digest.update(path.read_bytes())
    rows = lines_of(run / "log.jsonl", "examples")
    digest.update(json.dumps([row["loss"] for row in rows]).encode())
    return digest.hexdigest()
