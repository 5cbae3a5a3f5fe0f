"""`job.yaml` in, one `Job` out, or every mistake in it at once with its line and what to do.

Paths in the file are relative to the file, paths given by `--set` to the working directory. Reading
a job is instant and never executes anything it holds: safe YAML, no import paths, no interpolation.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import ValidationError

from farthing.addresses import is_remote
from farthing.config import job as sections
from farthing.config.bounded import read_yaml
from farthing.config.foreign_keys import Foreign, adopt, answer
from farthing.config.job import KEYS, SECTIONS, Job
from farthing.data.rows import Own
from farthing.errors import InputError, JobError
from farthing.objectives.registry import objective_names, objective_of, standard_columns
from farthing.storage.files import Json, small_text

MAX_JOB_BYTES = 1 << 20
MOST_NAME_BYTES = 255  # of ext4, XFS, APFS and NTFS
OF_FILES = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|gz|txt|zip|zst|arrow|xlsx)$", re.I)
OF_TOKENS = ("loss", "perplexity", "document_loss")
"""Metrics of models that write, a mean over tokens: other cuts of the same text have others."""
OF_TRAINING_DATA = ("", "train", "train_split", "max_train_samples")
OF_TEXTS = ("max_length", "max_target_length", "columns", "chat_template", "train_on_prompt")
"""Keys of data that leave the examples as they are, and change their texts."""
SHORTHAND = {"model": "model_name_or_path", "data": "train", "method": "name", "objective": "name"}


Places = dict[tuple[str, ...], str]
"""Key -> where it stands, for people."""


def load_job(path: str | Path, overrides: list[str] | None = None) -> Job:
    """Read and check a job file.

    `overrides` are `section.key=value` strings whose values are YAML. Raises `JobError` with every
    problem found, each with its line or its `--set`.
    """
    path = Path(path)
    return parse_job(_read_text(path), path, overrides)


def parse_job(text: str, path: Path, overrides: list[str] | None = None) -> Job:
    """`load_job` of a text: `path` is what messages call it, and relative names of the job stand
    beside it.
    """
    try:
        values = read_yaml(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except ValueError as error:
        problem = InputError(
            f"a value that can't be read: {str(error).partition(';')[0]}",
            where=str(path),
            to_do="write a smaller number, or a date that exists",
        )
        raise JobError([problem]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = str(getattr(error, "problem", None) or error)
        to_do = "check the indentation, quotes and colons on this line and the one above"
        if what.startswith(("aliases", "nested")):
            to_do = "write it out plainly"
        elif "'\\t'" in what:
            to_do = "indent with spaces, not with tabs"
        elif "constructor" in what:
            to_do = "a job holds plain values only"
        raise _refused(f"not valid YAML: {what}", f"{path}{line}", to_do) from error
    if not isinstance(values, dict):
        raise _refused(
            "a job is a mapping of keys to values", path, "`farthing init` writes a starter"
        )
    places: Places = {}
    problems = list(_walk(node, (), places, path))
    return _checked(values, problems, places, path, overrides)


def job_of(values: Json, overrides: list[str] | None = None) -> Job:
    """`load_job` of a mapping, whose relative names stand in the working folder."""
    places: Places = {}
    _note_keys(values, (), places)
    return _checked(values, [], places, Path.cwd() / "job", overrides)


def _note_keys(value: Any, at: tuple[str, ...], places: Places) -> None:
    """Fill `places` with the path of every key of a mapping."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = (*at, str(key))
        places[name] = "".join(f"[{each}]" if each.isdigit() else f".{each}" for each in name)[1:]
        if isinstance(inner, dict | list):
            _note_keys(inner, name, places)


def _checked(
    values: dict[Any, Any],
    problems: list[InputError],
    lines: Places,
    path: Path,
    overrides: list[str] | None,
) -> Job:
    """A job of values whose keys stand at `lines`. Raises `JobError`."""
    values = _expand(values)
    from_command_line: set[tuple[str, ...]] = set()
    for text in overrides or []:
        try:
            from_command_line.add(_override(values, text))
        except ValueError as error:
            problems.append(
                InputError(
                    str(error), where=f"--set {text}", to_do="--set train.learning_rate=1e-4"
                )
            )
    problems += _adopt(values, lines, path)

    def absolute(job: Job) -> Job:
        return _with_absolute_paths(job, path.resolve().parent, Path.cwd(), from_command_line)

    try:
        job = absolute(Job.model_validate(values))
    except ValidationError as error:
        problems += _once_each(
            _explain(item, lines, from_command_line, path) for item in error.errors()
        )
        rest = _without(values, [item["loc"] for item in error.errors()])
        raise JobError(problems, rest and absolute(rest)) from error
    for key, what, to_do in _contradictions(job):
        problems.append(
            InputError(what, where=_place(key, lines, from_command_line, path), to_do=to_do)
        )
    if problems:
        raise JobError(problems, job)
    return job


def _without(values: Json, places: Iterable[tuple[int | str, ...]]) -> Job | None:
    """The job without the keys at these places; None where what is left of it is none."""
    for place in places:
        inner = values
        for key in place[:-1]:
            if not isinstance(inner.get(str(key)), dict):
                break
            inner = inner[str(key)]
        else:
            key = place[-1] if place else ""
        inner.pop(str(key), None)
    try:
        return Job.model_validate(values)
    except ValidationError:
        return None


def _words_of_keys(module: ModuleType = sections) -> dict[str, dict[str, str]]:
    """What is written below each key in a module, by section. Read when asked for: pydantic would
    at every start.
    """
    import ast
    import inspect

    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(module)).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for key, words in pairwise(section.body):
            match key, words:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(told))
                ):
                    found.setdefault(section.name, {})[name] = inspect.cleandoc(told)
    return found


def job_schema() -> Json:
    """The JSON Schema of the job file, for editors. The short forms (`model: NAME`) are in it."""
    schema = Job.model_json_schema()
    for name, words in _words_of_keys().items():
        properties = schema["$defs"].get(name, schema)["properties"]
        for key, told in words.items():
            properties[key] = dict(sorted({**properties[key], "description": told}.items()))
    by_title = {each.get("title"): each for each in schema["properties"]["objective"]["anyOf"]}
    for settings in filter(None, (objective_of(name).settings for name in objective_names())):
        told_of = _words_of_keys(sys.modules[settings.__module__]).get(settings.__name__, {})
        for key, told in told_of.items():
            by_title[settings.__name__]["properties"][key]["description"] = told
    schema["required"].remove("task")  # where there is an objective
    for section, key in SHORTHAND.items():
        if section == "objective":  # has it
            continue
        short = {"type": "string", "description": f"short for {section}: {{{key}: ...}}"}
        schema["properties"][section] = {"anyOf": [short, schema["properties"][section]]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "farthing job",
        **schema,
    }


def _refused(what: str, where: Path | str, to_do: str = "") -> JobError:
    """A file that is no job."""
    return JobError([InputError(what, where=str(where), to_do=to_do)])


def _read_text(path: Path) -> str:
    try:
        return small_text(path, MAX_JOB_BYTES)
    except FileNotFoundError as error:
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1
        )
        to_do = (
            f"did you mean {path.parent / near[0]}?" if near else "`farthing init` writes a starter"
        )
        raise _refused("no such job file", path, to_do) from error
    except IsADirectoryError as error:
        raise _refused("a folder, not a job file", path, "name the YAML file") from error
    except UnicodeDecodeError as error:
        raise _refused(f"not UTF-8 text (byte {error.start})", path) from error
    except OSError as error:
        raise _refused(f"can't be read: {error.strerror}", path) from error


def _walk(
    node: yaml.Node | None, at: tuple[str, ...], lines: Places, path: Path
) -> Iterator[InputError]:
    """Fill `lines` with the line of every key; yield keys that stand twice (YAML would silently
    keep the last).
    """
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*at, str(index))] = f"{path}:{value.start_mark.line + 1}"
            yield from _walk(value, (*at, str(index)), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*at, str(getattr(key, "value", "?")))
            place = f"{path}:{key.start_mark.line + 1}"
            if name in lines:
                first = lines[name].rpartition(":")[2]
                yield InputError(
                    f"`{'.'.join(name)}` appears twice (first on line {first})",
                    where=place,
                    to_do="keep one of them",
                )
            lines[name] = place
            yield from _walk(value, name, lines, path)


def _expand(values: dict[Any, Any]) -> dict[Any, Any]:
    """`model: NAME` -> `model: {model_name_or_path: NAME}`, so that `--set model.revision=...`
    finds a mapping.

    A section with nothing in it (`limits:` and only comments below) is as good as absent.
    """
    return {
        key: (
            {SHORTHAND[key]: value} if key in SHORTHAND and isinstance(value, str | list) else value
        )
        for key, value in values.items()
        if value is not None or key not in SECTIONS
    }


def _adopt(values: dict[Any, Any], lines: Places, path: Path) -> Iterator[InputError]:
    """Other names of our keys are put in their place, and have the line where they stood."""
    try:
        for stood, stands in adopt(values, KEYS):
            if stood in lines:
                lines.setdefault(stands, lines[stood])
    except Foreign as error:
        yield InputError(str(error), where=str(path), to_do="keep one of them")


def _override(values: dict[Any, Any], text: str) -> tuple[str, ...]:
    """Put `a.b=value` into `values`; returns its key path."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise ValueError("expected key=value")
    names = tuple(key.strip().split("."))
    try:
        value = read_yaml(raw) if raw else None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"the value is not valid YAML: {raw[:80]!r}") from error
    if len(names) == 1 and names[0] in SHORTHAND and not isinstance(value, dict):
        names = (*names, SHORTHAND[names[0]])
    place = values
    for name in names[:-1]:
        inner = place.get(name)
        place[name] = inner if isinstance(inner, dict) else {}
        place = place[name]
    place[names[-1]] = value
    return names


_WANTED = {
    "string_type": "text is wanted: put it in quotes if it is meant so",
    "string_too_short": "name something, or leave the key out",
    "too_short": "name at least one",
    "int_type": "a whole number is wanted",
    "int_parsing": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "float_parsing": "a number is wanted",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list is wanted, as in [a, b]",
    "dict_type": "a mapping is wanted, as in {a: b}",
    "model_type": "it is a section: its keys stand below it, indented",
    "datetime_type": "a date and time is wanted, as in 2027-01-31T18:00",
    "datetime_parsing": "a date and time is wanted, as in 2027-01-31T18:00",
    "datetime_from_date_parsing": "a date and time is wanted, as in 2027-01-31T18:00",
}


def _place(
    loc: tuple[str, ...],
    lines: Places,
    from_command_line: set[tuple[str, ...]],
    path: Path,
) -> str:
    """`--set key` or `file:line` of a key, or of the nearest thing around it that has a place."""
    for key in sorted(from_command_line, key=lambda key: (loc[: len(key)] != key, key)):
        if loc[: len(key)] == key or (key[: len(loc)] == loc and loc not in lines):
            return f"--set {'.'.join(key)}"
    found = (lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines)
    return next(found, str(path))


def _explain(
    item: Any,
    lines: Places,
    from_command_line: set[tuple[str, ...]],
    path: Path,
) -> InputError:
    """A pydantic error in our words, with the line it stands on."""
    kind, message, value = item["type"], item["msg"].removeprefix("Value error, "), item["input"]
    loc = tuple(str(part) for part in item["loc"])
    loc = loc[:3] + loc[4:] if loc[:2] == ("search", "vary") else loc  # not which form it has
    raised = item.get("ctx", {}).get("error")
    where = _place((*loc, *getattr(raised, "place", ())), lines, from_command_line, path)
    if kind not in (
        "extra_forbidden",
        "missing",
    ):  # leave out which alternative or item of a key it was
        loc = _up_to_key(loc)
    key = ".".join(loc)
    if kind == "extra_forbidden":
        return InputError(f"unknown key `{key}`", where=where, to_do=_meant(loc))
    if kind == "missing":
        to_do = f"add `{loc[-1]}:`" + {
            "task": " " + " or ".join(", ".join(objective_names()).rsplit(", ", 1)),
            "model": " a Hub name or a folder",
            "data": " a file, or a section with `train:`",
            "output_dir": " a folder for the run",
        }.get(loc[-1], "")
        return InputError(f"`{key}` is missing", where=where, to_do=to_do)
    given = (
        {True: "true", False: "false", None: "empty"}.get(value)
        if isinstance(value, bool | None)
        else repr(value)
    )
    given = given if given and len(given) <= 80 else f"{given}"[:80] + "..."
    if kind == "literal_error":
        expected = item.get("ctx", {}).get("expected", "")
        near = difflib.get_close_matches(str(value), re.findall(r"'([^']+)'", expected), n=1)
        to_do = f"did you mean `{near[0]}`?" if near else f"use {expected}"
        if str(value).startswith(("cuda:", "gpu")):
            to_do = "use cuda; CUDA_VISIBLE_DEVICES=NUMBER in the environment chooses among GPUs"
        return InputError(f"`{key}` can't be {given}", where=where, to_do=to_do)
    if kind == "value_error":
        there = {*lines, *from_command_line}
        named = next((name for name in re.findall(r"\w+", message) if (*loc, name) in there), None)
        if named and not getattr(raised, "place", ()):
            where = _place((*loc, named), lines, from_command_line, path)
        what, _, to_do = message.partition("; ")
        return InputError(f"`{key}`: {what}" if key else what, where=where, to_do=to_do)
    wanted = message[:1].lower() + message[1:]
    return InputError(f"`{key}` can't be {given}", where=where, to_do=_WANTED.get(kind, wanted))


def _meant(loc: tuple[str, ...]) -> str:
    """What to do about an unknown key: the nearest one here, the section it belongs in, or all
    there are.
    """
    *section, name = loc
    known = KEYS.get(".".join(section), [])
    everywhere = [f"{name}.{key}" for name, keys in KEYS.items() if name for key in keys]
    is_slip = bool(difflib.get_close_matches(name, known, n=1, cutoff=0.9))
    if words := answer(name, is_exact=is_slip):
        return f"{words}; take the key out"
    elsewhere = [full for full in everywhere if full.split(".")[-1] == name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    near.sort(
        key=lambda key: sorted(key) != sorted(name)
    )  # letters that changed places are the likelier slip
    if elsewhere and not (near and difflib.SequenceMatcher(None, name, near[0]).ratio() > 0.9):
        return f"it belongs in `{elsewhere[0]}`"
    if near:
        return f"did you mean `{near[0]}`?"
    afar = difflib.get_close_matches(
        name, [full.split(".")[-1] for full in everywhere], n=1, cutoff=0.8
    )
    if afar:
        return (
            "did you mean `"
            + next(full for full in everywhere if full.split(".")[-1] == afar[0])
            + "`?"
        )
    return f"known here: {', '.join(known)}" if known else f"`{'.'.join(section)}` has no such key"


def _once_each(problems: Iterable[InputError]) -> list[InputError]:
    """A key that takes several kinds of value gives one problem for each kind: say them
    together.
    """
    together: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        wanted = together.setdefault((problem.what, problem.where), [])
        if problem.to_do not in wanted:
            wanted.append(problem.to_do)
    return [
        InputError(what, where=where, to_do=", or ".join(wanted))
        for (what, where), wanted in together.items()
    ]


def _up_to_key(loc: tuple[str, ...]) -> tuple[str, ...]:
    """The part of a pydantic location that names a key of the job."""
    if loc[:2] == ("search", "vary"):
        return loc[:3]
    return loc[:2] if loc and loc[0] in SECTIONS else loc[:1]


def _contradictions(job: Job) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(key, what, to do) of settings that are well-formed and can't work; paths are absolute
    already.
    """
    model = job.model
    on_hub = [
        name
        for name in (model.model_name_or_path, model.tokenizer_name_or_path)
        if name and name[0] != "/"
    ]
    if (
        model.trust_remote_code
        and on_hub
        and not re.fullmatch(r"[0-9a-f]{40}", model.revision or "")
    ):
        what = f"trust_remote_code runs whatever {on_hub[0]} holds on that day"
        yield (
            ("model", "trust_remote_code"),
            what,
            "pin `model.revision:` to a full commit (40 hex digits)",
        )
    for name in {name: None for columns in _all_columns(job) for name in columns}:
        if name not in standard_columns():
            near = difflib.get_close_matches(name, standard_columns(), n=1)
            to_do = (
                f"did you mean `{near[0]}`?"
                if near
                else f"use {', '.join(sorted(standard_columns()))}"
            )
            yield (
                ("data", "columns", name),
                f"`{name}` is no standard column (standard name: name in the data)",
                to_do,
            )
    if (init := job.method.init_lora_weights).startswith(("pissa", "olora")):
        odd = {
            "qlora": job.method.name == "qlora",
            "use_dora": job.method.use_dora,
            "lora_bias": job.method.lora_bias,
            f"strategy: {job.where.strategy}": job.where.strategy in ("fsdp", "hsdp"),
        }
        if names := [name for name, is_so in odd.items() if is_so]:
            yield (
                ("method", "init_lora_weights"),
                f"{init} does not go with {names[0]}",
                "leave one of the two out",
            )
    objective = objective_of(job.task)
    if job.data.train_on_prompt and (not objective.predicts_next or objective.loss):
        yield ("data", "train_on_prompt"), f"{job.task} has no prompt to train on", "leave it out"
    if objective.loss and job.data.too_long == "truncate":
        yield (
            ("data", "too_long"),
            f"{job.task} compares whole answers, and none of them is cut",
            "use skip or error",
        )
    if objective.loss and job.train.label_smoothing_factor:
        yield (
            ("train", "label_smoothing_factor"),
            f"{job.task} has no token targets to smooth",
            "leave it out; some objectives have a key `label_smoothing`",
        )
    if objective.labels and not objective.labels.smooths and job.train.label_smoothing_factor:
        yield (
            ("train", "label_smoothing_factor"),
            f"{job.task} has no probabilities of one class among others to smooth",
            "leave it out",
        )
    yield from _incomparable(job)
    is_paired = objective.n_sequences > 1
    if job.data.keep is not None and (is_paired or not objective.reads_answers):
        to_do = "use data.pairs" if is_paired else "leave it out"
        yield ("data", "keep"), f"{job.task} does not learn single answers", to_do
    if job.data.pairs is not None and not is_paired:
        yield ("data", "pairs"), f"{job.task} does not learn pairs of answers", "use data.keep"
    if objective.is_mismatched and job.global_batch_size == 1:
        own = job.train.global_batch_size
        yield (
            ("train", "global_batch_size" if own else "per_device_train_batch_size"),
            f"{job.task} compares the examples of a step, and one has no other",
            "use 4 or more",
        )
    yield from _without_evaluation(job)
    if job.train.metric_for_best_model is not None:
        metric, known = (
            job.train.metric_for_best_model.removeprefix("eval_"),
            objective_of(job.task).metrics,
        )
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=1)
            to_do = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(known)}"
            yield (
                ("train", "metric_for_best_model"),
                f"`{metric}` is not measured for {job.task}",
                to_do,
            )


def is_mean_of_tokens(job: Job) -> bool:
    """Whether the metric that chooses is a mean over tokens, which other tokens change."""
    metric = (job.train.metric_for_best_model or "loss").removeprefix("eval_")
    return not objective_of(job.task).counts_units and metric in OF_TOKENS


def other_metric(job: Job) -> str:
    """The first metric that is no mean over tokens; empty where there is none."""
    return next((name for name in objective_of(job.task).metrics if name not in OF_TOKENS), "")


def _incomparable(job: Job) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Keys of a search under which scores are no longer of one thing."""
    metric = (job.train.metric_for_best_model or "loss").removeprefix("eval_")
    is_of_tokens, instead = is_mean_of_tokens(job), other_metric(job)
    to_measure = f"set train.metric_for_best_model: {instead}" if instead else "leave it out"
    for key in job.search.vary:
        section, _, name = key.partition(".")
        splits = (section == "data" and name != "max_train_samples") or key == "train.seed"
        losses = f"losses under different `{key}` are different things and can't be compared"
        if splits and job.data.eval_fraction and not job.data.eval:
            what = f"data.eval_fraction holds out other examples under each `{key}`"
            yield ("search", "vary"), what, "name the evaluation data: data.eval"
        elif section == "data" and name not in (*OF_TRAINING_DATA, *OF_TEXTS):
            what = f"trials under different `{key}` would be scored on different examples"
            yield ("search", "vary"), what, "leave it out"
        elif (
            (section == "data" and name in OF_TEXTS and is_of_tokens)
            or (key == "model.tokenizer_name_or_path" and is_of_tokens)
            or (section == "objective" and metric == "loss")
        ):
            yield ("search", "vary"), losses, to_measure


def _without_evaluation(job: Job) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Keys that choose by evaluations of a job that has none."""
    train = job.train
    why = ""
    if not job.data.eval and not job.data.eval_fraction:
        why = "there is no evaluation data"
    elif train.eval_strategy == "no" and train.eval_steps is None:
        why = "eval_strategy is no"
    asked = {
        "early_stopping_patience": train.early_stopping_patience is not None,
        "load_best_model_at_end": train.load_best_model_at_end
        and "load_best_model_at_end" in train.model_fields_set,
    }
    for key, is_asked in asked.items():
        if why and is_asked:
            to_do = f"hold out a part with data.eval_fraction: 0.05, name data.eval, or drop {key}"
            yield ("train", key), f"{key} needs evaluations, and {why}", to_do


def _all_columns(job: Job) -> list[Json]:
    return [
        job.data.columns,
        *(each.columns for each in (*job.data.of_train, *job.data.of_eval) if each.columns),
    ]


def _absolute(path: str, base: Path) -> str:
    _refuse_long(path)
    expanded = Path(path).expanduser()
    return str(expanded) if expanded.is_absolute() else str((base / expanded).resolve())


def _refuse_long(path: str) -> None:
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > MOST_NAME_BYTES:
        raise InputError(
            f"a name of {longest} bytes in a path; file systems take {MOST_NAME_BYTES}",
            where=f"{path[:60]}...",
            to_do="give a shorter one",
        )


def _looks_local(name: str, base: Path) -> bool:
    """A Hub name has at most one slash and no leading dot; whatever exists, or looks like a path,
    is a path.
    """
    _refuse_long(name)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or (base / name).exists():
        return True
    return OF_FILES.search(name) is not None or any(c in name for c in "*?[")


def _with_absolute_paths(
    job: Job, base: Path, cwd: Path, from_command_line: set[tuple[str, ...]]
) -> Job:
    """The same job with local paths made absolute and globs spelled out."""

    def base_of(*key: str) -> Path:
        return cwd if any(key[:n] in from_command_line for n in range(1, len(key) + 1)) else base

    def local(name: str | None, *key: str) -> str | None:
        if name is None or is_remote(name) or not _looks_local(name, base_of(*key)):
            return name
        return _absolute(name, base_of(*key))

    def sources(names: tuple[str, ...], own: tuple[Own, ...], role: str) -> Json:
        found: list[str] = []
        said: list[Own] = []
        for name, each in zip(names, own or (Own(),) * len(names), strict=True):
            path = str(local(name, "data", role))
            spread = (
                sorted(glob.glob(path))
                if any(c in path for c in "*?[") and not is_remote(path)
                else [path]
            )
            found += spread or [path]
            said += [each] * len(spread or [path])
        return {role: tuple(found), f"of_{role}": tuple(said) if own else ()}

    def run_folder(name: str | None) -> str | None:
        """`RUN` or `RUN:STEP`, with the folder made absolute."""
        match = re.fullmatch(r"(.+):(\d+)", name or "")
        run, step = (match[1], f":{match[2]}") if match else (name, "")
        return run and _absolute(run, base_of("model", "from_run")) + step

    names = {
        key: local(getattr(job.model, key), "model", key)
        for key in ("model_name_or_path", "tokenizer_name_or_path")
    }
    model = job.model.model_copy(update={"from_run": run_folder(job.model.from_run), **names})
    template = job.data.chat_template
    data = job.data.model_copy(
        update={
            **sources(job.data.train, job.data.of_train, "train"),
            **sources(job.data.eval, job.data.of_eval, "eval"),
            "chat_template": template and _absolute(template, base_of("data", "chat_template")),
        }
    )
    cache, store = job.cache_dir, job.output_store
    _refuse_long(job.output_dir)
    return job.model_copy(
        update={
            "model": model,
            "data": data,
            # a link stays one: whose it is will be looked at
            "output_dir": os.path.abspath(
                base_of("output_dir") / Path(job.output_dir).expanduser()
            ),
            "output_store": (
                store
                if store is None or is_remote(store)
                else _absolute(store, base_of("output_store"))
            ),
            "cache_dir": (
                _absolute(cache, base_of("cache_dir"))
                if cache
                else str(Path.home() / ".cache" / "farthing")
            ),
        }
    )
