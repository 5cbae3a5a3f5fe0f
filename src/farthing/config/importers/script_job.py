"""The calls of a training script as a job: what TRL, Unsloth and plain Trainer scripts say in their
configuration calls.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from farthing.config.importers import hf
from farthing.config.importers.scripts import Call
from farthing.config.importers.tables import Computed, Imported, defaults, fact, read_keys, table
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.multi_label import MULTI_LABEL
from farthing.objectives.regression import REGRESSION
from farthing.storage.files import Json

_OF_DATA = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}


def kind_of(call: Call) -> str:
    """What a call says of a training; empty for one that says nothing."""
    if [list(each) for each in call.positional if isinstance(each, dict)] == [["pad_token"]]:
        return ""  # padding is never learned
    if call.last == "from_pretrained":
        if call.owner == "AutoTokenizer":
            return "tokenizer"
        if call.named.get("is_trainable") is True:
            return "code"  # an adapter
        is_model = re.search("Model|For|^Fast", call.owner)
        return "model" if is_model and not re.search("Peft|Auto[CFI]", call.owner) else ""
    if "truncation" in call.named:
        return "tokens"
    for kind, row in fact("script-calls").items():
        if call.last in row["names"].split():
            return str(kind)
    return "stranger" if call.last.endswith(("Trainer", "TrainingArguments")) else ""


def has_settings(calls: Sequence[Call]) -> bool:
    """Whether a script configures something by itself, and not all by its command line."""
    kinds = {kind_of(call) for call in calls}
    return bool(kinds & {"arguments", "trainer", "adapter", "stranger", "another"})


def read(calls: Sequence[Call], out: Imported) -> None:
    """The calls of a script of `out.source`, and what that tool does where they say nothing."""
    script = _Script(out, {kind_of(call) for call in calls})
    for call in calls:
        script.look(call, kind_of(call))
    values = script.values
    words = r"(DPO|KTO|ORPO|CPO|Reward|SFT)(Config|Trainer)$"
    asked = {found[1].lower() for call in calls if (found := re.match(words, call.last))}
    if len(asked) > 1:
        what = f"several trainings ({', '.join(sorted(asked))}): import them apart"
        out.refuse("(script)", None, what)
    elif asked:
        hf.read_objective(values, out, asked.pop())
    script.splits()
    if _is_text(values.get("model")):
        out.job["model.model_name_or_path"] = values["model"]
    hf.read_data(values, out)
    script.place_files()
    # Unsloth's model bounds the length that the trainer is given
    for before, given in sorted(script.calls, key=lambda each: each[0].startswith("Fast")):
        read_keys(out, given, "calls", before=before)
    name, to = script.tokenizer, "model.tokenizer_name_or_path"
    if name not in ("", out.job.get("model.model_name_or_path")):
        out.put("AutoTokenizer.from_pretrained", name, to, name)
    has_adapter = "adapter" in script.done
    if out.source == hf.UNSLOTH:
        if has_adapter:
            own = {"method.target_modules": ["all-linear"], "method.lora_r": 16}
            out.default({**own, "method.lora_alpha": 16})
            layers = out.job["method.target_modules"]
            if whole := [each for each in layers if each in ("embed_tokens", "lm_head")]:
                out.job["method.target_modules"] = [each for each in layers if each not in whole]
                out.job.setdefault("method.modules_to_save", whole)
        model = str(out.job.get("model.model_name_or_path", ""))
        if model.endswith("-bnb-4bit"):
            why = "is quantized already; farthing quantizes itself, and takes the name without"
            out.notes.append(f"{model} {why} -bnb-4bit (and -unsloth)")
            plain = model.removesuffix("-bnb-4bit").removesuffix("-unsloth")
            out.job["model.model_name_or_path"] = plain
        out.default({"data.max_length": None if out.prefers else 2048})
    of = "the script's calls" if has_adapter else "the script, which makes no adapter"
    is_4bit = values.get("load_in_4bit") is True
    out.default({"method.name": hf.method_of(has_adapter, is_4bit)}, of)
    made = {call.last for call in calls}
    of_trainer = {"TrainingArguments", "Seq2SeqTrainingArguments"} & made
    if of_trainer:  # SFTTrainer keeps their defaults
        defaults(out, "trainer")
    elif out.source == hf.UNSLOTH and "UnslothTrainingArguments" not in made:
        defaults(out, "unsloth-config")
    is_fp32 = bool(of_trainer) and out.source != hf.UNSLOTH
    hf.settle(values, out, has_adapter=has_adapter, has_fp32_default=is_fp32)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Computed)


class _Script:
    """Collects the settings of one script; names what a job has no place for."""

    def __init__(self, out: Imported, kinds: set[str]) -> None:
        self.out = out
        self.kinds = kinds  # of all its calls
        self.values = Json()  # all settings by their own names; the first call that has one counts
        self.calls: list[tuple[str, Json]] = []
        self.seen: Counter[str] = Counter()
        self.done: set[str] = set()
        self.files = Json()  # of `data_files`, by their splits
        self.tokenizer = ""  # the name of the first

    def look(self, call: Call, kind: str) -> None:
        """What a call says of the training."""
        row = fact("script-calls").get(kind, {})
        name = call.name if kind in ("model", "code") else call.last
        self.seen[name] += 1
        before = f"{name}." if self.seen[name] == 1 else f"{name}#{self.seen[name]}."
        known = row.get("positions", "").split()
        places = (*known, *(f"({i + 1})" for i in range(len(known), len(call.positional))))
        given = dict(zip(places, call.positional, strict=False)) | call.named
        match kind:
            case "" | "nothing":
                return
            case "tokenizer":
                of = (*call.positional, given.get("pretrained_model_name_or_path"))[0]
                tries = "trainer" in self.done  # the model
                self.tokenizer = (
                    of if _is_text(of) and not (self.tokenizer or tries) else self.tokenizer
                )
                return
            case "code":
                return self._code(call.name, call.last, (*call.positional, "...")[0])
            case "rows":
                return self._code(f"{before}function", "formatting_func", given.get("function"))
            case "tokens":
                return self._lengths(before, given)
            case "quantization" if given.get("load_in_4bit") is True:
                given = {"bnb_4bit_quant_type": "fp4"} | given  # the default there
            case "answers":
                self.out.job["data.train_on_prompt"] = False
            case "stranger":
                self.out.refuse(
                    call.last, None, "a trainer or an adapter that farthing does not know"
                )
            case "model" if "model" not in self.done:
                self._model(call.owner, given)
            case "adapter" if call.last == "get_peft_model" and "r" not in given:
                return  # its settings are in LoraConfig
            case "template" if given.get("chat_template") == "chatml":
                text = fact("chatml")
                self.out.template(f"{before}chat_template", "chatml", text, "chatml.jinja")
            case "data":
                is_train = self._is_learned(given)
                if not is_train or kind in self.done or not self._data(before, given):
                    why, effect = row["later"]["why"], "differs" if is_train else "none"
                    return self._name(before, given, why, effect)
            case _ if kind in self.done and "later" in row:
                return self._name(before, given, row["later"]["why"], row["later"]["effect"])
        self.done.add(kind)
        told = row.get("reads", "").split()
        given = {key: value for key, value in given.items() if not told or key in told}
        self.calls.append((before, given))
        new = {k: v for k, v in given.items() if v is not None and k not in self.values}
        self.values |= new
        self.out.labels |= {key: f"{before}{key}" for key in new}

    def splits(self) -> None:
        """Splits of the one data set that `data["train"]` and `data["test"]` stand for."""
        keys = {"train_dataset": "dataset_train_split", "eval_dataset": "dataset_test_split"}
        found = [re.match(r"(\w+)\['(\w+)'\]", str(self.values.get(key))) for key in keys]
        owners = {each[1] for each in found if each}
        is_known = self.seen["load_dataset"] == 1 and "split" not in self.done and len(owners) == 1
        if is_known and "dataset_train_split" not in self.values:
            for (own, key), each in zip(keys.items(), found, strict=True):
                if each:
                    self.values[key] = each[2]
                    self.out.labels[key] = self.out.labels[own]

    def place_files(self) -> None:
        """Give training and evaluation all files that `data_files` has for their splits."""
        for part in ("data.train", "data.eval"):
            if sources := self.out.job.get(part):
                self.out.job[part] = [
                    {**each, "path": path}
                    for each in sources
                    for path in self.files.get(each.get("split", "train"), (each["path"],))
                ]

    def _name(self, before: str, given: Json, why: str, effect: Any) -> None:
        for key, value in given.items():
            self.out.name(before + key, value, why, effect)

    def _code(self, key: str, name: str, value: Any) -> None:
        """Name code of the script that farthing does not run."""
        why = table("calls").why(name)
        assert why is not None
        self.out.name(key, value, why.reason, why.effect)

    def _model(self, owner: str, given: Json) -> None:
        """The task that a model's class has, and whether its base is in 4 bits."""
        classes, known = f"{owner} {given.get('auto_model', '')}", fact("model-classes").items()
        task = next((task for name, task in known if name in classes), None)
        if task in ("images or sound", "another task"):
            self.out.refuse(owner, None, f"{task}, which farthing does not train")
        elif task == CLASSIFICATION.name:  # what its head is for
            kinds = {"regression": REGRESSION, "multi_label_classification": MULTI_LABEL}
            default = REGRESSION if given.get("num_labels") == 1 else CLASSIFICATION
            self.out.job["task"] = kinds.get(str(given.get("problem_type")), default).name
        elif task:
            self.out.job["task"] = task
        is_16bit = given.get("load_in_8bit") or given.get("load_in_16bit")
        if owner.startswith("Fast") and not is_16bit:
            self.values.setdefault("load_in_4bit", given.get("load_in_4bit", True))

    def _lengths(self, before: str, given: Json) -> None:
        """Where a tokenizer cuts, unless it tries the model, or the trainer has a length."""
        if "trainer" not in self.done and self.out.source == hf.TRAINER and "max_length" in given:
            part = "max_target_length" if "text_target" in given else "max_length"
            self.calls.append((before, {part: given["max_length"]}))

    def _is_learned(self, given: Json) -> bool:
        """Whether a data set is not held out; what is held out of the same one is evaluated."""
        split = str(given.get("split", ""))
        if "split" in self.kinds or not re.search("test|valid|dev", split):
            return True
        if given.get("path") == self.values.get("dataset_name"):
            self.values.setdefault("dataset_test_split", split)
        return False

    def _data(self, before: str, given: Json) -> bool:
        """Whether a call names the training data."""
        path, files = given.get("path"), given.get("data_files")
        if path in ("json", "csv", "parquet", "text") and files:
            by_split = files if isinstance(files, dict) else {"train": files}
            lists = {
                key: each if isinstance(each, list) else [each] for key, each in by_split.items()
            }
            self.files = {key: each for key, each in lists.items() if all(map(_is_text, each))}
            path = next(iter(self.files.get("train", ())), None)
        if not _is_text(path):
            return False
        self.values |= {
            ours: given[key] for key, ours in _OF_DATA.items() if _is_text(given.get(key))
        }
        self.values["dataset_name"] = path
        self.out.labels |= {ours: f"{before}{key}" for key, ours in _OF_DATA.items()}
        own = {key: each for key, each in given.items() if key in (*_OF_DATA, "data_files")}
        self.out.keep(own, "data.train", before)
        read_keys(self.out, given, "axolotl-dataset", before=before)
        return True
