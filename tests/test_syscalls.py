"""SIGKILL before every system call of a save, and within a write to a folder that is a store: what
the kernel was told is all that is left.

One process is traced to see which calls it makes on files. Then for each of them `strace` attaches
to another that is about to do the same, and kills it there. Refuses to stand in for a disk that
loses its power: what the kernel has stays.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import restored, save
from farthing.run.checkpoint import Checkpoints
from farthing.storage.objects import open_store
from mirrored import folder_of_run, mirror_of

CALLS = "%file,%desc"
LOOKING = {
    *("newfstatat", "fstat", "stat", "lstat", "access", "faccessat2", "readlink"),
    *("getdents64", "lseek", "read", "fcntl", "mmap"),
}
"""Calls that change nothing: killed before one is killed before the next."""


def why_not_here() -> str:
    """Why nothing can be killed here; empty where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed: no process is killed at its system calls"
    command = ["strace", "-o", "/dev/null", "-e", "inject=write:signal=KILL:when=1", "echo"]
    done = subprocess.run(command, capture_output=True, check=False)
    return (
        "" if done.returncode == -signal.SIGKILL else "strace may not trace or kill here (ptrace)"
    )


def traced(work: Callable[[], None], *options: str) -> int:
    """The exit code of a child that does `work` under strace, from its first call on a file to its
    end.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.sigwait({signal.SIGUSR1})
            work()
            code = 0
        finally:
            os._exit(code)
    with subprocess.Popen(
        ["strace", "-f", "-qq", "-p", str(pid), *options], stderr=subprocess.DEVNULL
    ) as tracer:
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            assert tracer.poll() is None, "strace did not attach"
            time.sleep(0.001)
        os.kill(pid, signal.SIGUSR1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_each_call(
    folder: Path, scene: Callable[[Path], tuple[Callable[[], None], Callable[[], int]]]
) -> list[int]:
    """What is left of a kill before each call, in the order of the calls, and of no kill at last.

    `scene(folder)` sets up, and gives what is to be done and what then looks for the step that is
    left.
    """
    work, look = scene(folder / "whole")
    assert traced(work, "-o", str(folder / "trace"), "-e", f"trace={CALLS}") == 0
    names = re.findall(r"^\d+ +(\w+)\(", (folder / "trace").read_text(), re.MULTILINE)
    seen: Counter[str] = Counter()
    whole, outcomes, n_missed = look(), [], 0
    for name in names:
        if name in LOOKING:
            continue
        seen[name] += 1
        work, left = scene(folder / "killed")
        inject = f"inject={name}:signal=KILL:when={seen[name]}"
        code = traced(work, "-o", "/dev/null", "-e", f"trace={name}", "-e", inject)
        assert code in (0, -signal.SIGKILL), f"{name} {seen[name]}: {code}"
        step = left()
        if (
            code == 0
        ):  # names are drawn, so folders are listed in another order: a call less was made this time  # noqa: E501
            n_missed += 1
            assert step == whole
        else:
            outcomes.append(step)
        shutil.rmtree(folder / "killed")
    assert n_missed <= len(outcomes) // 20
    return [*outcomes, whole]


def a_save(folder: Path) -> tuple[Callable[[], None], Callable[[], int]]:
    """The checkpoints of steps 1 and 2 are there; that of 3 is written and linked for a store, and
    that of 1 removed.
    """
    run = folder_of_run(folder)
    mirror = mirror_of(open_store(str(folder / "store")), run)
    checkpoints = Checkpoints(run / "checkpoints", "run-1", 2, warn=print, copy=mirror.offer)
    for step in (1, 2):
        save(checkpoints, step)

    def left() -> int:
        step = restored(run / "checkpoints")
        assert step is not None, "there was one"
        assert not [path.name for path in (run / "checkpoints").iterdir() if ".draft-" in path.name]
        return step

    return lambda: save(checkpoints, 3), left


def tell_of_each_call(
    scene: Callable[[Path], tuple[Callable[[], None], Callable[[], int]]], folder: Path
) -> None:
    """Checks what is left and says how many kills there were."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    outcomes = killed_at_each_call(folder, scene)
    before, after = outcomes[0], outcomes[-1]
    assert after == before + 1
    assert set(outcomes) == {before, after}
    blur = (
        len(outcomes) // 10
    )  # names are drawn, and the order of calls with them: near the commit it is not sharp
    at = outcomes.count(before)
    assert outcomes[: at - blur] == [before] * (at - blur), "nothing is there before its commit"
    assert set(outcomes[at + blur :]) <= {after}, "and once committed it stays"
    print(
        f"{len(outcomes) - 1} kills, {outcomes.count(before)} of them before the new one was there"
    )


@pytest.mark.slow
def test_a_kill_before_any_system_call_of_a_save_leaves_what_was_there_or_what_is_new(tmp_path):
    """In a process of its own: it forks, which is safe only where no other thread runs."""
    if why := why_not_here():
        pytest.skip(why)
    code = (
        "import pathlib, test_syscalls as t; t.tell_of_each_call(t.a_save,"
        f" pathlib.Path({str(tmp_path)!r}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 50


def test_a_kill_within_a_write_to_a_folder_leaves_no_part_of_an_object(tmp_path):
    size = 64 << 20
    (tmp_path / "large").write_bytes(bytes(size))
    code = (
        "import pathlib, sys\nfrom farthing.storage.objects import open_store\n"
        f"store = open_store({str(tmp_path / 'store')!r})\n"
        "store.create('first', b'')\nprint('there', flush=True)\n"
        f"store.put('data/large', pathlib.Path({str(tmp_path / 'large')!r}))\n"
    )
    store = open_store(str(tmp_path / "store"))
    for after_s in (0.0, 0.005, 0.02, 0.08):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(after_s)
            process.kill()
        assert [each.n_bytes for each in store.list("data/").values()] in ([], [size])
