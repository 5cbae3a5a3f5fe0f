"""Tokenize once: a content-addressed, memory-mapped set of examples.

The key of a set is a hash of everything it follows from: the data's bytes, the tokenizer, the template and the limits.
So a stale set can't be used, and a set that exists is complete. On disk, flat:

    ids.bin      int32  [n_tokens]      all examples end to end
    targets.bin  uint8  [n_tokens]      1 where the model must predict the token
    offsets.bin  int64  [n_examples+1]  where each example begins
    lines.bin    int64  [n_examples]    the row it came from: source number * 2^40 + line
    groups.bin   uint64 [n_examples]    hash of the input text: equal inputs are never split between train and eval
    labels.bin   int32  [n_examples]    classification only: index into the label names

A seq2seq example is its input followed by its target. Refuses to batch and to know what trains on it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.formats import Text, Unusable, converter, recognise
from farthing.data.read import BadRow, Row, Source
from farthing.errors import DataError, Interrupted
from farthing.files import Damaged, commit_folder, discard, make_private, read_manifest, sweep_drafts, verify_folder

CACHE_VERSION = 1
CHUNK_ROWS = 1024
LINE_BITS = 40
_DTYPES: dict[str, Any] = {
    "ids": np.int32, "targets": np.uint8, "offsets": np.int64, "lines": np.int64, "groups": np.uint64, "labels": np.int32,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Everything about tokenization that is chosen, not given. Part of the key."""

    task: str
    max_length: int
    max_target_length: int = 128
    too_long: str = "truncate"
    train_on_prompt: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    label_map: dict[str, str] = field(default_factory=dict)
    max_bad_rows: float = 0.01
    label_names: tuple[str, ...] = ()
    """Known labels; empty: take the data's own, sorted."""


@dataclass(frozen=True)
class TokenSet:
    """Tokenized examples, memory-mapped."""

    folder: Path
    facts: dict[str, Any]
    ids: NDArray[np.int32]
    targets: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]
    groups: NDArray[np.uint64]
    labels: NDArray[np.int32] | None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example [n_examples]."""
        return np.diff(self.offsets)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Classification: the name of each label index."""
        return tuple(self.facts["label_names"])

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids [length] and target mask [length] of one example."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[span], self.targets[span]

    def n_targets(self, indices: Iterable[int]) -> int:
        """How many predictions these examples ask for: target tokens, or samples for classification."""
        if self.labels is not None:
            return len(list(indices))
        return int(sum(int(self.targets[self.offsets[i] : self.offsets[i + 1]].sum()) for i in indices))

    def place(self, index: int) -> str:
        """`file:line` of one example."""
        source, line = divmod(int(self.lines[index]), 1 << LINE_BITS)
        return f"{self.facts['sources'][source]['name']}:{line}"


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identity of a tokenizer: its whole definition, its special tokens and its chat template."""
    parts = [
        json.loads(tokenizer.backend_tokenizer.to_str()),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
        tokenizer.truncation_side,
    ]
    for part in parts[:1]:  # set by the last call that truncated or padded, not by the tokenizer's files
        part["truncation"] = part["padding"] = None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def set_key(sources: list[Source], tokenizer_hash: str, recipe: Recipe) -> str:
    """The name of a token set: a hash of everything it follows from."""
    content = [CACHE_VERSION, [source.sha256 for source in sources], tokenizer_hash, asdict(recipe)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def tokenize(
    sources: list[Source],
    tokenizer: Any,
    recipe: Recipe,
    cache_dir: Path,
    *,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TokenSet:
    """The token set of these sources: from the cache when it is there, else made and committed whole.

    `tokenizer` is a fast transformers tokenizer with its chat template set. `progress(rows, tokens)` is called about
    once a chunk. Raises `DataError` (too many bad rows, nothing usable, nothing to predict), `Interrupted`.
    """
    facts: dict[str, Any] = {}
    try:
        folder = make_private(cache_dir / "tokens") / set_key(sources, tokenizer_sha256(tokenizer), recipe)
        if folder.exists():
            try:
                return open_token_set(folder)
            except Damaged:
                discard(folder)
        _sweep_old_drafts(folder)
        commit_folder(
            folder, lambda draft: facts.update(_write(draft, sources, tokenizer, recipe, progress, should_stop)), facts
        )
    except FileExistsError:
        pass  # another process was quicker with the same content
    except OSError as error:
        raise DataError(
            f"the token cache can't be written: {error.strerror or error}",
            where=str(cache_dir),
            to_do="make room, or set cache_dir to a folder that can be written",
        ) from error
    return open_token_set(folder)


def _sweep_old_drafts(folder: Path) -> None:
    """Leave drafts alone that another process may be writing; remove those older than a day."""
    if any(time.time() - path.stat().st_mtime > 86400 for path in folder.parent.glob("*.draft-*")):
        sweep_drafts(folder.parent)


def open_token_set(folder: Path, *, check_bytes: bool = True) -> TokenSet:
    """Map a committed set, every byte checked first; without `check_bytes` the size of each file. Raises `Damaged`."""
    facts = verify_folder(folder) if check_bytes else _check_sizes(folder)
    arrays: dict[str, Any] = {}
    for name, dtype in _DTYPES.items():
        path = folder / f"{name}.bin"
        if path.exists():
            empty = path.stat().st_size == 0
            arrays[name] = np.zeros(0, dtype) if empty else np.memmap(path, dtype=dtype, mode="r")
    arrays.setdefault("labels", None)
    return TokenSet(folder, facts, **arrays)


def _check_sizes(folder: Path) -> dict[str, Any]:
    facts = read_manifest(folder)
    for entry in facts["files"]:
        path = folder / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise Damaged(f"{path.name} has not the size it was written with")
    return facts


# ---- making one ----


@dataclass
class Tally:
    """What became of the rows."""

    n_rows: int = 0
    n_bad: int = 0
    n_too_long: int = 0
    n_skipped_long: int = 0
    n_without_target: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)

    def reject(self, place: str, reason: str) -> None:
        """Count a bad row; the first thousand are named."""
        self.n_bad += 1
        if len(self.bad) < 1000:
            self.bad.append((place, reason))


def _write(
    draft: Path,
    sources: list[Source],
    tokenizer: Any,
    recipe: Recipe,
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Fill `draft`; returns the facts of the set for its manifest."""
    tally, encode = Tally(), Encoder(tokenizer, recipe)
    offset, n_targets = 0, 0
    label_ids: dict[str, int] = {}
    labels: list[int] = []
    formats: list[str] = []
    for name in recipe.label_names:
        label_ids[name] = len(label_ids)
    names = [name for name in _DTYPES if name != "labels"]
    files: dict[str, IO[bytes]] = {name: open(draft / f"{name}.bin", "wb") for name in names}  # noqa: SIM115
    groups_seen: Counter[int] = Counter()
    try:
        files["offsets"].write(np.int64(0).tobytes())
        for number, source in enumerate(sources):
            for chunk in _converted_chunks(number, source, tokenizer, recipe, tally, formats):
                if should_stop():
                    raise Interrupted("stopped while tokenizing", to_do="run the same command again")
                for place, line, text, ids, is_target in encode(chunk, tally):
                    if text.label is not None:
                        if recipe.label_names and text.label not in label_ids:
                            tally.reject(place, f"label {text.label!r} is never seen in training")
                            continue
                        labels.append(label_ids.setdefault(text.label, len(label_ids)))
                    offset += len(ids)
                    n_targets += int(is_target.sum())
                    source_text = "\0".join(part for part, target in text.segments if not target)
                    source_text = source_text or "\0".join(part for part, _ in text.segments)
                    group = int.from_bytes(hashlib.blake2b(source_text.encode(), digest_size=8).digest(), "little")
                    groups_seen[group] += 1
                    files["ids"].write(ids.tobytes())
                    files["targets"].write(is_target.tobytes())
                    files["offsets"].write(np.int64(offset).tobytes())
                    files["lines"].write(np.int64((number << LINE_BITS) + line).tobytes())
                    files["groups"].write(np.uint64(group).tobytes())
                progress(tally.n_rows, offset)
    finally:
        for file in files.values():
            file.close()
    names_sorted = list(recipe.label_names) or sorted(label_ids)
    if recipe.task == "classification":
        renumbered = {label_ids[name]: index for index, name in enumerate(names_sorted)}
        np.array([renumbered[label] for label in labels], dtype=np.int32).tofile(draft / "labels.bin")
    facts = {
        "kind": "farthing token set",
        "version": CACHE_VERSION,
        "sources": [{"name": source.name, "sha256": source.sha256} for source in sources],
        "formats": formats,
        "n_rows": tally.n_rows,
        "n_examples": sum(groups_seen.values()),
        "n_distinct_inputs": len(groups_seen),
        "n_tokens": offset,
        "n_targets": len(labels) if recipe.task == "classification" else n_targets,
        "n_bad": tally.n_bad,
        "n_too_long": tally.n_too_long,
        "n_skipped_long": tally.n_skipped_long,
        "n_without_target": tally.n_without_target,
        "bad_rows": tally.bad,
        "label_names": names_sorted,
    }
    _refuse_unusable(facts, recipe)
    return facts


def _refuse_unusable(facts: dict[str, Any], recipe: Recipe) -> None:
    where = ", ".join(source["name"] for source in facts["sources"])
    n_rows, n_bad = facts["n_rows"], facts["n_bad"]
    if n_rows == 0:
        raise DataError("no rows", where=where, to_do="check how the file was written")
    if n_bad > recipe.max_bad_rows * n_rows:
        shown = "".join(f"\n    {place}: {reason}" for place, reason in facts["bad_rows"][:5])
        more = f"\n    ... and {n_bad - 5:,} more" if n_bad > 5 else ""
        to_do = "mend them: no usable row is left"
        if n_bad < n_rows:
            to_do = f"mend them, or allow more with data.max_bad_rows: {min(1.0, round(n_bad / n_rows + 0.005, 2))}"
        raise DataError(
            f"{n_bad:,} of {n_rows:,} rows can't be used, {recipe.max_bad_rows:.0%} may be:{shown}{more}",
            where=where,
            to_do=to_do,
        )
    if facts["n_examples"] == 0 or facts["n_targets"] == 0:
        why = f"{facts['n_without_target']:,} of {n_rows:,} rows have no target token"
        if facts["n_skipped_long"]:
            why += f", {facts['n_skipped_long']:,} are longer than max_length {recipe.max_length}"
        raise DataError(
            f"nothing to learn: every target is masked ({why})",
            where=where,
            to_do="raise data.max_length (prompts may fill it), or check the columns and the chat template",
        )


def _converted_chunks(
    number: int, source: Source, tokenizer: Any, recipe: Recipe, tally: Tally, formats: list[str]
) -> Iterator[list[tuple[str, int, Text]]]:
    """Rows of one source as texts, in chunks; bad rows go to the tally."""
    convert: Callable[[dict[str, Any]], Text] | None = None
    for chunk in _batched(source.rows()):
        if convert is None:
            columns: set[str] = set().union(*(row.value.keys() for row in chunk if isinstance(row, Row)))
            if any(isinstance(row, Row) for row in chunk):
                formats.append(recognise(columns, recipe.task, recipe.columns, source.name))
                convert = converter(formats[-1], recipe.columns, recipe.label_map, tokenizer, recipe.task)
        texts = []
        for row in chunk:
            tally.n_rows += 1
            place = f"{source.name}:{row.line}"
            if isinstance(row, BadRow) or convert is None:
                tally.reject(place, row.reason if isinstance(row, BadRow) else "no usable row before it")
                continue
            try:
                texts.append((place, row.line, convert(row.value)))
            except Unusable as error:
                tally.reject(place, str(error))
        yield texts


def _batched(rows: Iterator[Row | BadRow]) -> Iterator[tuple[Row | BadRow, ...]]:
    while chunk := tuple(itertools.islice(rows, CHUNK_ROWS)):
        yield chunk


class Encoder:
    """Texts to (ids, target mask), a chunk at a time so that the tokenizer uses every core.

    Causal-lm: the segments are joined and encoded as one text, as `tokenizer(text)` would; a token belongs to the
    segment of its last character, so that one which spans prompt and completion is learned, not given.
    """

    def __init__(self, tokenizer: Any, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        empty = list(tokenizer("")["input_ids"])
        self.bos = empty[:1] if empty and empty[0] == tokenizer.bos_token_id else []
        self.eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def __call__(
        self, chunk: list[tuple[str, int, Text]], tally: Tally
    ) -> Iterator[tuple[str, int, Text, NDArray[np.int32], NDArray[np.uint8]]]:
        if not chunk:
            return
        encode = {"causal-lm": self._causal, "seq2seq": self._seq2seq, "classification": self._labelled}
        for (place, line, text), (ids, is_target, too_long) in zip(chunk, encode[self.recipe.task](chunk), strict=True):
            tally.n_too_long += too_long
            if too_long and self.recipe.too_long == "error":
                limits = f"max_length {self.recipe.max_length}"
                if self.recipe.task == "seq2seq":
                    limits += f" or max_target_length {self.recipe.max_target_length}"
                raise DataError(
                    f"longer than {limits}",
                    where=place,
                    to_do="raise data.max_length, or set data.too_long to truncate or skip",
                )
            if too_long and self.recipe.too_long == "skip":
                tally.n_skipped_long += 1
            elif text.label is None and not is_target.any():
                tally.n_without_target += 1
            else:
                yield place, line, text, ids, is_target

    def _encode(self, texts: list[str], **options: Any) -> Any:
        return self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options)

    def _causal(self, chunk: list[tuple[str, int, Text]]) -> Iterator[tuple[Any, Any, bool]]:
        joined = ["".join(part for part, _ in text.segments) for _, _, text in chunk]
        encoded = self._encode(joined, add_special_tokens=False)
        for index, (_, _, text) in enumerate(chunk):
            ids = list(encoded["input_ids"][index])
            is_target = np.zeros(len(ids), np.uint8)
            at = 0
            for part, target in text.segments:
                if (target or self.recipe.train_on_prompt) and part:
                    start = self._token_at(encoded, index, at, at + len(part))
                    stop = self._token_at(encoded, index, at + len(part), len(joined[index]))
                    is_target[len(ids) if start is None else start : len(ids) if stop is None else stop] = 1
                at += len(part)
            head = self.bos if ids[:1] != self.bos else []
            tail = self.eos if text.is_raw and text.segments[-1][1] and ids[-1:] != self.eos else []
            ids = [*head, *ids, *tail]
            is_target = np.concatenate([np.zeros(len(head), np.uint8), is_target, np.ones(len(tail), np.uint8)])
            is_target[:1] = 0  # nothing comes before the first token, so nothing can predict it
            limit = self.recipe.max_length
            yield np.array(ids[:limit], np.int32), is_target[:limit], len(ids) > limit

    @staticmethod
    def _token_at(encoded: Any, index: int, start: int, stop: int) -> int | None:
        """The first token that holds a character of [start, stop); None when there is none."""
        for position in range(start, stop):
            token = encoded.char_to_token(index, position)
            if token is not None:
                return int(token)
        return None

    def _whole(self, texts: list[str], limit: int) -> tuple[list[list[int]], list[bool]]:
        """Encode with the tokenizer's special tokens; those over the limit again, truncated by the tokenizer."""
        ids = [list(row) for row in self._encode(texts)["input_ids"]]
        too_long = [len(row) > limit for row in ids]
        long_ones = [index for index, is_long in enumerate(too_long) if is_long]
        if long_ones:
            again = self._encode([texts[i] for i in long_ones], truncation=True, max_length=limit)["input_ids"]
            for index, row in zip(long_ones, again, strict=True):
                ids[index] = list(row)
        return ids, too_long

    def _seq2seq(self, chunk: list[tuple[str, int, Text]]) -> Iterator[tuple[Any, Any, bool]]:
        def side(is_target: bool) -> list[str]:
            return ["".join(part for part, target in text.segments if target == is_target) for _, _, text in chunk]

        sources, long_sources = self._whole(side(False), self.recipe.max_length)
        targets, long_targets = self._whole(side(True), self.recipe.max_target_length)
        for source, target, long_source, long_target in zip(sources, targets, long_sources, long_targets, strict=True):
            is_target = np.concatenate([np.zeros(len(source), np.uint8), np.ones(len(target), np.uint8)])
            yield np.array([*source, *target], np.int32), is_target, long_source or long_target

    def _labelled(self, chunk: list[tuple[str, int, Text]]) -> Iterator[tuple[Any, Any, bool]]:
        ids, too_long = self._whole([text.segments[0][0] for _, _, text in chunk], self.recipe.max_length)
        for row, is_long in zip(ids, too_long, strict=True):
            yield np.array(row, np.int32), np.zeros(len(row), np.uint8), is_long
