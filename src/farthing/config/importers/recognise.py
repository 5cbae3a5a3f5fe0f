"""From a file of another tool to an `Imported`: whose it is, and what its keys became.

Files are read as YAML, JSON, Python syntax trees, notebooks or command lines; nothing of them is
executed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from farthing.config.bounded import read_yaml, whole_number
from farthing.config.importers import axolotl, hf, home_made, llama_factory, script_job, services
from farthing.config.importers.scripts import Command, calls_of, code_of_notebook, commands_of
from farthing.config.importers.tables import Imported, UnmatchedError, fact, table
from farthing.config.load import job_of
from farthing.config.values import flat
from farthing.errors import InputError, JobError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.storage.files import Json, small_text

FILL_IN = "FILL-IN/the-model"


def _of_machines(values: Json, out: Imported) -> None:
    why = "says on which machines a training runs: import the training's own configuration"
    for index, (key, value) in enumerate(flat(values)):
        out.name(key, value, why, "none" if index else "blocks")


_OF_HF = (hf.TRL, hf.UNSLOTH, hf.TRAINER)  # tools whose settings have the same names
_READERS = {
    services.OPENAI: services.read_openai,
    services.TOGETHER: services.read_together,
    services.FIREWORKS: services.read_fireworks,
    axolotl.NAME: axolotl.read,
    llama_factory.NAME: llama_factory.read,
    **dict.fromkeys(_OF_HF, hf.read),
}
SOURCES = (*_READERS,)
_UNNAMED = {home_made.NAME: home_made.read, "accelerate or deepspeed": _of_machines}
_CODE = (".py", ".ipynb", ".md", ".sh", ".bash", ".txt")
MAX_SCRIPT_BYTES, MAX_SETTINGS_BYTES = 16 << 20, 1 << 20


def import_file(path: Path, source: str | None = None) -> Imported:
    """What became of each key of a file. Raises `InputError` for a file of no known tool."""
    try:
        out = _imported(path, source)
        _finish(out)
    except UnmatchedError as odd:
        what = f"a setting can't be read: {odd}"
        raise InputError(what, where=str(path), to_do="correct it") from odd
    return out


def _imported(path: Path, source: str | None) -> Imported:
    suffix = path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        return _script(path, source)
    if suffix in _CODE:
        return _commands(path, list(commands_of(_text(path))), source)
    values = settings_in(path)
    seen = _whose(values)
    if seen is None and any("_component_" in str(value) for value in values.values()):
        what = "a config of torchtune, which `farthing import` does not read"
        raise InputError(what, where=str(path), to_do="write the job by hand: `farthing init`")
    if source is None and seen is None:
        what = f"can't tell which tool wrote this file: its keys are {', '.join([*values][:6])}"
        to_do = f"pass --from {' | '.join(SOURCES)}"
        raise InputError(what, where=str(path), to_do=to_do)
    return _read(source or str(seen), values, path, seen=seen)


def _read(
    source: str, values: Json, path: Path, program: str = "", seen: str | None = None
) -> Imported:
    """Raises `InputError` for settings that are not those of the tool that was named."""
    out = Imported(source, path, program, {"task": CAUSAL_LM.name})
    (_READERS | _UNNAMED)[source](values, out)
    is_other = seen not in (None, source) and not {seen, source} <= {*_OF_HF}
    if not out.blockers and (not out.mapped or (is_other and 2 * len(out.mapped) < len(out.lines))):
        what = f"no settings of {source}: of {len(out.lines)} keys it has {len(out.mapped)}"
        what += f"; they look like those of {seen}" if is_other else ""
        to_do = f"pass --from {seen}" if is_other else "name the tool's own configuration file"
        raise InputError(what, where=str(path), to_do=to_do)
    return out


# ---- what every import has to have ----


def _refuse_other_objectives(out: Imported) -> None:
    """Block settings of another objective: the job would train the same rows as something else.
    Axolotl's and LLaMA-Factory's files name their objective, and such settings alone mean nothing.
    """
    if out.prefers or out.source in (axolotl.NAME, llama_factory.NAME):
        return
    off: tuple[Any, ...] = (None, False, 0, "", "none", [], "None")
    others = table("other-objectives")
    for why in others.reasons:  # what says more comes first
        for line in out.named:
            if line.value not in off and others.why(line.key.rpartition(".")[2]) == why:
                return out.refuse(line.key, line.value, why.reason)


def _finish(out: Imported) -> None:
    """A task, a model, no code of strangers unasked, and nothing that a job would refuse."""
    _refuse_other_objectives(out)
    job = out.job
    job.setdefault("task", CAUSAL_LM.name)
    model, revision = job.get("model.model_name_or_path"), str(job.get("model.revision") or "")
    if not model:
        job["model.model_name_or_path"] = FILL_IN
        out.notes.append(f"it names no model: put its name in place of {FILL_IN}")
    if not job.get("data.train"):
        out.notes.append(
            "it names no data that can be read here: put yours in place of train.jsonl"
        )
    is_known = str(model).startswith(("/", ".", "~")) or re.fullmatch(r"[0-9a-f]{40}", revision)
    if job.get("model.trust_remote_code") and not is_known:
        why = "farthing runs the code of a Hub model only with a pinned `model.revision`"
        out.drop("model.trust_remote_code", f"{why}; most families need none")
    for source in (*job.get("data.train", ()), *job.get("data.eval", ())):
        columns = source.pop("columns", {}).items()
        if own := {name: column for name, column in columns if column not in (None, "", name)}:
            source["columns"] = own
    if job.get("method.name") == "full":
        for key in [key for key in job if key.startswith("method.") and key != "method.name"]:
            out.drop(key, "about an adapter, and there is none")
    if "train.warmup_steps" in job:
        is_share = job.get("train.warmup_ratio") and job["train.warmup_steps"] == 0
        why = "0 leaves it to warmup_ratio" if is_share else "warmup_steps overrides it"
        out.drop("train.warmup_steps" if is_share else "train.warmup_ratio", why)
    _settle_evaluation(out)
    if job.get("train.bf16"):
        out.drop("train.fp16", "bf16 is on too, and goes before it")
    while not out.blockers and _drops_what_a_job_refuses(out):
        pass


def _settle_evaluation(out: Imported) -> None:
    """Leave no key that needs evaluation data where there are none, or steps where it has none."""
    job = out.job
    if not job.get("data.eval") and not job.get("data.eval_fraction"):
        for key, (effect, why) in fact("without-evaluation").items():
            if job.get(key) not in (None, False, "no"):
                out.drop(key, why, effect)
    if job.get("train.load_best_model_at_end") or job.get("train.early_stopping_patience"):
        why = "the best is chosen among evaluations: set train.eval_steps to as many as there"
        for line in out.named:
            if re.search(r"(^|\.)(eval_steps|evals_per_epoch)$", line.key) and line.value:
                out.name(line.key, line.value, why, "differs", is_last=True)
    if job.get("train.eval_strategy") == "steps" and "train.eval_steps" not in job:
        job["train.eval_steps"] = job.get("train.logging_steps", 500)
        out.defaults["train.eval_steps"] = "Trainer: as often as it logs"
    if job.get("train.eval_strategy") in ("no", "epoch"):
        out.drop("train.eval_steps", "eval_strategy does not go by steps")


def _drops_what_a_job_refuses(out: Imported) -> bool:
    """Name what a job of these keys has wrong; what it can't do without makes no job."""
    values: Json = {"data": {"train": "train.jsonl"}, "output_dir": "runs/imported"}
    for key, value in out.job.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    if out.prefers:
        del values["task"]
    try:
        job_of(values)
    except JobError as error:
        for problem in error.problems:
            key, why = problem.where, f"farthing can't take it: {problem.what}; {problem.to_do}"
            if key in out.job and not key.startswith(("objective.", "train.per_", "train.global_")):
                out.drop(key, why, "differs")
            else:
                line = next((line for line in out.mapped if line.became == key), None)
                out.refuse(line.key if line else key, line.value if line else None, why)
        return True
    return False


# ---- reading ----


def _text(path: Path) -> str:
    most = MAX_SCRIPT_BYTES if path.suffix.lower() in _CODE else MAX_SETTINGS_BYTES
    try:
        text = small_text(path, most)
    except OSError as error:
        what = f"can't be read: {error.strerror}"
        to_do = "name a file with settings: .yaml, .json, .py, .ipynb, .sh"
        raise InputError(what, where=str(path), to_do=to_do) from error
    if not text.strip():
        raise InputError("the file is empty", where=str(path), to_do="check how it was written")
    return text


def settings_in(path: Path) -> Json:
    """The keys of a YAML file, of which JSON is one. Raises `InputError`."""
    text = _text(path)
    try:
        try:
            values = json.loads(text, parse_int=whole_number)
        except (ValueError, RecursionError):
            values = read_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = str(getattr(error, "problem", None) or error).splitlines()[0][:200]
        what = f"not valid YAML or JSON: {what}"
        raise InputError(what, where=where, to_do="correct the syntax") from error
    if not isinstance(values, dict) or not values:
        to_do = "name a configuration or a script"
        raise InputError("not a mapping of settings", where=str(path), to_do=to_do)
    return {str(key): value for key, value in values.items()}


def _whose(values: Json) -> str | None:
    """Whose settings these are, by keys that no other has."""
    known = {services.snake(key): value for key, value in values.items()}
    if str(known.get("base_model", "")).startswith("accounts/") or "baseModel" in values:
        return services.FIREWORKS
    keys = {*known}
    for row in fact("marks"):
        wanted, some, no = ({*row.get(name, "").split()} for name in ("all", "any", "none"))
        if wanted <= keys and (some & keys or not some) and not no & keys:
            return str(row["tool"])
    return home_made.NAME if home_made.is_home_made(values) else None


# ---- scripts ----


def _script(path: Path, source: str | None) -> Imported:
    code = _text(path)
    if path.suffix.lower() == ".ipynb":
        code = code_of_notebook(code, str(path))
    calls = calls_of(code, str(path))
    imports = re.findall(r"^\s*(?:from|import)\s+(\w+)", code, re.MULTILINE)
    # the call of OpenAI's or Together's Python client that creates a fine-tuning job
    ends = ("fine_tuning.jobs.create", "fine_tuning.create")
    if call := next((call for call in calls if call.name.endswith(ends)), None):
        is_together = "together" in imports or ".jobs." not in call.name
        return _read(services.TOGETHER if is_together else services.OPENAI, call.named, path)
    tools = {"unsloth": hf.UNSLOTH, "trl": hf.TRL, "transformers": hf.TRAINER}
    source = source or next((tool for word, tool in tools.items() if word in imports), None)
    takes_all = re.search(r"\b(TrlParser|HfArgumentParser)\(", code) is not None
    if takes_all or not script_job.has_settings(calls):
        comments = "\n".join(re.findall(r"^\s*#\s?(.*)$", code, re.MULTILINE))
        texts = [*re.findall(r'"""(.*?)"""', code, re.DOTALL), comments]
        if commands := [command for text in texts for command in commands_of(text)]:
            return _commands(path, commands, source)
        what = "a script without training settings of its own, or with a training loop of its own"
        to_do = "import the file that has its settings (.yaml, .json, .sh), or: farthing init JOB"
        raise InputError(what, where=str(path), to_do=to_do)
    if source is None:
        to_do = "pass --from trl | unsloth | hf-trainer"
        raise InputError("can't tell which library this script uses", where=str(path), to_do=to_do)
    out = Imported(source, path)
    script_job.read(calls, out)
    return out


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
        is_run = best.program.startswith(("run_", "finetune"))
        of_data = hf.TRL if "dataset_name" in best.values else _whose(best.values)
        source = None if is_run else of_data
    computes_in = best.launcher.get("mixed_precision")  # of accelerate, which the programs take up
    own = {computes_in: True} if computes_in in ("bf16", "fp16") else {}
    out = _read(source or hf.TRAINER, own | best.values, path, best.program)
    for key, value in flat(best.launcher):
        is_count = value != 1 and bool(re.search("nproc|num_(proc|gpus|machines)|nnodes", key))
        why = "how it is started; say where.gpus, or `farthing train --accelerate FILE`"
        why = "so many GPUs each took a batch of their own: multiply it in" if is_count else why
        out.name(f"launcher.{key}", value, why, "differs" if is_count else "none")
    if len(commands) > 1:
        note = f"{len(commands)} command lines are there; the one with {best.program} was read"
        out.notes.append(note)
    return out
