"""From a file of another tool to an `Imported`: whose it is by its content, and what its keys
became.

Files are read as YAML, JSON, Python syntax trees, notebooks or command lines; nothing of them is
executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from farthing.config.importers import (
    axolotl,
    hf,
    home_made,
    llama_factory,
    preference,
    script_job,
    services,
)
from farthing.config.importers.record import Computed, Imported, Line, flat
from farthing.config.importers.scripts import (
    MAX_SCRIPT_BYTES,
    Call,
    Command,
    calls_of,
    code_of_notebook,
    commands_of,
    tree_of,
)
from farthing.config.importers.tables import table
from farthing.config.job import DataSection, MethodSection, TrainSection
from farthing.errors import InputError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.registry import objective_of, read_settings
from farthing.storage.files import Json

FILL_IN = "FILL-IN/the-model"
_READERS = {
    services.OPENAI: services.read_openai,
    services.TOGETHER: services.read_together,
    services.FIREWORKS: services.read_fireworks,
    axolotl.NAME: axolotl.read,
    home_made.NAME: home_made.read,
}
_OF_HF = (hf.TRL, hf.UNSLOTH, hf.TRAINER)
"""Tools whose settings have the same names."""
SOURCES = (*list(_READERS)[:4], llama_factory.NAME, *_OF_HF)
MAX_DEPTH, MAX_SETTINGS_BYTES, MAX_NODES = 50, 1 << 20, 100_000


def import_file(path: Path, source: str | None = None) -> Imported:
    """What became of each key of a file. Raises `InputError` for a file of no known tool."""
    text, suffix = _text(path), path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        return _finish(_script(path, text, source), path.parent)
    if suffix in (".sh", ".bash", ".md", ".txt"):
        return _finish(_commands(path, list(commands_of(text)), source), path.parent)
    values = _mapping(path, text, is_json=suffix == ".json")
    if source is None and _is_of_machines(values):
        return _finish(_machines(values), path.parent)
    seen = _whose(values)
    if source is None and seen is None:
        raise InputError(
            f"can't tell which tool wrote these keys: {', '.join(map(str, list(values)[:6]))}",
            where=str(path),
            to_do=f"pass --from {' | '.join(SOURCES)}",
        )
    return _finish(
        _refuse_strangers(_read(source or str(seen), values, path), seen, path), path.parent
    )


def _refuse_strangers(out: Imported, seen: str | None, path: Path) -> Imported:
    """Raises `InputError` for settings that are not those of the tool that was named."""
    is_other = seen not in (None, out.source) and not {seen, out.source} <= {*_OF_HF}
    if not out.blockers and (not out.mapped or (is_other and 2 * len(out.mapped) < len(out.lines))):
        looks = f"; they look like those of {seen}" if is_other else ""
        raise InputError(
            f"these are no settings of {out.source}: of {len(out.lines)} keys it has"
            f" {len(out.mapped)}{looks}",
            where=str(path),
            to_do=f"pass --from {seen}" if is_other else "name the tool's own configuration file",
        )
    return out


def _read(source: str, values: Mapping[str, Any], path: Path, program: str = "") -> Imported:
    out = Imported(source, {"task": CAUSAL_LM.name})
    place = f"{path.absolute().parent.name}/{path.name}"
    if source == llama_factory.NAME:
        llama_factory.read(values, out, path.parent)
    elif source == hf.TRAINER:
        hf.read_trainer(values, out, program, place)
    elif source in _OF_HF:
        hf.read_trl(values, out, program, place)
    else:
        _READERS[source](values, out)
    return out


def _is_of_machines(values: Mapping[str, Any]) -> bool:
    """Whether these are settings of Accelerate or DeepSpeed, which say where a training runs and
    not what it learns.
    """
    marks = {"compute_environment", "distributed_type", "zero_optimization", "fp8_config"}
    marks |= {"zero_allow_untested_optimizer"}
    return bool(marks & set(values)) and not {"model_name_or_path", "base_model", "model"} & set(
        values
    )


def _machines(values: Mapping[str, Any]) -> Imported:
    out = Imported("accelerate or deepspeed")
    why = (
        "says on which machines another configuration runs; farthing needs no such file, import the"
        " other one"
    )
    for index, (key, value) in enumerate(flat(values)):
        out.name(key, value, why, "blocks" if index == 0 else "none")
    return out


# ---- what every import has to have ----


def _refuse_other_objectives(out: Imported) -> None:
    """Block settings of another objective: the job would train the same rows as something else.
    Axolotl's and LLaMA-Factory's files name their objective, and such settings alone mean nothing.
    """
    if preference.is_asked(out) or out.source in (axolotl.NAME, llama_factory.NAME):
        return
    off: tuple[Any, ...] = (None, False, 0, "", "none", [], "None")
    lines = [line for line in out.lines.values() if not line.became and line.value not in off]
    for why in table("other-objectives").reasons:  # what says more comes first
        for line in lines:
            if table("other-objectives").why(line.key.rpartition(".")[2]) == why:
                out.lines[line.key] = Line(line.key, line.value, "", why.reason, "blocks")
                return


def _finish(out: Imported, folder: Path) -> Imported:
    """A task, a model, no code of strangers unasked, and nothing that a job would refuse."""
    _refuse_other_objectives(out)
    hf.settle_prompts(out, folder)
    job = out.job
    job.setdefault("task", CAUSAL_LM.name)
    model, revision = job.get("model.model_name_or_path"), str(job.get("model.revision") or "")
    if not model:
        job["model.model_name_or_path"] = FILL_IN
        out.notes.append(f"it names no model: put its name in place of {FILL_IN}")
    is_known = str(model).startswith(("/", ".", "~")) or re.fullmatch(r"[0-9a-f]{40}", revision)
    if job.get("model.trust_remote_code") and not is_known:
        why = "farthing runs the code of a Hub model only with a pinned `model.revision`"
        out.drop("model.trust_remote_code", f"{why}; most families need none")
    if not job.get("data.eval") and not job.get("data.eval_fraction"):
        _settle_without_evaluation(out)
    if job.get("train.eval_strategy") == "steps" and "train.eval_steps" not in job:
        job["train.eval_steps"] = job.get("train.logging_steps", 500)
        out.defaults["train.eval_steps"] = "Trainer: as often as it logs"
    if job.get("train.eval_strategy") in ("no", "epoch"):
        out.drop("train.eval_steps", "eval_strategy does not go by steps")
    if job.get("train.bf16") and job.get("train.fp16"):
        out.drop("train.fp16", "bf16 is on too, and goes before it")
    metric = str(job.get("train.metric_for_best_model", "loss")).removeprefix("eval_")
    known = objective_of(str(job["task"])).metrics
    if metric not in known:
        why = f"not measured for {job['task']} ({', '.join(known)} are): the loss is used"
        out.drop("train.metric_for_best_model", why, "differs")
        out.drop("train.greater_is_better", "known from the metric")
    _settle(out)
    return out


def _settle(out: Imported) -> None:
    """Take out what a job would refuse, and name it: values out of range, keys that contradict each
    other.
    """
    preference.refuse_single(out)
    if preference.is_asked(out):
        given = _section(out, "objective")
        try:
            read_settings(given)
        except ValueError as error:
            line = next((li for li in out.mapped if li.became.startswith("objective.")), None)
            key, value = (line.key, line.value) if line else ("objective", given["name"])
            out.lines[key] = Line(key, value, "", f"farthing can't take it: {error}", "blocks")
    for section, model in (
        ("train", TrainSection),
        ("method", MethodSection),
        ("data", DataSection),
    ):
        for _ in range(len(out.job)):
            values = _section(out, section)
            if section == "data":
                values = {k: v for k, v in values.items() if k not in ("train", "eval")}
                values["train"] = "x"
            try:
                model.model_validate(values)
                break
            except ValidationError as error:
                first = error.errors()[0]
                message = first["msg"].removeprefix("Value error, ")
                named = [str(first["loc"][0])] if first["loc"] else []
                named = named or [key for key in values if key in message]
                named = named or [k for k, v in values.items() if str(v) == message.split()[0]]
                if not named:
                    break
                why = f"farthing can't take it: {message}"
                out.drop(f"{section}.{named[-1]}", why, "differs")


def _section(out: Imported, section: str) -> Json:
    before = f"{section}."
    return {k.removeprefix(before): v for k, v in out.job.items() if k.startswith(before)}


def _settle_without_evaluation(out: Imported) -> None:
    """Name what asks for evaluation data where the source names none that can be read."""
    todo = "it names no evaluation data: set data.eval, or data.eval_fraction: 0.05"
    for key in ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"):
        if out.job.get(f"train.{key}"):
            out.drop(f"train.{key}", f"{todo}; without it the last step is kept", "differs")
    for key in ("greater_is_better", "early_stopping_threshold"):
        out.drop(f"train.{key}", "settles what needs evaluation data")
    if out.job.get("train.eval_strategy") in ("steps", "epoch") or "train.eval_steps" in out.job:
        out.drop("train.eval_steps", todo)
        out.drop("train.eval_strategy", todo)


# ---- reading ----


def _text(path: Path) -> str:
    where = str(path)
    try:
        if not path.is_file():
            kinds = (("a folder", path.is_dir()), ("no such file", not path.exists()))
            what = next((what for what, is_so in kinds if is_so), "no ordinary file")
            raise InputError(what, where=where, to_do="name a file with settings")
        is_code = path.suffix.lower() in (".py", ".ipynb", ".md", ".sh")
        most = MAX_SCRIPT_BYTES if is_code else MAX_SETTINGS_BYTES
        if path.stat().st_size > most:
            what = f"larger than {most >> 20} MiB: these are no settings"
            raise InputError(what, where=where, to_do="name the configuration, not the data")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        to_do = "name a text: .yaml, .json, .py, .ipynb, .sh"
        raise InputError(
            f"not UTF-8 text (byte {error.start})", where=where, to_do=to_do
        ) from error
    except OSError as error:
        what = f"can't be read: {error.strerror}"
        raise InputError(what, where=where, to_do="check its permissions") from error
    if not text.strip():
        raise InputError("the file is empty", where=where, to_do="check how it was written")
    return text


def settings_in(path: Path) -> Json:
    """The keys of a YAML file, of which JSON is one. Raises `InputError`."""
    return _mapping(path, _text(path), is_json=False)


def _mapping(path: Path, text: str, *, is_json: bool) -> Json:
    try:
        if is_json:
            values = json.loads(text)
        else:
            _refuse_tangles(text)
            values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = str(getattr(error, "problem", None) or error).splitlines()[0][:200]
        what = "nested too deep" if isinstance(error, RecursionError) else what
        raise InputError(f"not valid YAML or JSON: {what}", where=where, to_do="mend it") from error
    if not isinstance(values, dict) or not values:
        to_do = "name a configuration or a script"
        raise InputError("not a mapping of settings", where=str(path), to_do=to_do)
    return {str(key): value for key, value in values.items()}


def _refuse_tangles(text: str) -> None:
    """Raises `ValueError` for aliases that expand without bound, before they are expanded."""
    depth = n_aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        n_aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or n_aliases > 100:
            raise ValueError("nested too deep, or too many aliases")
    if _n_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MAX_NODES:
        raise ValueError("aliases that expand to more values than any settings have")


def _n_nodes(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a document has with its aliases written out. Raises `ValueError` for an
    alias within what it stands for.
    """
    if id(node) not in known:
        known[id(node)] = MAX_NODES + 1  # until it is counted: an alias to itself
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_n_nodes(each, known) for each in inner)
    return known[id(node)]


_MARKS: tuple[tuple[str, str, str], ...] = (
    (
        axolotl.NAME,
        "base_model",
        "datasets sequence_len micro_batch_size adapter num_epochs optimizer pretraining_dataset"
        " output_dir",
    ),
    (services.OPENAI, "", "hyperparameters"),
    (
        llama_factory.NAME,
        "",
        "finetuning_type stage cutoff_len lora_target peft_config train_dataset template"
        " infer_backend adapter_name_or_path dist_config",
    ),
    (hf.TRAINER, "model_name_or_path", "task_name max_source_length do_train text_column"),
    (
        hf.TRL,
        "model_name_or_path",
        "dataset_name dataset_mixture dataset_mixer use_peft dataset_train_split"
        " lora_target_modules max_length assistant_only_loss completion_only_loss",
    ),
    (hf.TRAINER, "", "model_name_or_path per_device_train_batch_size"),
)
"""Whose settings have all of the first keys and one of the second; the first that fits."""
_TOGETHER = {
    *("lora", "n_checkpoints", "training_type", "lora_r", "wandb_api_key", "learning_rate"),
    *("warmup_ratio", "training_method", "n_evals", "n_epochs"),
}


def _whose(values: Mapping[str, Any]) -> str | None:
    """Whose settings these are, by keys that no other has."""
    keys = set(values)
    snakes = {services.snake(key) for key in keys}
    is_account = str(values.get("base_model", "")).startswith("accounts/")
    if is_account or "baseModel" in keys or {"display_name", "dataset", "base_model"} <= snakes:
        return services.FIREWORKS
    if "training_file" in keys or values.get("object") == "fine_tuning.job":
        is_together = keys & _TOGETHER and not keys & {"hyperparameters", "method"}
        return services.TOGETHER if is_together else services.OPENAI
    for name, all_of, one_of in _MARKS:
        if keys >= set(all_of.split()) and keys & set(one_of.split()):
            return name
    return home_made.NAME if home_made.is_home_made(values) else None


# ---- scripts ----


def _script(path: Path, text: str, source: str | None) -> Imported:
    code = code_of_notebook(text, str(path)) if path.suffix.lower() == ".ipynb" else text
    calls = calls_of(tree_of(code, str(path)))
    if (service := _service(calls, code)) is not None:
        return _refuse_strangers(_read(*service, path), service[0], path)
    _refuse_own_loop(calls, path)
    commands = [command for doc in _docstrings(code) for command in commands_of(doc)]
    source = source or _whose_script(code)
    takes_all = re.search(r"\b(TrlParser|HfArgumentParser)\(", code) is not None
    if (takes_all or script_job.no_settings(calls)) and not commands:
        raise InputError(
            "a script without training settings of its own",
            where=str(path),
            to_do="import the file or command line that it takes its settings from"
            " (.yaml, .json, .sh)",
        )
    if source is None:
        to_do = "pass --from trl | unsloth | hf-trainer"
        raise InputError("can't tell which library this script uses", where=str(path), to_do=to_do)
    if (commands and takes_all) or script_job.no_settings(calls):
        return _commands(path, commands, source)
    out = Imported(source)
    script_job.read(calls, out)
    return out


def _service(calls: list[Call], code: str) -> tuple[str, Json] | None:
    """A fine-tuning job of OpenAI or Together that a script creates by its Python client."""
    for call in calls:
        if call.name.endswith(("fine_tuning.jobs.create", "fine_tuning.create")):
            imports = re.search(r"^\s*(from|import)\s+together\b", code, re.MULTILINE)
            is_together = imports is not None or ".jobs." not in call.name
            return services.TOGETHER if is_together else services.OPENAI, call.named
    return None


def _refuse_own_loop(calls: list[Call], path: Path) -> None:
    """Raises `InputError` where a script goes backward by itself: its settings are in its code."""
    trainers = ("Trainer", "TrainingArguments", "SFTConfig")
    if not any(call.last == "backward" for call in calls) or any(
        call.last.endswith(trainers) for call in calls
    ):
        return
    optimizers = ("adam", "sgd", "adafactor", "lion")
    seen = [
        f"{key}={value}"
        for call in calls
        if call.last.lower().startswith(optimizers)
        for key, value in call.named.items()
        if not isinstance(value, Computed)
    ]
    raise InputError(
        "a home-made training loop; its settings are in its code"
        + (f" ({', '.join(seen)})" if seen else ""),
        where=str(path),
        to_do="farthing init JOB writes a job: set learning_rate, epochs and batch there",
    )


def _docstrings(code: str) -> list[str]:
    comments = "\n".join(re.findall(r"^\s*#\s?(.*)$", code, re.MULTILINE))
    return [*re.findall(r'"""(.*?)"""', code, re.DOTALL), comments]


def _whose_script(code: str) -> str | None:
    for name, word in ((hf.UNSLOTH, "unsloth"), (hf.TRL, "trl"), (hf.TRAINER, "transformers")):
        if re.search(rf"^\s*(from|import)\s+{word}\b", code, re.MULTILINE):
            return name
    return None


def _commands(path: Path, commands: list[Command], source: str | None) -> Imported:
    """The first of several command lines; what the others say differently is a note."""
    if not commands:
        raise InputError(
            "no command line that starts a training (python SCRIPT.py --key value, trl sft ...,"
            " llamafactory-cli train ...)",
            where=str(path),
            to_do="import the configuration file that it names",
        )
    with_rate = (c for c in commands if any("lr" in k or "learning_rate" in k for k in c.values))
    best = next(with_rate, commands[0])
    if source is None:
        source = _whose(best.values) or hf.TRAINER
        if best.program.startswith(("run_", "finetune")):
            source = hf.TRAINER
        elif "dataset_name" in best.values:
            source = hf.TRL
    out = _read(source, best.values, path, best.program)
    why = (
        "starts it on several GPUs or machines; say where.gpus, or `farthing train --accelerate"
        " FILE`"
    )
    for key, value in flat(best.launcher):
        out.name(f"launcher.{key}", value, why)
    if len(commands) > 1:
        note = f"{len(commands)} command lines are there; the one with {best.program} was read"
        out.notes.append(note)
    return _refuse_strangers(out, source, path)
