"""Tensors of a part of a checkpoint: in one file, or in a file of each rank that holds rows of
them.

`model.safetensors` has all of a part; of `model-00001-of-00004.safetensors` to
`model-00004-of-00004.safetensors` each has some rows of every tensor, which one after the other are
the whole. What is not spread is in the first of them alone. So a part is read by any number of
ranks, whoever has written it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from farthing.storage.files import DamagedFileError

RowsOf = Callable[[str], tuple[int, int] | None]
"""(name of a tensor) -> the first and the end of the rows that are wanted; None: all of it."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Shared:
    """A rank's part in checkpoints of spread tensors; all save and restore together."""

    is_first: bool
    shard: int
    n_shards: int
    is_copy: bool
    """Another rank has the same rows, and writes them."""
    rows_of: RowsOf
    gather: Callable[[Any], list[Any]]
    """Plain values of all ranks, by rank. Raises `OSError` where one is gone."""

    def name_of(self, part: str) -> str:
        """The file of this rank."""
        if self.n_shards == 1:
            return f"{part}.safetensors"
        return f"{part}-{self.shard + 1:05d}-of-{self.n_shards:05d}.safetensors"

    def writes(self, name: str) -> bool:
        """Whether this rank has to write what it has of a tensor."""
        return not self.is_copy and (self.shard == 0 or self.rows_of(name) is not None)


ALONE = Shared(True, 0, 1, False, lambda name: None, lambda value: [value])
"""Of a process that has everything, and saves it."""


def files_of(folder: Path, part: str) -> list[Path]:
    """By rows; none without tensors. Raises `DamagedFileError` where one is missing."""
    whole = folder / f"{part}.safetensors"
    found = {}
    for path in folder.glob(f"{part}-*.safetensors"):
        if match := _SHARD.fullmatch(path.name.removeprefix(part)):
            found[int(match[1]), int(match[2])] = path
    if whole.exists() or not found:
        return [whole] if whole.exists() else []
    numbers, totals = {number for number, _ in found}, {n for _, n in found}
    if len(totals) != 1 or numbers != set(range(1, max(totals) + 1)):
        raise DamagedFileError(
            f"of the files of its {part} there are {len(found)} of {max(totals)}"
        )
    return [found[key] for key in sorted(found)]


def read_part(folder: Path, part: str, rows_of: RowsOf = lambda name: None) -> dict[str, Tensor]:
    """The tensors of a part, whole or the rows that are wanted, on the CPU. Raises
    `DamagedFileError`.

    No more is in memory than what is returned and the rows of one tensor.
    """
    opened = [safetensors.safe_open(path, framework="pt") for path in files_of(folder, part)]
    names = {name: None for file in opened for name in file.keys()}  # noqa: SIM118
    return {
        name: _joined(
            [file.get_slice(name) for file in opened if name in file.keys()],  # noqa: SIM118
            rows_of(name),
        )
        for name in names
    }


def _joined(slices: Sequence[Any], rows: tuple[int, int] | None) -> Tensor:
    """The rows of what stands in one file or in several; all of it where `rows` is None."""
    if not slices[0].get_shape() or (rows is None and len(slices) == 1):
        return slices[0][...]
    pieces, start = [], 0
    for each in slices:
        n = each.get_shape()[0]
        first, end = (0, n) if rows is None else (max(0, rows[0] - start), min(n, rows[1] - start))
        if first < end:
            pieces.append(each[first:end])
        start += n
    return torch.cat(pieces) if pieces else slices[0][0:0]


def contents_of(files: Mapping[str, str], part: str) -> dict[str, str]:
    """Of the files of a manifest (name to sha256) those of a part."""
    return {
        name: sha256
        for name, sha256 in files.items()
        if name == f"{part}.safetensors" or (name.startswith(f"{part}-") and _SHARD.search(name))
    }
