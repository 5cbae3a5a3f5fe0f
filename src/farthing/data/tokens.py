"""Tokenize once: rows become a token set (`token_set.py`), unless the cache holds one of the same
content.

The sources are cut into parts (`parts.py`), which processes on all cores make where the data is
large. Parts are appended, in order, to the columns of a draft beside the set:

    work.json           whose draft it is
    <column>.bin        the columns so far
    part-000007.json    what is known of a part that was appended, and how long the columns are then
    part-000009.npz     a part that was made and waits for those before it

A tokenization that was killed resumes there, and gives the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farthing.data.chat import said_of_chats
from farthing.data.encode import TokenizerState
from farthing.data.formats import Understood
from farthing.data.parts import Part, PartMaker, Place, Tally, places, read_part
from farthing.data.read import Source, say_names
from farthing.data.reader import SourceReader, understand
from farthing.data.rows import Reading
from farthing.data.token_set import (
    CACHE_VERSION,
    Recipe,
    TokenSet,
    open_token_set,
    set_key,
    tokenizer_sha256,
)
from farthing.data.worker import end_path, error_of, part_path, write_spec
from farthing.errors import DataError, RunInterruptedError
from farthing.objectives.objective import Labels, in_models_order
from farthing.objectives.registry import is_installed, objective_of
from farthing.storage.files import (
    DamagedFileError,
    Json,
    belongs_to_another,
    commit_folder,
    discard,
    is_own,
    own_folder,
    read_json,
    write_json,
)

WORKER_BYTES = 8 << 20
"""Of the sources, for which a process of its own pays."""
MOST_WORKERS = 32
_WORKER_MEMORY_BYTES = 512 << 20
_ABANDONED_S = 86400.0
_POLL_S = 0.05
Progress = Callable[[int, int, float], None]


class Told(NamedTuple):
    """Whom a tokenization tells how far it is, and asks whether to stop."""

    progress: Progress
    should_stop: Callable[[], bool]
    warn: Callable[[str], None]

    def check(self) -> None:
        """Raises `RunInterruptedError`."""
        if self.should_stop():
            raise RunInterruptedError(
                "stopped while tokenizing", to_do="run the same command again: it resumes"
            )


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
    share)` is called after each part; `share` of the sources' bytes is read, from 0 to 1. A set
    that another user could have changed is made again, which `warn` is told. Raises `DataError`
    (too many bad rows, nothing usable, nothing to predict), `RunInterruptedError`.
    """
    told = Told(progress, should_stop, warn)
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
        _sweep(cache)
        with _held(folder, told):
            if not folder.exists():
                _make(folder, sources, tokenizer, recipe, told)
    except FileExistsError:
        pass  # another process was quicker with the same content
    except OSError as error:
        raise DataError(
            f"the token cache can't be written: {error.strerror or error}",
            where=str(cache_dir),
            to_do="make room, or set cache_dir to a folder that can be written",
        ) from error
    return open_token_set(folder)


def _sweep(cache: Path) -> None:
    """Remove drafts that nobody has resumed for a day."""
    for path in (*cache.glob("*.draft-*"), *cache.glob("*.lock")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextlib.contextmanager
def _held(folder: Path, told: Told) -> Iterator[None]:
    """Wait until no other process makes this set. Where files can't be locked, nobody waits."""
    path = folder.with_name(f"{folder.name}.lock")
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told.check()
                time.sleep(_POLL_S)
                continue
            except OSError:
                pass
            break
        yield
        path.unlink(missing_ok=True)


def _make(folder: Path, sources: list[Source], tokenizer: Any, recipe: Recipe, told: Told) -> None:
    """Resume the draft of a set, or begin one, and commit it."""
    state = TokenizerState.of(tokenizer, is_pair=objective_of(recipe.task).is_pair)
    understood = [understand(source, recipe) for source in sources]
    draft = _Draft(folder.with_name(f"{folder.name}.draft-tokens"), sources, understood, recipe)
    try:
        for part in _parts(draft, understood, state, told):
            draft.take(part)
            told.progress(draft.tally.n_rows, draft.tally.n_tokens, draft.share)
        facts = draft.finish(tokenizer)
    except DataError:
        shutil.rmtree(draft.folder, ignore_errors=True)
        raise
    commit_folder(folder, draft.link, facts)
    shutil.rmtree(draft.folder, ignore_errors=True)


def try_out(
    sources: list[Source], tokenizer: Any, recipe: Recipe, most_bytes: int
) -> tuple[Json, bool]:
    """The facts of a set of about so many bytes of the sources, and whether that is all of them.

    Nothing is written. Raises `DataError` as `tokenize` does.
    """
    is_pair = objective_of(recipe.task).is_pair
    state = TokenizerState.of(tokenizer, is_pair=is_pair)
    tally, readers, labels, is_whole = Tally(), list[SourceReader](), set[Any](), True
    groups: list[Any] = [np.zeros(0, np.uint64)]
    for source in sources:
        understood = understand(source, recipe)
        maker = PartMaker([source], [understood], state, recipe)
        readers.append(SourceReader(source, recipe, None, understood))
        reading = Reading(most_bytes)
        n_bytes = 0
        for block in source.blocks(reading):
            if n_bytes > most_bytes:
                is_whole = False
                break
            n_bytes += int(block.sizes.sum())
            part = maker.make(Place(0, [block], 1.0))
            tally.add(part.facts["tally"])
            readers[-1].merge(part.facts["reader"])
            labels |= set(part.facts["labels"])
            groups.append(part.columns.get("groups", groups[0]))
        is_whole &= reading.is_whole
    inputs = np.concatenate(groups)
    of = objective_of(recipe.task).labels if objective_of(recipe.task).reads_labels else None
    facts: Json = {
        **vars(tally),
        "sources": [{"name": source.name} for source in sources],
        "formats": [each.understood.format for each in readers if each.understood is not None],
        "notes": [f"{each.name}: {said}" for each in readers for said in each.said()],
        "n_targets": tally.n_targets if of is None else len(inputs),
        "n_examples": len(inputs),
        "n_distinct_inputs": len(np.unique(inputs)),
        "label_names": [] if of is None else of.names(labels),
    }
    _refuse_unusable(facts, recipe)
    if of is not None and is_whole:
        refuse_one_class(labels, [source.name for source in sources])
    return facts, is_whole


def refuse_one_class(labels: Collection[Any], sources: Sequence[str]) -> None:
    """Refuse data of one distinct label, of which nothing can be learned. Raises `DataError`."""
    if len(labels) == 1:
        label = next(iter(labels))
        raise DataError(
            f"every training example has the same label, {label!r}: there is nothing to learn",
            where=say_names(sources),
            to_do=(
                "check the label column, and data.max_train_samples where rows are sorted by label"
            ),
        )


class _Draft:
    """The columns of a set on their way, and what is known of the parts in them."""

    def __init__(
        self,
        folder: Path,
        sources: list[Source],
        understood: list[Understood | None],
        recipe: Recipe,
    ) -> None:
        self.folder, self.sources, self.recipe = folder, sources, recipe
        self._bytes = [source.n_bytes for source in sources]
        self._understood = understood
        whose = {"set": folder.name, "version": CACHE_VERSION}
        is_ours = folder.is_dir() and not belongs_to_another(folder)
        if not (is_ours and _read(folder / "work.json") == whose and self._resumed()):
            if os.path.lexists(folder):
                discard(folder)
            folder.mkdir(mode=0o700)
            write_json(folder / "work.json", whose)
            self._begin()

    def _begin(self) -> None:
        self.n_parts, self.tally, self.share = 0, Tally(), 0.0
        self._labels: dict[Any, int] = {}
        self._sizes: dict[str, int] = {}
        self._readers = [
            SourceReader(source, self.recipe, None, each)
            for source, each in zip(self.sources, self._understood, strict=True)
        ]

    def _resumed(self) -> bool:
        """Take in the parts that were appended; false where bytes of them are lost."""
        self._begin()
        while (noted := _read(self._noted(self.n_parts))) is not None:
            self._sizes = noted["sizes"]
            self._note(noted["facts"])
        for path in self.folder.glob("*.bin"):
            size = self._sizes.get(path.stem, 0)
            if path.stat().st_size < size:
                return False
            os.truncate(path, size)  # a part may have been half appended
        for path in self.folder.glob("part-*.npz"):
            if read_part(path) is None:
                path.unlink()
        for path in self.folder.glob("end-*.json"):
            path.unlink()
        return all((self.folder / f"{name}.bin").exists() for name in self._sizes)

    def _noted(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.json"

    def take(self, part: Part) -> None:
        """Append a part, for good. Raises `OSError`."""
        columns = dict(part.columns)
        number, n_tokens = self.n_parts, self.tally.n_tokens
        self._note(part.facts)
        if "lengths" in columns:
            offsets = n_tokens + np.cumsum(columns.pop("lengths"), dtype=np.int64)
            is_first = "offsets" not in self._sizes
            columns["offsets"] = np.concatenate([[0], offsets]) if is_first else offsets
        if "classes" in columns:
            own = [self._labels[_hashable(label)] for label in part.facts["labels"]]
            columns["classes"] = np.array(own, np.int32)[columns["classes"]]
        for name, column in columns.items():
            with open(self.folder / f"{name}.bin", "ab") as file:
                file.write(np.ascontiguousarray(column).data)
                file.flush()
                os.fsync(file.fileno())
                self._sizes[name] = file.tell()
        write_json(self._noted(number), {"facts": part.facts, "sizes": self._sizes})
        part_path(self.folder, number).unlink(missing_ok=True)

    def _note(self, facts: Json) -> None:
        source = facts["source"]
        for label in facts["labels"]:
            self._labels.setdefault(_hashable(label), len(self._labels))
        self.tally.add(facts["tally"])
        self._readers[source].merge(facts["reader"])
        done = sum(self._bytes[:source]) + self._bytes[source] * facts["share"]
        self.share = float(done / max(1, sum(self._bytes)))
        self.n_parts += 1

    def finish(self, tokenizer: Any) -> Json:
        """Write the columns that follow from all parts; returns the facts of the set for its
        manifest. Raises `DataError`.
        """
        groups = self._column("groups", np.uint64)
        names = self._label_names()
        facts = self._facts(tokenizer, names) | {
            "n_examples": len(groups),
            "n_distinct_inputs": len(np.unique(groups)),
        }
        _refuse_unusable(facts, self.recipe)
        np.unique(self._column("seen", np.uint64)).tofile(self.folder / "inputs.bin")
        if (of := self._of_labels()) is not None:
            numbers = {name: number for number, name in enumerate(names)}
            of_each = np.array([of.number(label, numbers) for label in self._labels], of.dtype)
            if of_each.ndim > 1:
                facts["label_shape"] = of_each.shape[1:]
            if of.per_word:
                facts["labels_per_word"] = True
            of_each[self._column("classes", np.int32)].tofile(self.folder / "labels.bin")
        return facts

    def _column(self, name: str, dtype: Any) -> Any:
        path = self.folder / f"{name}.bin"
        return np.fromfile(path, dtype) if path.exists() else np.zeros(0, dtype)

    def _of_labels(self) -> Labels | None:
        objective = objective_of(self.recipe.task)
        return objective.labels if objective.reads_labels else None

    def _label_names(self) -> list[str]:
        """The known labels in their order, else those that the objective finds in the data, in the
        order of the model's classes where they are the same.
        """
        of = self._of_labels()
        if self.recipe.label_names or of is None:
            return list(self.recipe.label_names)
        names = of.names(set(self._labels))
        return in_models_order(names, self.recipe.model_classes) or names

    def _facts(self, tokenizer: Any, names: list[str]) -> Json:
        tally, readers, labels = self.tally, self._readers, self._of_labels()
        of_chats = said_of_chats(
            tally.n_rendered > 0, tokenizer, self.recipe.date, tally.n_unrolled
        )
        n_labelled = self._sizes.get("classes", 0) // 4
        return {
            "kind": "farthing token set",
            "version": CACHE_VERSION,
            "sources": [{"name": each.name, "sha256": each.sha256} for each in self.sources],
            "formats": [each.understood.format for each in readers if each.understood is not None],
            **vars(tally),
            "n_targets": tally.n_targets if labels is None else n_labelled,
            "ignored_columns": [
                {"source": reader.name, "columns": reader.ignored, "n_rows": reader.n_rows}
                for reader in readers
                if reader.ignored
            ],
            "chosen": (
                [
                    {"source": reader.name, "what": what}
                    for reader in readers
                    for what in reader.notes
                ]
                + [{"source": "chats", "what": what} for what in of_chats]
            ),
            "max_length": self.recipe.max_length,
            "label_names": names,
            "counts_units": objective_of(self.recipe.task).counts_units,
            **(
                {"label_dtype": labels.dtype}
                if labels is not None and labels.dtype != "int32"
                else {}
            ),
        }

    def link(self, final: Path) -> None:
        """The columns of the set, in its folder."""
        for path in self.folder.glob("*.bin"):
            if path.stem not in ("seen", "classes"):
                try:
                    os.link(path, final / path.name)
                except OSError:
                    shutil.copyfile(path, final / path.name)


def _read(path: Path) -> Any:
    """The content of a JSON file; None where it is not there or not whole."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _hashable(label: Any) -> Any:
    return tuple(_hashable(each) for each in label) if isinstance(label, list) else label


# ---- who makes the parts ----


class _WorkersLost(Exception):
    """Workers ended without a word."""


def _parts(
    draft: _Draft, understood: list[Understood | None], state: TokenizerState, told: Told
) -> Iterator[Part]:
    """The parts that the draft lacks, in order."""
    n_workers = _n_workers(draft.sources, draft.recipe)
    if n_workers > 1:
        write_spec(draft.folder, draft.sources, understood, state, draft.recipe, draft.n_parts)
        try:
            yield from _of_workers(draft, n_workers, told)
            return
        except _WorkersLost as error:
            told.warn(f"tokenizing continues in one process: {error}")
    maker = PartMaker(draft.sources, understood, state, draft.recipe)
    for number, place in enumerate(places(draft.sources)):
        told.check()
        if number >= draft.n_parts:
            path = part_path(draft.folder, number)
            yield (read_part(path) if path.exists() else None) or maker.make(place)


def _n_workers(sources: list[Source], recipe: Recipe) -> int:
    """One for each core and 8 MB of data, as far as memory holds them."""
    import psutil

    most = psutil.virtual_memory().available // _WORKER_MEMORY_BYTES
    n_bytes = sum(source.n_bytes for source in sources)
    n = min(len(os.sched_getaffinity(0)), n_bytes // WORKER_BYTES, most, MOST_WORKERS)
    return int(n) if is_installed(recipe.task) else 1


def _of_workers(draft: _Draft, n: int, told: Told) -> Iterator[Part]:
    """Raises `InputError`, `OSError` as a worker did, and `_WorkersLost`."""
    threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "farthing.data.worker", str(draft.folder)]
    with contextlib.ExitStack() as stack:
        workers = []
        for number in range(n):
            worker = subprocess.Popen(
                [*command, str(number), str(n)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads,
            )
            stack.callback(_end, worker)
            workers.append(worker)
        n_parts: int | None = None
        while n_parts is None or draft.n_parts < n_parts:
            told.check()
            are_done = [worker.poll() is not None for worker in workers]
            path = part_path(draft.folder, draft.n_parts)
            if path.exists() and (part := read_part(path)):
                yield part
                continue
            ends = [_read(end_path(draft.folder, number)) for number in range(n)]
            errors = [end for end in ends if end and "error" in end]
            if errors:
                raise error_of(min(errors, key=lambda end: int(end["part"])))
            for worker, end, is_done in zip(workers, ends, are_done, strict=True):
                if is_done and end is None:
                    raise _WorkersLost(f"another ended with exit code {worker.returncode}")
                n_parts = end["n_parts"] if end else n_parts
            if all(are_done) and n_parts != draft.n_parts:
                raise _WorkersLost("a part that another made is damaged")
            time.sleep(_POLL_S)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.communicate()


def _refuse_unusable(facts: Json, recipe: Recipe) -> None:
    where = say_names([source["name"] for source in facts["sources"]])
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
