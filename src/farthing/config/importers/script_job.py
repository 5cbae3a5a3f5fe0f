"""The calls of a training script as a job: what TRL, Unsloth and plain Trainer scripts say in their
configuration calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farthing.config.importers import hf_trainer as hf
from farthing.config.importers import trl
from farthing.config.importers.prompts import CHATML
from farthing.config.importers.record import Imported, To, flat, read_keys, truth
from farthing.config.importers.scripts import Call, Computed
from farthing.config.importers.shared import reasons
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.classification import CLASSIFICATION
from farthing.objectives.seq2seq import SEQ2SEQ
from farthing.storage.files import Json

UNSLOTH = "unsloth"
ARGUMENTS = (
    "SFTConfig",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "UnslothTrainingArguments",
)
TRAINERS = ("SFTTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer")
OTHER_TRAINERS = {
    "DPO": "preference learning (DPO)",
    "GRPO": "reinforcement learning (GRPO)",
    "ORPO": "preference learning (ORPO)",
    "KTO": "learning from verdicts (KTO)",
    "PPO": "reinforcement learning (PPO)",
    "Reward": "a reward model",
    "RLOO": "reinforcement learning (RLOO)",
    "SentenceTransformer": "embeddings",
    "PRM": "a reward model",
}
_LOAD = {**hf.MODEL, "max_seq_length": trl.SFT["max_seq_length"]}
_LORA = {
    **hf.LORA,
    "loraplus_lr_ratio": To("method.loraplus_lr_ratio"),
    "use_dora": To("method.use_dora", truth),
}
_VISION = (
    "Vision",
    "ImageText",
    "Vision2Seq",
    "VL",
    "Whisper",
    "Csm",
    "Audio",
    "Speech",
    "CTC",
    "ImageClassification",
    "Segmentation",
    "ObjectDetection",
)
_TASKS = {
    "SequenceClassification": CLASSIFICATION.name,
    "Seq2SeqLM": SEQ2SEQ.name,
    "T5ForConditionalGeneration": SEQ2SEQ.name,
    "BartForConditionalGeneration": SEQ2SEQ.name,
}
_NO_TASKS = (
    "TokenClassification",
    "QuestionAnswering",
    "MaskedLM",
    "MultipleChoice",
    "ForPreTraining",
    "SentenceTransformer",
)


def read(calls: Sequence[Call], out: Imported) -> None:
    """The calls of a script of `out.source`, and what that tool does where they say nothing."""
    script = Script(out, calls)
    script.read()
    if out.source == UNSLOTH:
        _unsloth(script, out)
    elif out.source == trl.NAME:
        trl.defaults(out)
        if not script.masks_prompts:
            out.notes.append(
                "TRL learns every token of `messages` and `text` rows, and only completions of"
                " prompt/completion rows: set data.train_on_prompt: true for messages to do the"
                " same"
            )
    else:
        hf.trainer_defaults(out)


def _unsloth(script: Script, out: Imported) -> None:
    is_causal = out.job.get("task", CAUSAL_LM.name) == CAUSAL_LM.name
    if is_causal and not script.masks_prompts and "data.train_on_prompt" not in out.job:
        out.default(
            "data.train_on_prompt",
            True,
            "SFTTrainer without train_on_responses_only: every token is learned",
        )
    model = str(out.job.get("model.model_name_or_path", ""))
    if model.endswith("-bnb-4bit"):
        out.notes.append(
            f"{model} is quantized already; farthing quantizes itself: take the name without"
            " -bnb-4bit (and -unsloth)"
        )
        out.job["model.model_name_or_path"] = model.removesuffix("-bnb-4bit").removesuffix(
            "-unsloth"
        )
    out.default("data.max_length", 2048)
    trl.defaults(out)


class Script:
    """Reads the calls of one script into a job."""

    def __init__(self, out: Imported, calls: Sequence[Call]) -> None:
        self.out, self.calls = out, calls
        self.seen: dict[str, int] = {}
        self.has_adapter = self.is_4bit = self.masks_prompts = False
        self.has_arguments = self.has_model = False

    def read(self) -> None:
        """All calls; then what they leave to defaults."""
        for call in self.calls:
            self._one(call)
        self._method()

    def _one(self, call: Call) -> None:
        last, owner = call.last, call.name.rpartition(".")[0].rpartition(".")[2]
        if last == "from_pretrained" and owner:
            self._load(call, owner)
        elif last in ARGUMENTS:
            is_first, self.has_arguments = not self.has_arguments, True
            self.masks_prompts = self.masks_prompts or call.named.get("assistant_only_loss") is True
            self._table(self._keys(call, call.named, ("output_dir",)), trl.SFT, is_first=is_first)
        elif last in TRAINERS:
            self._trainer(call)
        elif last.endswith(("Trainer", "TrainingArguments")) or (
            last.endswith("Config") and last.startswith(tuple(OTHER_TRAINERS))
        ):
            self._other_training(call)
        elif last in ("LoraConfig", "get_peft_model"):
            self._adapter(call)
        elif last == "BitsAndBytesConfig":
            self._quantized(call)
        elif last == "load_dataset":
            self._data(call)
        elif last in (
            "train_on_responses_only",
            "get_chat_template",
            "standardize_sharegpt",
            "apply_chat_template",
        ):
            self._chat(call)
        elif last == "map" and not call.name.startswith("()") and len(call.positional) == 1:
            keys = self._keys(call, {"function": call.positional[0]})
            read_keys(self.out, keys, {}, reasons("calls"), name_of=lambda key: "formatting_func")

    def _keys(
        self, call: Call, values: Mapping[str, Any], positions: Sequence[str] = ()
    ) -> list[tuple[str, Any]]:
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

    def _name_all(self, call: Call, why: str, positions: Sequence[str] = ()) -> None:
        """Every argument of a call that settles nothing of the training."""
        for key, value in self._keys(call, call.named, positions):
            self.out.name(key, _plain(value), why)

    def _table(
        self, keys: list[tuple[str, Any]], table: Mapping[str, To], *, is_first: bool = True
    ) -> None:
        """By a table; computed values are named, and so is all of a call that is not the first of
        its kind.
        """
        for key, value in keys:
            name = key.rpartition(".")[2]
            if not is_first:
                self.out.name(
                    key, _plain(value), "a later call of the same kind; the first one is read"
                )
            elif (
                isinstance(value, Computed)
                and (name in table or name in ("warmup_steps", "warmup_ratio"))
                and not value.startswith(("torch.", "IntervalStrategy", "SchedulerType"))
            ):
                self._computed(key, name, value)
            elif name.startswith("("):
                self.out.name(key, _plain(value), "an object of the script")
            elif name in ("warmup_steps", "warmup_ratio") and not isinstance(value, Computed):
                hf.warmup(self.out, key, value)
        left = [(key, _plain(value)) for key, value in keys if key not in self.out.lines]
        read_keys(
            self.out,
            _spread(left),
            table,
            reasons("calls", "model", trl.NAME, "common"),
            name_of=_argument,
        )

    def _computed(self, key: str, name: str, value: Computed) -> None:
        if name in ("bf16", "fp16") and ("support" in value or "is_available" in value):
            self.out.name(key, str(value), "farthing takes bf16 where the GPU has it natively")
        elif name == "output_dir":
            self.out.name(
                key, str(value), "a computed value: output_dir in the job is a new folder"
            )
        else:
            self.out.name(
                key,
                str(value),
                "a value that only running the script would tell: set it by hand",
                "differs",
            )

    def _load(self, call: Call, owner: str) -> None:
        if (
            owner.startswith(
                ("AutoTokenizer", "AutoProcessor", "AutoConfig", "AutoFeature", "AutoImage")
            )
            or "Tokenizer" in owner
            or "Processor" in owner
        ):
            why = "the tokenizer comes with the model (model.tokenizer_name_or_path names another)"
            return self._name_all(call, why, ("name",))
        if "Peft" in owner:
            return self._name_all(call, "loads a trained adapter, to ask the model afterwards")
        if not ("Model" in owner or "For" in owner or owner.startswith("Fast")):
            return self._name_all(call, "not the model that is trained")
        is_first, self.has_model = not self.has_model, True
        keys = self._keys(call, call.named, ("model_name",))
        if is_first:
            self._task(owner, keys)
            values = {key.rpartition(".")[2]: value for key, value in keys}
            others = (
                owner.startswith("Fast")
                and not values.get("load_in_8bit")
                and not values.get("load_in_16bit")
            )
            self.is_4bit = self.is_4bit or values.get("load_in_4bit", others) is True
            if values.get("full_finetuning") is True:
                key = next(key for key, _ in keys if key.endswith(".full_finetuning"))
                self.out.put(key, True, "method.name", "full")
                self.is_4bit = False
        for key, value in keys:
            name = key.rpartition(".")[2]
            if is_first and name in ("load_in_4bit", "load_in_8bit", "full_finetuning"):
                self._name_bits(key, name, value)
        self._table(keys, _LOAD, is_first=is_first)

    def _task(self, owner: str, keys: list[tuple[str, Any]]) -> None:
        auto = next((str(value) for key, value in keys if key.endswith("auto_model")), "")
        kinds = f"{owner} {auto}"
        key = keys[0][0] if keys else owner
        for name, task in _TASKS.items():
            if name in kinds:
                self.out.job.setdefault("task", task)
        if any(name in kinds for name in _VISION):
            self.out.lines.pop(key, None)
            self.out.name(
                f"{owner}", None, "images or sound, which farthing does not train on", "blocks"
            )
        elif any(name in kinds for name in _NO_TASKS):
            self.out.name(f"{owner}", None, "a task that farthing does not have", "blocks")

    def _name_bits(self, key: str, name: str, value: Any) -> None:
        if name == "load_in_8bit" and value is True:
            self.out.name(
                key, True, "farthing has no 8-bit base: the base stays in 16 bits", "differs"
            )
        else:
            self.out.name(
                key, _plain(value), "method: qlora is the 4-bit base, lora and full are without"
            )

    def _quantized(self, call: Call) -> None:
        self.is_4bit = self.is_4bit or call.named.get("load_in_4bit") is True
        for key, value in self._keys(call, call.named):
            name = key.rpartition(".")[2]
            if name in ("load_in_4bit", "load_in_8bit"):
                self._name_bits(key, name, value)
            else:
                self.out.name(
                    key,
                    _plain(value),
                    "farthing's 4-bit base is always nf4 with double quantization",
                )

    def _trainer(self, call: Call) -> None:
        keys = self._keys(call, call.named, ("model", "args"))
        model = call.named.get("model", call.positional[0] if call.positional else None)
        if isinstance(model, str) and not isinstance(model, Computed) and not self.has_model:
            key = next(key for key, value in keys if value is model)
            self.out.put(key, model, "model.model_name_or_path", model)
            self.has_model = True
        for key, value in keys:
            if key.endswith((".model", ".args", ".tokenizer")) and not isinstance(value, Computed):
                self.out.name(key, _plain(value), "an object of the script")
        self._table(keys, {"max_seq_length": trl.SFT["max_seq_length"]})

    def _other_training(self, call: Call) -> None:
        what = next(
            (words for name, words in OTHER_TRAINERS.items() if call.last.startswith(name)),
            "a trainer of its own",
        )
        if call.last.endswith("Trainer"):
            self.out.name(f"{call.last}", None, f"{what}, which farthing does not do", "blocks")
        self._name_all(call, f"settles {what}")

    def _adapter(self, call: Call) -> None:
        if (
            call.last == "get_peft_model"
            and "r" not in call.named
            and "lora_alpha" not in call.named
        ):
            return self._name_all(call, "puts the adapter on; its settings are in LoraConfig")
        is_first, self.has_adapter = not self.has_adapter, True
        self._table(self._keys(call, call.named), _LORA, is_first=is_first)
        if is_first:
            unsloth = call.last == "get_peft_model"
            size = 16 if unsloth else 8
            self.out.default_all("method", lora_r=size, lora_alpha=size, lora_dropout=0.0)
            if unsloth:
                self.out.default("method.target_modules", ["all-linear"])

    def _data(self, call: Call) -> None:
        keys = self._keys(call, call.named, ("path", "name"))
        values = {key.rpartition(".")[2]: value for key, value in keys}
        path, known = (
            values.get("path"),
            {k: v for k, v in values.items() if isinstance(v, str) and not isinstance(v, Computed)},
        )
        sources = self.out.job.get("data.train")
        files = values.get("data_files")
        if path in ("json", "csv", "parquet", "text") and files:
            train = files.get("train") if isinstance(files, Mapping) else files
            path = train[0] if isinstance(train, list) and train else train
        is_train = "test" not in str(values.get("split", "")) and "valid" not in str(
            values.get("split", "")
        )
        if (
            sources is None
            and isinstance(path, str)
            and not isinstance(path, Computed)
            and is_train
        ):
            source: Json = {
                "path": str(path),
                **{k: known[k] for k in ("name", "split") if k in known},
            }
            self.out.job["data.train"] = [source]
            for key, value in keys:
                self.out.keep(key, _plain(value), "data.train")
        else:
            why = (
                "another data set of the script; data.train and data.eval take it where it is"
                " learned or evaluated"
            )
            for key, value in keys:
                self.out.name(key, _plain(value), why, "differs" if sources is None else "none")

    def _chat(self, call: Call) -> None:
        keys = self._keys(call, call.named, ("tokenizer", "chat_template"))
        for key, value in keys:
            name = key.rpartition(".")[2]
            if call.last == "train_on_responses_only":
                self.masks_prompts = True
                self.out.name(key, _plain(value), "farthing masks prompts by the chat template")
            elif call.last == "get_chat_template" and name == "chat_template" and value == "chatml":
                self.out.files["chatml.jinja"] = CHATML
                self.out.put(key, value, "data.chat_template", "chatml.jinja")
            elif call.last == "get_chat_template" and name == "chat_template":
                self.out.name(
                    key,
                    _plain(value),
                    "the tokenizer's own chat template is used; give a Jinja file in"
                    " data.chat_template for another",
                    "differs",
                )
            else:
                self.out.name(
                    key,
                    _plain(value),
                    "farthing reads ShareGPT and OpenAI chats as they are, and renders them by the"
                    " tokenizer's template",
                )

    def _method(self) -> None:
        if self.has_adapter and self.out.job.get("method.name") != "full":
            self.out.default(
                "method.name", "qlora" if self.is_4bit else "lora", "the script's calls"
            )
            hf.peft_targets(self.out)
        else:
            self.out.default("method.name", "full", "the script, which makes no adapter")
            if self.out.job.get("method.name") == "full":
                for key in [
                    key
                    for key in self.out.job
                    if key.startswith("method.") and key != "method.name"
                ]:
                    del self.out.job[key]


def _spread(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Mappings as the keys within them."""
    return [
        pair
        for key, value in pairs
        for pair in (flat({key: value}) if isinstance(value, Mapping) else [(key, value)])
    ]


def _argument(key: str) -> str:
    """`SFTConfig#2.dataset_kwargs.skip` as `dataset_kwargs.skip`; `FastModel.from_pretrained.dtype`
    as `dtype`.
    """
    return key.partition(".from_pretrained.")[2] or key.partition(".")[2]


def _plain(value: Any) -> Any:
    if isinstance(value, Computed):
        return str(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def no_settings(calls: Sequence[Call]) -> bool:
    """Whether a script configures nothing by itself: it takes all from its command line."""
    return not any(
        call.last in (*ARGUMENTS, *TRAINERS, "LoraConfig") or call.last.endswith("Trainer")
        for call in calls
    )
