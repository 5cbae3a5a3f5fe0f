"""Tokenize once: rows become a token set (`token_set.py`), unless the cache holds one of the same
content.

One thread reads rows and renders their texts, one waits for the tokenizer, one writes. Refuses to
batch and to know what trains on the examples.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.data.chat import said_of_chats
from farthing.data.encode import Encoded, Encoder
from farthing.data.formats import Text, hash_of_input
from farthing.data.loader import Ahead
from farthing.data.read import Source, n_characters
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Reading, Row
from farthing.data.token_set import (
    CACHE_VERSION,
    DTYPES,
    LINE_BITS,
    Recipe,
    TokenSet,
    open_token_set,
    set_key,
    tokenizer_sha256,
)
from farthing.data.units import n_shared
from farthing.errors import DataError, RunInterruptedError
from farthing.objectives.columns import Unusable
from farthing.objectives.objective import Labels, in_models_order
from farthing.objectives.registry import objective_of
from farthing.storage.files import (
    DamagedFileError,
    Json,
    commit_folder,
    discard,
    is_own,
    own_folder,
    sweep_drafts,
)

CHUNK_ROWS = 1024  # that are read together
MOST_CHARACTERS_TOGETHER = 32 << 20
CHUNK_CHARACTERS = (
    1 << 18
)  # that are encoded together: enough for the threads of many cores, and few for their caches
CHUNKS_AHEAD = 1  # that wait for the tokenizer, and as many after it
Progress = Callable[[int, int, float], None]


def tokenize(
    sources: list[Source],
    tokenizer: Any,
    recipe: Recipe,
    cache_dir: Path,
    *,
    progress: Progress = lambda rows, tokens, share: None,
    should_stop: Callable[[], bool] = lambda: False,
    warn: Callable[[str], None] = lambda text: None,
) -> TokenSet:
    """The token set of these sources: from the cache when it is there, else made and committed
    whole.

    `tokenizer` is a fast transformers tokenizer with its chat template set. `progress(rows, tokens,
    share)` is called about once a chunk; `share` of the sources' bytes is read, from 0 to 1. A set
    that another user could have changed is made again, which `warn` is told. Raises `DataError`
    (too many bad rows, nothing usable, nothing to predict), `RunInterruptedError`.
    """
    facts: Json = {}
    try:
        cache, identity = own_folder(cache_dir / "tokens", warn), tokenizer_sha256(tokenizer)
        folder = cache / set_key(sources, identity, recipe)
        if os.path.lexists(folder) and not is_own(folder):
            warn(f"another user made or could change the tokens in {folder}: they are made again")
            discard(folder)
        if folder.exists():
            try:
                return open_token_set(folder)
            except DamagedFileError:
                discard(folder)
        if any(
            time.time() - path.stat().st_mtime > 86400 for path in cache.glob("*.draft-*")
        ):  # younger: of others
            sweep_drafts(cache)
        commit_folder(
            folder,
            lambda draft: facts.update(
                _write(draft, sources, tokenizer, recipe, progress, should_stop)
            ),
            facts,
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


# ---- making one ----


@dataclass
class Tally:
    """What became of the rows, as the manifest of a set says it."""

    n_rows: int = 0
    n_bad: int = 0
    n_too_long: int = 0
    n_skipped_long: int = 0
    n_without_target: int = 0
    n_unlearned_turns: int = 0
    n_unrolled: int = 0
    n_rendered: int = 0
    n_tokens: int = 0
    n_targets: int = 0
    bad_rows: list[tuple[str, str]] = field(default_factory=list)

    def reject(self, place: str, reason: str) -> None:
        """Count a bad row; the first thousand are named."""
        self.n_bad += 1
        if len(self.bad_rows) < 1000:
            self.bad_rows.append((place, reason))


@dataclass
class _Chunk:
    """Neighbouring rows of one source, as texts; `lines` and `groups` are of these."""

    source: str
    source_number: int
    n_rows: int = 0
    n_characters: int = 0
    share: float = 0.0
    texts: list[Text] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    groups_of_rejected: list[int] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)

    def place(self, line: int) -> str:
        """`file:line`."""
        return f"{self.source}:{line}"


def _write(
    draft: Path,
    sources: list[Source],
    tokenizer: Any,
    recipe: Recipe,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Json:
    """Fill `draft`; returns the facts of the set for its manifest."""
    objective = objective_of(recipe.task)
    tally, labels = Tally(), _Labels(objective.labels if objective.reads_labels else None, recipe)
    encode = Encoder(
        tokenizer,
        recipe.task,
        recipe.max_length,
        recipe.max_target_length,
        recipe.train_on_prompt,
    )
    readers: list[SourceReader] = []
    all_groups, all_inputs = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    seldom = ("labels", "inputs", "sequences", "shared", "values")
    names = [name for name in DTYPES if name not in seldom]
    names += ["sequences", "shared"] * (objective.n_sequences > 1)
    names += ["values"] * bool(objective.value)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(draft / f"{name}.bin", "wb")) for name in names}
        files["offsets"].write(np.int64(0).tobytes())
        chunks = _ahead(
            _chunks(sources, tokenizer, recipe, readers), stack
        )  # one thread reads and renders
        asked = _ahead(
            ((chunk, encode.ask(chunk.texts)) for chunk in chunks), stack
        )  # one waits for the tokenizer
        for chunk, answers in asked:
            if should_stop():
                raise RunInterruptedError(
                    "stopped while tokenizing", to_do="run the same command again"
                )
            tally.n_rows += chunk.n_rows
            for line, reason in chunk.rejected:
                tally.reject(chunk.place(line), reason)
            encoded = encode(chunk.texts, answers)
            kept = _usable(encoded, chunk, recipe, tally)
            all_inputs.append(
                np.unique(np.array(chunk.groups + chunk.groups_of_rejected, np.uint64))
            )
            labels.take(chunk, kept, tally)
            tally.n_unlearned_turns += sum(
                chunk.texts[index].n_unlearned for index in np.flatnonzero(kept)
            )
            tally.n_rendered += sum(not text.is_raw for text in chunk.texts)
            tally.n_unrolled += sum(len(text.earlier) for text in chunk.texts)
            encoded = encoded.only(kept)
            target_lengths = encoded.n_targets()
            columns: dict[str, NDArray[Any]] = {
                "target_lengths": target_lengths,
                "ids": encoded.ids,
                "targets": encoded.is_target,
                "offsets": tally.n_tokens + np.cumsum(encoded.lengths),
                "lines": (chunk.source_number << LINE_BITS) + np.array(chunk.lines, np.int64)[kept],
                "groups": np.array(chunk.groups, np.uint64)[kept],
            }
            if encoded.sequences is not None:
                columns["sequences"] = encoded.sequences.astype(np.int32)
                columns["shared"] = n_shared(encoded.ids, encoded.sequences).astype(np.int32)
            if objective.value is not None:
                values = [text.value for text in chunk.texts]
                columns["values"] = np.array(values, np.float32)[kept]
            for name, column in columns.items():
                files[name].write(column.tobytes())
            all_groups.append(columns["groups"])
            tally.n_tokens += len(encoded.ids)
            tally.n_targets += int(target_lengths.sum())
            progress(tally.n_rows, tally.n_tokens, chunk.share)
    groups = np.concatenate(all_groups)
    if labels.of is not None:
        labels.numbered().tofile(draft / "labels.bin")
    np.unique(np.concatenate(all_inputs)).tofile(draft / "inputs.bin")
    facts = _facts(sources, readers, recipe, tally, labels, tokenizer) | {
        "n_examples": len(groups),
        "n_distinct_inputs": len(np.unique(groups)),
    }
    _refuse_unusable(facts, recipe)
    return facts


def _facts(
    sources: list[Source],
    readers: list[SourceReader],
    recipe: Recipe,
    tally: Tally,
    labels: _Labels,
    tokenizer: Any,
) -> Json:
    """What the manifest says of a set, but for its number of examples."""
    formats = [reader.understood.format for reader in readers if reader.understood is not None]
    is_chat = tally.n_rendered > 0
    return {
        "kind": "farthing token set",
        "version": CACHE_VERSION,
        "sources": [{"name": source.name, "sha256": source.sha256} for source in sources],
        "formats": formats,
        **asdict(tally),
        "n_targets": tally.n_targets if labels.of is None else len(labels.seen),
        "ignored_columns": [
            {"source": reader.name, "columns": reader.ignored, "n_rows": reader.n_rows}
            for reader in readers
            if reader.ignored
        ],
        "chosen": (
            [{"source": reader.name, "what": what} for reader in readers for what in reader.notes]
            + [
                {"source": "chats", "what": what}
                for what in said_of_chats(is_chat, tokenizer, recipe.date, tally.n_unrolled)
            ]
        ),
        "label_names": labels.names,
        "counts_units": objective_of(recipe.task).counts_units,
        **(
            {"label_dtype": labels.of.dtype}
            if labels.of is not None and labels.of.dtype != "int32"
            else {}
        ),
    }


Item = TypeVar("Item")


def _ahead(items: Iterator[Item], stack: contextlib.ExitStack) -> Iterator[Item]:
    """`items`, of which a thread of its own keeps a few ready, until the stack is left."""
    return stack.enter_context(contextlib.closing(Ahead(items, CHUNKS_AHEAD)))


def _usable(encoded: Encoded, chunk: _Chunk, recipe: Recipe, tally: Tally) -> NDArray[np.bool_]:
    """Which examples of a chunk become some of the set [n]; the others are counted. Raises
    `DataError`.
    """
    long_ones = np.flatnonzero(encoded.was_cut)
    tally.n_too_long += len(long_ones)
    if len(long_ones) and recipe.too_long == "error":
        limits = f"max_length {recipe.max_length}"
        if objective_of(recipe.task).is_pair:
            limits += f" or max_target_length {recipe.max_target_length}"
        raise DataError(
            f"longer than {limits}",
            where=chunk.place(chunk.lines[int(long_ones[0])]),
            to_do="raise data.max_length, or set data.too_long to truncate or skip",
        )
    kept = ~encoded.was_cut if recipe.too_long == "skip" else np.ones(len(chunk.texts), bool)
    tally.n_skipped_long += len(kept) - int(kept.sum())
    if objective_of(recipe.task).scores_tokens:
        has_target = encoded.n_targets() > 0
        tally.n_without_target += int((kept & ~has_target).sum())
        kept &= has_target
    return kept


class _Labels:
    """The labels of a set, if its task has some (`of`), numbered once all have been seen."""

    def __init__(self, of: Labels | None, recipe: Recipe) -> None:
        self.of, self.of_model, self.seen = of, recipe.model_classes, list[Any]()
        self.known = {name: number for number, name in enumerate(recipe.label_names)}

    @property
    def names(self) -> list[str]:
        """The known labels in their order, else those that the task finds in the data, in the
        order of the model's classes where they are the same.
        """
        if self.known or self.of is None:
            return list(self.known)
        names = self.of.names(set(self.seen))
        return in_models_order(names, self.of_model) or names

    def take(self, chunk: _Chunk, kept: NDArray[np.bool_], tally: Tally) -> None:
        """Note the labels of the kept examples of a chunk; one that is not known is a bad row, and
        not kept.
        """
        if self.of is None:
            return
        for index in np.flatnonzero(kept).tolist():
            label = chunk.texts[index].label
            try:
                if self.known:
                    self.of.number(label, self.known)
                self.seen.append(label)
            except KeyError:
                tally.reject(
                    chunk.place(chunk.lines[index]), f"label {label!r} is never seen in training"
                )
                kept[index] = False

    def numbered(self) -> NDArray[Any]:
        """What is stored of each label that was noted."""
        assert self.of is not None
        numbers = {name: number for number, name in enumerate(self.names)}
        return np.array([self.of.number(label, numbers) for label in self.seen], self.of.dtype)


def _refuse_unusable(facts: Json, recipe: Recipe) -> None:
    where = ", ".join(source["name"] for source in facts["sources"])
    n_rows, n_bad = facts["n_rows"], facts["n_bad"]
    if n_rows == 0:
        raise DataError("no rows", where=where, to_do="check how the file was written")
    if n_bad > recipe.max_bad_rows * n_rows:
        shown = "".join(f"\n    {place}: {reason}" for place, reason in facts["bad_rows"][:5])
        more = f"\n    ... and {n_bad - 5:,} more" if n_bad > 5 else ""
        to_do = "correct these rows: none can be used"
        if n_bad < n_rows:
            to_do = (
                "correct these rows, or allow more with data.max_bad_rows:"
                f" {min(1.0, round(n_bad / n_rows + 0.005, 2))}"
            )
        raise DataError(
            f"{n_bad:,} of {n_rows:,} rows can't be used, at most {recipe.max_bad_rows:.0%} are"
            f" allowed:{shown}{more}",
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
            to_do=(
                "raise data.max_length (prompts may fill it), or check the columns and the chat"
                " template"
            ),
        )


def _chunks(
    sources: list[Source], tokenizer: Any, recipe: Recipe, readers: list[SourceReader]
) -> Iterator[_Chunk]:
    """The rows of all sources as texts, in order; the reader of each goes to `readers`."""
    sizes = [source.n_bytes for source in sources]
    for number, source in enumerate(sources):
        reading, reader = Reading(), SourceReader(source, recipe, tokenizer)
        readers.append(reader)
        for rows in _batched(source.rows(reading)):
            reader.look(rows)
            share = (sum(sizes[:number]) + sizes[number] * reading.share()) / max(1, sum(sizes))
            chunk = _Chunk(source.name, number, share=share)
            for row in rows:
                if chunk.n_characters > CHUNK_CHARACTERS:
                    yield chunk
                    chunk = _Chunk(source.name, number, share=share)
                chunk.n_rows += 1
                try:
                    text = reader.text(row)
                except Unusable as error:
                    chunk.rejected.append((row.line, str(error)))
                    chunk.groups_of_rejected += [hash_of_input(error.given)] if error.given else []
                    continue
                for each in text.of_row:
                    chunk.texts.append(each)
                    chunk.lines.append(row.line)
                    chunk.groups.append(hash_of_input(each.given))
                    parts = itertools.chain(each.segments, *each.beside)
                    chunk.n_characters += sum([len(part) for part, _ in parts])
            yield chunk


def _batched(rows: Iterator[Row | BadRow]) -> Iterator[list[Row | BadRow]]:
    """Rows that are read together: so many, or fewer where they are large."""
    chunk: list[Row | BadRow] = []
    n = 0
    for row in rows:
        chunk.append(row)
        n += n_characters(row.value) if isinstance(row, Row) else 0
        if len(chunk) == CHUNK_ROWS or n > MOST_CHARACTERS_TOGETHER:
            yield chunk
            chunk, n = [], 0
    if chunk:
        yield chunk
