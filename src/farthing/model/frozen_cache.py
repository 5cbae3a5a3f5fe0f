"""Hidden states of the frozen layers on disk: one row of h numbers for each token, computed once,
before training.

    <cache_dir>/prefix/<key>/<number>/rows.bin, manifest.json

The key is a hash of everything the rows follow from, and each part is a folder committed by the
protocol of `files`, with the same facts in its manifest: a cache of other weights, data or numbers
is never found, a part that differs from what was written is made again, and a fill that was killed
goes on with the first part that is missing. Examples are computed in an order and in micro-batches
that follow from their lengths alone, so a part made twice on one machine is the same to the bit.

A cache that can't be had is a reason in words, and the run computes instead; folders that are not
in use may be deleted, the time of a folder says when it was last used. Refuses to choose whether a
cache pays: `models.frozen_cache_cost` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

import farthing
from farthing.data.packing import collate_packed
from farthing.data.token_set import TokenSet
from farthing.errors import RunBusyError, RunInterruptedError
from farthing.model.attention import first_position
from farthing.model.documents import packed_batch
from farthing.model.frozen_layers import FrozenLayers
from farthing.model.hardware import Numerics, device_name
from farthing.models.frozen_cache_cost import DISK_SHARE, frozen_cache_bytes
from farthing.storage.files import (
    DamagedFileError,
    commit_folder,
    discard,
    make_private,
    only_writer,
    read_manifest,
    sweep_drafts,
    verify_folder,
)
from farthing.units import say_bytes

CACHE_VERSION = 1
PART_BYTES = 256 << 20  # at most that much is computed again after a kill
CHECK_THREADS = 4
ROWS = "rows.bin"
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
WAIT_S = 0.2  # between looks at a cache that another process is filling


@dataclass(frozen=True, eq=False)
class FrozenCache:
    """Hidden states of examples, memory-mapped."""

    folder: Path
    starts: NDArray[np.int64]
    """[n_examples of the set]: the row where each example begins; -1 where it is not in here."""
    lengths: NDArray[np.int64]
    """[n_examples of the set]: tokens of each."""
    part_starts: NDArray[np.int64]
    """[n_parts]: the row where each part begins."""
    parts: tuple[Tensor, ...]
    """Each [rows of the part, h]."""

    @property
    def n_bytes(self) -> int:
        """On disk."""
        return sum(part.nbytes for part in self.parts)

    def rows(self, examples: NDArray[np.int64], *, pin: bool = False) -> Tensor:
        """[1, T, h]: the rows of a micro-batch, its examples end to end in this order; in pinned
        memory if asked.
        """
        starts, lengths = self.starts[examples], self.lengths[examples]
        if (starts < 0).any():
            raise ValueError("an example that was not cached")
        first = self.parts[0]
        found = torch.empty(
            1, int(lengths.sum()), first.shape[1], dtype=first.dtype, pin_memory=pin
        )
        numbers = np.searchsorted(self.part_starts, starts, side="right") - 1
        places = (starts - self.part_starts[numbers]).tolist()
        at = 0
        for number, place, length in zip(numbers.tolist(), places, lengths.tolist(), strict=True):
            found[0, at : at + length] = self.parts[number][place : place + length]
            at += length
        return found


def open_frozen_cache(
    frozen: FrozenLayers,
    tokens: TokenSet,
    examples: NDArray[np.int64],
    cache_dir: Path,
    *,
    numerics: Numerics,
    micro_batch_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FrozenCache | str:
    """The cache of these examples (indices into `tokens`): what is there and whole is used, the
    rest is computed.

    At most `micro_batch_tokens` are computed at once. `progress(done, total)` counts tokens. A
    string says why there is no cache, and then none is left on the disk. Raises
    `RunInterruptedError`; what was computed is kept.
    """
    plan = _Plan.of(tokens, examples, frozen.width, micro_batch_tokens)
    if not plan.parts:
        return "no example has a token"
    facts = _facts(frozen, tokens, plan, numerics, micro_batch_tokens)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir / "prefix" / key
    try:
        make_private(folder.parent)
        make_private(folder)
        with _alone(folder, should_stop):
            found = _whole_parts(folder, len(plan.parts), facts, should_stop)
            missing = [number for number in range(len(plan.parts)) if number not in found]
            if missing:
                why = _why_no_room(frozen, tokens, plan, missing, numerics, folder)
                if why:
                    shutil.rmtree(folder, ignore_errors=True)
                    return why

                def commit(number: int, computed: list[Tensor]) -> None:
                    _commit(folder / _name(number), computed, facts)

                _fill(frozen, tokens, plan, missing, numerics, commit, progress, should_stop)
            os.utime(folder)
            return _mapped(folder, plan, tokens.lengths, frozen.width)
    except OSError as error:
        if folder.is_dir():  # room for checkpoints is worth more
            shutil.rmtree(folder, ignore_errors=True)
        return f"the cache of the frozen layers can't be written: {error.strerror or error}"


# ---- what is in it ----


class _Plan(NamedTuple):
    """Which examples are computed together, and where their rows go: a function of lengths and
    budgets.
    """

    parts: list[list[NDArray[np.int64]]]
    """Of each part, the examples of its micro-batches: the longest first, equal ones side by side.
    """
    bounds: NDArray[np.int64]
    """[n_parts + 1]: the row where each part begins, and where the last ends."""
    example_starts: NDArray[np.int64]
    """As `FrozenCache.starts`."""

    @classmethod
    def of(
        cls, tokens: TokenSet, examples: NDArray[np.int64], width: int, micro_batch_tokens: int
    ) -> _Plan:
        """Each micro-batch takes as many examples as fit in the budget, each part as many
        micro-batches as fit in its bytes.
        """
        lengths = tokens.lengths
        wanted = np.unique(np.asarray(examples, np.int64))
        wanted = wanted[lengths[wanted] > 0]
        order = wanted[np.argsort(-lengths[wanted], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        most_rows = PART_BYTES // frozen_cache_bytes(1, width, 4)
        parts: list[list[NDArray[np.int64]]] = []
        bounds, at = [0], 0
        while at < len(order):
            stop = max(
                at + 1,
                int(np.searchsorted(starts, starts[at] + micro_batch_tokens, side="right")) - 1,
            )
            if not parts or starts[stop] - bounds[-2] > most_rows:
                parts.append([])
                bounds.append(0)
            parts[-1].append(order[at:stop])
            bounds[-1] = int(starts[stop])
            at = stop
        example_starts = np.full(len(tokens), -1, np.int64)
        example_starts[order] = starts[:-1]
        return cls(parts, np.array(bounds), example_starts)

    def n_tokens(self, numbers: list[int]) -> int:
        """Rows of these parts."""
        return int(np.diff(self.bounds)[numbers].sum())


def _facts(
    frozen: FrozenLayers, tokens: TokenSet, plan: _Plan, numerics: Numerics, micro_batch_tokens: int
) -> dict[str, object]:
    """Everything the rows follow from."""
    order = np.concatenate([piece for part in plan.parts for piece in part])
    data = hashlib.sha256(tokens.lengths[order].tobytes())
    for index in order:
        data.update(tokens.example(int(index))[0].tobytes())
    return {
        "version": CACHE_VERSION,
        "prefix (content)": frozen.sha256(),
        "examples (content)": data.hexdigest(),
        "n_layers": frozen.n_layers,
        "precision": numerics.name,
        "tf32": numerics.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,
        "most_tokens": micro_batch_tokens,
        "device": device_name(numerics.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "farthing": farthing.__version__,
    }


# ---- making it ----


@contextlib.contextmanager
def _alone(folder: Path, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder; another process that fills it is waited for, as it makes what we need.
    Raises `RunInterruptedError`.
    """
    with contextlib.ExitStack() as stack:
        while True:
            _stop_if(should_stop)
            try:
                stack.enter_context(only_writer(folder))
                break
            except RunBusyError:
                time.sleep(WAIT_S)
        yield


def _stop_if(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise RunInterruptedError(
            "stopped while the frozen layers were computed", to_do="run the same command again"
        )


def _whole_parts(
    folder: Path, n_parts: int, facts: dict[str, object], should_stop: Callable[[], bool]
) -> set[int]:
    """The parts that are there to the bit; what is damaged, and what killed writers left, is
    removed.
    """
    sweep_drafts(folder)
    there = [number for number in range(n_parts) if (folder / _name(number)).is_dir()]

    def is_whole(number: int) -> bool:
        _stop_if(should_stop)
        try:
            return bool(verify_folder(folder / _name(number)).get("of") == facts)
        except (DamagedFileError, OSError):
            return False

    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        whole = {
            number
            for number, is_good in zip(there, pool.map(is_whole, there), strict=True)
            if is_good
        }
    for number in set(there) - whole:
        discard(folder / _name(number))
    return whole


def _why_no_room(
    frozen: FrozenLayers,
    tokens: TokenSet,
    plan: _Plan,
    missing: list[int],
    numerics: Numerics,
    folder: Path,
) -> str:
    """Why the disk can't hold the missing parts, in words; empty if it can. One token tells what a
    number takes.
    """
    sample = _computed(frozen, tokens, plan.parts[-1][-1][-1:], numerics)
    needed = plan.n_tokens(missing) * sample[0].nbytes
    free = shutil.disk_usage(folder).free
    if needed <= DISK_SHARE * free:
        return ""
    return (
        f"what the frozen layers compute would take {say_bytes(needed)} on the disk, and half of"
        f" the {say_bytes(free)} that are free may be used"
    )


def _fill(
    frozen: FrozenLayers,
    tokens: TokenSet,
    plan: _Plan,
    missing: list[int],
    numerics: Numerics,
    commit: Callable[[int, list[Tensor]], None],
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> None:
    """Compute and commit the missing parts; one is written while the next is computed."""
    total = int(plan.bounds[-1])
    done = total - plan.n_tokens(missing)
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for number in missing:
            computed = []
            for piece in plan.parts[number]:
                _stop_if(should_stop)
                computed.append(_computed(frozen, tokens, piece, numerics))
                done += len(computed[-1])
                progress(done, total)
            if written is not None:
                written.result()
            written = writer.submit(commit, number, computed)
        if written is not None:
            written.result()


def _computed(
    frozen: FrozenLayers, tokens: TokenSet, examples: NDArray[np.int64], numerics: Numerics
) -> Tensor:
    """[T, h] on the CPU."""
    arrays = collate_packed(tokens, examples, frozen.task, first_position(frozen.inner.config))
    batch = packed_batch(arrays, numerics.device)
    with numerics.autocasting():
        return frozen.hidden_states(batch)[0].cpu()


def _commit(folder: Path, pieces: list[Tensor], facts: dict[str, object]) -> None:
    def write(draft: Path) -> None:
        with open(draft / ROWS, "wb") as file:
            for piece in pieces:
                file.write(piece.contiguous().view(torch.uint8).numpy())

    commit_folder(folder, write, {"of": facts, "dtype": str(pieces[0].dtype)})


def _name(number: int) -> str:
    return f"{number:05d}"


def _mapped(folder: Path, plan: _Plan, lengths: NDArray[np.int64], width: int) -> FrozenCache:
    """The parts, mapped by torch: a map of numpy would hold a descriptor for each."""
    parts = []
    for number, n_rows in enumerate(np.diff(plan.bounds).tolist()):
        path, dtype = (
            folder / _name(number),
            _DTYPES[read_manifest(folder / _name(number))["dtype"]],
        )
        rows = torch.from_file(str(path / ROWS), shared=False, size=n_rows * width, dtype=dtype)
        parts.append(rows.view(-1, width))
    return FrozenCache(folder, plan.example_starts, lengths, plan.bounds[:-1], tuple(parts))
