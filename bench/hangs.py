"""Processes that hang where and how they are told: for tests and benches of caps.

`hanging` gives an environment in which a Python process patches a function as its module is
imported; the call after which it hangs leaves a file `hung`.
"""

from __future__ import annotations

import os
from pathlib import Path

WAYS = {
    "sleep": "time.sleep(10_000)",
    # Python's lock is held: no other thread runs
    "lock": "ctypes.PyDLL(None).sleep(10_000)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    # a file system that never answers
    "fifo": "os.path.exists(FIFO) or os.mkfifo(FIFO); open(FIFO).read()",
    "slow": "time.sleep(SLOW_S)",
}
_CODE = """
import ctypes, importlib.abc, importlib.util, os, signal, sys, time
MODULE, NAME, CALLS, HUNG, FIFO, SLOW_S, ONCE = {settings!r}
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
        slow_s,
        once,
    )
    place = folder / "hangs"
    place.mkdir(parents=True, exist_ok=True)
    code = _CODE.format(settings=settings, way=WAYS[way])
    (place / "sitecustomize.py").write_text(code, encoding="utf-8")
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(place), *([others] if others else [])])}
