"""Several processes that train together in a test: forks of a server that has imported what they
need, once for all tests.

Each works in its own process with a hard limit of time, after which all of them are killed; what
one prints is kept for the test that fails. Refuses GPUs.
"""

import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 300.0
STORES = ("obstore",)
LIBRARIES = (
    "farthing.train.run",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
)


def forkserver():
    """Where processes are forked from that have the libraries of all tests already: a process has
    one such server, and what that imports is said by whoever asks for it first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES, *STORES, "workshop", "together", "mirrored"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ensure_running()
    return context


def on_ranks(
    n: int, folder: Path, work: Callable[..., Any], *arguments, limit_s: float = LIMIT_S
) -> list[Any]:
    """What `work(rank, *arguments)` returns in each of `n` processes that find each other, through
    JSON.

    `work` is a function of a module. A process that ended otherwise gives its exit code (negative:
    the signal) instead.
    """
    server = forkserver()
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    places = [folder / f"{meeting.name}-{rank}.json" for rank in range(n)]
    children = [
        server.Process(
            target=_work,
            args=(rank, n, str(meeting), str(places[rank]), work, arguments),
            daemon=True,
        )
        for rank in range(n)
    ]
    for child in children:
        child.start()
    until = time.monotonic() + limit_s
    for child in children:
        child.join(max(0.1, until - time.monotonic()))
    late = [child for child in children if child.is_alive()]
    for child in late:
        child.kill()
        child.join()
    assert not late, f"{len(late)} of {n} processes had not ended after {limit_s:.0f} s"
    found = []
    for child, place in zip(children, places, strict=True):
        found.append(
            json.loads(place.read_text()) if place.exists() else {"exit_code": child.exitcode}
        )
    errors = [each["error"] for each in found if isinstance(each, dict) and "error" in each]
    assert not errors, "\n".join(errors)
    return [each.get("value", each.get("exit_code")) for each in found]


def _work(
    rank: int,
    n: int,
    meeting: str,
    place: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
):
    # what the server has imported: each process looked through all of it for garbage, and copied it
    gc.freeze()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "GLOO_SOCKET_IFNAME": "lo",
        "FARTHING_RANKS_STORE": meeting,
        "FARTHING_RANKS_ATTEMPT": "0",
    }
    try:
        found = {"value": work(rank, *arguments)}
    except BaseException:
        found = {"error": f"rank {rank} of {n}:\n{traceback.format_exc()}"}
    draft = Path(f"{place}.draft")
    draft.write_text(json.dumps(found))
    draft.rename(place)
