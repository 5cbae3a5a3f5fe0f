"""What can be seen to be wrong with a job before anything heavy is imported: its data's columns,
its model's presence.

A second of looking, and all faults at once: the first rows of every local file, folders, the cache
of the Hub and one quick question to the Hub. What passes may still be refused later, by those who
read it whole.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote

from farthing.addresses import without_secrets
from farthing.config.data_lengths import SAVED, files_of_split
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.data.chat import read_template
from farthing.data.fetch import refuse_metadata
from farthing.data.formats import RENDERED
from farthing.data.read import (
    KINDS,
    Source,
    ending_of,
    file_source,
    place_of,
)
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Own, Row
from farthing.data.token_set import TokenRecipe
from farthing.errors import (
    DataError,
    InputError,
    JobError,
    ModelError,
    PreflightError,
    UnusableRowError,
)
from farthing.models.model_config import (
    CONFIG,
    HubStatusError,
    cached_snapshot,
    find_config,
    hub_config,
    is_hub_name,
    is_offline,
    read_from_hub,
    refuse_folder,
    refuse_tokenizer,
)
from farthing.models.refused import refuse_model
from farthing.objectives.registry import objective_of
from farthing.tables import facts

_FIRST_ROWS = 64
_MOST_ROWS = 20_000  # are read in search of one that can be used
_LARGEST_JSON_BYTES = 64 << 20  # a larger document, which has to be read whole, is not looked into


def load_job_or_tell_all(
    path: str, overrides: list[str], *, only_plans: bool = False, with_data: bool = True
) -> Job:
    """`load_job`; of a job that is wrong it is told, with its mistakes, what `look_over` finds in
    what is left of it.
    """
    try:
        return load_job(path, overrides)
    except JobError as error:
        if error.rest is None:
            raise
        try:
            look_over(error.rest, only_plans=only_plans, with_data=with_data)
        except InputError as more:
            raise JobError(
                [*error.problems, *(more.problems if isinstance(more, JobError) else [more])]
            ) from error
        raise


def look_over(job: Job, *, only_plans: bool = False, with_data: bool = True) -> None:
    """Look at data and model. A plan needs of the model only the sizes, and no data where their
    lengths are given.

    Raises the `InputError` that was found, or `PreflightError` of all of them.
    """
    found: list[InputError] = []
    for check in _checks(job, only_plans, with_data):
        try:
            check()
        except InputError as error:
            if str(error) not in [str(other) for other in found]:
                found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise PreflightError(found)


_NOT_ADAM = ("sgd", "adagrad", "rmsprop")
_USUAL_RATE = 1e-8, 0.02
"""Of Adam, with room: 1e-6 to 1e-4 is usual for all weights, 1e-5 to 1e-3 for adapters."""


def spot_without_store(job: Job) -> str:
    """What a job for a spot machine loses without a store; empty where nothing is lost."""
    is_spot = job.where.spot or job.where.offers == "spot"
    if job.output_store or not is_spot:
        return ""
    return "a machine that is taken away takes this run with it: set output_store"


def _kinds(job: Job) -> set[str]:
    """Of the job's data: as `Source.kind`, or `data set`; `unknown` where no name tells."""
    kinds = set[str]()
    for name, _ in (*job.data.sources("train"), *job.data.sources("eval")):
        path, place = Path(name), place_of(name)
        if place == "remote":
            kinds.add(KINDS.get(ending_of(path), "unknown"))
        elif place != "file":
            kinds.add("data set")
        else:
            with contextlib.suppress(DataError):  # looked at elsewhere
                kinds.add(file_source(path).kind)
    return kinds


def unread_keys(job: Job) -> list[str]:
    """Keys with a value of their own that nothing reads beside the other keys, a sentence each.

    In the table, `beside` is a key of the job, or one of the words that are gathered here.
    """
    data, found, true = job.data, list[str](), _kinds(job)
    if "unknown" in true:
        true |= {*KINDS.values()}
    for word, is_so in (
        ("text", true - {"parquet", "data set"}),
        ("model folder", Path(job.model.model_name_or_path).is_absolute()),
        ("evaluation data", data.eval or data.eval_fraction),
        ("pairs", objective_of(job.task).is_pair),
    ):
        true |= {word} if is_so else set()
    for row in facts("unread_keys"):
        beside = row["beside"]
        value = attrgetter(beside)(job) if "." in beside else beside in true
        if not {str(value), "set" if value else "unset"} & {*row["states"].split()}:
            continue
        for key in row["keys"].split():
            section, name = key.split(".")
            asked = getattr(job, section)
            for each, field in type(asked).model_fields.items():
                is_meant = name in (each, "*") and f"{section}.{each}" != beside
                if is_meant and getattr(asked, each) not in (field.default, "no"):
                    found.append(f"{section}.{each} is not used: {row['why'].format(job=job)}")
    several = [*zip(data.train, data.of_train, strict=False)]
    several += zip(data.eval, data.of_eval, strict=False)
    for path, own in several:
        if (own.split or own.name) and place_of(path) in ("file", "remote"):
            shown = without_secrets(path)
            found.append(f"split and name of {shown} are not used: files have no splits")
    return found


def unusual_settings(job: Job) -> list[str]:
    """Numbers of the job that no published recipe has, a sentence each: slips of a digit or two."""
    found = unread_keys(job)
    for row in facts("usual_settings"):
        key, low, high = row["key"], float(row["least"]), float(row["most"])
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        is_used = section != "method" or job.method.name != "full"
        if value is not None and is_used and not low <= value <= high:
            found.append(f"{key} {value:g} is unusual: published recipes use {low:g} to {high:g}")
    if job.train.optim not in _NOT_ADAM:
        low, high = _USUAL_RATE
        if not low <= job.learning_rate <= high:
            usual = "1e-6 to 1e-4" if job.method.name == "full" else "1e-5 to 1e-3"
            found.append(
                f"train.learning_rate {job.learning_rate:g} is unusual: {usual} is the usual range"
                f" of method {job.method.name}"
            )
    return found


def _checks(job: Job, only_plans: bool, with_data: bool) -> Iterator[Callable[[], object]]:
    if with_data:
        for name, own in (*job.data.sources("train"), *job.data.sources("eval")):
            yield partial(_look_at_data, job, name, own, only_plans)
        if job.data.chat_template is not None:
            yield partial(read_template, job.data.chat_template)
    yield partial(_look_at_config if only_plans else _look_at_model, job)


# ---- the data ----


def _look_at_data(job: Job, name: str, own: Own, only_plans: bool) -> None:
    """A file, the first file of a folder's split, or whether an address may be asked and the Hub
    knows a name.
    """
    place = place_of(name)
    if "[" in str(own.split) and place in ("file", "remote"):
        what = f"a file is no data set, of which a split such as {own.split} can be taken"
        to_do = "leave it out; data.max_train_samples takes fewer"
        raise DataError(what, where=without_secrets(name), to_do=to_do)
    if place == "remote":
        refuse_metadata(name)
    elif place == "file":
        _look_at_file(job, Path(name), own)
    elif place == "folder":
        for path in _first_of(Path(name), str(own.split)):
            _look_at_file(job, path, own)
    elif not only_plans:
        _look_for_data_set(job, name)


def _first_of(folder: Path, split: str) -> list[Path]:
    """The first file of a split; none where the folder's own description says what its
    splits are.
    """
    if (folder / "README.md").exists():
        return []
    try:
        return [path for path in files_of_split(folder, split) if path.suffix != SAVED][:1]
    except InputError:
        return []


def _look_at_file(job: Job, path: Path, own: Own) -> None:
    """Whether a file's first rows can be read, and whether their columns are of a kind that is
    known.
    """
    source = file_source(path, job.data.layout)
    if source.kind == "json" and source.n_bytes > _LARGEST_JSON_BYTES:
        return
    source = replace(source, columns=own.columns)
    rows = list(itertools.islice(source.rows(), _FIRST_ROWS))
    recipe = TokenRecipe(job.task, 0, columns=dict(job.data.columns), scored=job.scored)
    reader = SourceReader(source, recipe, None)
    reader.look(rows)
    if reader.understood is not None:
        _look_at_values(job.task, source, rows, reader)
    elif not rows:
        raise DataError("no rows", where=source.name, to_do="check how the file was written")


def _look_at_values(
    task: str, source: Source, first: list[Row | BadRow], reader: SourceReader
) -> None:
    """Whether one row of a file can be used whose columns hold plain text. Raises `DataError` with
    what is wrong.
    """
    understood, reason, objective = reader.understood, "", objective_of(task)
    if understood is None or understood.format in RENDERED:
        return  # what chats mean is not known without the tokenizer ...
    if objective.learns_units or not objective.scores_tokens:
        return  # ... nor labels without the other rows; answers are texts or chats
    behind = itertools.islice(source.rows(), _FIRST_ROWS, _MOST_ROWS)
    for row in itertools.chain(first, behind if len(first) == _FIRST_ROWS else ()):
        if not isinstance(row, Row):
            continue
        if isinstance(row.value.get("prompt"), list):
            return  # of messages, as above
        try:
            reader.text(row)
        except UnusableRowError as error:
            reason = reason or f"line {row.line}: {error}"
        else:
            return
    if not reason:
        return
    to_do = "check the columns, or map others with data.columns"
    if found := re.search(r"`(\w+)` is (?:a number|true/false), not text", reason):
        needs = {name: understood.columns.get(name, name) for name in understood.format.split("/")}
        own = needs.get(found[1], found[1])
        mapped = [f"{name}: {one}" for name, one in {**needs, found[1]: f'"{{{own}}}"'}.items()]
        to_do = (
            f"write it as text: data.columns: {{{', '.join(mapped)}}}; to pick a text by its"
            f' number: "{{choices[{own}]}}"'
        )
    raise DataError(f"no row can be used: {reason}", where=source.name, to_do=to_do)


# ---- the model ----


def _look_at_config(job: Job) -> None:
    config, _ = find_config(job.model.model_name_or_path, job.model.revision)
    refuse_model(config, job.task, job.model.model_name_or_path, job.method.name)


def _look_at_model(job: Job) -> None:
    """Its folder with what has to be in it, or that the Hub or its cache has it."""
    section = job.model
    name, needs_weights = section.model_name_or_path, section.init == "pretrained"
    if Path(name).is_absolute():
        refuse_folder(Path(name), needs_weights=needs_weights)
        find_config(name)
    else:
        _look_on_hub(name, section.revision, needs_weights=needs_weights)
    tokenizer = section.tokenizer_name_or_path or name
    if Path(tokenizer).is_absolute():
        refuse_tokenizer(Path(tokenizer))


def _look_on_hub(name: str, revision: str | None, *, needs_weights: bool) -> None:
    """Its cache, else one question with a short timeout."""
    if not is_hub_name(name):
        raise ModelError(
            "the model's configuration can't be loaded: neither a folder nor a name on the Hub",
            where=name,
            to_do="check the name: ORGANISATION/MODEL, or a path that begins with ./ or /",
        )
    snapshot = cached_snapshot(name, revision)
    if snapshot is not None and (snapshot / CONFIG).is_file():
        if is_offline() and needs_weights and not any(snapshot.glob("*.safetensors")):
            raise ModelError(
                "its weights (*.safetensors) are not in the Hugging Face cache, and HF_HUB_OFFLINE"
                " is set",
                where=name,
                to_do="unset it, or give a folder that has them",
            )
        return
    try:
        hub_config(name, revision)
    except ModelError as error:
        raise ModelError(
            f"the model's configuration can't be loaded: {error.what}",
            where=name,
            to_do=error.to_do,
        ) from error


def _look_for_data_set(job: Job, name: str) -> None:
    """One question to the Hub, for a data set that was never fetched."""
    if (
        is_offline()
        or is_offline("HF_DATASETS_OFFLINE")
        or any((Path(job.cache_dir or ".") / "datasets").glob("*"))
    ):
        return
    try:
        read_from_hub(f"api/datasets/{quote(name)}")
    except HubStatusError as error:
        if error.code not in (401, 403, 404):
            return
        why = f"the Hub answers {error.code}"
    except (OSError, ValueError) as error:
        why = str(error)
    else:
        return
    raise DataError(
        f"neither a local file nor a data set that can be reached ({why})",
        where=name,
        to_do=(
            "check the name, or the network; a local path needs its file ending (.jsonl, .csv ...)"
        ),
    )
