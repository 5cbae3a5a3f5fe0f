"""A token set: tokenized examples, memory-mapped, in a folder that is named by a hash of everything
they follow from.

So a stale set can't be used, and a set that exists is complete. On disk, flat:

    ids.bin      int32  [n_tokens]      all examples end to end
    targets.bin  uint8  [n_tokens]      1 where the model must predict the token; where examples
    have a label: the type of the token, 1 in the second of two texts
    offsets.bin  int64  [n_examples+1]  where each example begins
    lines.bin    int64  [n_examples]    the row it came from: source number * 2^40 + line
    target_lengths.bin int64 [n_examples] how many of its tokens are targets
    groups.bin   uint64 [n_examples]    hash of the input as it was written: equal inputs are never
    split between train and eval
    labels.bin   int32  [n_examples]    where the task has labels: index into the label names, or
    another dtype and shape of its own; [n_targets] where words have labels
    sequences.bin int32 [n_examples,k]  where an example is a unit of k sequences end to end: tokens
    of each
    shared.bin   int32 [n_examples,k]   how many it begins with in common with the first
    values.bin   float32 [n_examples]   where the objective reads a number of each unit
    inputs.bin   uint64 [n_inputs]      the distinct inputs of all rows that could be read, sorted,
    those among them that
                                        became no example: which side of a split an input is on must
                                        not hang on limits

A seq2seq example is its input followed by its target.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import Ints
from farthing.data.read import Source
from farthing.objectives.registry import code_sha256
from farthing.storage.files import (
    DamagedFileError,
    Json,
    check_file,
    read_manifest,
    verify_folder,
)

CACHE_VERSION = 11
"""Of the files of a token set, and of how rows become texts, tokens and a split."""
LINE_BITS = 40
Indices = Sequence[int] | Ints
DTYPES: dict[str, Any] = {
    "ids": np.int32,
    "targets": np.uint8,
    "offsets": np.int64,
    "lines": np.int64,
    "target_lengths": np.int64,
    "groups": np.uint64,
    "labels": np.int32,
    "inputs": np.uint64,
    "sequences": np.int32,
    "shared": np.int32,
    "values": np.float32,
}


@dataclass(frozen=True)
class TokenRecipe:
    """Everything about tokenization that is chosen, not given. Part of the key."""

    task: str
    max_length: int
    max_target_length: int = 128
    too_long: str = "truncate"
    train_on_prompt: bool = False
    columns: dict[str, Any] = field(default_factory=dict)
    """Standard column -> name or templates, see `columns.py`; a source may have its own."""
    label_map: dict[str, str] = field(default_factory=dict)
    max_bad_rows: float = 0.01
    label_names: tuple[str, ...] = ()
    """Known labels; empty: take the data's own."""
    model_classes: tuple[str, ...] = ()
    """The classes of a pretrained model: the data's own are numbered as these where they are the
    same.
    """
    source_lang: str = ""
    target_lang: str = ""
    """Languages that the tokenizer is set to, where it writes them into each text."""
    scored: str = ""
    """What is learned of rows with several answers and scores, see `scored.way_of`."""
    date: str = ""
    """ISO date that a chat template sees which asks for it; empty: it does not."""


@dataclass(frozen=True)
class TokenSet:
    """Tokenized examples, memory-mapped."""

    folder: Path
    facts: Json
    ids: NDArray[np.int32]
    targets: NDArray[np.uint8]
    offsets: Ints
    lines: Ints
    target_lengths: Ints
    groups: NDArray[np.uint64]
    labels: NDArray[Any] | None
    inputs: NDArray[np.uint64] | None = None
    sequences: NDArray[np.int32] | None = None
    """[n_examples * k], as on disk."""
    shared: NDArray[np.int32] | None = None
    values: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> Ints:
        """Tokens of each example [n_examples]."""
        return np.diff(self.offsets)

    @functools.cached_property
    def _of_words(self) -> Ints:
        """Where the labels of the words of each example begin [n_examples]."""
        return np.cumsum(self.target_lengths) - self.target_lengths

    def labels_of(self, indices: Indices) -> NDArray[Any] | None:
        """The labels of these examples, or of their words, end to end."""
        chosen = np.asarray(indices, dtype=np.int64)
        if self.labels is None or not self.facts.get("labels_per_word"):
            return None if self.labels is None else self.labels[chosen]
        return self.labels[ranges(self._of_words[chosen], self.target_lengths[chosen])]

    @property
    def content_sha256(self) -> str:
        """Identity of the examples: of every byte that training reads."""
        columns = ("ids", "targets", "offsets", "groups", "labels", "sequences", "values")
        names = [f"{column}.bin" for column in columns]
        files = {entry["name"]: entry["sha256"] for entry in self.facts["files"]}
        content = [[name, files[name]] for name in names if name in files]
        content.append(list(self.label_names))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of its sources: columns that are not used, what was guessed, data of
        another kind that the job has chosen.
        """
        return tuple(self.facts["notes"])

    @property
    def label_names(self) -> tuple[str, ...]:
        """Classification: the name of each label index."""
        return tuple(self.facts["label_names"])

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids [length] and target mask [length] of one example."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[span], self.targets[span]

    def release(self) -> None:
        """Unmap the pages that were read. Linux maps 64 KiB around each, so that a few thousand
        drawn examples would hold hundreds of megabytes.
        """
        for column in (self.ids, self.targets):
            mapped = column.base.obj if isinstance(column.base, memoryview) else None
            if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def n_sequences(self) -> int:
        """Of an example."""
        return 1 if self.sequences is None else len(self.sequences) // max(1, len(self))

    def sequences_of(self, indices: Indices) -> tuple[Ints, Ints]:
        """Where the sequences of these examples begin, and the tokens of each [n * k]."""
        chosen = np.asarray(indices, dtype=np.int64)
        starts = self.offsets[chosen]
        if self.sequences is None:
            return starts, self.offsets[chosen + 1] - starts
        lengths = self.sequences.reshape(-1, self.n_sequences)[chosen].astype(np.int64)
        return (starts[:, None] + np.cumsum(lengths, 1) - lengths).ravel(), lengths.ravel()

    def places_of(self, indices: Indices, skipped: Ints | int = 0) -> tuple[Ints, Ints]:
        """Where the tokens of these examples stand, end to end [n_tokens], and how many each has
        [n].

        Without the first `skipped` [n] of each.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        starts = self.offsets[chosen] + skipped
        lengths = self.offsets[chosen + 1] - starts
        return ranges(starts, lengths), lengths

    def n_targets(self, indices: Indices) -> int:
        """How many predictions these examples ask for: target tokens, or units where these are
        scored or compared.
        """
        if self.facts.get("counts_units", self.labels is not None):
            return len(indices)
        return int(self.target_lengths[np.asarray(indices)].sum())

    def place(self, index: int) -> str:
        """`file:line` of one example."""
        source, line = divmod(int(self.lines[index]), 1 << LINE_BITS)
        return f"{self.facts['sources'][source]['name']}:{line}"


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... of each, end to end."""
    stops = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) + np.repeat(starts - stops + lengths, lengths)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identity of a tokenizer: its whole definition, its special tokens and its chat template."""
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    others = json.dumps(
        [special_tokens, tokenizer.chat_template, tokenizer.truncation_side], sort_keys=True
    )
    return _definition_sha256(tokenizer.backend_tokenizer.to_str(), others)


@functools.lru_cache(maxsize=2)
def _definition_sha256(definition: str, others: str) -> str:
    """Remembered, as it takes a tenth of a second and a job asks several times."""
    content = json.loads(definition)
    content |= {
        "truncation": None,
        "padding": None,
    }  # by the last call that asked for it, not by the tokenizer's files
    return hashlib.sha256(
        json.dumps([content, *json.loads(others)], sort_keys=True).encode()
    ).hexdigest()


def set_key(sources: list[Source], tokenizer_hash: str, recipe: TokenRecipe) -> str:
    """The name of a token set: a hash of everything it follows from."""
    content = [
        CACHE_VERSION,
        [source.identity for source in sources],
        tokenizer_hash,
        asdict(recipe),
        code_sha256(recipe.task),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def open_token_set(folder: Path, *, checks_tokens: bool = True) -> TokenSet:
    """Map a committed set, every byte checked first; without `checks_tokens` not those of tokens,
    which a plan does not read.
    Raises `DamagedFileError`.
    """
    facts = verify_folder(folder) if checks_tokens else _check_columns(folder)
    arrays: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        path = folder / f"{name}.bin"
        if path.exists():
            dtype = facts.get("label_dtype", dtype) if name == "labels" else dtype
            arrays[name] = _mapped(path, dtype)
            if name == "labels":
                arrays[name] = arrays[name].reshape(-1, *facts.get("label_shape", ()))
    arrays.setdefault("labels", None)
    return TokenSet(folder, facts, **arrays)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    """The numbers of a file, of which memory holds those that are asked for."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # examples are drawn: what lies around one is not wanted
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


def _check_columns(folder: Path) -> Json:
    facts = read_manifest(folder)
    for entry in facts["files"]:
        path = folder / entry["name"]
        if entry["name"] not in ("ids.bin", "targets.bin"):
            check_file(path, entry, path.name)
        elif not path.is_file() or path.stat().st_size != entry["size"]:
            raise DamagedFileError(f"{path.name} does not have the size it was written with")
    return facts
