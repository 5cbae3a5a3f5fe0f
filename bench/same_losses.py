"""The first losses of an imported job beside those of the tool that it was imported from, on one CPU.

    python bench/same_losses.py [--tool trainer|trl] [--steps 20] [--json]

A script of the tool is written, imported with `farthing import` and trained by farthing; then the tool trains on the same rows
in the order that farthing took them in (each tool shuffles in its own way, so the order is given to it). The model is a small
Llama with random weights in fp32, full and LoRA. TRL has to be installed for --tool trl. Ends with 1 where a loss differs by
more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from farthing.cli import main as farthing
from farthing.config.load import load_job
from farthing.tiny import demo_rows, make_model_folder

BOUND = 1e-4
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "weight_decay": 0.01,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "max_grad_norm": 1.0, "seed": 42, "bf16": False, "logging_steps": 1,
}  # fmt: skip
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def said(values: dict[str, Any]) -> str:
    """Keyword arguments as a script has them."""
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def script(tool: str, steps: int, with_lora: bool) -> str:
    """A training script of the tool."""
    settings = said({**ARGUMENTS, "max_steps": steps})
    peft = f"from peft import LoraConfig\npeft_config = LoraConfig({said(LORA)})\n" if with_lora else ""
    if tool == "trl":
        return (
            f"from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n{peft}"
            'rows = load_dataset("json", data_files="rows.jsonl", split="train")\n'
            f"trainer = SFTTrainer(model='model', args=SFTConfig('out', max_length=64, {settings}), train_dataset=rows"
            f"{', peft_config=peft_config' if with_lora else ''})\n"
        )
    return (
        f"from datasets import load_dataset\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n{peft}"
        'rows = load_dataset("json", data_files="rows.jsonl", split="train")\n'
        "model = AutoModelForCausalLM.from_pretrained('model')\n"
        f"trainer = Trainer(model=model, args=TrainingArguments('out', {settings}), train_dataset=rows)\n"
    )


def of_farthing(folder: Path, name: str) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the imported job."""
    job = folder / f"{name}.yaml"
    assert farthing(["import", str(folder / f"{name}.py"), "-o", str(job)]) == 0
    run = folder / f"run-{name}"
    assert farthing(["train", str(job), "--set", f"output_dir={run}", "--set", "where.device=cpu", "--json"]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [row for row in log if "examples" in row]
    load_job(job)
    return [row["loss"] for row in steps], [row["examples"] for row in steps]


def of_tool(folder: Path, tool: str, order: list[list[int]], with_lora: bool) -> list[float]:
    """Losses of the tool on the same rows in that order."""
    import datasets
    import peft
    import torch
    import transformers

    datasets.disable_progress_bars()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    ordered = [rows[index] for step in order for index in step]
    settings = {**ARGUMENTS, "max_steps": len(order), "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
                "train_sampling_strategy": "sequential", "use_cpu": True}  # fmt: skip
    settings["warmup_steps"] = settings.pop("warmup_ratio")  # transformers 5 takes a share there
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = peft.LoraConfig(**LORA, task_type="CAUSAL_LM") if with_lora else None
    if config is not None:
        torch.manual_seed(42)
        model = peft.get_peft_model(model, config)
    if tool == "trl":
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(str(folder / "out"), max_length=64, shuffle_dataset=False, **settings)
        trainer = SFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(ordered), processing_class=tokenizer
        )
    else:

        def encoded(row: dict[str, str]) -> dict[str, list[int]]:
            ids = tokenizer(row["text"])["input_ids"]
            ids = ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
            return {"input_ids": ids, "labels": ids}

        def padded(batch: list[dict[str, list[int]]]) -> dict[str, Any]:
            longest = max(len(each["input_ids"]) for each in batch)

            def filled(key: str, value: int) -> Any:
                return torch.tensor([each[key] + [value] * (longest - len(each[key])) for each in batch])

            mask = [[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in batch]
            return {
                "input_ids": filled("input_ids", 0),
                "labels": filled("labels", -100),
                "attention_mask": torch.tensor(mask),
            }

        arguments = transformers.TrainingArguments(str(folder / "out"), remove_unused_columns=False, **settings)
        data: Any = [encoded(row) for row in ordered]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=padded)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> int:
    """Prints the losses of both; 1 where one differs by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=("trainer", "trl"), default="trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(demo_rows(200))
        make_model_folder(
            folder / "model", [row["prompt"] + row["completion"] for row in rows], "llama", hidden=64, layers=2
        )
        import torch
        import transformers

        torch.manual_seed(1)
        config = transformers.AutoConfig.from_pretrained(folder / "model")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        as_rows = rows if arguments.tool == "trl" else [{"text": row["prompt"] + row["completion"]} for row in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in as_rows))
        os.chdir(folder)
        for kind in ("full", "lora") if arguments.tool == "trl" else ("full",):
            (folder / f"{kind}.py").write_text(script(arguments.tool, arguments.steps, kind == "lora"))
            ours, order = of_farthing(folder, kind)
            theirs = of_tool(folder, arguments.tool, order, kind == "lora")
            worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            found[kind] = {
                "farthing": ours,
                arguments.tool: theirs,
                "largest_difference": worst,
                "same": worst <= BOUND,
            }
        os.chdir("/")
    if arguments.json:
        print(json.dumps(found))
    else:
        for kind, each in found.items():
            print(f"{kind}: {len(each['farthing'])} losses, largest difference {each['largest_difference']:.2e}")
    return 0 if all(each["same"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
