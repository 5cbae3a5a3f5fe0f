"""Where the processes that share a run find each other: a store at the first rank's address, or in
a file.

Each rank sends who it is first. A port that another program has, a seat that is taken, one that
stays empty, and ranks without a GPU of their own beside others that have one are errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farthing.errors import EXIT_INTERRUPTED, FarthingError, InputError
from farthing.run.group import ATTEMPT, EXIT_RANK_LOST, STORE, Seat

JOIN_S, JOIN_HERE_S = 120.0, 4.0
"""Besides the patience: so much later may a rank come than another, which reads libraries from a
slow disk; where `farthing` has started all of them at once, on one machine."""
SAY_AFTER_S = 10.0
BEYOND_S = 2.0
"""After the end of torch's own wait for a store, which one that never answers outlasts."""


class RankLostError(FarthingError):
    """Another process of this run does not answer; what was committed is safe and the same command
    carries on.
    """

    exit_code = EXIT_INTERRUPTED


def meet(seat: Seat, device: torch.device, patience_s: float) -> Any:
    """The store in which all ranks were seen. Raises `RankLostError`, `InputError`."""
    most_s = patience_s + (JOIN_HERE_S if seat.by == "farthing" else JOIN_S)
    attempt = os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        with bounded(seat, most_s + BEYOND_S, "no first rank answers at that address"):
            store = _opened(seat, timedelta(seconds=most_s), is_host=seat.is_first and not is_kept)
        # an agent's store still has the addresses of an attempt that died (pytorch/pytorch#135712)
        store = dist.PrefixStore(f"farthing-{attempt}", store)
        if store.add(f"taken-{seat.index}", 1) > 1 and not is_kept:
            raise InputError(
                f"another process is rank {seat.index} already: this address is that of"
                " another run",
                where="MASTER_ADDR, MASTER_PORT",
                to_do="choose a port that no other run uses",
            )
        store.set(f"seat-{seat.index}", json.dumps(device_of(device)))
        _wait(store, seat, most_s)
        seen = [json.loads(store.get(f"seat-{index}")) for index in range(seat.n)]
    except (RuntimeError, OSError) as error:
        raise lost(seat, str(error).splitlines()[0][:200]) from error
    _refuse_odd(seat, seen)
    return store


@contextlib.contextmanager
def bounded(seat: Seat, most_s: float, why: str) -> Iterator[None]:
    """End this process with a message where the block takes longer: torch itself waits for ever."""

    def end() -> None:
        error = lost(seat, why)
        os.write(2, f"farthing: {error}\n".encode())
        os._exit(error.exit_code)

    timer = threading.Timer(most_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def lost(seat: Seat, why: str) -> RankLostError:
    """What to raise where the others do not come."""
    is_ours = seat.by == "farthing"
    error = RankLostError(
        f"rank {seat.index} of {seat.n} could not meet the others: {why}",
        where="" if is_ours else "MASTER_ADDR, MASTER_PORT",
        to_do="see whether all processes were started, then run the same command again",
    )
    error.exit_code = EXIT_RANK_LOST if is_ours else error.exit_code
    return error


def _opened(seat: Seat, come_by: timedelta, *, is_host: bool) -> Any:
    if path := os.environ.get(STORE):
        store: Any = dist.FileStore(path, seat.n)
        store.set_timeout(come_by)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(address, port, seat.n, is_host, come_by, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise InputError(
            f"port {port} of this machine is in use by another program",
            where="MASTER_PORT",
            to_do="choose a free port",
        ) from error


def _wait(store: Any, seat: Seat, most_s: float) -> None:
    """Until all have told who they are; signals are heard meanwhile. Says once who is missing,
    where that takes long.
    """
    began_s, is_said, missing = time.monotonic(), False, list(range(seat.n))
    while missing := [index for index in missing if not store.check([f"seat-{index}"])]:
        names = ", ".join(str(index) for index in missing[:8]) + (
            ", ..." if len(missing) > 8 else ""
        )
        if time.monotonic() - began_s > most_s:
            raise lost(seat, f"{len(missing)} did not come within {most_s:.0f} s (rank {names})")
        if not is_said and time.monotonic() - began_s > SAY_AFTER_S:
            is_said = True
            text = (
                f"farthing: rank {seat.index} of {seat.n}, started by {seat.by}, waits for rank"
                f" {names}\n"
            )
            os.write(2, text.encode())
        time.sleep(0.02)


def device_of(device: torch.device) -> tuple[str, str]:
    """(kind of device, which one it is of all machines; "" where that is not known)."""
    number = (
        str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if device.type == "cuda"
        else ""
    )
    return device.type, f"{socket.gethostname()} {number}" if number.strip("0-") else ""


def _refuse_odd(seat: Seat, seen: list[list[str]]) -> None:
    """Refuse ranks of which some have no GPU of their own; the first alone tells of it. Raises
    `InputError`.
    """
    kinds, places = [kind for kind, _ in seen], [place for _, place in seen if place]
    twice = next((at for at, place in enumerate(places) if place in places[:at]), None)
    if len(set(kinds)) > 1:
        what = f"rank {kinds.index('cpu')} of {seat.n} sees no GPU, and others do"
    elif twice is not None:
        what = f"ranks {places.index(places[twice])} and {twice} of {seat.n} have the same GPU"
    else:
        return
    error = InputError(
        what,
        where="CUDA_VISIBLE_DEVICES, number of processes",
        to_do=(
            "start one process for each GPU, or set where.gpus and start `farthing train` by itself"
        ),
    )
    error.is_told = not seat.is_first  # type: ignore[attr-defined]
    raise error
