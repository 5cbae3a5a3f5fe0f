"""Tensors of a GPU as they are now, on their way to the disk while the next forward and backward
pass run.

The thread that writes a checkpoint fetches them in pieces, through two pinned buffers, on a stream
of its own. Weights and state do not change before the next update, and the trainer waits for
`is_copied` before it begins that, so nothing has to be copied on the GPU. Copies go to main memory
where they take no more than half of what is free there; else straight into the file, which holds
the update up for as long as the disk takes.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
AT_ONCE_BYTES = 1 << 20
"""Up to this tensors are copied at once: buffers that a forward pass may change."""
HOST_SHARE = 0.5
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of safetensors' format (huggingface/safetensors, README, "Format")."""


class CudaLane:
    """A way from the device to main memory, beside the one on which training computes: a stream of
    its own, behind what was queued before it was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

    def fetch(self, piece: Tensor, number: int) -> tuple[Tensor, Any]:
        """Begin to copy bytes [n] into buffer `number`; these, and what to `synchronize`."""
        into = self._buffers[number][: len(piece)]
        with torch.cuda.stream(self._stream):
            into.copy_(piece, non_blocking=True)
            return into, self._stream.record_event()


def can_wait(tensor: Tensor) -> bool:
    """Whether a tensor is fetched later: a large one on a GPU."""
    return tensor.device.type == "cuda" and tensor.is_contiguous() and tensor.nbytes > AT_ONCE_BYTES


class Later:
    """Tensors that are still where training has them; `fetch`, `write` in one thread."""

    def __init__(self, tensors: dict[str, dict[str, Tensor]], lane: CudaLane) -> None:
        self._tensors, self._lane = tensors, lane
        self._copied = threading.Event()
        n_bytes = sum(tensor.nbytes for of_part in tensors.values() for tensor in of_part.values())
        self.keeps_in_memory = n_bytes <= HOST_SHARE * psutil.virtual_memory().available

    @property
    def is_copied(self) -> bool:
        """Whether the tensors may change."""
        return self._copied.is_set()

    def wait(self) -> None:
        """Until they may change."""
        self._copied.wait()

    def release(self) -> None:
        """They may change: all is copied, or nobody will."""
        self._copied.set()

    def fetch(self) -> None:
        """Copy everything to main memory, if that is where it goes."""
        if self.keeps_in_memory:
            for of_part in self._tensors.values():
                for name, tensor in of_part.items():
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                    start, flat = 0, copy.reshape(-1).view(torch.uint8)
                    for piece in self._pieces(tensor):
                        flat[start : start + len(piece)] = piece
                        start += len(piece)
                    of_part[name] = copy
            self.release()

    def copies(self, part: str) -> dict[str, Tensor]:
        """Of a part: after `fetch` in main memory, if that is where they go."""
        return self._tensors[part]

    def write(self, part: str, more: dict[str, Tensor], path: Path) -> None:
        """As a file of safetensors: large numbers first, so that all are aligned."""
        own = self._tensors[part]
        tensors = {**more, **own}
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        header, end = {}, 0
        for name in order:
            begin, end = end, end + tensors[name].nbytes
            shape = list(tensors[name].shape)
            header[name] = {
                "dtype": DTYPES[tensors[name].dtype],
                "shape": shape,
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for piece in (
                    self._pieces(tensors[name]) if name in own else [_bytes_of(tensors[name])]
                ):
                    file.write(memoryview(piece.numpy()))

    def _pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Bytes in main memory; each piece is there until the next but one is asked for."""
        flat, under_way = _bytes_of(tensor), deque[tuple[Tensor, Any]]()
        for number, start in enumerate(range(0, len(flat), PIECE_BYTES)):
            under_way.append(self._lane.fetch(flat[start : start + PIECE_BYTES], number % 2))
            if len(under_way) == 2:
                yield _arrived(*under_way.popleft())
        while under_way:
            yield _arrived(*under_way.popleft())


def _arrived(piece: Tensor, event: Any) -> Tensor:
    event.synchronize()
    return piece


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
