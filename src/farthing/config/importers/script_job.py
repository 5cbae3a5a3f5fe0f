"""The calls of a training script as a job: what TRL, Unsloth and plain Trainer scripts say in their
configuration calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farthing.config.importers import hf, preference
from farthing.config.importers.scripts import OWN_METHODS, Call
from farthing.config.importers.tables import Computed, Imported, defaults, fact, read_keys, table
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.regression import REGRESSION
from farthing.storage.files import Json

_ARGUMENTS = ("SFTConfig", "TrainingArguments", "Seq2SeqTrainingArguments")
_TRAINERS = ("SFTTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer")
_PAIRS = {
    f"{name}{kind}": name.lower()
    for name in ("DPO", "KTO", "ORPO", "CPO", "Reward")
    for kind in ("Config", "Trainer")
}
_AGAIN = "a later call of the same kind; the first one is read"
_SECOND = "a second training of the script; the first one is read"


def read(calls: Sequence[Call], out: Imported) -> None:
    """The calls of a script of `out.source`, and what that tool does where they say nothing."""
    script = _Script(out, calls)
    for call in calls:
        script.one(call)
    script.method()
    preference.settle(out, hf.TRL)
    if out.source == hf.TRAINER and not out.prefers:
        return defaults(out, "trainer")
    hf.learns_prompts(out, is_said=out.source == hf.UNSLOTH)
    if out.source == hf.UNSLOTH:
        model = str(out.job.get("model.model_name_or_path", ""))
        if model.endswith("-bnb-4bit"):
            why = "is quantized already; farthing quantizes itself, and takes the name without"
            out.notes.append(f"{model} {why} -bnb-4bit (and -unsloth)")
            plain = model.removesuffix("-bnb-4bit").removesuffix("-unsloth")
            out.job["model.model_name_or_path"] = plain
        out.default({"data.max_length": None if out.prefers else 2048})
    return hf.trl_defaults(out)


def is_text(value: Any) -> bool:
    """Whether a value is a text that is written down."""
    return isinstance(value, str) and not isinstance(value, Computed)


class _Script:
    """Reads the calls of one script into a job."""

    def __init__(self, out: Imported, calls: Sequence[Call]) -> None:
        self.out = out
        self.seen: dict[str, int] = {}
        self.done: set[str] = set()
        self.text_field = ""
        self.is_4bit = False
        pairs = [call for call in calls if call.last in _PAIRS]
        asked = {_PAIRS[call.last] for call in pairs}
        others = {call.last.removeprefix("Unsloth") for call in calls} & {*_TRAINERS}
        if len(asked) == 1 and "SFTTrainer" not in others:
            named = {k: v for call in pairs for k, v in call.named.items() if v is not None}
            preference.read(out, asked.pop(), named)
            for call in pairs:  # each key has its line by the call it stands in
                for key in {*call.named} & {*out.lines}:
                    label = f"{call.last}.{key}"
                    out.lines[label] = out.lines.pop(key)._replace(key=label)
        elif asked:
            what = f"several trainings ({', '.join(sorted(asked | others))}): import them apart"
            out.refuse("(script)", None, what)

    def one(self, call: Call) -> None:
        """What a call says of the training."""
        last, owner = call.last, call.name.rpartition(".")[0].rpartition(".")[2]
        is_training = last in _TRAINERS or last in _PAIRS
        if last == "from_pretrained":
            is_model = re.search("Model|For|^Fast", owner)
            if is_model and not re.search("Peft|Processor|Auto[CFI]", owner):
                self._model(call, owner)
        elif last.removeprefix("Unsloth") in _ARGUMENTS or (is_training and "Config" in last):
            self._table(call, ("output_dir",), "arguments", _SECOND)
            self._text_field(call.named)
        elif is_training:
            self._trainer(call)
        elif last.endswith(("Trainer", "TrainingArguments")) or last in fact("other-configs"):
            if last.endswith("Trainer"):
                why = f"{last.removesuffix('Trainer') or 'a loop'}, which farthing does not do"
                self.out.refuse(last, None, why)
            self._table(call)
        elif last in ("LoraConfig", "get_peft_model"):
            self._adapter(call)
        elif last == "BitsAndBytesConfig":
            self.is_4bit |= call.named.get("load_in_4bit") is True
            self._table(call)
        elif last == "EarlyStoppingCallback":
            self._table(call, ("early_stopping_patience",))
        elif last == "requires_grad_" and call.positional[:1] == [False]:
            self._code("requires_grad", last)
        elif (last in OWN_METHODS and not call.positional) or (
            last in ("filter", "select") and "." in call.name
        ):
            self._code(call.name, last)
        elif last == "load_dataset":
            self._data(call)
        elif last in ("DataCollatorForCompletionOnlyLM", "train_on_responses_only"):
            self.out.job["data.train_on_prompt"] = False
        elif last in ("get_chat_template", "apply_chat_template"):
            self._chat(call)
        elif last == "map" and not call.name.startswith("()") and len(call.positional) == 1:
            before, values = self._arguments(call, ("formatting_func",))
            self._code(f"{before}function", "formatting_func", values["formatting_func"])

    def _code(self, key: str, name: str, value: Any = None) -> None:
        """Name code of the script that farthing does not run."""
        why = table("calls").why(name)
        assert why is not None
        self.out.name(key, value, why.reason, why.effect)

    def _arguments(self, call: Call, positions: Sequence[str] = ()) -> tuple[str, Json]:
        """(what their keys begin with, arguments by name): `SFTConfig.`; of a second such call
        `SFTConfig#2.`.
        """
        name = call.name if call.last == "from_pretrained" else call.last
        self.seen[name] = self.seen.get(name, 0) + 1
        label = name if self.seen[name] == 1 else f"{name}#{self.seen[name]}"
        places = (*positions, *(f"({i + 1})" for i in range(len(positions), len(call.positional))))
        return f"{label}.", dict(zip(places, call.positional, strict=False)) | call.named

    def _first(self, kind: str) -> bool:
        is_first = kind not in self.done
        self.done.add(kind)
        return is_first

    def _table(
        self, call: Call, positions: Sequence[str] = (), kind: str = "", later: str = _AGAIN
    ) -> bool:
        """Read a call by the table of calls; of a later call of a `kind` everything is named."""
        before, values = self._arguments(call, positions)
        is_first = not kind or self._first(kind)
        for key, value in values.items():
            if not is_first:
                self.out.name(before + key, value, later, "differs" if later == _SECOND else "none")
            elif key.endswith(")"):
                self.out.name(before + key, value, "an object of the script")
        if is_first:
            read_keys(self.out, values, "calls", before=before, name_of=_without(before))
        return is_first

    def _text_field(self, named: Mapping[str, Any]) -> None:
        column = named.get("dataset_text_field")
        if is_text(column) and column != "text":
            self.text_field = str(column)

    def _model(self, call: Call, owner: str) -> None:
        given = call.named
        if "model" not in self.done:
            self._task(f"{owner} {given.get('auto_model', '')}", owner)
            if self.out.job.get("task") == CLASSIFICATION.name:  # what its head is for
                kinds = {"regression": REGRESSION, "multi_label_classification": MULTI_LABEL}
                default = REGRESSION if given.get("num_labels") == 1 else CLASSIFICATION
                self.out.job["task"] = kinds.get(str(given.get("problem_type")), default).name
            is_16bit = given.get("load_in_8bit") or given.get("load_in_16bit")
            is_fast = owner.startswith("Fast") and not is_16bit
            self.is_4bit |= given.get("load_in_4bit", is_fast) is True
        self._table(call, ("model_name",), "model")

    def _task(self, kinds: str, owner: str) -> None:
        for name, task in fact("model-classes").items():
            if name not in kinds:
                continue
            if task in ("images or sound", "another task"):
                return self.out.refuse(owner, None, f"{task}, which farthing does not train")
            if not self.out.prefers:
                self.out.job.setdefault("task", task)

    def _trainer(self, call: Call) -> None:
        model = call.named.get("model", next(iter(call.positional), None))
        if is_text(model) and self._first("model"):
            self.out.job["model.model_name_or_path"] = model
        self._text_field(call.named)
        self._table(call, ("model", "args"))

    def _adapter(self, call: Call) -> None:
        is_made = call.last == "get_peft_model"
        if is_made and not {"r", "lora_alpha"} & set(call.named):
            return  # its settings are in LoraConfig
        if self._table(call, (), "adapter"):
            if is_made:  # Unsloth's
                self.out.default({"method.lora_r": 16, "method.lora_alpha": 16})
                self.out.default({"method.target_modules": ["all-linear"]})
            defaults(self.out, "lora")

    def _data(self, call: Call) -> None:
        before, values = self._arguments(call, ("path", "name"))
        path, files, split = values.get("path"), values.get("data_files"), values.get("split", "")
        if path in ("json", "csv", "parquet", "text") and files:
            train = files.get("train") if isinstance(files, Mapping) else files
            path = train[0] if isinstance(train, list) and train else train
        is_train = not any(word in str(split) for word in ("test", "valid", "dev"))
        if "data.train" not in self.out.job and is_text(path) and is_train:
            own = {key: values[key] for key in ("name", "split") if is_text(values.get(key))}
            self.out.job["data.train"] = [{"path": str(path), **own}]
            self.out.keep(values, "data.train", before)
        else:
            why = (
                "another data set of the script; data.train and data.eval take it where it is"
                " learned or evaluated"
            )
            for key, value in values.items():
                self.out.name(before + key, value, why, "differs" if is_train else "none")

    def _chat(self, call: Call) -> None:
        """Another template than the tokenizer's own, and what it is told."""
        before, values = self._arguments(call, ("tokenizer", "chat_template"))
        name = values.get("chat_template")
        if call.last == "apply_chat_template":
            values.pop("chat_template", None)
        elif name == "chatml":
            self.out.template(f"{before}chat_template", name, fact("chatml"), "chatml.jinja")
        known = ("chat_template", "enable_thinking", "system_message")
        told = {key: value for key, value in values.items() if key in known}
        read_keys(self.out, told, "calls", before=before, name_of=_without(before))

    def method(self) -> None:
        """How much of the model is trained and which column is read, from all calls."""
        out = self.out
        if self.text_field and out.job.get("data.train"):
            out.job["data.train"][0]["columns"] = {"text": self.text_field}
        if "adapter" in self.done:
            method = hf.method_of(True, self.is_4bit)
            out.default({"method.name": method}, "the script's calls")
            hf.peft_targets(out)
        out.default({"method.name": "full"}, "the script, which makes no adapter")


def _without(before: str) -> Callable[[str], str]:
    return lambda key: key.removeprefix(before)


def no_settings(calls: Sequence[Call]) -> bool:
    """Whether a script configures nothing by itself: it takes all from its command line."""
    return not any(
        call.last in (*_ARGUMENTS, "UnslothTrainingArguments", "LoraConfig", *_PAIRS)
        or call.last.endswith("Trainer")
        for call in calls
    )
