"""The lengths of a job's data: from the token cache where training or tokenizing has left them,
else from a sample of rows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from farthing.addresses import without_secrets
from farthing.config.job import DataSection, Job
from farthing.data.batches import Batches, split_by_input
from farthing.data.blocks import is_text
from farthing.data.chat import asks_for_the_date, read_template
from farthing.data.encode import PlainTokenizer
from farthing.data.lengths import Lengths, from_token_set
from farthing.data.light_tokenizer import light_tokenizer, own_template
from farthing.data.read import (
    KINDS,
    Source,
    ending_of,
    file_source,
    folder_sha256,
    place_of,
    short_name,
)
from farthing.data.reader import SourceReader
from farthing.data.rows import Example
from farthing.data.sample import sample_lengths
from farthing.data.token_set import (
    CACHE_VERSION,
    LINE_BITS,
    TokenRecipe,
    TokenSet,
    open_token_set,
)
from farthing.errors import FarthingError, InputError
from farthing.models.model_config import CONFIG, cached_snapshot, find_config
from farthing.models.shapes import read_shape
from farthing.objectives.registry import objective_of
from farthing.run.folder import began
from farthing.storage.files import (
    DamagedFileError,
    belongs_to_another,
    is_own,
    make_private,
    sha256_of,
    write_json,
)
from farthing.units import plural

_ELSEWHERE = ("remote", "hub")  # what only the network can show
_MOST_LABELLED = 200_000  # rows of a file of which labels are read
INDEX = "token_index"  # the folder in the cache that tells which token set a job's data became
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_MOST_TOKENIZER_BYTES = 256 << 20  # a larger json file is none of a tokenizer


def read_lengths(job: Job, *, cache_dir: Path) -> tuple[Lengths, Lengths | None]:
    """The lengths of a job's training and evaluation examples, exact where they have been tokenized
    before.

    Raises `DataError` for data that can't be used, `InputError` for data that can't be seen without
    the network.
    """
    cache = Path(cache_dir)
    tokens = _tokens_of(job, "train", cache)
    if tokens is not None:
        found = _exact(job, tokens, cache)
        if found is not None:
            return found
    return _estimated(job)


def note_token_set(
    job: Job,
    role: str,
    train_sources: list[Source],
    eval_sources: list[Source],
    folder: Path,
    *,
    cache_dir: Path,
) -> None:
    """Remember which token set the data of `role` (train or eval) became, for `read_lengths`.
    Raises `OSError`.
    """
    key = _index_key(job, role, {"train": train_sources, "eval": eval_sources})
    if key is not None and _noted(cache_dir, key) != folder.name:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(
            make_private(cache_dir / INDEX) / f"{key}.json", {"set": folder.name, "when": when}
        )


def _exact(job: Job, tokens: TokenSet, cache: Path) -> tuple[Lengths, Lengths | None] | None:
    """From token sets; None when that of the evaluation data is not there."""
    train = np.arange(len(tokens))
    held_out: tuple[TokenSet, NDArray[np.int64]] | None = None
    if job.data.eval:
        eval_tokens = _tokens_of(job, "eval", cache)
        if eval_tokens is None:
            return None
        held_out = eval_tokens, np.arange(len(eval_tokens))
    elif job.data.eval_fraction > 0:
        train, chosen = split_by_input(
            tokens.groups, job.data.eval_fraction, job.train.seed, tokens.inputs
        )
        held_out = (tokens, chosen) if len(chosen) else None
    train = train[: job.data.max_train_samples]
    weights = [said.weight for said in job.data.of_train]
    of_each = (
        np.array(weights)[tokens.lines[train] >> LINE_BITS]
        if any(weight != 1 for weight in weights)
        else None
    )
    n_per_epoch = Batches(train, 1, 0, of_each).n_per_epoch
    is_exact = not any(place_of(name) in _ELSEWHERE for name in (*job.data.train, *job.data.eval))

    def lengths_of(of: TokenSet, indices: NDArray[np.int64]) -> Lengths:
        words = f"token cache, {plural(len(indices), 'example')}"
        words += "" if is_exact else "; the data was not looked at again"
        found = replace(from_token_set(of, indices, job.task, source=words), notes=of.notes)
        if not objective_of(job.task).scores_tokens:
            found = replace(found, n_labels=max(1, len(of.label_names)))
        return found if is_exact else replace(found, is_exact=False)

    of_train = lengths_of(tokens, train)
    if n_per_epoch != len(train):
        of_train = of_train.repeated(n_per_epoch)
    if held_out is None:
        return of_train, None
    return of_train, lengths_of(held_out[0], held_out[1][: job.data.max_eval_samples])


def _estimated(job: Job) -> tuple[Lengths, Lengths | None]:
    """From a sample of the rows."""
    tokenizer, recipe = reading_of(job, began(Path(job.output_dir)))
    n_labels = _n_labels(job, tokenizer, recipe)

    def part_of(
        found: Lengths, weights: Sequence[float], share: float, most: int | None
    ) -> Lengths:
        """The share of each source, of all these the first `most`, as often as they are learned."""
        left, n_examples = math.inf if most is None else most, 0.0
        for n, weight in zip(found.of_sources, weights, strict=True):
            n_kept = min(n * share, left)
            left, n_examples = left - n_kept, n_examples + n_kept * weight
        part = found.repeated(max(1, round(n_examples)))
        return replace(part, source=found.source, n_labels=n_labels)

    data, held_out = job.data, None
    share = 0.0 if data.eval else data.eval_fraction
    sources = _local_sources(job, "train")
    train = sample_lengths(sources, tokenizer, recipe)
    if data.eval or share:
        of_eval = train
        if data.eval:
            of_eval = sample_lengths(_local_sources(job, "eval"), tokenizer, recipe)
        once = [1.0] * len(of_eval.of_sources)
        held_out = part_of(of_eval, once, share or 1.0, data.max_eval_samples)
    weights = [source.weight for source in sources]
    return part_of(train, weights, 1 - share, data.max_train_samples), held_out


def _n_labels(job: Job, tokenizer: PlainTokenizer, recipe: TokenRecipe) -> int:
    """Outputs of the head for the labels of the training data; 0 where the task has none."""
    labels = objective_of(job.task).labels
    if labels is None:
        return 0
    found = set[Any]()
    for source in _local_sources(job, "train"):
        reader = SourceReader(source, recipe, tokenizer)
        for block in source.blocks():
            for _, text in reader.texts(block.rows()):
                for each in text.of_row if isinstance(text, Example) else ():
                    found.update(each.label if labels.per_word else [each.label])
            if reader.n_rows > _MOST_LABELLED:
                break
    return max(1, len(labels.names(found)))


def reading_of(job: Job, day: str) -> tuple[PlainTokenizer, TokenRecipe]:
    """How a job reads its rows, without transformers: its tokenizer, or a guess where none is here.
    Raises `ModelError`.
    """
    folder = _tokenizer_folder(job)
    tokenizer = light_tokenizer(folder, _template_of_job(job), job.model.new_tokens)
    return tokenizer, recipe_of(job, _max_length(job, folder), tokenizer.chat_template, day)


def recipe_of(job: Job, max_length: int, template: str | None, day: str) -> TokenRecipe:
    """How a job's rows become tokens; `day` is what a chat template sees that asks for it."""
    data = job.data
    is_dated = objective_of(job.task).reads_answers and asks_for_the_date(template)
    return TokenRecipe(
        task=job.task,
        max_length=max_length,
        max_target_length=data.max_target_length,
        too_long=job.too_long,
        train_on_prompt=data.train_on_prompt,
        scored=job.scored,
        columns=dict(data.columns),
        label_map=dict(data.label_map),
        source_lang=data.source_lang or "",
        target_lang=data.target_lang or "",
        date=day if is_dated else "",
        max_bad_rows=data.max_bad_rows,
    )


def _template_of_job(job: Job) -> str | None:
    """The chat template that the job names. Raises `ModelError`."""
    return job.data.chat_template and read_template(job.data.chat_template)


_TO_DO = (
    "give --examples N --mean-tokens M, or run `farthing train` once: tokenized data is remembered"
)


def _local_sources(job: Job, role: Literal["train", "eval"]) -> list[Source]:
    """The files of the job's data; no content is hashed. Raises `InputError`, `DataError`."""
    sources = []
    for name, own in job.data.sources(role):
        place = place_of(name)
        if place in _ELSEWHERE:
            what = "no file here; as a data set of the Hub"
            what = "a file of another machine" if place == "remote" else what
            raise InputError(
                f"{what}, it can't be looked at without the network",
                where=without_secrets(name),
                to_do=_TO_DO,
            )
        is_data_set = place == "folder"
        if is_data_set and (config_name := own.name or job.data.dataset_config_name):
            what = f"what its configuration `{config_name}` holds is not known yet"
            raise InputError(what, where=name, to_do=_TO_DO)
        parts = str(own.split).split("+") if is_data_set else []
        paths = [path for part in parts for path in files_of_split(Path(name), part.strip())]
        found = [
            Source(short_name(str(path)), "", "arrow", (path,))
            if path.suffix == SAVED
            else file_source(path, job.data.layout)
            for path in (paths if is_data_set else [Path(name)])
        ]
        sources += [replace(each, columns=own.columns, weight=own.weight) for each in found]
    return sources


_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Words for a split in the names of files, as `datasets` has them."""
SAVED = ".arrow"
"""Ending of the files that `save_to_disk` of `datasets` writes."""


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a data set folder that hold a split: its name is in theirs, or no file
    names a split at all.
    """
    about = ("dataset_info.json", "state.json", "dataset_dict.json")
    inside = {
        path: str(path.relative_to(folder)).lower()
        for path in sorted(folder.rglob("*"))
        if (ending_of(path) in KINDS or path.match(f"data-*{SAVED}"))
        and path.is_file()
        and path.name not in about
    }
    if not all(map(is_text, inside)):  # a licence is no data
        inside = {path: name for path, name in inside.items() if not is_text(path)}

    def of(words: str) -> list[Path]:
        of_split = re.compile(rf"(^|[-._ 0-9/])({words})[-._ 0-9/]")
        return [path for path, name in inside.items() if of_split.search(name)]

    named = of(_SPLITS.get(split, re.escape(split)))
    if not named and split == "train" and not of("|".join(_SPLITS.values())):
        named = list(inside)
    if not named:
        what = f"no file of the folder can be recognised as its split `{split}`"
        raise InputError(what, where=str(folder), to_do=_TO_DO)
    return named


# ---- the index of token sets ----


def _tokens_of(job: Job, role: str, cache: Path) -> TokenSet | None:
    """The token set that the job's data became, if it was made from the same bytes in the same way
    and is whole.
    """
    if not (cache / INDEX).is_dir():
        return None
    try:
        key = _index_key(job, role, {})
        name = None if key is None else _noted(cache, key)
        folder = cache / "tokens" / (name or "")
        of_others = any(map(belongs_to_another, (cache / INDEX, folder.parent)))
        if name is None or of_others or not is_own(folder):
            return None
        return open_token_set(folder, checks_tokens=False)
    except (OSError, ValueError, DamagedFileError):
        return None


def _noted(cache: Path, key: str) -> str | None:
    """The name of the token set that is noted under a key."""
    try:
        name = json.loads((cache / INDEX / f"{key}.json").read_text(encoding="utf-8"))["set"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and Path(name).name == name else None


def _index_key(job: Job, role: str, known: dict[str, list[Source]]) -> str | None:
    """A hash of everything a token set follows from that can be known without transformers; None
    without a tokenizer.

    `known` has the sources that were opened already.
    """
    folder = _tokenizer_folder(job)
    if folder is None:
        return None
    data, day = job.data, began(Path(job.output_dir))
    template = _template_of_job(job) or own_template(folder)
    content = {
        "version": [CACHE_VERSION, _version("transformers"), _version("tokenizers")],
        # the labels of the evaluation data are those of the training data
        "train": _content_of(data, "train", known.get("train")),
        "eval": role == "eval" and _content_of(data, "eval", known.get("eval")),
        "role": role,
        "recipe": asdict(recipe_of(job, _max_length(job, folder), template, day)),
        "template": template,
        "tokenizer": _files_sha256(folder),
        "model": sha256_of(config) if (config := _model_folder(job) / CONFIG).is_file() else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _content_of(
    data: DataSection, role: Literal["train", "eval"], known: list[Source] | None
) -> list[Any]:
    """The identity of data: of its bytes and how they are read, or of the address where only the
    network could tell.
    """
    found: list[Any] = []
    for index, (name, own) in enumerate(data.sources(role)):
        path, config_name = Path(name), own.name or data.dataset_config_name
        place = place_of(name)
        if place in _ELSEWHERE:
            found.append(["at", name, own, config_name, asdict(data.layout)])
        elif known is not None:
            found.append(known[index].identity)
        elif place == "folder":
            sha256 = folder_sha256(path, f"{config_name}/{own.split}")
            found.append(Source("", sha256, "arrow", columns=own.columns).identity)
        else:
            sha256 = folder_sha256(path, "") if path.is_dir() else sha256_of(path)
            source = file_source(path, data.layout)
            found.append(replace(source, sha256=sha256, columns=own.columns).identity)
    return found


def _tokenizer_folder(job: Job) -> Path | None:
    """The folder with the job's tokenizer: a local one, or what the Hugging Face cache holds."""
    own = job.model.tokenizer_name_or_path
    name = own or job.model.model_name_or_path
    if Path(name).is_dir():
        return Path(name)
    return cached_snapshot(
        name, None if own and own != job.model.model_name_or_path else job.model.revision
    )


def _model_folder(job: Job) -> Path:
    """The folder with the model's configuration, here or in the Hugging Face cache; one that is not
    there otherwise.
    """
    path = Path(job.model.model_name_or_path)
    return path if path.is_dir() else cached_snapshot(str(path), job.model.revision) or path


def _files_sha256(folder: Path) -> str:
    """Identity of the tokenizer's and the model's settings in a folder."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_file() and path.stat().st_size <= _MOST_TOKENIZER_BYTES:
            digest.update(f"{path.name}:{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _max_length(job: Job, folder: Path | None) -> int:
    """The longest input as `train.resolve` settles it: the job's, or what model and tokenizer
    allow of the default.
    """
    if job.data.max_length:
        return job.data.max_length
    limits = [job.max_length]
    with contextlib.suppress(FarthingError):  # whoever needs the model will say so
        config, _ = find_config(job.model.model_name_or_path, job.model.revision, ask_hub=False)
        limits.append(read_shape(config, "body").max_positions or job.max_length)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if folder:
            says = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            limits.append(int(says.get("model_max_length") or job.max_length))
    return min(limits)


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
