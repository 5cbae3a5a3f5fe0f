"""The model card: what the model was made from, how well it does, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.printable import printable
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

_PIPELINES = {
    "causal-lm": "text-generation",
    "seq2seq": "text2text-generation",
    "classification": "text-classification",
}


def model_card(receipt: dict[str, Any], step: int, *, is_merged: bool) -> str:
    """Markdown with the metadata block that the Hub reads. Local paths are shortened to their last part."""
    job = receipt["job"] or {}
    task, method = job.get("task", "causal-lm"), (job.get("method") or {}).get("name", "full")
    base = (job.get("model") or {}).get("model_name_or_path", "unknown")
    is_local = Path(base).is_absolute()
    shown = _cell(Path(base).name if is_local else base)
    is_adapter = method != "full" and not is_merged
    meta = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", f"pipeline_tag: {_PIPELINES[task]}"]
    if not is_local:
        meta.append(f"base_model: {base}")
    meta += ["tags:", "- farthing", *([f"- {method}"] if method != "full" else []), "---", ""]
    form = "an adapter for" if is_adapter else "a fine-tune of"
    train = job.get("train") or {}
    lines = [
        f"# {_cell(Path(receipt['run']).name)}",
        "",
        f"This is {form} `{shown}`, made by farthing with method `{method}` for {task}.",
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
        f"| data | {', '.join(_cell(Path(name).name) for name in (job.get('data') or {}).get('train', []))} |",
        f"| step | {step} of {receipt['steps']} |",
        f"| tokens | {say_count(receipt['tokens'])} ({say_count(receipt['target_tokens'])} of them targets) |",
        f"| epochs | {train.get('num_train_epochs')} |",
        f"| learning rate | {_learning_rate(job)}, {train.get('lr_scheduler_type')} |",
        f"| seed | {train.get('seed')} |",
        f"| machine | {_machine(receipt)} |",
    ]
    metrics = receipt["metrics"] or {}
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    if numbers:
        lines += [
            "",
            "## Evaluation",
            "",
            f"On {metrics.get('n_examples', 0):,} held-out examples.",
            "",
            "| metric | value |",
        ]
        lines += ["|---|---|", *(f"| {name} | {value:.4f} |" for name, value in numbers.items())]
    classes = metrics.get("per_class")
    if classes:
        lines += ["", "| class | precision | recall | F1 | examples |", "|---|---|---|---|---|"]
        lines += [
            f"| {_cell(name)} | {row['precision']:.3f} | {row['recall']:.3f} | {row['f1']:.3f} | {row['n']} |"
            for name, row in classes.items()
        ]
    cost = say_usd(receipt["usd"]) if receipt["usd_is_known"] else "no price was given"
    lines += [
        "",
        "## Receipt",
        "",
        "| | |",
        "|---|---|",
        f"| cost | {cost} |",
        f"| time | {say_seconds(receipt['wall_s'])}, {plural(receipt['interruptions'], 'interruption')} |",
        f"| peak memory | {say_bytes(receipt['peak_bytes'])} |",
        "",
        "| where the time went | seconds | dollars |",
        "|---|---|---|",
    ]
    lines += [
        f"| {span['what']} | {span['seconds']:.1f} | {say_usd(span['usd'])} |"
        for span in receipt["spans"]
        if span["seconds"] >= 0.005
    ]
    return "\n".join([*meta, *lines]) + "\n"


def _learning_rate(job: dict[str, Any]) -> str:
    try:
        return f"{Job.model_validate(job).learning_rate:g}"
    except ValueError:  # the job of an older farthing
        return str((job.get("train") or {}).get("learning_rate") or "default")


def _cell(text: str) -> str:
    """A name as a table cell: no column, no line and no tag of its own, and nothing that steers a terminal."""
    words = " ".join(str(text).split())
    return printable(words).replace("|", "\\|").replace("<", "&lt;")


def _machine(receipt: dict[str, Any]) -> str:
    machine = receipt["machine"] or {}
    return f"{machine.get('device', 'unknown')}, {machine.get('precision', '')}"
