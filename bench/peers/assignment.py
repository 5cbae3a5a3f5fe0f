"""What a contestant is given: one file of tokenized examples, one checkpoint, one order, one set of
training arguments.

Read by every contestant in its own process, so nothing here imports torch or farthing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
MAX_GRAD_NORM = 1.0
USD_PER_HOUR = 0.10


@dataclass(frozen=True)
class Examples:
    """Tokenized examples, end to end; a seq2seq example is its input followed by its target."""

    ids: NDArray[np.int32]
    is_target: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    classes: NDArray[np.int64] | None
    is_seq2seq: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example [n]."""
        return np.diff(self.offsets)

    @property
    def n_targets(self) -> int:
        """How many predictions the examples ask for."""
        return int(self.is_target.sum()) if self.classes is None else len(self)

    def row(self, index: int) -> dict[str, Any]:
        """`input_ids` and `labels` as the libraries want them: aligned, -100 where nothing is to be
        predicted.
        """
        span = slice(self.offsets[index], self.offsets[index + 1])
        ids, is_target = self.ids[span], self.is_target[span].astype(bool)
        if self.classes is not None:
            return {"input_ids": ids.tolist(), "labels": int(self.classes[index])}
        if self.is_seq2seq:
            return {"input_ids": ids[~is_target].tolist(), "labels": ids[is_target].tolist()}
        return {"input_ids": ids.tolist(), "labels": np.where(is_target, ids, IGNORED).tolist()}

    def save(self, path: Path) -> None:
        """Write the one file that all contestants read."""
        np.savez(path, **{key: value for key, value in vars(self).items() if value is not None})

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Read it."""
        with np.load(path) as arrays:
            return cls(**{"classes": None, **arrays, "is_seq2seq": bool(arrays["is_seq2seq"])})


@dataclass(frozen=True)
class Assignment:
    """One run of one contestant."""

    contestant: str
    folder: str
    """Of the workload: `model/` (the initial weights of all), `train.npz`, `eval.npz`,
    `train.jsonl`.
    """
    out: str
    """Where the contestant may write; the model it trained comes to `out`/model or where it says.
    """
    task: str
    method: str
    precision: str
    order: list[list[int]]
    """The examples of every optimizer step."""
    seed: int
    max_length: int
    max_target_length: int
    learning_rate: float
    targets: list[str]
    """Layers that get an adapter, as peft wants them named."""
    lora_r: int = 16
    columns: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """What is the contestant's own to choose: micro-batch, checkpointing, workers; for farthing
    keys of its job.
    """

    @property
    def batch(self) -> int:
        """Examples of an optimizer step."""
        return len(self.order[0])

    @property
    def model(self) -> Path:
        """The folder with the initial weights."""
        return Path(self.folder) / "model"

    def examples(self, split: str) -> Examples:
        """The tokenized file."""
        return Examples.load(Path(self.folder) / f"{split}.npz")

    def write(self, path: Path) -> None:
        """As JSON, for the process that will run it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """From JSON."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
