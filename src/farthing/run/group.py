"""The processes of an attempt that several GPUs share: which of them this one is, and how they are
started and end together.

A launcher (torchrun, accelerate, deepspeed, srun) says in the environment who is who; without one
`Elastic` starts the processes itself. Where one is lost the others end, and it begins again with
those that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from farthing.errors import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_LIMIT, EXIT_MISTAKE, InputError
from farthing.run.signals import handled
from farthing.run.supervisor import Child, how_it_ended
from farthing.units import plural

EXIT_RANK_LOST = 76
"""Of a process whose fellow was lost; seen by nobody but `Elastic`."""
GRACE_S, LAST_WORDS_S = 5.0, 60.0
"""For the others to end: once one was lost or the first has ended; once another has."""
STUCK_S = 30.0
"""After so long a killed process is taken for gone: it waits in the kernel."""
MOST_VAIN_STARTS = 3
"""Attempts in a row that end as their processes lose each other, and none of them is gone."""
STORE = "FARTHING_RANKS_STORE"
"""Names the file through which processes that `farthing` has started find each other."""
ATTEMPT = "FARTHING_RANKS_ATTEMPT"
_LEFT = {EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGINT}
"""Codes of a process that was asked to leave: in order, or before it could listen."""
_SLURM_LOCAL = "SLURM_STEP_TASKS_PER_NODE"
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_FOREIGN = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "PARALLELISM_CONFIG_")


@dataclass(frozen=True)
class Seat:
    """Which of the processes of an attempt this is; alone where nobody has started others."""

    index: int = 0
    n: int = 1
    local_index: int = 0
    """Among those of this machine."""
    n_local: int = 1
    by: str = ""
    """Who has started them; empty where nobody has."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that decides, writes and speaks."""
        return self.index == 0


def seat_in(environ: Mapping[str, str]) -> Seat:
    """The seat that an environment gives. Raises `InputError` where it contradicts itself, or says
    half of it.

    RANK and WORLD_SIZE are those of torchrun, which accelerate and deepspeed set too; the SLURM_
    ones are those of a step that `srun` has begun (a batch script itself has no
    SLURM_STEP_NUM_TASKS). MASTER_ADDR alone means nothing.
    """

    def number(name: str, unset: int) -> int:
        text = environ.get(name, str(unset)).split("(")[0]  # as Slurm has it: 1(x2)
        try:
            return int(text)
        except ValueError:
            raise _refusal(f"{text!r} is no number", name) from None

    by, names = "", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        is_torchrun = "TORCHELASTIC_RUN_ID" in environ
        by = "farthing" if STORE in environ else "torchrun" if is_torchrun else "a launcher"
    elif number("SLURM_STEP_NUM_TASKS", 1) > 1:
        by = "srun"
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _SLURM_LOCAL)
    elif "RANK" in environ or number("WORLD_SIZE", 1) != 1:
        raise _refusal("of RANK and WORLD_SIZE only one is set", "RANK, WORLD_SIZE")
    elif also := next((each for each in _OF_MPI if number(each, 1) > 1), ""):
        raise _refusal("mpirun has started several processes, and farthing does not join", also)
    index, n = number(names[0], 0), number(names[1], 1)
    local, n_local = number(names[2], index), number(names[3], n)
    is_so = (number("RANK", index), number("WORLD_SIZE", n)) == (index, n)
    if not (is_so and 0 <= index < n and 0 <= local < n_local):
        raise _refusal(
            f"process {index} of {n}, {local} of {n_local} on this machine: that can't be",
            ", ".join(dict.fromkeys([*names, "RANK", "WORLD_SIZE"])),
        )
    if by == "srun" and os.isatty(0):
        raise _refusal(
            f"this terminal is one of the {n} tasks of a Slurm step, and the others start nothing"
            " by themselves",
            names[1],
        )
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if n > 1 and by != "farthing" and lacking:
        raise InputError(
            f"{by} has started {n} processes, which can't find each other",
            where=", ".join(lacking),
            to_do=(
                "export the first machine's name and a free port, or start one process a machine"
                " with where.gpus: all"
            ),
        )
    number("MASTER_PORT", 0)
    return Seat(index, n, local, n_local, by)


def _refusal(what: str, where: str) -> InputError:
    to_do = "start with torchrun or srun, or unset it and set where.gpus"
    return InputError(what, where=where, to_do=to_do)


def not_followed(environ: Mapping[str, str]) -> list[str]:
    """A launcher's variables that say how to train: the job says that."""
    return sorted(name for name in environ if name.startswith(_FOREIGN))


def device_of(slot: int, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process on GPU number `slot` of this machine's visible ones."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(slot)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[slot] if slot < len(names) else ",".join(names)


def sit_down(seat: Seat, environ: MutableMapping[str, str]) -> None:
    """Leave this process the one GPU of its seat, before torch is imported."""
    if seat.by != "farthing":
        environ["CUDA_VISIBLE_DEVICES"] = device_of(seat.local_index, environ)


def environ_of(seat: Seat, slot: int, meeting: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a seat, on GPU number `slot`; all meet in the file `meeting`."""
    added = {
        "RANK": str(seat.index),
        "WORLD_SIZE": str(seat.n),
        "LOCAL_RANK": str(seat.local_index),
        "LOCAL_WORLD_SIZE": str(seat.n_local),
        STORE: str(meeting),
        ATTEMPT: "0",
        "CUDA_VISIBLE_DEVICES": device_of(slot, environ),
    }
    if "GLOO_SOCKET_IFNAME" not in environ and sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = "lo"  # the name of a container's host need not lead anywhere
    return added


Start = Callable[[Seat, int, int], "subprocess.Popen[bytes]"]
"""(seat, number of the GPU on this machine, how often it was begun) -> the process."""


class Elastic:
    """An attempt on several GPUs of this machine, begun again with those that are left whenever
    some are lost.

    The steps stay the same: what a step is made of does not depend on how many share it.
    """

    def __init__(
        self,
        n: int,
        start: Start,
        say: Callable[[str], None],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_end` is called when all processes of an attempt have ended."""
        self._start, self._say, self._at_end = start, say, at_end
        self._slots = list(range(n))
        self._asked_to_leave = False
        self.n_begun = 0
        self._begin()

    def _begin(self) -> None:
        n, self.n_begun = len(self._slots), self.n_begun + 1
        self.children = [
            self._start(Seat(index, n, index, n, "farthing"), slot, self.n_begun)
            for index, slot in enumerate(self._slots)
        ]
        self._codes = dict[int, int]()
        """Exit codes of those that have ended, negative: the signal."""
        self._killed = set[int]()
        """Those that did not end when the others had."""
        if self._asked_to_leave:  # meanwhile
            self.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Until the attempt has ended for good; its exit code, negative: a signal."""
        n_vain = 0
        while True:
            self.wait_for_all()
            self._at_end()
            lost, codes, n = self._lost(), set(self._codes.values()), len(self._slots)
            for wanted in (EXIT_MISTAKE, EXIT_LIMIT):
                if wanted in codes:
                    return wanted
            if not lost and EXIT_RANK_LOST not in codes:
                return self._codes[0]
            n_vain = 0 if lost else n_vain + 1
            if self._asked_to_leave or codes & _LEFT or n_vain == MOST_VAIN_STARTS:
                return EXIT_INTERRUPTED
            if len(lost) == n:
                return self._codes[0]
            self._slots = [slot for index, slot in enumerate(self._slots) if index not in lost]
            who = ", ".join(f"rank {index} of {n} ({self._how(index)})" for index in lost)
            self._say(
                f"{f'{who} was lost' if who else 'all ranks ended'}; resuming from the last"
                f" checkpoint with {plural(len(self._slots), 'rank')}"
            )
            self._begin()

    def wait_for_all(self) -> None:
        """Until none is left. Who has not ended some time after the first that has is killed."""
        kills_at = float("inf")
        while len(self._codes) < len(self.children):
            for index, child in enumerate(self.children):
                if index not in self._codes and (code := child.poll()) is not None:
                    self._codes[index] = code
                    was_lost = code < 0 or code in (EXIT_CRASH, EXIT_MISTAKE, EXIT_RANK_LOST)
                    soon = was_lost or index == 0
                    kills_at = min(kills_at, time.monotonic() + (GRACE_S if soon else LAST_WORDS_S))
            left = [index for index in range(len(self.children)) if index not in self._codes]
            if time.monotonic() > kills_at:
                for index in left:
                    if index not in self._killed:
                        self._killed.add(index)
                        self.children[index].kill()
            if time.monotonic() > kills_at + STUCK_S:
                self._codes |= dict.fromkeys(left, -signal.SIGKILL)
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        """Hand a wish to leave to all that are left; no attempt is begun after it."""
        self._asked_to_leave = True
        for index, child in enumerate(self.children):
            if index not in self._codes:
                child.send_signal(number)

    def _lost(self) -> list[int]:
        """Those that were killed or crashed; where none was, those that did not answer."""
        gone = [
            each for each, code in sorted(self._codes.items()) if code < 0 or code == EXIT_CRASH
        ]
        return [index for index in gone if index not in self._killed] or gone

    def _how(self, index: int) -> str:
        """What became of one that was lost."""
        if index in self._killed:
            return "it did not answer"
        return "it crashed" if self._codes[index] > 0 else how_it_ended(self._codes[index])


def until_it_ends(attempt: Child) -> int:
    """Of an attempt that is not tried again, 1 where it was killed; signals go to it."""
    with handled(lambda number, frame: attempt.send_signal(number)):
        code = attempt.wait()
        return code if code >= 0 else EXIT_CRASH
