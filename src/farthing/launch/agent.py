"""What runs on a rented machine: fetch what the run needs, train within the cap, say how it ended.

The cap that training gets is what is left after the machines before, this one's boot and its
teardown. At the end of the machine's time training is told to leave while there is time to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from farthing.errors import EXIT_INTERRUPTED, EXIT_LIMIT, FarthingError, RunBusyError
from farthing.launch.inputs import fetch_inputs
from farthing.launch.request import CREATED_AT, GRACE_S, LEAST_USE_S
from farthing.launch.words import Speaker
from farthing.run.ledger import MACHINE, steady_clock
from farthing.run.signals import handled
from farthing.run.supervisor import begin
from farthing.storage.files import Json, only_writer, read_json
from farthing.storage.objects import Retrying, Store, open_store

LOG, BEAT_S, MOST_LOG_BYTES = "log.agent.txt", 30.0, 65536
STORE_S = 600.0


class HostAgent:
    """One stay on a machine. `facts` are the ask's; `job` is the job file beside."""

    def __init__(self, job: Path, facts: Json, clock: Callable[[], float] | None = None) -> None:
        self.job, self.facts, self.clock = job, facts, clock or steady_clock()
        self.store: Store = open_store(facts["store"])
        self.speaker = Speaker(self.store, facts["name"])
        self._booted_s, self._booted_at = self._boot_s(), self.clock()
        self.usd_per_hour = float(facts["usd_per_hour"])
        self._child: subprocess.Popen[bytes] | None = None
        self._was_told = False

    def _boot_s(self) -> float:
        """Since it was asked for; a clock that is off counts as the whole boot limit."""
        try:
            since = self.clock() - float(os.environ[CREATED_AT])
        except (KeyError, ValueError):
            return 0.0
        limit = float(self.facts["boot_limit_s"])
        return since if 0 <= since <= limit else limit

    @property
    def boot_s(self) -> float:
        """From the request for the machine until now: inputs are fetched before training begins."""
        return self._booted_s + self.clock() - self._booted_at

    @property
    def max_usd(self) -> float | None:
        """What training may cost in all; None without a cap."""
        if (left_usd := self.facts.get("max_usd")) is None:
            return None
        return max(0.0, round(left_usd - self.boot_s / 3600 * self.usd_per_hour, 6))

    def run(self) -> int:
        """The exit code of the run or search here."""
        self.speaker.booted()
        code, why = EXIT_INTERRUPTED, "asked to leave before it began"
        with handled(self._hand_on):
            try:
                if self.facts.get("inputs"):
                    fetch_inputs(
                        Retrying(self.store, STORE_S), self.facts["inputs"], self.job.parent
                    )
                self._until_free()
                self.usd_per_hour = self.speaker.price() or self.usd_per_hour
                if not self._was_told:
                    code, why = self._train()
            except (FarthingError, OSError) as error:  # of a disk: another machine may do better
                code = error.exit_code if isinstance(error, FarthingError) else EXIT_INTERRUPTED
                why = str(error).splitlines()[0]
                sys.stderr.write(f"farthing: {error}\n")
        self.speaker.left(code, why)
        return code

    def _until_free(self) -> None:
        """Wait while the machine before this one may still save in a shared run folder."""
        folder, until = Path(self.facts["store"]), time.monotonic() + GRACE_S
        while (folder / ".lock").exists() and time.monotonic() < until and not self._was_told:
            try:
                with only_writer(folder):
                    return
            except RunBusyError:
                time.sleep(0.5)

    def _train(self) -> tuple[int, str]:
        n_rented = self.facts["n_gpus"]
        if n_rented and (n := n_gpus_of_torch()) < n_rented:
            return EXIT_INTERRUPTED, f"torch can use {n} of the {n_rented} GPUs that were rented"
        left_s = self.facts["most_s"] - self.boot_s - GRACE_S
        if left_s < LEAST_USE_S:
            return EXIT_LIMIT, f"booting left {max(0.0, left_s):.0f} s to train: too little"
        ends_at, does = time.monotonic() + left_s, self.facts["does"]
        values = {"limits.max_usd": self.max_usd} if self.max_usd is not None else {}
        if self.usd_per_hour != self.facts["usd_per_hour"]:
            values["where.usd_per_hour"] = self.usd_per_hour
        settings = [f"--set={name}={value!r}" for name, value in values.items()]
        settings += ["--set=when_done=null"]  # who has rented the machine gives it back
        with open(LOG, "ab") as out, open(LOG, "rb") as log:
            log.seek(0, os.SEEK_END)
            words = [does[0], str(self.job), *does[1:], *settings]
            own = {MACHINE: self.facts["name"]}
            self._child = begin(words, stdout=out, stderr=subprocess.STDOUT, environ=own)
            if self._was_told:  # while it began
                self._child.send_signal(signal.SIGTERM)
            done = threading.Event()
            follower = threading.Thread(target=self._follow, args=(log, done), daemon=True)
            follower.start()
            is_over, code = False, None
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._child.wait(timeout=1.0)
                if code is None and time.monotonic() > ends_at and not is_over:
                    is_over = True
                    self._child.send_signal(signal.SIGTERM)
            done.set()
            follower.join(60.0)
        if is_over and code in (EXIT_INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM):
            return EXIT_LIMIT, "the machine's time is over: as much as the cap buys"
        code = code if code >= 0 else 128 - code
        return code, f"`farthing {does[0]}` ended with {code}"

    def _hand_on(self, number: int, frame: Any) -> None:
        self._was_told = True
        if self._child is not None:
            self._child.send_signal(number)

    def _follow(self, log: IO[bytes], done: threading.Event) -> None:
        """Copy what training prints to our own output, and its end into the store now and then."""
        due_at, n_beats = 0.0, 0
        while True:
            is_last = done.wait(1.0)
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(log.read())
                sys.stdout.buffer.flush()
            if is_last or time.monotonic() >= due_at:
                due_at, n_beats, at = time.monotonic() + BEAT_S, n_beats + 1, log.tell()
                log.seek(max(0, at - MOST_LOG_BYTES))
                text = log.read(at - log.tell()).decode("utf-8", "replace")
                self.speaker.beat(f"{text}\n[{n_beats}]\n")
            if is_last:
                return


def n_gpus_of_torch() -> int:
    """That it can use here: a machine may have none, fewer, or a driver that is too old for it."""
    count = "import torch; print(torch.cuda.device_count() * torch.cuda.is_available())"
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        words = [sys.executable, "-c", count]
        return int(subprocess.run(words, stdout=subprocess.PIPE, timeout=300).stdout)
    return 0


def run_agent(job: str, told: str) -> int:
    return HostAgent(Path(job), read_json(Path(told))).run()
