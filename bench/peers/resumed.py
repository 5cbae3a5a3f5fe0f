"""`transformers.Trainer` through bench/survive.py: the job's data, model and settings, resumed as
its own examples resume.

That is `trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))` and the defaults of
its checkpoints. It is helped where it can be: full determinism, one thread, a loss in every line of
its log. Written for transformers 5.23.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kills import Whereabouts, patched

TIMINGS = ("runtime", "per_second", "total_flos")
LABELS_AT_LEAST = 2


class HuggingFace:
    """A training script as its users write it."""

    name = "transformers.Trainer"
    packages = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "numpy")
    where: Whereabouts

    def prepare(self, where: Whereabouts) -> None:
        """See `survive.Contestant`."""
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        import datasets
        import peft  # noqa: F401
        import transformers
        import transformers.integrations.peft
        import transformers.models.bert.modeling_bert
        import transformers.models.llama.modeling_llama
        import transformers.models.t5.modeling_t5

        self.where = where
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        logging.disable(logging.WARNING)

        def around(place: str) -> Callable[..., Any]:
            def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                with where.within(place):
                    return function(*args, **kwargs)

            return run

        patched(transformers.Trainer, "_save_checkpoint", around("save"))
        patched(transformers.Trainer, "evaluate", around("evaluation"))

    def attempt(self, job: Path) -> int:
        """See `survive.Contestant`."""
        import torch
        from transformers.trainer_utils import get_last_checkpoint

        torch.set_num_threads(1)
        with open(job, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
        trainer = _trainer(settings, self.where)
        run = settings["output_dir"]
        last = get_last_checkpoint(run) if Path(run).is_dir() else None
        self.where.enter("restore" if last else "start")
        trainer.train(resume_from_checkpoint=last)
        self.where.enter("export")
        trainer.save_model()
        trainer.save_state()
        return 0

    def last_step(self, run: Path) -> int:
        """See `survive.Contestant`."""
        return max((int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")), default=0)

    def resumed_at(self, run: Path) -> list[int]:
        """See `survive.Contestant`. The trainer keeps no account of its attempts."""
        return []

    def steps(self, run: Path) -> list[int]:
        """See `survive.Contestant`."""
        return [row["step"] for row in _log(run) if "loss" in row]

    def result_of(self, run: Path) -> dict[str, bytes | str]:
        """See `survive.Contestant`. The contents of what was pickled are compared, not its bytes."""  # noqa: E501
        newest = run / f"checkpoint-{self.last_step(run)}"
        result: dict[str, bytes | str] = {
            f"log line {at}": json.dumps(row) for at, row in enumerate(_log(run))
        }
        for path in (*run.glob("*.safetensors"), *newest.glob("*.safetensors")):
            result[path.relative_to(run).as_posix()] = path.read_bytes()
        for name in ("optimizer.pt", "scheduler.pt"):
            result[f"{newest.name}/{name}"] = _content(newest / name)
        return result


def _log(run: Path) -> list[dict[str, Any]]:
    """What the trainer logged of a finished run, without timings."""
    rows = json.loads((run / "trainer_state.json").read_text("utf-8"))["log_history"]
    kept = [
        {key: row[key] for key in row if not any(word in key for word in TIMINGS)} for row in rows
    ]
    return [row for row in kept if "loss" in row or "eval_loss" in row]


def _content(path: Path) -> str:
    import torch

    if not path.exists():
        return "not there"

    def spelled(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [str(value.dtype), list(value.shape), value.flatten().view(torch.uint8).tolist()]
        if isinstance(value, dict):
            return {str(key): spelled(inner) for key, inner in value.items()}
        return (
            [spelled(inner) for inner in value] if isinstance(value, list | tuple) else repr(value)
        )

    return json.dumps(spelled(torch.load(path, weights_only=True)))


def _trainer(job: dict[str, Any], where: Whereabouts) -> Any:
    import datasets
    import transformers

    task, data, train = job["task"], job["data"], job["train"]
    transformers.set_seed(train["seed"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"]["model_name_or_path"])
    with where.within("tokenization"):
        rows = datasets.load_dataset(
            "json", data_files=data["train"], split="train", cache_dir=job["cache_dir"]
        )
        label_names = sorted(set(rows["label"])) if task == "classification" else []

        def encode(row: dict[str, Any]) -> dict[str, Any]:
            if task == "classification":
                text = tokenizer(row["text"], truncation=True, max_length=data["max_length"])
                return {**text, "label": label_names.index(row["label"])}
            if task == "seq2seq":
                text = tokenizer(row["input"], truncation=True, max_length=data["max_length"])
                target = tokenizer(
                    text_target=row["target"], truncation=True, max_length=data["max_target_length"]
                )
                return {**text, "labels": target["input_ids"]}
            return dict(tokenizer(_plain(row), truncation=True, max_length=data["max_length"]))

        parts = rows.map(encode, remove_columns=rows.column_names).train_test_split(
            data["eval_fraction"], seed=train["seed"]
        )
        train_set = parts["train"].select(
            range(min(len(parts["train"]), data["max_train_samples"]))
        )
        eval_set = parts["test"].select(range(min(len(parts["test"]), data["max_eval_samples"])))
    config = transformers.AutoConfig.from_pretrained(job["model"]["model_name_or_path"])
    if task == "classification":
        config.num_labels = max(LABELS_AT_LEAST, len(label_names))
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        collator: Any = transformers.DataCollatorWithPadding(tokenizer)
    elif task == "seq2seq":
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if job["method"]["name"] == "lora":
        model = _adapted(model, job["method"], task)
    trainer = transformers.Trainer(
        model=model,
        args=_arguments(job),
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=collator,
        processing_class=tokenizer,
    )

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            where.enter("training step")

    trainer.add_callback(Marks())
    return trainer


def _arguments(job: dict[str, Any]) -> Any:
    """The job's settings by the names that the trainer has for them."""
    import transformers

    train = job["train"]
    return transformers.TrainingArguments(
        output_dir=job["output_dir"],
        max_steps=train["max_steps"],
        per_device_train_batch_size=train["global_batch_size"] // 2,
        gradient_accumulation_steps=2,
        learning_rate=train["learning_rate"],
        save_strategy="steps",
        save_steps=train["save_steps"],
        save_total_limit=train["save_total_limit"],
        eval_strategy="steps",
        eval_steps=train["eval_steps"],
        logging_strategy="steps",
        logging_steps=1,
        seed=train["seed"],
        full_determinism=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


def _adapted(model: Any, method: dict[str, Any], task: str) -> Any:
    import peft

    kinds = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}
    settings = peft.LoraConfig(
        r=method["lora_r"], lora_dropout=method["lora_dropout"], task_type=kinds[task]
    )
    return peft.get_peft_model(model, settings)


def _plain(row: dict[str, Any]) -> str:
    """A row as text to go on from: only how much of it there is matters here."""
    if "messages" in row:
        return "\n".join(str(message["content"]) for message in row["messages"])
    return str(row["text"]) if "text" in row else f"{row['prompt']}{row['completion']}"
