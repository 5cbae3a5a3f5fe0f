"""Write the pages of docs/reference from the code and its facts: `make pages`. A test holds them to
what this writes.

The pages do not depend on the clock or the network: today is the date of the newest price.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

import farthing
from farthing.cli.parser import VERBS, build_parser
from farthing.config.load import job_schema
from farthing.models.families import FAMILIES, KNOWN_HEADS, PACKED, PADS_SAFELY
from farthing.prices.gpus import gpus
from farthing.report.draw import draw
from farthing.report.plan_report import brief
from farthing.report.receipt import build_receipt
from farthing.report.receipt_report import receipt_report
from farthing.units import say_seconds

FOLDER = Path(__file__).parent / "reference"
FACTS = Path(farthing.__file__).parent / "facts"
NOTE = "<!-- written by docs/pages.py; do not edit -->\n\n"
SIZES = {
    "7B": "meta-llama/Llama-2-7b-hf",
    "13B": "meta-llama/Llama-2-13b-hf",
    "34B": "Qwen/Qwen2.5-32B",
    "70B": "meta-llama/Llama-2-70b-hf",
}
"""A model of each size that has a public config; of 34B the nearest."""
N_EXAMPLES, MEAN_TOKENS = 10_000, 500


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [
        list(names),
        ["---"] * len(list(names)),
        *([str(cell) for cell in row] for row in rows),
    ]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


# ---- keys ----


def keys() -> str:
    """Every key of a job file: type, default, meaning; from its JSON Schema."""
    schema = job_schema()
    text = "# Keys of a job file\n\n" + NOTE
    text += (
        "`farthing init --schema` prints this as a JSON Schema. `--set train.learning_rate=1e-4`"
        " sets a key on the command line, and `KEY=null` takes it back to its default. A short form"
        " in the second column stands for the whole section.\n\n"
    )
    text += table(("key", "what it takes", "default", "meaning"), _keys_of(schema, schema, ""))
    text += "\n## objective\n\nEach objective has keys of its own.\n"
    for settings in schema["properties"]["objective"]["anyOf"]:
        if "properties" in settings:
            name = settings["properties"].pop("name")["const"]
            text += f"\n### objective: {name}\n\n{_plain(settings['description'])}\n\n"
            columns = ("key", "what it takes", "default", "meaning")
            text += table(columns, _keys_of(schema, settings, ""))
    for section, value in schema["properties"].items():
        definition = _definition(schema, value)
        if definition and "properties" in definition:
            text += f"\n## {section}\n\n{_plain(definition.get('description', ''))}\n\n"
            text += table(
                ("key", "what it takes", "default", "meaning"),
                _keys_of(schema, definition, f"{section}."),
            )
    return text


def _definition(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any] | None:
    for each in (value, *value.get("anyOf", ())):
        for name in (each.get("$ref"), *(one.get("$ref") for one in each.get("anyOf", ()))):
            if name:
                return dict(schema["$defs"][name.split("/")[-1]])
    return None


def _keys_of(schema: dict[str, Any], of: dict[str, Any], before: str) -> list[list[str]]:
    rows = []
    for name, value in of["properties"].items():
        default = value.get("default", "required" if name in of.get("required", ()) else "")
        if _definition(schema, value):
            default = ""
        section = _definition(schema, value) or {}
        meaning = _plain(value.get("description") or section.get("description", ""))
        rows.append(
            [
                f"`{before}{name}`",
                _kind(value),
                "" if default in ("", None, []) else f"`{_said(default)}`",
                meaning,
            ]
        )
    return rows


def _said(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _kind(value: dict[str, Any]) -> str:
    """`number`, `true or false`, or the words that a key takes."""
    if "enum" in value:
        return ", ".join(f"`{_said(word)}`" for word in value["enum"])
    if "const" in value:
        return f"`{_said(value['const'])}`"
    if "anyOf" in value:
        kinds = [_kind(each) for each in value["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    if "$ref" in value:
        return "a section"
    kind = value.get("type", "")
    names = {
        "boolean": "`true` or `false`",
        "integer": "whole number",
        "object": "mapping",
        "string": "text",
    }
    return f"list of {_kind(value['items'])}" if kind == "array" else names.get(kind, kind)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# ---- verbs ----


def verbs() -> str:
    """The help of every verb."""
    text = "# Verbs\n\n" + NOTE
    for verb, summary in VERBS.items():
        parser = build_parser([verb])
        (choices,) = (
            action.choices
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        text += f"## farthing {verb}\n\n{summary[0].upper()}{summary[1:]}.\n\n"
        rows = []
        for action in choices[verb]._actions:
            names = ", ".join(action.option_strings) or action.dest
            shown = action.metavar or (
                action.dest.upper() if action.option_strings and action.nargs != 0 else ""
            )
            words = " ".join(shown) if isinstance(shown, tuple) else str(shown)
            taken = f"{names} {words}".strip() if action.option_strings else words or names
            if "--help" not in names and action.help != argparse.SUPPRESS:
                rows.append([f"`{taken}`", _plain((action.help or "").replace("%%", "%"))])
        text += table(("argument", "meaning"), rows) + "\n"
    return text


# ---- models ----


def models() -> str:
    """What can be trained, how, and how well it is known."""
    text = "# Models and methods\n\n" + NOTE
    text += (
        "farthing trains any model that transformers loads as `AutoModelForCausalLM`,"
        " `AutoModelForSeq2SeqLM` or `AutoModelForSequenceClassification`. It refuses models whose"
        " answer to a text depends on the texts beside it.\n\n"
        "- **Plan**: `exact` families are counted weight by weight from a table. For others,"
        " farthing counts the weights on the model's own code, assumes usual layers, and gives"
        " wider ranges.\n"
        "- **Trained**: tasks in which a small model of the family was trained on a CPU, with the"
        " losses and gradients of transformers (`bench/every_family.py`). On a GPU only Llama was"
        " trained, on one H100.\n"
        "- **Packed**: documents lie end to end without padding.\n"
        "- **Chunked loss**: the logits of the whole vocabulary are never all in memory.\n\n"
    )
    causal, seq2seq = KNOWN_HEADS["causal-lm"], KNOWN_HEADS["seq2seq"]
    trained: dict[str, str] = {}
    for task, names in PADS_SAFELY.items():
        for name in names | PACKED.get(task, frozenset()):
            trained[name] = f"{trained[name]}, {task}" if name in trained else task
    all_packed = frozenset[str]().union(*PACKED.values())
    known = FAMILIES.keys() | all_packed | causal | seq2seq
    rows = [
        [
            f"`{name}`",
            "exact" if name in FAMILIES else "wider",
            trained.get(name, ""),
            _yes(name in all_packed),
            _yes(name in causal | seq2seq),
        ]
        for name in sorted(known)
    ]
    text += table(("model_type", "plan", "trained", "packed", "chunked loss"), rows)
    others = ", ".join(f"`{name}`" for name in sorted(trained.keys() - known))
    text += f"\nAlso trained, padded and planned with wider ranges: {others}.\n"
    text += "\n## Methods\n\n"
    text += table(
        ("method", "what is trained", "on a CPU", "on a GPU"),
        [
            [
                "`full`",
                "every weight; fp32 masters, bf16 or fp16 compute",
                "tested",
                "one H100: Llama of 1B",
            ],
            [
                "`lora`",
                "adapters on a frozen base; DoRA and rsLoRA by their keys",
                "tested",
                "one H100: Llama of 1B and 8B",
            ],
            [
                "`qlora`",
                "adapters on a base in 4 bits (NF4, bitsandbytes)",
                "tested with its CPU side",
                "tests of its parts on one H100",
            ],
        ],
    )
    return text


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""


# ---- GPUs and providers ----


def gpu_sizes() -> str:
    """For 7B to 70B and each method: the smallest GPU that fits and the cheapest machine."""
    newest = max(date.fromisoformat(row["date"]) for row in _facts("prices"))
    now = datetime.combine(newest, time(12))
    text = "# A GPU for each size of model\n\n" + NOTE
    text += (
        f"`farthing plan` for {N_EXAMPLES:,} examples of {MEAN_TOKENS} tokens on average, one"
        f" epoch, with the prices of {newest.isoformat()}. Memory and hours are estimates: of"
        " these GPUs farthing ran on an H100 alone. Dollars depend on your data, so plan your own"
        " job. The smallest GPU holds all weights in its own memory. Where no single GPU does, the"
        " table shows a machine with several.\n\n"
    )
    rows = []
    for size, model in SIZES.items():
        for method in ("full", "lora", "qlora"):
            rows.append([size, f"`{model}`", method, *_smallest_and_cheapest(model, method, now)])
    text += table(
        (
            *("size", "model", "method"),
            *("smallest GPU", "its time", "its dollars"),
            *("first choice", "its time", "its dollars"),
        ),
        rows,
    )
    return text


def _facts(name: str) -> list[dict[str, str]]:
    with (FACTS / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _smallest_and_cheapest(model: str, method: str, now: datetime) -> list[str]:
    job = {
        "task": "causal-lm",
        "model": model,
        "data": "data.jsonl",
        "method": method,
        "train": {"num_train_epochs": 1},
        "output_dir": "runs/page",
    }
    plan = farthing.plan(
        job,
        now=now,
        prices=FACTS / "prices.csv",
        n_examples=N_EXAMPLES,
        mean_tokens=MEAN_TOKENS,
        is_local=False,
        torch="2.13.0+cu126",
    )
    rows = [row for row in plan.view.plans if not row.memory.host_bytes]
    best, memory = plan.view.best, {name: gpu.memory_gib for name, gpu in gpus().items()}
    if best is None or not rows:
        return ["none", "", "", "none", "", ""]
    least = min(rows, key=lambda row: (row.n_gpus, memory[row.gpu], row.total_usd))
    found: list[str] = []
    for row, name in ((least, least.machine), (best, best.name)):
        where = ", weights in main memory" if row.memory.host_bytes else ""
        found += [name + where, say_seconds(row.wall_s), f"${row.total_usd:.2f}"]
    return found


def providers() -> str:
    """Who rents machines: what they have, by which terms, what they charge beside the hours."""
    text = "# Providers\n\n" + NOTE
    text += (
        "From farthing's price table and billing terms. `farthing prices --json` prints each row's"
        " source and date. An empty cell has no source.\n\n"
    )
    terms = {row["provider"]: row for row in _facts("billing")}
    prices = _facts("prices")
    rows = []
    for provider in sorted({row["provider"] for row in prices}, key=str.lower):
        own = [row for row in prices if row["provider"] == provider]
        gpu_names = sorted({row["gpu"] for row in own if row["gpu"]})
        shown = ", ".join(gpu_names[:4]) + (
            f" and {len(gpu_names) - 4} more" if len(gpu_names) > 4 else ""
        )
        kinds = ", ".join(sorted({row["kind"] for row in own}))
        term = terms.get(provider, {})
        rows.append(
            [
                provider,
                shown,
                kinds,
                _minimum(term),
                _per_gb(term, "storage"),
                _per_gb(term, "egress"),
                max(row["date"] for row in own),
            ]
        )
    names = ("provider", "GPUs", "kinds", "least that is billed", "disk", "egress", "newest price")
    return text + table(names, rows)


def _minimum(term: dict[str, str]) -> str:
    said = [f"{float(term[key]):g} s" for key in ("minimum_s",) if term.get(key)]
    words = {
        "minimum_usd": "${} at least",
        "pack_usd": "packs of ${}",
        "deposit_usd": "deposit of ${}",
    }
    return ", ".join(
        [*said, *(text.format(term[key]) for key, text in words.items() if term.get(key))]
    )


def _per_gb(term: dict[str, str], kind: str) -> str:
    key = "storage_usd_per_gb_month" if kind == "storage" else "egress_usd_per_gb"
    value = term.get(key)
    if not value:
        return ""
    if float(value) == 0:
        return "free"
    return f"${value} per GB{' and month' if kind == 'storage' else ''}"


# ---- pictures ----


def _picture(title: str, draw: Callable[[Console], None], n_lines: int) -> str:
    """What a terminal of 100 columns shows, as an SVG that fetches no font."""
    console = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    draw(console)
    text = console.export_text(styles=True, clear=True).splitlines()[:n_lines]
    for line in text:
        console.print(Text.from_ansi(line), soft_wrap=True)
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=form, unique_id="farthing")


def plan_picture() -> str:
    """`farthing plan` of a job of about ten dollars: LoRA on 8B with 200,000 chats."""
    newest = max(date.fromisoformat(row["date"]) for row in _facts("prices"))
    job = {
        "task": "causal-lm",
        "model": "meta-llama/Llama-3.1-8B",
        "data": "chats.jsonl",
        "method": "lora",
        "train": {"num_train_epochs": 2},
        "output_dir": "runs/chats",
    }
    plan = farthing.plan(
        job,
        now=datetime.combine(newest, time(12)),
        prices=FACTS / "prices.csv",
        n_examples=200_000,
        mean_tokens=450,
        is_local=False,
        torch="2.13.0+cu126",
    )
    return _picture("farthing plan job.yaml", lambda console: draw(console, brief(plan.view)), 15)


def receipt_picture() -> str:
    """The receipt of a run that was killed once, from the small files that it left:
    docs/pictures/run.
    """
    folder = FOLDER.parent / "pictures/run"
    receipt = replace(build_receipt(folder), run="runs/demo", diagnosis=None)
    return _picture(
        "farthing report runs/demo", lambda console: draw(console, receipt_report(receipt)), 16
    )


PAGES: dict[str, Callable[[], str]] = {
    "keys.md": keys,
    "verbs.md": verbs,
    "models.md": models,
    "gpus.md": gpu_sizes,
    "providers.md": providers,
    "../pictures/plan.svg": plan_picture,
    "../pictures/receipt.svg": receipt_picture,
}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
