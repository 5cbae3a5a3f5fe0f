"""Tokenize once: rows become a token set (`token_set.py`), unless the cache holds one of the same
content.

The sources are cut into parts (`parts.py`), which processes on all cores make where the data is
large. Parts are files in a draft beside the set, and the columns of the set are theirs end to end.
So a tokenization that was killed resumes with the parts it lacks, and gives the same bytes.
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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.chat import said_of_chats
from farthing.data.encode import PlainTokenizer
from farthing.data.parts import (
    PartMaker,
    PartPlace,
    Tally,
    TokenPart,
    path_of_part,
    places,
    read_part,
)
from farthing.data.read import Source, say_names
from farthing.data.reader import understood_reader
from farthing.data.token_set import (
    CACHE_VERSION,
    TokenRecipe,
    TokenSet,
    open_token_set,
    set_key,
    tokenizer_sha256,
)
from farthing.data.worker import Spec
from farthing.errors import DataError, RunInterruptedError
from farthing.objectives.objective import Labels, in_models_order
from farthing.objectives.registry import is_installed, objective_of
from farthing.storage.files import (
    DamagedFileError,
    Json,
    Warn,
    belongs_to_another,
    commit_folder,
    discard,
    is_own,
    own_folder,
)

WORKER_BYTES = 8 << 20
"""Of the sources, for which a process of its own pays."""
MOST_WORKERS = 32
_WORKER_MEMORY_BYTES = 512 << 20
_ABANDONED_S = 86400.0
_POLL_S = 0.05
Progress = Callable[[int, int, float], None]


def tokenize(
    sources: list[Source],
    tokenizer: Any,
    recipe: TokenRecipe,
    cache_dir: Path,
    *,
    progress: Progress = lambda rows, tokens, share: None,
    should_stop: Callable[[], bool] = lambda: False,
    warn: Warn = lambda text: None,
) -> TokenSet:
    """The token set of these sources: from the cache when it is there, else made and committed
    whole.

    `tokenizer` is a fast transformers tokenizer with its chat template set. `progress(rows, tokens,
    share)` is called after each part; `share` of the sources' bytes is read, from 0 to 1. A set
    that another user could have changed is made again, which `warn` is told. Raises `DataError`
    (too many bad rows, nothing usable, nothing to predict), `RunInterruptedError`.
    """

    def check() -> None:
        if should_stop():
            raise RunInterruptedError(
                "stopped while tokenizing", to_do="run the same command again: it resumes"
            )

    try:
        cache, identity = own_folder(cache_dir / "tokens", warn), tokenizer_sha256(tokenizer)
        folder = cache / set_key(sources, identity, recipe)
        if os.path.lexists(folder) and not is_own(folder):
            warn(f"another user made or could change the tokens in {folder}: they are made again")
            discard(folder)
        if folder.exists():
            try:
                return open_token_set(folder)
            except DamagedFileError as error:
                warn(f"the tokens in {folder} are damaged ({error}): they are made again")
                discard(folder)
        _sweep(cache)
        with _held(folder, check):
            if not folder.exists():
                _make(folder, sources, tokenizer, recipe, progress, check)
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
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _held(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Wait until no other process makes this set. Where files can't be locked, nobody waits."""
    path = folder.with_name(f"{folder.name}.lock")
    with open(path, "a") as file:
        is_locked = False
        while not is_locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                check()
                time.sleep(_POLL_S)
            except OSError:
                is_locked = True
        yield
        path.unlink(missing_ok=True)


def _make(
    folder: Path,
    sources: list[Source],
    tokenizer: Any,
    recipe: TokenRecipe,
    progress: Progress,
    check: Callable[[], None],
) -> None:
    """Resume the draft of a set, or begin one, and commit it.

    Of n processes each makes every n-th part; this one also what a process that has ended left
    undone.
    """
    known, plain = KnownFacts(sources, recipe), _plain(tokenizer, recipe)
    maker = known.maker(plain)
    draft = folder.with_name(f"{folder.name}.draft-tokens")
    if os.path.lexists(draft) and (draft.is_symlink() or belongs_to_another(draft)):
        discard(draft)
    draft.mkdir(mode=0o700, exist_ok=True)
    before, paths = set(draft.iterdir()), list[Path]()
    n = _n_processes(sources, recipe)
    if n > 1:
        Spec(sources, known.understood, plain.state(), recipe).write(draft)
    try:
        with _workers(draft, n) as workers:
            for number, place in enumerate(places(sources)):
                check()
                path, worker = path_of_part(draft, number), workers[number % n]
                while worker is not None and not path.exists() and worker.poll() is None:
                    check()
                    time.sleep(_POLL_S)
                try:
                    part = read_part(path)
                except OSError:  # it is not there, or damaged
                    part = maker.make(place)
                    part.write(path)
                    before.discard(path)
                known.add(part)
                paths.append(path)
                if path not in before:
                    progress(known.tally.n_rows, known.tally.n_tokens, known.share)
        facts = known.facts(tokenizer)
    except DataError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    commit_folder(folder, lambda final: _write_columns(final, paths, facts, known.of_labels), facts)
    shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _workers(draft: Path, n: int) -> Iterator[list[subprocess.Popen[bytes] | None]]:
    """The processes that make parts: none in place of this one, which is the first."""
    threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    workers: list[subprocess.Popen[bytes] | None] = [None]
    with contextlib.ExitStack() as stack:
        for number in range(1, n):
            command = [sys.executable, "-P", "-m", "farthing.data.worker", draft, number, n]
            worker = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        yield workers


def _plain(tokenizer: Any, recipe: TokenRecipe) -> PlainTokenizer:
    return PlainTokenizer.of(tokenizer, is_pair=objective_of(recipe.task).is_pair)


def _write_columns(folder: Path, paths: list[Path], facts: Json, of: Labels | None) -> None:
    """The columns of some parts end to end. Raises `OSError`."""
    numbers = {name: number for number, name in enumerate(facts["label_names"])}
    seen, n_tokens = [np.zeros(0, np.uint64)], 0
    with contextlib.ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}

        def append(name: str, column: NDArray[Any]) -> None:
            if name not in files:
                files[name] = stack.enter_context(open(folder / f"{name}.bin", "wb"))
            column.tofile(files[name])

        append("offsets", np.zeros(1, np.int64))
        for columns, about in map(read_part, paths):
            seen.append(columns.pop("seen"))
            if "lengths" not in columns:
                continue
            offsets = n_tokens + np.cumsum(columns.pop("lengths"), dtype=np.int64)
            n_tokens = int(offsets[-1]) if len(offsets) else n_tokens
            append("offsets", offsets)
            if of is not None:
                labels = [of.number(_hashable(label), numbers) for label in about["labels"]]
                append("labels", np.array(labels, of.dtype)[columns.pop("classes")])
            for name, column in columns.items():
                append(name, column)
    np.unique(np.concatenate(seen)).tofile(folder / "inputs.bin")


def try_out(
    sources: list[Source], tokenizer: Any, recipe: TokenRecipe, most_bytes: int
) -> tuple[Json, bool]:
    """The facts of a set of about so many bytes of the sources, and whether that is all of them.

    Nothing is written. Raises `DataError` as `tokenize` does.
    """
    known, is_whole = KnownFacts(sources, recipe), True
    maker = known.maker(_plain(tokenizer, recipe))
    for number, source in enumerate(sources):
        n_bytes, share = 0, 1.0
        for block in source.blocks(most_bytes):
            if n_bytes > most_bytes:
                is_whole = False
                break
            n_bytes, share = n_bytes + int(block.sizes.sum()), block.share
            known.add(maker.make(PartPlace(number, [block.rows()], 1.0)))
        is_whole &= share == 1.0
    facts = known.facts(tokenizer)
    if known.of_labels is not None and is_whole:
        refuse_one_class(known.labels, [source.name for source in sources])
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


class KnownFacts:
    """What is known of a set from the parts so far: the same for training, a plan and checks."""

    def __init__(self, sources: list[Source], recipe: TokenRecipe) -> None:
        objective = objective_of(recipe.task)
        self.of_labels = objective.labels if objective.reads_labels else None
        self.sources, self.recipe = sources, recipe
        self.readers = [understood_reader(source, recipe) for source in sources]
        self.understood = [reader.understood for reader in self.readers]
        self.tally, self.labels, self.share = Tally(), set[Any](), 0.0
        self._bytes = [source.n_bytes for source in sources]
        self._groups = [np.zeros(0, np.uint64)]

    def maker(self, tokenizer: PlainTokenizer) -> PartMaker:
        return PartMaker(self.sources, self.understood, tokenizer, self.recipe)

    @property
    def notes(self) -> list[str]:
        """What there is to say of each source."""
        return [f"{each.name}: {said}" for each in self.readers for said in each.said()]

    def add(self, part: TokenPart) -> None:
        """Take in a part that follows those before."""
        facts, number = part.facts, part.facts["source"]
        self.labels.update(map(_hashable, facts["labels"]))
        self.tally.add(facts["tally"])
        self.readers[number].merge(facts["reader"])
        self._groups.append(part.columns.get("groups", self._groups[0]))
        done = sum(self._bytes[:number]) + self._bytes[number] * facts["share"]
        self.share = float(done / max(1, sum(self._bytes)))

    def facts(self, tokenizer: Any) -> Json:
        """The facts of the set for its manifest. Raises `DataError` where nothing can be learned of
        it.
        """
        recipe, tally, of = self.recipe, self.tally, self.of_labels
        groups = np.concatenate(self._groups)
        self._refuse_unusable(len(groups))
        of_chats = said_of_chats(tally.n_rendered > 0, tokenizer, recipe.date, tally.n_unrolled)
        names = self._label_names()
        facts: Json = {
            "kind": "farthing token set",
            "version": CACHE_VERSION,
            "sources": [{"name": each.name, "sha256": each.sha256} for each in self.sources],
            "formats": [each.format for each in self.understood if each is not None],
            **vars(tally),
            "n_examples": len(groups),
            "n_distinct_inputs": len(np.unique(groups)),
            "notes": [*self.notes, *(f"chats: {said}" for said in of_chats)],
            "max_length": recipe.max_length,
            "label_names": names,
            "counts_units": objective_of(recipe.task).counts_units,
        }
        if of is not None:
            numbers = {name: number for number, name in enumerate(names)}
            shape = np.shape(of.number(next(iter(self.labels)), numbers)) if self.labels else ()
            facts |= {"label_dtype": of.dtype, "label_shape": shape}
            facts |= {"labels_per_word": of.per_word}
        return facts

    def _label_names(self) -> list[str]:
        """The known labels in their order, else those that the objective finds in the data, in the
        order of the model's classes where they are the same.
        """
        if self.recipe.label_names or self.of_labels is None:
            return list(self.recipe.label_names)
        names = self.of_labels.names(self.labels)
        return in_models_order(names, self.recipe.model_classes) or names

    def _refuse_unusable(self, n_examples: int) -> None:
        recipe, tally = self.recipe, self.tally
        where = say_names([source.name for source in self.sources])
        n_rows, n_bad = tally.n_rows, tally.n_bad
        if n_rows == 0:
            raise DataError("no rows", where=where, to_do="check how the file was written")
        if n_bad > recipe.max_bad_rows * n_rows:
            shown = "".join(f"\n    {place}: {reason}" for place, reason in tally.bad_rows[:5])
            more = f"\n    ... and {n_bad - 5:,} more" if n_bad > 5 else ""
            to_do = "correct these rows: none can be used"
            if n_bad < n_rows:
                enough = min(1.0, round(n_bad / n_rows + 0.005, 2))
                to_do = f"correct these rows, or allow more with data.max_bad_rows: {enough}"
            raise DataError(
                f"{n_bad:,} of {n_rows:,} rows can't be used, at most {recipe.max_bad_rows:.0%} are"
                f" allowed:{shown}{more}",
                where=where,
                to_do=to_do,
            )
        if n_examples == 0 or tally.n_targets == 0:
            why = f"{tally.n_without_target:,} of {n_rows:,} rows have no target token"
            if tally.n_skipped_long:
                why += f", {tally.n_skipped_long:,} are longer than max_length {recipe.max_length}"
            raise DataError(
                f"nothing to learn: every target is masked ({why})",
                where=where,
                to_do=(
                    "raise data.max_length (prompts may fill it), or check the columns and the chat"
                    " template"
                ),
            )


def _hashable(label: Any) -> Any:
    return tuple(_hashable(each) for each in label) if isinstance(label, list) else label


def _n_processes(sources: list[Source], recipe: TokenRecipe) -> int:
    """One for each core and 8 MB of data, as far as memory holds them."""
    import psutil

    if not is_installed(recipe.task):
        return 1
    most = psutil.virtual_memory().available // _WORKER_MEMORY_BYTES
    n_bytes = sum(source.n_bytes for source in sources)
    n = min(len(os.sched_getaffinity(0)), n_bytes // WORKER_BYTES, most, MOST_WORKERS)
    return max(1, int(n))
