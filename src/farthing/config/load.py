"""`job.yaml` in, one `Job` out, or every mistake in it at once with its line and what to do.

Paths in the file are relative to the file, paths given by `--set` to the working directory. Reading
a job is instant and never executes anything it holds: safe YAML, no import paths, no interpolation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from farthing.config.bounded import parse_yaml, read_yaml
from farthing.config.foreign_keys import ForeignKeyError, adopt, answer
from farthing.config.job import KEYS, SECTIONS, Job, ValueRange
from farthing.errors import InputError, JobError
from farthing.objectives.registry import objective_names, objective_of
from farthing.storage.files import Json, small_text

MAX_JOB_BYTES = 1 << 20
OF_TOKENS = ("loss", "perplexity", "document_loss")
"""Metrics of models that write, a mean over tokens: other cuts of the same text have others."""
OF_TRAINING_DATA = ("", "train", "train_split", "max_train_samples")
OF_TEXTS = ("max_length", "max_target_length", "columns", "chat_template", "train_on_prompt")
"""Keys of data that leave the examples as they are, and change their texts."""
SHORTHAND = {"model": "model_name_or_path", "data": "train", "method": "name", "objective": "name"}
_YAML_ADVICE = {
    "aliases": "write it out plainly",
    "nested": "write it out plainly",
    "'\\t'": "indent with spaces, not with tabs",
    "YAML reads": "put it in quotes, or write a plain number",
    "constructor": "a job holds plain values only",
    "can't be read": "write a smaller number, or a date that exists",
    "": "check the indentation, quotes and colons on this line and the one above",
}

Key = tuple[str, ...]
_HOMES: dict[str, Key] = {
    key: (section, key) if section else (key,) for section in KEYS for key in KEYS[section]
}


@dataclass
class _Origin:
    """Where the keys of a job stand."""

    path: Path
    """What messages call the job. Relative names stand beside it."""
    places: dict[Key, str] = field(default_factory=dict)
    """Key -> where it stands, for people."""
    overrides: set[Key] = field(default_factory=set)
    """Keys of the command line."""

    def of(self, key: Key) -> str:
        """`--set key` or `file:line` of a key, or of the nearest thing around it."""
        for given in sorted(self.overrides, key=lambda given: (key[: len(given)] != given, given)):
            is_within = given[: len(key)] == key and key not in self.places
            if key[: len(given)] == given or is_within:
                return f"--set {'.'.join(given)}"
        around = (self.places.get(key[:n]) for n in range(len(key), 0, -1))
        return next(filter(None, around), str(self.path))

    def folder_of(self, name: str) -> Path:
        """The folder that a relative name of this key stands in."""
        is_given = _HOMES[name] in self.overrides or _HOMES[name][:1] in self.overrides
        return Path.cwd() if is_given else self.path.resolve().parent


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
        values, node = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or error)
        to_do = next(advice for word, advice in _YAML_ADVICE.items() if word in what)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise _refused(f"not valid YAML: {what}", where, to_do) from error
    if not isinstance(values, dict):
        to_do = "`farthing init` writes a starter"
        raise _refused("a job is a mapping of keys to values", path, to_do)
    origin = _Origin(path)
    return _checked(values, list(_walk(node, (), origin)), origin, overrides)


def job_of(values: Json, overrides: list[str] | None = None) -> Job:
    """`load_job` of a mapping, whose relative names stand in the working folder."""
    origin = _Origin(Path.cwd() / "job")
    _note_keys(values, (), origin.places)
    return _checked(values, [], origin, overrides)


def _note_keys(value: Any, at: Key, places: dict[Key, str]) -> None:
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
    origin: _Origin,
    overrides: list[str] | None,
) -> Job:
    """A job of values with their origin. Raises `JobError`."""
    values = _expand(values)
    problems += _adopted(values, origin)
    for text in overrides or []:
        try:
            origin.overrides.add(_override(values, text))
        except ValueError as error:
            to_do = "--set train.learning_rate=1e-4"
            problems.append(InputError(str(error), where=f"--set {text}", to_do=to_do))
    problems += _adopted(values, origin)  # sections of the command line
    if values.get("cache_dir") is None:
        values["cache_dir"] = "~/.cache/farthing"
    try:
        job = Job.model_validate(values, context=origin.folder_of)
    except ValidationError as error:
        problems += _once_each(_explain(item, origin) for item in error.errors())
        rest = _without(values, [item["loc"] for item in error.errors()], origin)
        raise JobError(problems, rest) from error
    for key, what, to_do in _contradictions(job):
        problems.append(InputError(what, where=origin.of(tuple(key.split("."))), to_do=to_do))
    if problems:
        raise JobError(problems, job)
    return job


def _adopted(values: dict[Any, Any], origin: _Origin) -> Iterator[InputError]:
    """Move keys by other names to where they belong; yields why one can't be."""
    try:
        for stood, stands in adopt(values, KEYS):
            if stood in origin.places:
                origin.places.setdefault(stands, origin.places[stood])
    except ForeignKeyError as error:
        yield InputError(str(error), where=str(origin.path), to_do="keep one of them")


def _without(values: Json, places: Iterable[tuple[int | str, ...]], origin: _Origin) -> Job | None:
    """The job without the keys at these places; None where what is left of it is none."""
    for place in places:
        inner: Any = values
        for key in map(str, place):
            if isinstance(inner.get(key), dict) and key != str(place[-1]):
                inner = inner[key]
            else:
                inner.pop(key, None)
                break
    try:
        return Job.model_validate(values, context=origin.folder_of)
    except ValidationError:
        return None


def _docs_of(model: type[BaseModel]) -> dict[str, str]:
    """What is written below each key of a model. pydantic would read it at every start."""
    import ast
    import inspect
    import textwrap

    found = {}
    of_model: Any = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    for key, words in pairwise(of_model.body):
        if isinstance(key, ast.AnnAssign) and isinstance(words, ast.Expr):
            found[ast.unparse(key.target)] = inspect.cleandoc(ast.literal_eval(words.value))
    return found


def job_schema() -> Json:
    """The JSON Schema of the job file, for editors. The short forms (`model: NAME`) are in it."""
    schema = Job.model_json_schema()
    settings = [objective_of(name).settings for name in objective_names()]
    parts = {each.get("title"): each for each in schema["properties"]["objective"]["anyOf"]}
    parts |= {**schema["$defs"], "Job": schema}
    for model in filter(None, (Job, ValueRange, *SECTIONS.values(), *settings)):
        for key, words in _docs_of(model).items():
            parts[model.__name__]["properties"][key]["description"] = words
    schema["required"].remove("task")  # where there is an objective
    for section, key in SHORTHAND.items():
        if section == "objective":  # has it
            continue
        short = {"type": "string", "description": f"short for {section}: {{{key}: ...}}"}
        schema["properties"][section] = {"anyOf": [short, schema["properties"][section]]}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "farthing job", **schema}


def _refused(what: str, where: Path | str, to_do: str = "") -> JobError:
    """A file that is no job."""
    return JobError([InputError(what, where=str(where), to_do=to_do)])


def _read_text(path: Path) -> str:
    try:
        return small_text(path, MAX_JOB_BYTES)
    except FileNotFoundError as error:
        names = [other.name for other in path.parent.glob("*.y*ml")]
        near = difflib.get_close_matches(path.name, names, n=1)
        to_do = (
            f"did you mean {path.parent / near[0]}?" if near else "`farthing init` writes a starter"
        )
        raise _refused("no such job file", path, to_do) from error
    except IsADirectoryError as error:
        raise _refused("a folder, not a job file", path, "name the YAML file") from error
    except (OSError, ValueError) as error:
        raise _refused(f"can't be read: {getattr(error, 'strerror', error)}", path) from error


def _walk(node: yaml.Node | None, at: Key, origin: _Origin) -> Iterator[InputError]:
    """Note the line of every key; yield keys that stand twice (YAML would silently keep the
    last).
    """
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            origin.places[(*at, str(index))] = f"{origin.path}:{value.start_mark.line + 1}"
            yield from _walk(value, (*at, str(index)), origin)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*at, str(getattr(key, "value", "?")))
            place = f"{origin.path}:{key.start_mark.line + 1}"
            if name in origin.places:
                first = origin.places[name].rpartition(":")[2]
                what = f"`{'.'.join(name)}` appears twice (first on line {first})"
                yield InputError(what, where=place, to_do="keep one of them")
            origin.places[name] = place
            yield from _walk(value, name, origin)


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


def _override(values: dict[Any, Any], text: str) -> Key:
    """Put `a.b=value` into `values`; returns its key path."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise ValueError("expected key=value")
    names = tuple(key.strip().split("."))
    try:
        value = read_yaml(raw) if raw else None
    except yaml.YAMLError as error:
        why = getattr(error, "problem", error)
        raise ValueError(f"the value is not valid YAML: {raw[:80]!r} ({why})") from error
    if len(names) == 1 and names[0] in SHORTHAND and not isinstance(value, dict):
        names = (*names, SHORTHAND[names[0]])
    made: Any = value
    for name in reversed(names):
        made = {name: made}
    if not isinstance(value, dict):
        for _, stands in adopt(made, KEYS):  # by another name
            names = stands
    for name in names:
        made = made[name]
    place = values
    for name in names[:-1]:
        inner = place.get(name)
        place[name] = inner if isinstance(inner, dict) else {}
        place = place[name]
    place[names[-1]] = made
    if made is None and names[-1] in KEYS.get(".".join(names[:-1]), ()):
        del place[names[-1]]  # its default
    return names


# ---- mistakes ----

_WANTED = {
    "too_short": "name at least one",
    "string_too_short": "name something, or leave the key out",
    "string": "text is wanted: put it in quotes if it is meant so",
    "int": "a whole number is wanted",
    "float": "a number is wanted",
    "bool": "true or false",
    "tuple": "a list is wanted, as in [a, b]",
    "dict": "a mapping is wanted, as in {a: b}",
    "model": "it is a section: its keys stand below it, indented",
    "datetime": "a date and time is wanted, as in 2027-01-31T18:00",
}
"""A kind of value -> what to do about a value of another kind."""
_OTHER_KIND = re.compile(r"^([a-z]+)_(type|parsing|from_float|from_date_parsing)$")
_ADD = {
    "model": " a Hub name or a folder",
    "data": " a file, or a section with `train:`",
    "output_dir": " a folder for the run",
}


def _explain(item: Any, origin: _Origin) -> InputError:
    """A pydantic error in our words, with the line it stands on."""
    kind, message, value = item["type"], item["msg"].removeprefix("Value error, "), item["input"]
    loc = tuple(str(part) for part in item["loc"])
    is_varied = loc[:2] == ("search", "vary")
    loc = loc[:3] + loc[4:] if is_varied else loc  # not which form it has
    context = item.get("ctx", {})
    own_place = getattr(context.get("error"), "place", ())
    where = origin.of((*loc, *own_place))
    if kind == "extra_forbidden":
        return InputError(f"unknown key `{'.'.join(loc)}`", where=where, to_do=_meant(loc))
    if kind == "missing":
        names = f" {' or '.join(', '.join(objective_names()).rsplit(', ', 1))}"
        to_do = f"add `{loc[-1]}:`" + ({"task": names} | _ADD).get(loc[-1], "")
        return InputError(f"`{'.'.join(loc)}` is missing", where=where, to_do=to_do)
    # leave out which alternative or item of a key it was
    loc = loc[: 3 if is_varied else 2 if loc and loc[0] in SECTIONS else 1]
    key = ".".join(loc)
    if kind == "value_error":
        there = {*origin.places, *origin.overrides}
        named = next((name for name in re.findall(r"\w+", message) if (*loc, name) in there), None)
        if named and not own_place:
            where = origin.of((*loc, named))
        what, _, to_do = message.rpartition("; ") if "; " in message else (message, "", "")
        return InputError(f"`{key}`: {what}" if key else what, where=where, to_do=to_do)
    words = {True: "true", False: "false", None: "empty"}
    given = words[value] if isinstance(value, bool | None) else repr(value)
    what = f"`{key}` can't be {given if len(given) <= 80 else given[:80] + '...'}"
    if kind != "literal_error":
        to_do = _WANTED.get(_OTHER_KIND.sub(r"\1", kind), message[:1].lower() + message[1:])
    elif str(value).startswith(("cuda:", "gpu")):
        to_do = "use cuda; CUDA_VISIBLE_DEVICES=NUMBER in the environment chooses among GPUs"
    else:
        near = difflib.get_close_matches(
            str(value), re.findall("'([^']+)'", context["expected"]), n=1
        )
        to_do = f"did you mean `{near[0]}`?" if near else f"use {context['expected']}"
    return InputError(what, where=where, to_do=to_do)


def _meant(loc: Key) -> str:
    """What to do about an unknown key: the nearest one here, the section it belongs in, or all
    there are.
    """
    *section, name = loc
    known = KEYS.get(".".join(section), [])
    homes = {key: f"{home}.{key}" for home, keys in reversed(KEYS.items()) if home for key in keys}
    is_slip = bool(difflib.get_close_matches(name, known, n=1, cutoff=0.9))
    if words := answer(name, is_exact=is_slip):
        return f"{words}; take the key out"
    if name in homes and not is_slip:
        return f"it belongs in `{homes[name]}`"
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    # letters that changed places are the likelier slip
    near.sort(key=lambda key: sorted(key) != sorted(name))
    afar = difflib.get_close_matches(name, homes, n=1, cutoff=0.8)
    if found := [*near, *(homes[key] for key in afar)]:
        return f"did you mean `{found[0]}`?"
    return f"known here: {', '.join(known)}" if known else f"`{'.'.join(section)}` has no such key"


def _once_each(problems: Iterable[InputError]) -> list[InputError]:
    """A key that takes several kinds of value gives one problem for each kind: say them
    together.
    """
    together: dict[tuple[str, str], dict[str, None]] = {}
    for problem in problems:
        together.setdefault((problem.what, problem.where), {})[problem.to_do] = None
    return [
        InputError(what, where=where, to_do=", or ".join(wanted))
        for (what, where), wanted in together.items()
    ]


def _contradictions(job: Job) -> Iterator[tuple[str, str, str]]:
    """(key, what, to do) of settings that are well-formed and can't work; paths are absolute
    already.
    """
    model, data, train, method = job.model, job.data, job.train, job.method
    names = filter(None, (model.model_name_or_path, model.tokenizer_name_or_path))
    on_hub = [name for name in names if not name.startswith("/")]
    if f"{job.output_dir}/model" in (model.model_name_or_path, model.tokenizer_name_or_path):
        what = "the run would write its model over the one that it reads"
        yield "output_dir", what, "name another output_dir"
    store = (job.output_store or "").removeprefix("file://")
    if store and Path(store).is_relative_to(job.output_dir):
        what = "the copy would lie in the run folder, and be lost with it"
        yield "output_store", what, "name a bucket, or a folder of another disk"
    is_pinned = re.fullmatch(r"[0-9a-f]{40}", model.revision or "")
    if model.trust_remote_code and on_hub and not is_pinned:
        what = f"trust_remote_code runs whatever {on_hub[0]} holds on that day"
        to_do = "pin `model.revision:` to a full commit (40 hex digits)"
        yield "model.trust_remote_code", what, to_do
    odd = {
        "qlora": method.name == "qlora",
        "use_dora": method.use_dora,
        "lora_bias": method.lora_bias,
        f"strategy: {job.where.strategy}": job.where.strategy in ("fsdp", "hsdp"),
    }
    init = method.init_lora_weights
    if init.startswith(("pissa", "olora")) and (found := [name for name in odd if odd[name]]):
        what = f"{init} does not go with {found[0]}"
        yield "method.init_lora_weights", what, "leave one of the two out"
    objective = objective_of(job.task)
    if data.train_on_prompt and (not objective.predicts_next or objective.loss):
        yield "data.train_on_prompt", f"{job.task} has no prompt to train on", "leave it out"
    if objective.loss and data.too_long == "truncate":
        what = f"{job.task} compares whole answers, and none of them is cut"
        yield "data.too_long", what, "use skip or error"
    smooths = not objective.loss and (not objective.labels or objective.labels.smooths)
    if train.label_smoothing_factor and not smooths:
        what = f"{job.task} has no probabilities of targets to smooth"
        to_do = "leave it out; some objectives have a key `label_smoothing`"
        yield "train.label_smoothing_factor", what, to_do
    yield from _incomparable(job)
    is_paired = objective.n_sequences > 1
    if data.keep is not None and (is_paired or not objective.reads_answers):
        to_do = "use data.pairs" if is_paired else "leave it out"
        yield "data.keep", f"{job.task} does not learn single answers", to_do
    if data.pairs is not None and not is_paired:
        yield "data.pairs", f"{job.task} does not learn pairs of answers", "use data.keep"
    if data.label_map and objective.labels is None:
        yield "data.label_map", f"{job.task} has no classes to name", "leave it out"
    if objective.is_mismatched and job.global_batch_size == 1:
        key = "global_batch_size" if train.global_batch_size else "per_device_train_batch_size"
        what = f"{job.task} compares the examples of a step, and one has no other"
        yield f"train.{key}", what, "use 4 or more"
    yield from _without_evaluation(job)
    if job.metric not in objective.metrics:
        near = difflib.get_close_matches(job.metric, objective.metrics, n=1)
        to_do = f"did you mean `{near[0]}`?" if near else f"use {', '.join(objective.metrics)}"
        yield "train.metric_for_best_model", f"`{job.metric}` is not measured for {job.task}", to_do


def is_mean_of_tokens(job: Job) -> bool:
    """Whether the metric that chooses is a mean over tokens, which other tokens change."""
    return not objective_of(job.task).counts_units and job.metric in OF_TOKENS


def other_metric(job: Job) -> str:
    """The first metric that is no mean over tokens; empty where there is none."""
    return next((name for name in objective_of(job.task).metrics if name not in OF_TOKENS), "")


def _varied(job: Job) -> Iterator[str]:
    """The keys that a search varies; of choices that are sections those that differ."""
    for key, values in job.search.vary.items():
        whole = [v for v in values if isinstance(v, dict)] if isinstance(values, tuple) else []
        inner = sorted({name for section in whole for name in section})
        differ = [name for name in inner if any(v.get(name) != whole[0].get(name) for v in whole)]
        yield from [f"{key}.{name}" for name in differ] if len(whole) > 1 else [key]


def _incomparable(job: Job) -> Iterator[tuple[str, str, str]]:
    """Keys of a search under which scores are no longer of one thing."""
    is_of_tokens, instead = is_mean_of_tokens(job), other_metric(job)
    for key in _varied(job):
        section, _, name = key.partition(".")
        is_text = (section == "data" and name in OF_TEXTS) or key == "model.tokenizer_name_or_path"
        splits = (section == "data" and name != "max_train_samples") or key == "train.seed"
        if splits and job.data.eval_fraction and not job.data.eval:
            what = f"data.eval_fraction holds out other examples under each `{key}`"
            yield "search.vary", what, "name the evaluation data: data.eval"
        elif section == "data" and name not in (*OF_TRAINING_DATA, *OF_TEXTS):
            what = f"trials under different `{key}` would be scored on different examples"
            yield "search.vary", what, "leave it out"
        elif (is_text and is_of_tokens) or (section == "objective" and job.metric == "loss"):
            what = f"losses under different `{key}` are different things and can't be compared"
            to_do = f"set train.metric_for_best_model: {instead}" if instead else "leave it out"
            yield "search.vary", what, to_do


def _without_evaluation(job: Job) -> Iterator[tuple[str, str, str]]:
    """Keys that choose by evaluations of a job that has none."""
    train = job.train
    why = ""
    if not job.data.eval and not job.data.eval_fraction:
        why = "there is no evaluation data"
    elif train.eval_strategy == "no":
        why = "eval_strategy is no"
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if why and key in train.model_fields_set and getattr(train, key):
            to_do = f"hold out a part with data.eval_fraction: 0.05, name data.eval, or drop {key}"
            yield f"train.{key}", f"{key} needs evaluations, and {why}", to_do
