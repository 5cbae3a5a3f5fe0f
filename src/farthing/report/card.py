"""The model card: what the model was made from, how well it does, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from farthing.config.job import Job
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.registry import objective_of
from farthing.printable import printable
from farthing.report.receipt_rows import CLASSES, class_rows
from farthing.report.receipt_types import Receipt
from farthing.storage.files import Json
from farthing.units import digits_of, plural, say_bytes, say_count

_BEFORE_TASKS = CAUSAL_LM.name  # what the job of an older run is of, that names none


def model_card(
    receipt: Receipt, *, is_merged: bool, step: int | None = None, in_form: Sequence[str] = ()
) -> str:
    """Markdown with the metadata block that the Hub reads. Local paths are shortened to their last
    part.

    `step`: whose weights these are, where the receipt does not know it yet. `in_form`: the lines of
    a section on a form that transformers does not have it in.
    """
    job, step = receipt.job or {}, step or receipt.exported_step or receipt.steps
    task, method = job.get("task", _BEFORE_TASKS), (job.get("method") or {}).get("name", "full")
    base = (job.get("model") or {}).get("model_name_or_path", "unknown")
    is_local = Path(base).is_absolute()
    shown = _cell(Path(base).name if is_local else base)
    is_adapter = method != "full" and not is_merged
    meta = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        f"pipeline_tag: {objective_of(task).pipeline_tag}",
    ]
    if not is_local:
        meta.append(f"base_model: {base}")
    meta += ["tags:", "- farthing", *([f"- {method}"] if method != "full" else []), "---", ""]
    form = "an adapter for" if is_adapter else "a fine-tune of"
    train, steps_per_epoch = job.get("train") or {}, receipt.steps_per_epoch
    lines = [
        f"# {_cell(Path(receipt.run).name)}",
        "",
        f"This is {form} `{shown}`, made by farthing with method `{method}` for {task}.",
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
        (
            "| data |"
            f" {', '.join(_cell(Path(name).name) for name in (job.get('data') or {}).get('train', []))} |"  # noqa: E501
        ),
        f"| step | {step} of {receipt.steps} |",
        (
            f"| tokens | {say_count(receipt.tokens)} ({say_count(receipt.target_tokens)} of them"
            " targets) |"
        ),
        *([f"| epochs | {step / steps_per_epoch:.3g} |"] if steps_per_epoch else []),
        f"| learning rate | {_learning_rate(job)}, {train.get('lr_scheduler_type')} |",
        f"| seed | {train.get('seed')} |",
        f"| machine | {_machine(receipt)} |",
    ]
    lines += _measured(receipt.metrics or {})
    lines += _beside_base("Before and after", receipt.evaluation)
    lines += _beside_base("Before and after, by standard tasks", receipt.standard_tasks)
    lines += _how_to_load(receipt, shown) if is_adapter else []
    lines += in_form
    lines += _bill(receipt)
    return "\n".join([*meta, *lines]) + "\n"


def _measured(metrics: Json) -> list[str]:
    """The run's own evaluation, and that of each class."""
    lines: list[str] = []
    numbers = [
        (name, f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float)
    ]
    if numbers:
        lines += [
            "",
            "## Evaluation",
            "",
            f"On {metrics.get('n_examples', 0):,} held-out examples.",
        ]
        lines += _table("metric", "value", rows=numbers)
    if rows := class_rows(metrics):
        lines += _table(
            *(head.lstrip("#") for head in CLASSES),
            rows=[(_cell(name), *row) for name, *row in rows],
        )
    return lines


def _table(*heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown, the first of them empty."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return ["", lines[0], "|" + "---|" * len(heads), *lines[1:]]


def _beside_base(title: str, evaluation: Json | None) -> list[str]:
    """What `farthing eval` has measured of the model, and of what the run began with."""
    if evaluation is None or "tuned" not in evaluation:
        return []
    base, tuned = evaluation.get("base", {}), evaluation["tuned"]
    before = {name: f"{value:.4f}" for name, value in base.items() if isinstance(value, float)}
    rows = [
        (name, before.get(name, ""), f"{value:.4f}")
        for name, value in tuned.items()
        if isinstance(value, float)
    ]
    lines = ["", f"## {title}", "", f"On {_cell(evaluation['examples'])}."]
    return lines + _table("metric", "before", "after", rows=rows)


def _how_to_load(receipt: Receipt, base: str) -> list[str]:
    """What loads an adapter; a classifier's needs the classes, which are in model_config.json and
    not in the base.
    """
    job = receipt.job or {}
    if (job.get("model") or {}).get("init") == "random":
        words = f"`{base}` has no weights, they were drawn from the seed: take the whole model,"
        return ["", "## Use", "", f"{words} which `farthing export --format merged` writes."]
    task = objective_of(job.get("task", _BEFORE_TASKS))
    name = task.auto_class
    lines = ["", "## Use", "", "In this folder, with `peft` installed:", "", "```python"]
    has_classes, is_scaled = (
        not task.scores_tokens,
        bool((job.get("model") or {}).get("rope_scaling")),
    )
    if has_classes or is_scaled:
        what = (
            "the names of the classes"
            if has_classes
            else "its positions, which are not those of the base"
        )
        more = ", ignore_mismatched_sizes=True" if has_classes else ""
        lines += [
            f"from transformers import AutoConfig, {name}",
            "",
            f'config = AutoConfig.from_pretrained("model_config.json")  # {what}',
            f'model = {name}.from_pretrained(".", config=config{more})',
        ]
    else:
        lines += [f"from transformers import {name}", "", f'model = {name}.from_pretrained(".")']
    return [*lines, "```"]


def _bill(receipt: Receipt) -> list[str]:
    """What it cost, in the digits of the receipt: all on the card that depends on how often the run
    was interrupted.
    """
    dollars = digits_of(receipt.usd)
    cost = dollars(receipt.usd) if receipt.usd_is_known else "no price was given"
    lines = [
        "",
        "## Receipt",
        "",
        "| | |",
        "|---|---|",
        f"| cost | {cost} |",
        f"| time | {receipt.wall_s:.1f} s, {plural(receipt.interruptions, 'interruption')} |",
        f"| peak memory | {say_bytes(receipt.peak_bytes)} |",
    ]
    n = 3 if receipt.usd_is_known else 2
    heads = ("where the time went", "seconds", "dollars")[:n]
    spans = [
        (s.what, f"{s.seconds:.1f}", dollars(s.usd)) for s in receipt.spans if s.seconds >= 0.005
    ]
    return lines + _table(*heads, rows=[span[:n] for span in spans])


def _learning_rate(job: Json) -> str:
    try:
        return f"{Job.model_validate(job).learning_rate:g}"
    except ValueError:  # the job of an older farthing
        return str((job.get("train") or {}).get("learning_rate") or "default")


def _cell(text: str) -> str:
    """A name as a table cell: no column, no line and no tag of its own, and nothing that steers a
    terminal.
    """
    words = " ".join(str(text).split())
    return printable(words).replace("|", "\\|").replace("<", "&lt;")


def _machine(receipt: Receipt) -> str:
    machine = receipt.machine or {}
    return f"{machine.get('device', 'unknown')}, {machine.get('precision', '')}"
