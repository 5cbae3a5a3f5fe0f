"""The calls of a training script as a job: what TRL, Unsloth and plain Trainer scripts say in their
configuration calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from farthing.config.importers import hf, preference
from farthing.config.importers.record import Computed, Effect, Imported, flat, read_keys
from farthing.config.importers.scripts import OWN_METHODS, Call
from farthing.config.importers.tables import defaults, fact, table
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.regression import REGRESSION
from farthing.storage.files import Json

Keys = list[tuple[str, Any]]
_ARGUMENTS = ("SFTConfig", "TrainingArguments", "Seq2SeqTrainingArguments")
_TRAINERS = ("SFTTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer")
_PAIRS = {
    f"{name}{kind}": name.lower()
    for name in ("DPO", "KTO", "ORPO", "CPO", "Reward")
    for kind in ("Config", "Trainer")
}
_OBJECT = "an object of the script"
Later = tuple[str, Effect]
_AGAIN: Later = ("a later call of the same kind; the first one is read", "none")
_SECOND: Later = ("a second training of the script; the first one is read", "differs")


def read(calls: Sequence[Call], out: Imported) -> None:
    """The calls of a script of `out.source`, and what that tool does where they say nothing."""
    script = _Script(out, calls)
    for call in calls:
        script.one(call)
    script.method()
    preference.settle(out, hf.TRL)
    if out.source == hf.TRAINER and not preference.is_asked(out):
        return hf.trainer_defaults(out)
    if script.masks_prompts:
        out.job.setdefault("data.train_on_prompt", False)
    hf.learns_prompts(out, {"completion_only_loss": False} if out.source == hf.UNSLOTH else {})
    if out.source == hf.UNSLOTH:
        _unsloth(out)
    hf.trl_defaults(out)


def _unsloth(out: Imported) -> None:
    model = str(out.job.get("model.model_name_or_path", ""))
    if model.endswith("-bnb-4bit"):
        why = "is quantized already; farthing quantizes itself, and takes the name without"
        out.notes.append(f"{model} {why} -bnb-4bit (and -unsloth)")
        plain = model.removesuffix("-bnb-4bit").removesuffix("-unsloth")
        out.job["model.model_name_or_path"] = plain
    if not preference.is_asked(out):
        out.default({"data.max_length": 2048})


class _Script:
    """Reads the calls of one script into a job."""

    def __init__(self, out: Imported, calls: Sequence[Call]) -> None:
        self.out = out
        self.seen: dict[str, int] = {}
        self.text_field = ""
        self.has_adapter = self.is_4bit = self.masks_prompts = False
        self.has_arguments = self.has_model = False
        asked = {_PAIRS[call.last] for call in calls if call.last in _PAIRS}
        others = {
            name for call in calls if (name := call.last.removeprefix("Unsloth")) in _TRAINERS
        }
        if len(asked) == 1 and not others & {"SFTTrainer"}:
            named: Json = {}
            for call in calls:
                named |= call.named if call.last in _PAIRS else {}
            preference.read(out, asked.pop(), {k: v for k, v in named.items() if v is not None})
            # each key has its line by the call it stands in
            for key in [key for key in out.lines if "." not in key]:
                line = out.lines.pop(key)
                for call in calls:
                    if call.last in _PAIRS and key in call.named:
                        label = f"{call.last}.{key}"
                        out.lines[label] = line._replace(key=label)
        elif asked:
            what = f"several trainings ({', '.join(sorted(asked | others))}): import them apart"
            out.name("(script)", None, what, "blocks")

    def one(self, call: Call) -> None:
        """What a call says of the training."""
        last, owner = call.last, call.name.rpartition(".")[0].rpartition(".")[2]
        if last == "from_pretrained":
            if re.search("Model|For|^Fast", owner) and not re.search(
                "Peft|Processor|Auto[CFI]", owner
            ):
                self._model(call, owner)
        elif last.removeprefix("Unsloth") in _ARGUMENTS or (last in _PAIRS and "Config" in last):
            is_first, self.has_arguments = not self.has_arguments, True
            self.masks_prompts |= call.named.get("assistant_only_loss") is True
            keys = self._keys(call, call.named, ("output_dir",))
            self._table(keys, is_first=is_first, later=_SECOND)
            self._text_field(call.named)
        elif last in _TRAINERS or last in _PAIRS:
            self._trainer(call)
        elif last.endswith(("Trainer", "TrainingArguments")) or last in fact("other-configs"):
            if last.endswith("Trainer"):
                why = f"{last.removesuffix('Trainer') or 'a loop'}, which farthing does not do"
                self.out.name(last, None, why, "blocks")
            read_keys(
                self.out, _plain(self._keys(call, call.named)), table("calls"), name_of=_argument
            )
        elif last in ("LoraConfig", "get_peft_model"):
            self._adapter(call)
        elif last == "BitsAndBytesConfig":
            self.is_4bit |= call.named.get("load_in_4bit") is True
            keys = self._keys(call, call.named)
            self._bits(keys)
            self._table(keys)
        elif last == "EarlyStoppingCallback":
            self._table(self._keys(call, call.named, ("early_stopping_patience",)))
        elif last in OWN_METHODS and not call.positional:
            why = "code of the script that farthing does not run; without it the losses differ"
            self.out.name(call.name, None, why, "differs")
        elif last == "requires_grad_" and call.positional[:1] == [False]:
            why = "freezes weights of the script's choice; farthing trains all, or an adapter"
            self.out.name("requires_grad", False, why, "differs")
        elif last in ("filter", "select") and "." in call.name:
            why = "chooses rows; farthing takes all of the file: make it so"
            self.out.name(call.name, None, why, "differs")
        elif last == "load_dataset":
            self._data(call)
        elif last in ("DataCollatorForCompletionOnlyLM", "train_on_responses_only"):
            self.masks_prompts = True
        elif last in ("get_chat_template", "apply_chat_template"):
            self._chat(call)
        elif last == "map" and not call.name.startswith("()") and len(call.positional) == 1:
            keys = self._keys(call, {"function": call.positional[0]})
            read_keys(self.out, _plain(keys), table("calls"), name_of=lambda key: "formatting_func")

    def _keys(self, call: Call, values: Mapping[str, Any], positions: Sequence[str] = ()) -> Keys:
        """(key, value) of a call's arguments: `SFTConfig.seed`; of a second such call
        `SFTConfig#2.seed`.
        """
        name = call.name if call.last == "from_pretrained" else call.last
        self.seen[name] = self.seen.get(name, 0) + 1
        label = name if self.seen[name] == 1 else f"{name}#{self.seen[name]}"
        given = {
            (positions[i] if i < len(positions) else f"({i + 1})"): value
            for i, value in enumerate(call.positional)
        }
        return [(f"{label}.{key}", value) for key, value in {**given, **values}.items()]

    def _table(self, keys: Keys, *, is_first: bool = True, later: Later = _AGAIN) -> None:
        """By the table of calls; of a later call of the same kind everything is named."""
        for key, value in keys:
            if not is_first:
                self.out.name(key, str(value), *later)
            elif key.endswith(")"):
                self.out.name(key, str(value), _OBJECT)
            elif key.endswith(".max_length") and value is None:
                hf.no_limit(self.out, {key: None}, key)
        hf.warmups(self.out, {k: v for k, v in keys if not isinstance(v, Computed)})
        left: Json = {key: value for key, value in keys if key not in self.out.lines}
        leaves = [key for key in left if key.endswith(("rope_scaling", "lr_scheduler_kwargs"))]
        tool = "calls-preference" if preference.is_asked(self.out) else "calls"
        read_keys(self.out, flat(left, whole=leaves), table(tool), name_of=_argument)

    def _text_field(self, named: Mapping[str, Any]) -> None:
        column = named.get("dataset_text_field")
        if isinstance(column, str) and not isinstance(column, Computed) and column != "text":
            self.text_field = column

    def _model(self, call: Call, owner: str) -> None:
        is_first, self.has_model = not self.has_model, True
        keys = self._keys(call, call.named, ("model_name",))
        if is_first:
            given = call.named
            self._task(owner, str(given.get("auto_model", "")))
            self._labels(given)
            is_16bit = given.get("load_in_8bit") or given.get("load_in_16bit")
            is_fast = owner.startswith("Fast") and not is_16bit
            self.is_4bit |= given.get("load_in_4bit", is_fast) is True
            if given.get("full_finetuning") is True:
                key = next(key for key, _ in keys if key.endswith(".full_finetuning"))
                self.out.put(key, True, "method.name", "full")
                self.is_4bit = False
            self._bits(keys)
        self._table(keys, is_first=is_first)

    def _task(self, owner: str, auto: str) -> None:
        kinds = f"{owner} {auto}"
        for name, task in fact("model-classes").items():
            if name not in kinds:
                continue
            if task in ("images or sound", "another task"):
                why = f"{task}, which farthing does not train"
                return self.out.name(owner, None, why, "blocks")
            if not preference.is_asked(self.out):
                self.out.job.setdefault("task", task)

    def _labels(self, given: Mapping[str, Any]) -> None:
        """What a classifier's head is for, where the script says it."""
        if self.out.job.get("task") != CLASSIFICATION.name:
            return
        kinds = {"regression": REGRESSION, "multi_label_classification": MULTI_LABEL}
        is_number = given.get("num_labels") == 1
        default = REGRESSION if is_number else CLASSIFICATION
        self.out.job["task"] = kinds.get(str(given.get("problem_type")), default).name

    def _bits(self, keys: Keys) -> None:
        for key, value in keys:
            name = _argument(key)
            if name == "load_in_8bit" and value is True:
                why = "farthing has no 8-bit base: the base stays in 16 bits"
                self.out.name(key, True, why, "differs")
            elif name in ("load_in_4bit", "load_in_8bit", "full_finetuning"):
                why = "method: qlora is the 4-bit base, lora and full are without"
                self.out.name(*_plain([(key, value)])[0], why)

    def _trainer(self, call: Call) -> None:
        keys = self._keys(call, call.named, ("model", "args"))
        for key, value in keys:
            is_text = isinstance(value, str) and not isinstance(value, Computed)
            if _argument(key) == "model" and is_text and not self.has_model:
                self.out.put(key, value, "model.model_name_or_path", value)
                self.has_model = True
            elif _argument(key) == "ref_model" and value is not None:
                why = "another model as the reference; farthing's is the model as it begins"
                self.out.name(key, str(value), why, "differs")
            elif _argument(key) in ("model", "args", "tokenizer"):
                self.out.name(*_plain([(key, value)])[0], _OBJECT)
        self._text_field(call.named)
        self._table(keys)

    def _adapter(self, call: Call) -> None:
        is_made = call.last == "get_peft_model"
        if is_made and not {"r", "lora_alpha"} & set(call.named):
            return  # its settings are in LoraConfig
        is_first, self.has_adapter = not self.has_adapter, True
        self._table(self._keys(call, call.named), is_first=is_first)
        if is_first and is_made:  # Unsloth's
            self.out.default({"method.lora_r": 16, "method.lora_alpha": 16})
            self.out.default({"method.target_modules": ["all-linear"]})
        if is_first:
            defaults(self.out, "lora")

    def _data(self, call: Call) -> None:
        keys = self._keys(call, call.named, ("path", "name"))
        values = {_argument(key): value for key, value in keys}
        path, files, split = values.get("path"), values.get("data_files"), values.get("split", "")
        if path in ("json", "csv", "parquet", "text") and files:
            train = files.get("train") if isinstance(files, Mapping) else files
            path = train[0] if isinstance(train, list) and train else train
        is_known = isinstance(path, str) and not isinstance(path, Computed)
        is_train = not any(word in str(split) for word in ("test", "valid", "dev"))
        if "data.train" not in self.out.job and is_known and is_train:
            source = {"path": str(path)}
            for name in ("name", "split"):
                if isinstance(values.get(name), str) and not isinstance(values[name], Computed):
                    source[name] = values[name]
            self.out.job["data.train"] = [source]
            self.out.keep(_plain(keys), "data.train")
        else:
            effect: Effect = "differs" if is_train else "none"
            why = (
                "another data set of the script; data.train and data.eval take it where it is"
                " learned or evaluated"
            )
            for key, value in _plain(keys):
                self.out.name(key, value, why, effect)

    def _chat(self, call: Call) -> None:
        """Another template than the tokenizer's own, and what it is told."""
        for key, value in _plain(self._keys(call, call.named, ("tokenizer", "chat_template"))):
            name = _argument(key)
            if name == "chat_template" and call.last == "get_chat_template":
                if value == "chatml":
                    self.out.files["chatml.jinja"] = fact("chatml")
                    self.out.put(key, value, "data.chat_template", "chatml.jinja")
                why = "the tokenizer's own chat template is used; give a Jinja file in"
                self.out.name(key, value, f"{why} data.chat_template for another", "differs")
            elif name in ("enable_thinking", "system_message"):
                why = "farthing renders chats by the template's defaults"
                self.out.name(key, value, why, "differs")

    def method(self) -> None:
        """How much of the model is trained and which column is read, from all calls."""
        out = self.out
        if self.text_field and out.job.get("data.train"):
            out.job["data.train"][0]["columns"] = {"text": self.text_field}
        if self.has_adapter and out.job.get("method.name") != "full":
            out.default({"method.name": "qlora" if self.is_4bit else "lora"}, "the script's calls")
            hf.peft_targets(out)
            return
        out.default({"method.name": "full"}, "the script, which makes no adapter")
        for key in [key for key in out.job if key.startswith("method.") and key != "method.name"]:
            del out.job[key]


def _argument(key: str) -> str:
    """`SFTConfig#2.dataset_kwargs.skip` as `dataset_kwargs.skip`; `FastModel.from_pretrained.dtype`
    as `dtype`.
    """
    return key.partition(".from_pretrained.")[2] or key.partition(".")[2]


def _plain(keys: Keys) -> Keys:
    """Values as they are shown."""
    return [(key, str(v) if isinstance(v, Computed) else v) for key, v in keys]


def no_settings(calls: Sequence[Call]) -> bool:
    """Whether a script configures nothing by itself: it takes all from its command line."""
    return not any(
        call.last in (*_ARGUMENTS, "UnslothTrainingArguments", "LoraConfig", *_PAIRS)
        or call.last.endswith("Trainer")
        for call in calls
    )
