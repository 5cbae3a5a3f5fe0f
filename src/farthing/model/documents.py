"""Where the documents of a packed batch begin and end, which every layer of a model looks at.

Made once a batch, on the host, from lengths that the host knows: nothing here waits for a GPU.
Shapes: T tokens of N documents, K keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.arrays import Ints
from farthing.model.hardware import pinned

Batch = dict[str, Any]
"""What the forward pass of a model of `transformers` takes of a micro-batch, by name: tensors, and
where documents begin.
"""


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the N documents of a packed batch of T tokens begin and end; computed once, used by
    every layer.
    """

    lengths: tuple[int, ...]
    """Tokens of each, in order."""
    bounds: Tensor
    """int32 [N + 1] on the batch's device: 0, then where each ends."""
    longest: int
    no_mask: Tensor
    """[1, 1, 1, 1]: transformers takes a mask of four dimensions as made, so it looks for no
    boundaries by itself.
    """
    key_bounds: Tensor
    """int32 [N + 1], as `bounds`, of the keys that each document sees; its own tokens are the last
    of them.
    """
    key_lengths: tuple[int, ...]
    key_rows: Tensor | None = None
    """int64 [K]: the token of each key, where a document continues another; else keys and tokens
    are the same.
    """
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Ints,
        device: torch.device | str = "cpu",
        key_lengths: Sequence[int] | Ints | None = None,
        key_rows: Ints | None = None,
    ) -> Documents:
        """From the tokens of each document; nothing waits for the device.

        Where documents continue others, `key_lengths` [N] are the tokens that each sees, its own
        among them, and `key_rows` [K], document by document, which those are. Without `key_rows`
        the keys are other tokens laid end to end, `key_lengths` of them for each document, as a
        decoder reads its sources.
        """
        sizes = tuple(int(length) for length in lengths)
        if not sizes or min(sizes) < 1:
            raise ValueError("a packed batch needs documents of at least one token")
        keys = sizes if key_lengths is None else tuple(int(length) for length in key_lengths)
        bounds = _ends(sizes, device)
        return cls(
            sizes,
            bounds,
            max(sizes),
            torch.ones(1, 1, 1, 1, device=device),
            bounds if keys == sizes else _ends(keys, device),
            keys,
            None if key_rows is None else sent(key_rows, device),
        )

    @property
    def most_keys(self) -> int:
        """Keys of the document that sees most."""
        return max(self.key_lengths)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made at the first call with this key: masks that several layers
        share.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def sent(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An array on a device. The host continues at once: from pageable memory it would wait for the
    GPU from 64 KB on.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = pinned(tensor)
    return tensor.to(device, non_blocking=True)


def _ends(sizes: Sequence[int], device: torch.device | str) -> Tensor:
    """int32 [N + 1]: 0, then where each ends."""
    return sent(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), device)


def owners_of(documents: Documents) -> Tensor:
    """int64 [K]: the number of each key's document; of each token's, where no document continues
    another.
    """

    def make() -> Tensor:
        return numbered(documents.key_bounds, sum(documents.key_lengths))

    return documents.once("owners", make)


def numbered(bounds: Tensor, n: int) -> Tensor:
    """int64 [n]: the number of the document between whose bounds [N + 1] each place is."""
    numbers = torch.arange(len(bounds) - 1, device=bounds.device)
    return numbers.repeat_interleave(bounds.diff(), output_size=n)


def packed_batch(arrays: Mapping[str, Ints], device: torch.device | str = "cpu") -> Batch:
    """The arrays of `collate_packed`, `collate_shared` or `collate_pairs`, and others beside them,
    as tensors on `device`.

    Those that say where documents are become `documents`; of pairs these are the targets, `sources`
    the sources, and `across` the targets as they see their sources. But for the labels it is what a
    model takes.
    """
    batch: Batch = {
        name: torch.from_numpy(array).to(device, non_blocking=True)
        for name, array in arrays.items()
        if name not in ("lengths", "source_lengths", "key_lengths", "key_rows")
    }
    lengths, sources = arrays["lengths"], arrays.get("source_lengths")
    documents = Documents.of(lengths, device, arrays.get("key_lengths"), arrays.get("key_rows"))
    if sources is not None:
        batch["sources"] = Documents.of(sources, device)
        batch["across"] = Documents.of(lengths, device, sources)
    return {**batch, "attention_mask": documents.no_mask, "documents": documents}
