"""Kill a training run at random moments, again and again, and hold the result against one that was left alone.

    python bench/survive.py --seeds 50 --first-seed 0 [--data FILE.jsonl] [--json] [--spawn] [--new-machine]

For each seed a small model is trained twice: once uninterrupted, once through a chain of 3 to 5 SIGKILLs at random
moments (half of them while a checkpoint is being written), then to the end by the same command. Dropout is on. Equal
means to the bit: every logged (step, example ids, loss, gradient norm, metrics), the final weights, the optimizer's
state and the exported model. A last run of the same command must train nothing. Exits with 1 if anything differs.

The attempts are forked from a parent that has the libraries imported, so that a kill costs a second and not ten;
`--spawn` starts `python -m farthing train` each time instead. With `--new-machine` each kill takes the run folder too: the
next attempt starts on an empty disk, from a store (a folder beside it) alone.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from farthing.tiny import demo_rows, make_model_folder, write_jsonl

N_STEPS = 18
FAMILY = {"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"}


@dataclass
class Chain:
    """What happened to one seed."""

    seed: int
    task: str
    method: str
    kills: list[int] = field(default_factory=list)
    """Step in the log when each kill struck."""
    resumed_at: list[int] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def survive(
    seed: int, folder: Path, data: Path | None = None, *, spawn: bool = False, new_machine: bool = False
) -> Chain:
    """Run one seed in `folder`; the chain says what differed (nothing, if all is well)."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    train_file, task = _data(folder, data, seed)
    method = ["full", "lora"][seed // 3 % 2]
    with open(train_file, encoding="utf-8-sig", errors="replace") as file:
        some_text = list(itertools.islice(file, 500))
    if not spawn:
        _import_everything()
    # in a child: training a tokenizer starts threads, and a process with threads must not be forked from
    _in_a_child(lambda: make_model_folder(folder / "model", some_text, FAMILY[task], hidden=32, layers=2, dropout=0.1))
    chain = Chain(seed, task, method)
    alone, killed = (
        _job(folder, "alone", train_file, task, method, seed),
        _job(folder, "killed", train_file, task, method, seed, folder / "store" if new_machine else None),
    )
    started = time.monotonic()
    code = _finish(_start(alone, spawn))
    duration_s = time.monotonic() - started
    if code != 0:
        chain.differences.append(f"the uninterrupted run exited with {code}: {_last_words(alone)}")
        return chain
    for _ in range(chance.randint(3, 5)):
        attempt = _start(killed, spawn)
        still_to_do = max(0.2, 1 - _last_step(folder / "killed") / N_STEPS)
        _wait_for_the_moment(attempt, folder / "killed" / "checkpoints", chance, 0.8 * duration_s * still_to_do)
        if attempt.poll() is not None:
            break  # it had reached the end before the moment came
        attempt.kill()
        _finish(attempt)
        chain.kills.append(_last_step(folder / "killed"))
        if new_machine:
            shutil.rmtree(folder / "killed", ignore_errors=True)
    code = _finish(_start(killed, spawn))
    if code != 0:
        chain.differences.append(f"the last attempt exited with {code}: {_last_words(killed)}")
        return chain
    before = result_of(folder / "killed")
    chain.differences += differences(result_of(folder / "alone"), before)
    chain.resumed_at = [row["first_step"] for row in _ledger(folder / "killed") if row["state"] == "started"]
    code = _finish(_start(killed, spawn))
    if code != 0 or result_of(folder / "killed") != before:
        chain.differences.append(f"the run of a finished job exited with {code} and changed something")
    return chain


def result_of(run: Path) -> dict[str, bytes | str]:
    """Everything about a finished run that has to be equal, by name."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name[:13])
    result: dict[str, bytes | str] = {f"log line {index}": json.dumps(row) for index, row in enumerate(rows)}
    for path in sorted([*newest.glob("*.safetensors"), newest / "state.json", *(run / "model").glob("*.safetensors")]):
        result[f"{path.parent.name[:13]}/{path.name}"] = path.read_bytes()
    return result


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of what differs, at most ten."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)][:10]


def _data(folder: Path, data: Path | None, seed: int) -> tuple[Path, str]:
    """The file to train on and its task; without `data` the three tasks take turns."""
    if data is not None:
        with open(data, encoding="utf-8-sig") as file:
            columns = set(json.loads(file.readline()))
        if {"text", "label"} <= columns:
            return data, "classification"
        return data, "seq2seq" if {"input", "target"} <= columns else "causal-lm"
    task = list(FAMILY)[seed % 3]
    rows: list[dict[str, Any]] = []
    for row in demo_rows(80, seed):
        if task == "classification":
            rows.append({"text": row["prompt"], "label": row["completion"].split(" food")[0].split()[-1]})
        elif task == "seq2seq":
            rows.append({"input": row["prompt"], "target": row["completion"]})
        else:
            rows.append(row)
    return write_jsonl(folder / "data.jsonl", rows), task


def _job(
    folder: Path, name: str, train_file: Path, task: str, method: str, seed: int, store: Path | None = None
) -> Path:
    job = {
        "task": task,
        "model": {"model_name_or_path": str(folder / "model"), "init": "random"},
        "data": {
            "train": str(train_file),
            "eval_fraction": 0.2,
            "max_length": 128,
            "max_target_length": 24,
            "max_train_samples": 64,
            "max_eval_samples": 8,
            "max_bad_rows": 0.2,
        },
        "method": {"name": method, "lora_r": 4, "lora_dropout": 0.1},
        "train": {
            "max_steps": N_STEPS,
            "global_batch_size": 8,
            "per_device_train_batch_size": 3,
            "learning_rate": 3e-3,
            "save_steps": 2,
            "eval_steps": 6,
            "seed": seed,
        },
        "output_dir": str(folder / name),
        "output_store": store and str(store),
        "cache_dir": str(folder / "cache" / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


# ---- attempts ----


class Forked:
    """`farthing train` in a child forked from this process, which has the libraries already."""

    def __init__(self, job: Path) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                output = os.open(job.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                import torch

                from farthing.cli import main

                torch.set_num_threads(1)  # the model is tiny: a second thread would only wait
                code = main(["train", str(job)])
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _in_a_child(work: Callable[[], object]) -> None:
    """Do something that only leaves files behind."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("the model folder could not be made")


def _import_everything() -> None:
    for module in ("farthing.train", "peft", "rouge_score.rouge_scorer", "transformers.integrations.peft"):
        importlib.import_module(module)
    for family in FAMILY.values():
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _start(job: Path, spawn: bool) -> Any:
    if not spawn:
        return Forked(job)
    with open(job.with_suffix(".out"), "wb") as output:
        command = [sys.executable, "-m", "farthing", "train", str(job)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def _finish(attempt: Any) -> int:
    while (code := attempt.poll()) is None:
        time.sleep(0.01)
    return int(code)


def _wait_for_the_moment(attempt: Any, checkpoints: Path, chance: random.Random, duration_s: float) -> None:
    """A random moment of the run; every second time, a random moment within the writing of a checkpoint."""
    end = time.monotonic() + chance.uniform(0, duration_s)
    inside_a_save = chance.random() < 0.5
    while time.monotonic() < end and attempt.poll() is None:
        time.sleep(0.002)
    if inside_a_save:
        while attempt.poll() is None and not any(checkpoints.glob("*.draft-*")):
            time.sleep(0.0002)
        time.sleep(chance.uniform(0, 0.01))


def _ledger(run: Path) -> list[dict[str, Any]]:
    lines = (run / "ledger.jsonl").read_text("utf-8").splitlines() if (run / "ledger.jsonl").exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    return rows


def _last_step(run: Path) -> int:
    log = run / "log.jsonl"
    return log.read_text("utf-8").count('"examples"') if log.exists() else 0


def _last_words(job: Path) -> str:
    return job.with_suffix(".out").read_text("utf-8", errors="replace")[-500:]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many chains")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="train on this JSONL file instead of made-up rows")
    parser.add_argument("--spawn", action="store_true", help="a fresh Python for each attempt")
    parser.add_argument("--new-machine", action="store_true", help="each kill takes the disk too: only a store is left")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chains = []
    started = time.monotonic()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        with tempfile.TemporaryDirectory(prefix="farthing-survive-") as folder:
            chain = survive(
                seed, Path(folder), arguments.data, spawn=arguments.spawn, new_machine=arguments.new_machine
            )
        chains.append(chain)
        if not arguments.json:
            verdict = "identical" if not chain.differences else f"DIFFERS: {'; '.join(chain.differences)}"
            print(
                f"seed {seed}: {chain.task}, {chain.method}; killed at steps {chain.kills}, "
                f"resumed at {chain.resumed_at}: {verdict}",
                flush=True,
            )
    n_identical = sum(not chain.differences for chain in chains)
    n_kills = sum(len(chain.kills) for chain in chains)
    seconds = time.monotonic() - started
    if arguments.json:
        print(
            json.dumps(
                {
                    "identical": n_identical,
                    "seeds": len(chains),
                    "kills": n_kills,
                    "seconds": round(seconds, 1),
                    "chains": [vars(chain) for chain in chains],
                },
                indent=1,
            )
        )
    else:
        print(f"{n_identical} of {len(chains)} runs bit-identical after {n_kills} kills, {seconds:.0f} s")
    return 0 if n_identical == len(chains) else 1


if __name__ == "__main__":
    sys.exit(main())
