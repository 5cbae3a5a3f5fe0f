"""The workers of a search, one a GPU, as this process sees them.

A worker that fails or dies is replaced. Signals of the terminal reach workers only through `leave`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from farthing.storage.files import Json, open_own


class WorkerDiedError(Exception):
    """A worker ended without an answer; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process of the trial ended with {code}")
        self.code = code


class Worker:
    """A process that trains trials on one device."""

    def __init__(self, log: Path, environ: dict[str, str]) -> None:
        self.log, self._environ = log, environ
        self._process: subprocess.Popen[str] | None = None

    def call(self, task: Json, tell: Callable[[Json], None]) -> Json:
        """The answer to a task; what comes before it goes to `tell`. Raises `WorkerDiedError`."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: the answer does not come either
            process.stdin.write(json.dumps(task, default=str) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if not line.endswith("\n"):  # it died while it wrote
                break
            row = json.loads(line)
            if "done" in row:
                if row["done"]["state"] == "failed":  # its memory may hold what failed
                    self.end()
                return dict(row["done"])
            tell(row)
        code = process.wait()
        self._process = None
        raise WorkerDiedError(code)

    def start(self) -> subprocess.Popen[str]:
        """The process, begun where there is none."""
        if self._process is None:
            with open_own(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "farthing.search.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **self._environ},
                    process_group=0,
                )
        return self._process

    def leave(self) -> None:
        """Ask the trial under way to save and leave."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the trial under way at once."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """End the process, which is idle."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            process.wait()


def environs(n: int, device: str, group: str) -> list[dict[str, str]]:
    """What tells each of `n` workers which GPU is its own, and trackers what belongs together."""
    of_trackers = ("WANDB_RUN_GROUP", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT")
    grouped = {name: group for name in of_trackers if name not in os.environ}
    if device == "cpu" or n == 1:
        return [grouped for _ in range(n)]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(n)]
    return [{**grouped, "CUDA_VISIBLE_DEVICES": name} for name in names[:n]]
