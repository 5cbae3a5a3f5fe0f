"""A trial of a job before it costs much: a few examples through train, save, kill, resume and
export, with its dollars.

The job's own files are used, in a folder of their own that is removed; attempts are processes, and
the first one is killed as a machine that is taken away would end it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from farthing.config.job import Job
from farthing.errors import FarthingError
from farthing.export.folders import export_run
from farthing.report.receipt import build_receipt
from farthing.run.folder import is_finished
from farthing.run.supervisor import begin, standing
from farthing.units import plural, say_bytes, say_seconds, say_usd

N_STEPS = 4
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Stage:
    name: str
    is_good: bool
    found: str


def try_out(path: Path, overrides: Sequence[str], job: Job, n_examples: int) -> Iterator[Stage]:
    """The stages, each as soon as it is done; after one that has failed nothing more comes."""
    with tempfile.TemporaryDirectory(prefix="farthing-trial-") as scratch:
        folder = Path(scratch) / "run"
        words = _words(path, overrides, folder, job, n_examples)
        killed = yield from _train_and_kill(words, folder)
        if not killed:
            return
        code, said = _run(words)
        if code != 0 or not is_finished(folder):
            yield Stage("resume", False, said)
            return
        receipt = build_receipt(folder)
        n = plural(receipt.interruptions, "interruption")
        yield Stage(
            "resume", True, f"{plural(receipt.steps, 'step')} done over {n}; the model is written"
        )
        if job.method.name != "full":
            yield _export(folder, job)
        price = say_usd(receipt.usd) if receipt.usd_is_known else "no price was given"
        yield Stage("bill of the trial", True, f"{price}, {say_seconds(receipt.wall_s)}")


def _words(
    path: Path, overrides: Sequence[str], folder: Path, job: Job, n_examples: int
) -> list[str]:
    """The command line of one attempt."""
    batch = max(1, min(job.global_batch_size, n_examples // 2))
    micro = job.train.per_device_train_batch_size
    few = [
        f"output_dir={folder}",
        f"data.max_train_samples={n_examples}",
        f"data.max_eval_samples={n_examples}",
        f"train.max_steps={N_STEPS}",
        "train.save_steps=1",
        "train.report_to=[]",
        "train.probe=false",
        f"train.global_batch_size={batch}",
        "train.gradient_accumulation_steps=null",
        "output_store=null",
    ]
    few += [f"train.per_device_train_batch_size={min(micro, batch)}"] if micro else []
    return [
        "train",
        str(path),
        *(word for value in [*overrides, *few] for word in ("--set", value)),
        "--json",
    ]


def _train_and_kill(words: Sequence[str], folder: Path) -> Generator[Stage, None, bool]:
    """Train until a checkpoint is safe, then kill the process. Returns whether that went as it
    should.
    """
    with tempfile.TemporaryFile() as printed:
        child, until = begin(words, stdout=printed), time.monotonic() + PATIENCE_S
        try:
            while (
                child.poll() is None and standing(folder).committed < 1 and time.monotonic() < until
            ):
                time.sleep(0.02)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        at = standing(folder)
        if at.committed < 1:
            printed.seek(0)
            yield Stage("train and save", False, _why(printed.read()))
            return False
    yield Stage("train and save", True, f"a checkpoint of step {at.committed} is safe")
    yield Stage("kill", True, f"the process was killed after step {at.step}")
    return True


def _run(words: Sequence[str]) -> tuple[int, str]:
    """(exit code, why where it is not 0)."""
    with tempfile.TemporaryFile() as printed:
        child = begin(words, stdout=printed)
        try:
            code = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return 1, f"it was not done after {say_seconds(PATIENCE_S)}"
        printed.seek(0)
        return code, _why(printed.read())


def _why(printed: bytes) -> str:
    """What an attempt has said of its end."""
    try:
        return str(json.loads(printed)["what"])
    except (ValueError, KeyError, TypeError):
        return "the attempt has ended early; its messages stand above"


def _export(folder: Path, job: Job) -> Stage:
    try:
        written = export_run(
            folder,
            folder.parent / "merged",
            "merged",
            trust_remote_code=job.model.trust_remote_code,
        )
    except FarthingError as error:
        return Stage("export", False, error.what)
    return Stage(
        "export",
        True,
        f"merged, {say_bytes(written['bytes'])}; it answers as the trained model does",
    )
