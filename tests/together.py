"""Several processes that train together in a test: forks of a server that has imported what they need, once for all tests.

Each works in its own process with a hard limit of time, after which all of them are killed; what one prints is kept for the
test that fails. Refuses GPUs.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farthing.durability.group import ATTEMPT, STORE

LIMIT_S = 120.0
LIBRARIES = ("farthing.train.run", "transformers.generation", "transformers.models.llama.modeling_llama")
_server = multiprocessing.get_context("forkserver")


def on_ranks(n: int, folder: Path, work: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """What `work(rank, *arguments)` returns in each of `n` processes that find each other, through JSON.

    `work` is a function of a module. A process that ended otherwise gives its exit code (negative: the signal) instead.
    """
    _server.set_forkserver_preload([*LIBRARIES, "workshop", "together"])
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    places = [folder / f"{meeting.name}-{rank}.json" for rank in range(n)]
    children = [
        _server.Process(target=_work, args=(rank, n, str(meeting), str(places[rank]), work, arguments), daemon=True)
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
        found.append(json.loads(place.read_text()) if place.exists() else {"exit_code": child.exitcode})
    errors = [each["error"] for each in found if isinstance(each, dict) and "error" in each]
    assert not errors, "\n".join(errors)
    return [each.get("value", each.get("exit_code")) for each in found]


def _work(rank: int, n: int, meeting: str, place: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server has imported: each process looked through all of it for garbage, and copied it
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n),
        "GLOO_SOCKET_IFNAME": "lo", STORE: meeting, ATTEMPT: "0",
    }  # fmt: skip
    try:
        found: dict[str, Any] = {"value": work(rank, *arguments)}
    except BaseException:
        found = {"error": f"rank {rank} of {n}:\n{traceback.format_exc()}"}
    draft = Path(f"{place}.draft")
    draft.write_text(json.dumps(found))
    draft.rename(place)
