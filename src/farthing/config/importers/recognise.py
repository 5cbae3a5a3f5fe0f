"""From a file of another tool to an `Imported`: whose it is by its content, and what its keys
became.

Files are read as YAML, JSON, Python syntax trees, notebooks or command lines; nothing of them is
executed. Refuses what it can't recognise by name.
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
    fireworks,
    hf_scripts,
    home_made,
    llama_factory,
    openai,
    script_job,
    together,
    trl,
)
from farthing.config.importers.record import Effect, Imported, Line, flat
from farthing.config.importers.scripts import (
    MAX_SCRIPT_BYTES,
    Call,
    Command,
    Computed,
    calls_of,
    code_of_notebook,
    commands_of,
    tree_of,
)
from farthing.config.job import DataSection, MethodSection, TrainSection
from farthing.errors import InputError
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json

FILL_IN = "FILL-IN/the-model"
SOURCES = (
    "openai",
    "together",
    "fireworks",
    "axolotl",
    "llama-factory",
    "trl",
    "unsloth",
    "hf-trainer",
)
KIN = {trl.NAME, script_job.UNSLOTH, hf_scripts.NAME}
"""Tools whose settings have the same names."""
_READERS = {
    axolotl.NAME: axolotl.read,
    trl.NAME: trl.read,
    script_job.UNSLOTH: trl.read,
    openai.NAME: openai.read,
    together.NAME: together.read,
    fireworks.NAME: fireworks.read,
    home_made.NAME: home_made.read,
}
MAX_DEPTH, MAX_SETTINGS_BYTES, MAX_NODES = 50, 1 << 20, 100_000
_MACHINES = (
    "compute_environment",
    "distributed_type",
    "zero_optimization",
    "fp8_config",
    "zero_allow_untested_optimizer",
)


def import_file(path: Path, source: str | None = None) -> Imported:
    """What became of each key of a file. Raises `InputError` for what can't be read or recognised."""  # noqa: E501
    return finish(_import(path, source))


def _import(path: Path, source: str | None) -> Imported:
    text = _text(path)
    suffix = path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        return _script(path, text, source)
    if suffix in (".sh", ".bash", ".md", ".txt"):
        return _commands(path, list(commands_of(text)), source)
    values = _mapping(path, text, is_json=suffix == ".json")
    if source is None and _is_of_machines(values):
        return _machines(values)
    seen = _whose(values)
    source = source or seen
    if source is None:
        raise InputError(
            "whose settings these are is not seen from its keys"
            f" ({', '.join(map(str, list(values)[:6]))})",
            where=str(path),
            to_do=f"say it: --from {' | '.join(SOURCES)}",
        )
    return _refuse_strangers(_read(source, values, path), seen, path)


def _refuse_strangers(out: Imported, seen: str | None, path: Path) -> Imported:
    """Raises `InputError` for settings that are not those of the tool that was named."""
    is_other = seen is not None and seen != out.source and not {seen, out.source} <= KIN
    if not out.blockers and (not out.mapped or (is_other and 2 * len(out.mapped) < len(out.lines))):
        looks = f"; they look like those of {seen}" if is_other else ""
        raise InputError(
            f"these are no settings of {out.source}: of {len(out.lines)} keys it has"
            f" {len(out.mapped)}{looks}",
            where=str(path),
            to_do=(
                f"say --from {seen}, or leave it out"
                if is_other
                else "name the tool's own configuration file"
            ),
        )
    return out


def _read(source: str, values: Mapping[str, Any], path: Path, program: str = "") -> Imported:
    out = Imported(source)
    out.job["task"] = CAUSAL_LM.name
    if source == llama_factory.NAME:
        llama_factory.read(values, out, path.parent)
    elif source == hf_scripts.NAME:
        hf_scripts.read(values, out, program)
    else:
        if (
            source in (trl.NAME, script_job.UNSLOTH)
            and program
            and program not in ("sft", "sft.py")
        ):
            _other_verb(out, program)
        _READERS[source](values, out)
    return out


def _is_of_machines(values: Mapping[str, Any]) -> bool:
    """Whether these are settings of Accelerate or DeepSpeed, which say where a training runs and
    not what it learns.
    """
    return any(key in values for key in _MACHINES) and not any(
        key in values for key in ("model_name_or_path", "base_model", "model")
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


_OTHER_OBJECTIVE = re.compile(
    r"beta|rl_beta|(dpo|orpo|kto|ppo|grpo|pref|reward|simpo|cpo|rpo|sft_in)_\w+|ref_model\w*"
    r"|reward_\w+|num_generations|max_prompt_length|max_prompt_len|max_completion_length|use_vllm"
    r"|precompute_ref_log_probs|center_rewards_coefficient|missing_eos_penalty|total_episodes"
    r"|steps_per_generation|num_ppo_epochs|kl_coef|loss_weights|teacher_model\w*|ctc_\w+"
    r"|feature_extractor_name|audio_column_name|speaker_\w+|image_column|freeze_feature_encoder"
)
"""Settings that only preference learning, reinforcement learning, distillation and speech have."""
_ASKED_BY_NAME = {axolotl.NAME, llama_factory.NAME}
"""Tools whose files say which objective they train; there such settings alone mean nothing."""


def _refuse_other_objectives(out: Imported) -> None:
    """Block settings of another objective: the job would train the same rows as something else."""
    if out.source in _ASKED_BY_NAME:
        return
    for key, line in list(out.lines.items()):
        name = key.rpartition(".")[2]
        is_on = line.value not in (None, False, 0, "", "none", [])
        if not line.became and is_on and _OTHER_OBJECTIVE.fullmatch(name):
            why = "a setting of preference or reinforcement learning, distillation or speech"
            out.lines[key] = Line(
                key, line.value, "", f"{why}, which farthing does not do", "blocks"
            )
            return


def finish(out: Imported) -> Imported:
    """What every import has to have: a task, a model, and no code of strangers unasked."""
    _refuse_other_objectives(out)
    out.job.setdefault("task", CAUSAL_LM.name)
    model, revision = (
        out.job.get("model.model_name_or_path"),
        str(out.job.get("model.revision") or ""),
    )
    if not model:
        out.job["model.model_name_or_path"] = FILL_IN
        out.notes.append(
            f"which model is trained is not said here: put its name in the place of {FILL_IN}"
        )
    is_local = str(model).startswith(("/", ".", "~"))
    if (
        out.job.get("model.trust_remote_code")
        and not is_local
        and not re.fullmatch(r"[0-9a-f]{40}", revision)
    ):
        del out.job["model.trust_remote_code"]
        for key, line in list(out.lines.items()):
            if line.became == "model.trust_remote_code":
                del out.lines[key]
                why = (
                    "farthing runs the code of a Hub model only with a pinned `model.revision`;"
                    " most families need none"
                )
                out.name(key, line.value, why, "none")
    _settle(out)
    return out


def _settle(out: Imported) -> None:
    """Take out what a job would refuse, and name it: values out of range, keys that contradict each
    other.
    """
    job = out.job
    if not job.get("data.eval") and not job.get("data.eval_fraction"):
        _settle_without_evaluation(out)
    if job.get("train.eval_strategy") == "steps" and "train.eval_steps" not in job:
        job["train.eval_steps"] = job.get("train.logging_steps", 500)
        out.defaults["train.eval_steps"] = "Trainer: as often as it logs"
    if job.get("train.eval_strategy") in ("no", "epoch"):
        _drop(out, "train.eval_steps", "eval_strategy does not go by steps")
    if job.get("train.bf16") and job.get("train.fp16"):
        _drop(out, "train.fp16", "bf16 is on too, and goes before it")
    metric, known = (
        str(job.get("train.metric_for_best_model", "loss")).removeprefix("eval_"),
        objective_of(str(job["task"])).metrics,
    )
    if metric not in known:
        _drop(
            out,
            "train.metric_for_best_model",
            f"not measured for {job['task']} ({', '.join(known)} are): the loss is used",
        )
        _drop(out, "train.greater_is_better", "known from the metric")
    for section, model in (
        ("train", TrainSection),
        ("method", MethodSection),
        ("data", DataSection),
    ):
        for _ in range(len(job)):
            values = {
                key.partition(".")[2]: value
                for key, value in job.items()
                if key.startswith(f"{section}.")
            }
            if section == "data":
                values = {
                    key: value for key, value in values.items() if key not in ("train", "eval")
                } | {"train": "x"}
            try:
                model.model_validate(values)
                break
            except ValidationError as error:
                first = error.errors()[0]
                message = first["msg"].removeprefix("Value error, ")
                named = (
                    [str(first["loc"][0])]
                    if first["loc"]
                    else [key for key in values if key in message]
                )
                if not named:
                    break
                _drop(
                    out, f"{section}.{named[-1]}", f"farthing can't take it: {message}", "differs"
                )


def _settle_without_evaluation(out: Imported) -> None:
    """Name what asks for evaluation data where the source names none that can be read."""
    todo = "no evaluation data is named there: set data.eval, or data.eval_fraction: 0.05"
    for key in ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"):
        if out.job.get(f"train.{key}"):
            _drop(out, f"train.{key}", f"{todo}; without it the last step is kept", "differs")
    for key in ("greater_is_better", "early_stopping_threshold"):
        if f"train.{key}" in out.job:
            _drop(out, f"train.{key}", "settles what needs evaluation data")
    if out.job.get("train.eval_strategy") in ("steps", "epoch") or "train.eval_steps" in out.job:
        _drop(out, "train.eval_steps", todo)
        _drop(out, "train.eval_strategy", todo)


def _drop(out: Imported, to: str, why: str, effect: Effect = "none") -> None:
    if out.job.pop(to, None) is None:
        return
    out.defaults.pop(to, None)
    for key, line in list(out.lines.items()):
        if line.became == to:
            out.lines[key] = Line(key, line.value, "", why, effect)


def _other_verb(out: Imported, program: str) -> None:
    """A program of TRL's other than supervised fine-tuning."""
    other = (
        "dpo",
        "grpo",
        "kto",
        "ppo",
        "rloo",
        "reward",
        "orpo",
        "cpo",
        "xpo",
        "prm",
        "bco",
        "gkd",
        "nash",
        "online",
        "gold",
        "gspo",
        "distill",
        "tpo",
        "sdft",
        "sdpo",
        "ssd",
        "mpo",
        "env",
    )
    if "vlm" in program or "_vl" in program:
        out.name("(script)", program, "images, which farthing does not train on", "blocks")
    elif program.startswith(other) or program.startswith("async_"):
        out.name(
            "(script)",
            program,
            f"{program} is preference or reinforcement learning, which farthing does not do",
            "blocks",
        )
    elif not program.startswith("sft"):
        out.name("(script)", program, "what this script trains is in its code", "differs")


# ---- reading ----


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            what = (
                "a folder"
                if path.is_dir()
                else "no such file"
                if not path.exists()
                else "no ordinary file"
            )
            raise InputError(
                what, where=str(path), to_do="name a file with settings" + " of it" * path.is_dir()
            )
        most = (
            MAX_SCRIPT_BYTES
            if path.suffix.lower() in (".py", ".ipynb", ".md", ".sh")
            else MAX_SETTINGS_BYTES
        )
        if path.stat().st_size > most:
            what = f"larger than {most >> 20} MiB: these are no settings"
            raise InputError(what, where=str(path), to_do="name the configuration, not the data")
        text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise InputError("the file is empty", where=str(path), to_do="check how it was written")
        return text
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
        raise InputError(
            what, where=str(path), to_do="name a text: .yaml, .json, .py, .ipynb, .sh"
        ) from error
    except OSError as error:
        raise InputError(
            f"can't be read: {error.strerror}", where=str(path), to_do="check its permissions"
        ) from error


def settings_in(path: Path) -> Json:
    """The keys of a YAML file, of which JSON is one. Raises `InputError`."""
    return _mapping(path, _text(path), is_json=False)


def _mapping(path: Path, text: str, *, is_json: bool) -> Json:
    try:
        if is_json:
            values = json.loads(text)
        else:
            _refuse_depth(text)
            values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = str(getattr(error, "problem", None) or error).splitlines()[0][:200]
        what = "nested too deep" if isinstance(error, RecursionError) else what
        raise InputError(
            f"not valid YAML or JSON: {what}", where=f"{path}{line}", to_do="mend the file"
        ) from error
    if not isinstance(values, dict) or not values:
        raise InputError(
            "not a mapping of settings", where=str(path), to_do="name a configuration or a script"
        )
    return {str(key): value for key, value in values.items()}


def _refuse_depth(text: str) -> None:
    depth = n_aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        n_aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or n_aliases > 100:
            raise ValueError("nested too deep, or too many aliases")
    if _n_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MAX_NODES:
        raise ValueError("aliases that expand to more values than any settings have")


def _n_nodes(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a document has with its aliases written out."""
    if id(node) not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_n_nodes(each, known) for each in inner)
    return known[id(node)]


_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        axolotl.NAME,
        ("base_model",),
        (
            "datasets",
            "sequence_len",
            "micro_batch_size",
            "adapter",
            "num_epochs",
            "optimizer",
            "pretraining_dataset",
            "output_dir",
        ),
    ),
    (openai.NAME, (), ("hyperparameters",)),
    (
        llama_factory.NAME,
        (),
        (
            "finetuning_type",
            "stage",
            "cutoff_len",
            "lora_target",
            "peft_config",
            "train_dataset",
            "template",
            "infer_backend",
            "adapter_name_or_path",
            "dist_config",
        ),
    ),
    (
        hf_scripts.NAME,
        ("model_name_or_path",),
        ("task_name", "max_source_length", "do_train", "text_column"),
    ),
    (
        trl.NAME,
        ("model_name_or_path",),
        (
            "dataset_name",
            "use_peft",
            "dataset_train_split",
            "lora_target_modules",
            "max_length",
            "assistant_only_loss",
            "completion_only_loss",
        ),
    ),
    (hf_scripts.NAME, (), ("model_name_or_path", "per_device_train_batch_size")),
)
"""Whose settings have all of the first keys and one of the second; the first that fits."""
_TOGETHER = (
    "lora",
    "n_checkpoints",
    "training_type",
    "lora_r",
    "wandb_api_key",
    "learning_rate",
    "warmup_ratio",
    "training_method",
    "n_evals",
    "n_epochs",
)


def _whose(values: Mapping[str, Any]) -> str | None:
    """Whose settings these are, by keys that no other has."""
    keys = set(values)
    snakes = {fireworks.snake(key) for key in keys}
    base = str(values.get("base_model", values.get("baseModel", "")))
    if (
        base.startswith("accounts/")
        or "baseModel" in keys
        or {"display_name", "dataset", "base_model"} <= snakes
    ):
        return fireworks.NAME
    if "training_file" in keys or values.get("object") == "fine_tuning.job":
        is_together = keys & set(_TOGETHER) and not keys & {"hyperparameters", "method"}
        return together.NAME if is_together else openai.NAME
    for name, all_of, one_of in _MARKS:
        if keys >= set(all_of) and keys & set(one_of):
            return name
    return home_made.NAME if home_made.is_home_made(values) else None


# ---- scripts ----


def _script(path: Path, text: str, source: str | None) -> Imported:
    code = code_of_notebook(text, str(path)) if path.suffix.lower() == ".ipynb" else text
    tree = tree_of(code, str(path))
    calls = calls_of(tree)
    if (service := _service(calls, code)) is not None:
        return _refuse_strangers(_read(*service, path), service[0], path)
    if _has_own_loop(calls):
        raise InputError(
            "a training loop of its own, whose settings are in its code" + _seen_in_loop(calls),
            where=str(path),
            to_do="farthing init JOB writes a job: set learning_rate, epochs and batch there",
        )
    commands = [command for doc in _docstrings(code) for command in commands_of(doc)]
    source = source or _whose_script(code)
    if script_job.no_settings(calls) and not commands:
        raise InputError(
            "a script that says nothing of a training by itself",
            where=str(path),
            to_do=(
                "import the file or the command line that it takes its settings from (.yaml, .json,"
                " .sh)"
            ),
        )
    if source is None:
        raise InputError(
            "whose script this is is not seen",
            where=str(path),
            to_do="say it: --from trl | unsloth | hf-trainer",
        )
    if (commands and _is_parser_script(code)) or script_job.no_settings(calls):
        return _commands(
            path, [command for command in commands if command.values], source, program=path.name
        )
    out = Imported(source)
    script_job.read(calls, out)
    return out


def _service(calls: list[Call], code: str) -> tuple[str, Json] | None:
    """A fine-tuning job of OpenAI or Together that a script creates by its Python client."""
    for call in calls:
        if call.name.endswith(("fine_tuning.jobs.create", "fine_tuning.create")):
            name = openai.NAME if ".jobs." in call.name else together.NAME
            if re.search(r"^\s*(from|import)\s+together\b", code, re.MULTILINE):
                name = together.NAME
            return name, {
                key: str(v) if isinstance(v, Computed) else v for key, v in call.named.items()
            }
    return None


def _has_own_loop(calls: list[Call]) -> bool:
    """Whether a script goes backward by itself and no Trainer is there to configure."""
    return any(call.last == "backward" for call in calls) and not any(
        call.last.endswith(("Trainer", "TrainingArguments", "SFTConfig")) for call in calls
    )


def _seen_in_loop(calls: list[Call]) -> str:
    values = [
        f"{key}={value}"
        for call in calls
        if call.last.lower().startswith(("adam", "sgd", "adafactor", "lion"))
        for key, value in call.named.items()
        if not isinstance(value, Computed)
    ]
    return f" ({', '.join(values)})" if values else ""


def _docstrings(code: str) -> list[str]:
    comments = "\n".join(re.findall(r"^\s*#\s?(.*)$", code, re.MULTILINE))
    return [*re.findall(r'"""(.*?)"""', code, re.DOTALL), comments]


def _is_parser_script(code: str) -> bool:
    return re.search(r"\b(TrlParser|HfArgumentParser)\(", code) is not None


def _whose_script(code: str) -> str | None:
    for name, word in (
        (script_job.UNSLOTH, "unsloth"),
        (trl.NAME, "trl"),
        (hf_scripts.NAME, "transformers"),
    ):
        if re.search(rf"^\s*(from|import)\s+{word}\b", code, re.MULTILINE):
            return name
    return None


def _commands(
    path: Path, commands: list[Command], source: str | None, program: str = ""
) -> Imported:
    """The first of several command lines; what the others say differently is a note."""
    if not commands:
        raise InputError(
            "no command line that starts a training (python SCRIPT.py --key value, trl sft ...,"
            " llamafactory-cli train ...)",
            where=str(path),
            to_do="import the configuration file that it names",
        )
    best = next(
        (c for c in commands if any("lr" in k or "learning_rate" in k for k in c.values)),
        commands[0],
    )
    program = best.program
    if source is None:
        source = _whose(best.values) or hf_scripts.NAME
        if program.startswith(("run_", "finetune")):
            source = hf_scripts.NAME
        elif "dataset_name" in best.values and not program.startswith("run_"):
            source = trl.NAME
    open_ones = {
        key: each for key, each in best.values.items() if re.search(r"\$[\w({]", str(each))
    }
    out = _read(
        source,
        {key: each for key, each in best.values.items() if key not in open_ones},
        path,
        program,
    )
    for key, value in open_ones.items():
        out.name(
            key, value, "a value that only running the script would tell: set it by hand", "differs"
        )
    for key, value in flat(best.launcher):
        out.name(
            f"launcher.{key}",
            value,
            "starts it on several GPUs or machines; say where.gpus, or `farthing train --accelerate"
            " FILE`",
        )
    if len(commands) > 1:
        out.notes.append(
            f"{len(commands)} command lines are there; the one with {program} was read"
        )
    return out
