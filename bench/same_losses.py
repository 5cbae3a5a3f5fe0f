"""The first losses of an imported job beside those of the tool that it was imported from, on one
CPU.

    python bench/same_losses.py [--tool trainer|trl|llama-factory|axolotl] [--python PATH] [--steps
    20] [--json]

A script or a configuration of the tool is written, imported with `farthing import` and trained by
farthing; then the tool trains on the same rows in the order that farthing took them in (each tool
shuffles in its own way, so the order is given to it). The model is a small Llama with random
weights in fp32, full and LoRA. Ends with 1 where a loss differs by more than 1e-4.

Trainer and TRL run in this process, and TRL has to be installed beside farthing. LLaMA-Factory and
Axolotl pin other versions: they run as their command lines from an environment of their own, whose
Python --python names. Unsloth has no CPU path, and the services (OpenAI, Together, Fireworks) show
no losses of a model that one has. The environments that were used, with Python 3.11, and pip
install --no-deps for Axolotl's first lines:

    LLaMA-Factory: `make peers-llama-factory`, which makes .venv/llama-factory. Not transformers
    5.2.0: it divides gradients by
                   gradient_accumulation_steps once more than it should, which shows once they are
                   clipped.
    Axolotl:       axolotl==0.18.0 torch==2.13.0+cpu transformers==5.14.1 datasets==4.8.4
    accelerate==1.13.0 peft==0.19.1
                   trl==1.8.0 kernels==0.15.2 kernels-data bitsandbytes==0.49.1 torchao==0.17.0
                   triton==3.6.0 wandb trackio
                   axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 huggingface_hub==1.17.0
                   tokenizers==0.22.2
      with addict fire colorama art numba tomlkit python-dotenv zstandard fastcore posthog
      schedulefree evaluate optimum==1.16.2
      mistral-common==1.11.5; nothing is stubbed, none of the packages for GPUs computes
      anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common import lines_of, play
from farthing.cli import main as farthing
from farthing.tiny import demo_rows, make_model_folder, write_jsonl

BOUND = 1e-4
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "max_grad_norm": 1.0,
    "seed": 42,
    "bf16": False,
    "logging_steps": 1,
}
LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.0,
}
Rows = list[dict[str, str]]


class Run(NamedTuple):
    """What is compared: a folder with `model`, and which of the two methods."""

    folder: Path
    steps: int
    with_lora: bool
    python: str


def said(values: dict[str, Any]) -> str:
    """Keyword arguments as a script has them."""
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


# ---- each tool: its configuration, and its losses ----


def script_of(run: Run, of_trl: bool) -> str:
    """A script with Trainer, or with SFTTrainer."""
    settings = said({**ARGUMENTS, "max_steps": run.steps})
    rows = 'load_dataset("json", data_files="rows.jsonl", split="train")'
    lines = ["from datasets import load_dataset"]
    given = f"train_dataset={rows}"
    if of_trl:
        lines.append("from trl import SFTConfig, SFTTrainer")
        if run.with_lora:
            lines.append("from peft import LoraConfig")
            given += f", peft_config=LoraConfig({said(LORA)})"
        config = f"SFTConfig('out', max_length=64, {settings})"
        lines.append(f"trainer = SFTTrainer(model='model', args={config}, {given})")
    else:
        lines.append("from transformers import AutoModelForCausalLM, Trainer, TrainingArguments")
        lines.append("model = AutoModelForCausalLM.from_pretrained('model')")
        config = f"TrainingArguments('out', {settings})"
        lines.append(f"trainer = Trainer(model=model, args={config}, {given})")
    return "\n".join(lines) + "\n"


def yaml_of_llama_factory(run: Run) -> str:
    """A file for `llamafactory-cli train`, and the `dataset_info.json` that it needs."""
    (run.folder / "dataset_info.json").write_text(json.dumps({"demo": {"file_name": "rows.jsonl"}}))
    lora = {
        "lora_rank": LORA["r"],
        "lora_alpha": LORA["lora_alpha"],
        "lora_dropout": 0.0,
        "lora_target": ",".join(LORA["target_modules"]),
    }
    values = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": "model",
        "dataset": "demo",
        "dataset_dir": ".",
        "template": "alpaca",
        "cutoff_len": 512,
        "output_dir": "out",
        "overwrite_output_dir": True,
        "finetuning_type": "lora" if run.with_lora else "full",
        "max_steps": run.steps,
        **ARGUMENTS,
        **(lora if run.with_lora else {}),
    }
    return yaml.safe_dump(values)


def yaml_of_axolotl(run: Run) -> str:
    """A file for `axolotl train`. One micro-batch a step: Axolotl takes the mean of its
    micro-batches' means, whatever number of targets each has, where farthing (as Trainer) weighs
    every target of a step alike."""
    own = {"per_device_train_batch_size": "micro_batch_size", "lr_scheduler_type": "lr_scheduler"}
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    values = {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "alpaca", "ds_type": "json"}],
        "sequence_len": 512,
        "sample_packing": False,
        "optimizer": "adamw_torch",
        "output_dir": "out",
        "num_epochs": 1,
        "max_steps": run.steps,
        **{own.get(key, key): value for key, value in arguments.items()},
    }
    if run.with_lora:
        values |= {
            "adapter": "lora",
            "lora_r": LORA["r"],
            "lora_alpha": LORA["lora_alpha"],
            "lora_dropout": 0.0,
            "lora_target_modules": LORA["target_modules"],
        }
    return yaml.safe_dump(values)


def losses_of_command(run: Run, command: list[str]) -> list[float]:
    """What a tool's command line has left in the state of its Trainer."""
    told = {
        "DISABLE_VERSION_CHECK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_DISABLED": "true",
    }
    found = subprocess.run(
        [run.python, *command],
        cwd=run.folder,
        env=os.environ | told,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise SystemExit(
            f"{' '.join(command)} has failed:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
        )
    states = sorted(
        (run.folder / "out").rglob("trainer_state.json"), key=lambda path: len(path.parts)
    )
    return [
        row["loss"] for row in json.loads(states[0].read_text())["log_history"] if "loss" in row
    ]


def losses_of_llama_factory(run: Run, ordered: Rows) -> list[float]:
    """`llamafactory-cli train` in the given order."""
    more = ["disable_shuffling=true", "use_cpu=true", "save_steps=1000", "report_to=none"]
    write_jsonl(run.folder / "rows.jsonl", ordered)
    return losses_of_command(run, ["-m", "llamafactory.cli", "train", "config.yaml", *more])


def losses_of_axolotl(run: Run, ordered: Rows) -> list[float]:
    """`axolotl train` in the given order."""
    write_jsonl(run.folder / "rows.jsonl", ordered)
    values = yaml.safe_load((run.folder / "config.yaml").read_text())
    values |= {
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,
        "use_cpu": True,
        "saves_per_epoch": 1,
    }
    if run.with_lora:  # it draws other numbers before it draws the adapter
        adapted(run).save_pretrained(run.folder / "start")
        values["lora_model_dir"] = "start"
    (run.folder / "ordered.yaml").write_text(yaml.safe_dump(values))
    return losses_of_command(run, ["-m", "axolotl.cli.train", "ordered.yaml"])


def adapted(run: Run) -> Any:
    """The model with the adapter that farthing begins with."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        run.folder / "model", dtype=torch.float32
    )
    torch.manual_seed(ARGUMENTS["seed"])
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))


def losses_here(run: Run, ordered: Rows, of_trl: bool) -> list[float]:
    """Trainer or SFTTrainer in the given order, in this process."""
    import datasets
    import torch
    import transformers

    datasets.disable_progress_bars()
    settings = {
        **ARGUMENTS,
        "max_steps": run.steps,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
    }
    settings["warmup_steps"] = settings.pop("warmup_ratio")  # transformers 5 takes a share there
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder / "model")
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        run.folder / "model", dtype=torch.float32
    )
    model = adapted(run) if run.with_lora else whole
    if of_trl:
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(
            str(run.folder / "out"), max_length=64, shuffle_dataset=False, **settings
        )
        rows = datasets.Dataset.from_list(ordered)
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    else:
        arguments = transformers.TrainingArguments(
            str(run.folder / "out"), remove_unused_columns=False, **settings
        )
        data = []
        for row in ordered:
            ids = tokenizer(row["text"])["input_ids"]
            ids += [tokenizer.eos_token_id] * (ids[-1:] != [tokenizer.eos_token_id])
            data.append({"input_ids": ids, "labels": ids})
        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


class Tool(NamedTuple):
    """A tool whose losses can be had: the ending of its file, its methods, columns of a row, its
    file and its losses.
    """

    ending: str
    kinds: tuple[str, ...]
    row: Callable[[dict[str, str]], dict[str, str]]
    config: Callable[[Run], str]
    losses: Callable[[Run, Rows], list[float]]


def alpaca(row: dict[str, str]) -> dict[str, str]:
    """A row with the columns of Alpaca's data."""
    return {"instruction": row["prompt"], "input": "", "output": row["completion"].strip()}


BOTH = ("full", "lora")
TOOLS = {
    "trainer": Tool(
        ".py",
        ("full",),
        lambda row: {"text": row["prompt"] + row["completion"]},
        lambda run: script_of(run, of_trl=False),
        lambda run, rows: losses_here(run, rows, of_trl=False),
    ),
    "trl": Tool(
        ".py",
        BOTH,
        dict,
        lambda run: script_of(run, of_trl=True),
        lambda run, rows: losses_here(run, rows, of_trl=True),
    ),
    "llama-factory": Tool(".yaml", BOTH, alpaca, yaml_of_llama_factory, losses_of_llama_factory),
    "axolotl": Tool(".yaml", BOTH, alpaca, yaml_of_axolotl, losses_of_axolotl),
}


def of_farthing(run: Run, config: Path) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the imported job."""
    job, output = run.folder / "job.yaml", run.folder / "run"
    words = ["train", str(job), "--json"]
    for key in (f"output_dir={output}", "where.device=cpu"):
        words += ["--set", key]
    for each in (["import", str(config), "-o", str(job)], words):
        assert farthing(each) == 0
    steps = lines_of(output / "log.jsonl", "examples")
    return [row["loss"] for row in steps], [row["examples"] for row in steps]


def compare(name: str, run: Run) -> dict[str, Any]:
    """The losses of both in one method."""
    import torch
    import transformers

    tool, demo = TOOLS[name], demo_rows(200)
    make_model_folder(
        run.folder / "model",
        [row["prompt"] + row["completion"] for row in demo],
        hidden=64,
        layers=2,
    )
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(run.folder / "model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(run.folder / "model")
    rows = [tool.row(row) for row in demo]
    write_jsonl(run.folder / "rows.jsonl", rows)
    file = run.folder / f"config{tool.ending}"
    file.write_text(tool.config(run))
    os.chdir(run.folder)
    ours, order = of_farthing(run, file)
    theirs = tool.losses(run, [rows[index] for step in order for index in step])
    os.chdir("/")
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    said = f"{'lora' if run.with_lora else 'full'}: {len(ours)} losses, at most {worst:.2e} apart"
    return {"farthing": ours, name: theirs, "said": said, "ok": worst <= BOUND}


def main() -> int:
    """Prints the losses of both; 1 where one differs by more than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tool", choices=tuple(TOOLS), default="trainer")
    add("--python", type=Path, default=Path(sys.executable), help="that has the tool")
    add("--steps", type=int, default=20)
    add("--json", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    python = str(asked.python.absolute())

    def compared(kind: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return compare(asked.tool, Run(Path(folder), asked.steps, kind == "lora", python))

    return play(TOOLS[asked.tool].kinds, compared, asked.json)


if __name__ == "__main__":
    sys.exit(main())
