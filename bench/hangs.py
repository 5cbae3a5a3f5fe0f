"""Processes that hang where and how they are told: for tests and benches of caps.

`hanging` gives an environment in which a Python process patches a function as its module is
imported; the call after which it hangs leaves a file `hung`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WAYS = {
    "sleep": "time.sleep(10_000)",
    # Python's lock is held: no other thread runs
    "lock": "ctypes.PyDLL(None).sleep(10_000)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    # a file that never answers
    "fifo": "os.path.exists(FIFO) or os.mkfifo(FIFO); open(FIFO).read()",
    # a file system that never answers: no signal ends who waits for it
    "stuck": "os.stat(STUCK)",
    "slow": "time.sleep(SLOW_S)",
}
_CODE = """
import ctypes, importlib.abc, importlib.util, os, signal, sys, time
MODULE, NAME, CALLS, HUNG, FIFO, STUCK, SLOW_S, ONCE = {settings!r}
calls = 0

def fire():
    global calls
    calls += 1
    if calls < CALLS or (ONCE and os.path.exists(HUNG)):
        return
    open(HUNG, "w").write(str(time.time()))
    {way}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            owner = module
            *outer, last = NAME.split(".")
            for each in outer:
                owner = getattr(owner, each)
            function = getattr(owner, last)

            def armed(*arguments, **more):
                fire()
                return function(*arguments, **more)

            setattr(owner, last, armed)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def hanging(
    folder: Path,
    where: str,
    way: str,
    *,
    calls: int | None = None,
    slow_s: float = 0.0,
    once: bool = False,
) -> dict[str, str]:
    """The environment of a process that hangs in `where` ("module:function") from its n-th call on.

    A phase that happens once hangs in its first call. `once`: only in the first process.
    """
    n_calls = calls or (12 if where.endswith("take_step") else 1)
    settings = (
        *where.split(":"),
        n_calls,
        str(folder / "hung"),
        str(folder / "fifo"),
        str(folder / "stuck" / "file"),
        slow_s,
        once,
    )
    place = folder / "hangs"
    place.mkdir(parents=True, exist_ok=True)
    code = _CODE.format(settings=settings, way=WAYS[way])
    (place / "sitecustomize.py").write_text(code, encoding="utf-8")
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(place), *([others] if others else [])])}


@contextlib.contextmanager
def stuck_file_system(place: Path) -> Iterator[None]:
    """Within the block `place` is a FUSE file system whose server takes requests and never answers.

    A process that asks it for a file can't be killed until the block ends. Raises `OSError` where
    this user may not mount.
    """
    place.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([sys.executable, __file__, str(place)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"mounted\n":
            raise OSError("FUSE can't be mounted here")
        yield
    finally:
        server.kill()  # the kernel gives up on what waits for it
        server.wait()
        ctypes.CDLL(None).umount2(bytes(place), 2)


def _serve(place: bytes) -> None:
    """Mount there, answer the greeting, and take everything else without an answer."""
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if ctypes.CDLL(None).mount(b"stuck", place, b"fuse", 6, options.encode()):
        return
    print("mounted", flush=True)
    while request := os.read(server, 1 << 18):
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode == 26:  # FUSE_INIT
            about = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, 0)
            os.write(server, struct.pack("<IiQ", 16 + len(about), 0, unique) + about)


if __name__ == "__main__":
    _serve(os.fsencode(sys.argv[1]))
