"""Hold the planner's memory and speed against what others measured.

    python bench/plan_accuracy.py FILE.csv ... [--json] [--rows] [--strangers] [--write]

A FILE has the columns source, model, method, precision, quant, optimizer, seq_len, micro_batch,
grad_ckpt, gpu, n_gpu, peak_gb, tokens_per_s, notes. Each row is read into the way its code computes
(kernels, loss, dtypes, adapters) from its source and notes; a row that says too little, or does
what the planner can't express, is listed with the reason. Errors are predicted / measured - 1.

`--strangers` reads every row as if nobody had read its trainer's code, from its own words alone.
`--write` makes `facts/estimate_errors.csv`, the ranges that plans print, of all files, read as
strangers: for each class of models and GPUs the middle 80 % of measured / predicted over sources,
each alike, widened until it holds 80 % of each source when that has no say in it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import farthing
from farthing.errors import FarthingError
from farthing.models.blocks import Block, block_of
from farthing.models.shapes import Shape
from farthing.planner.memory import Memory, estimate_memory
from farthing.planner.ranges import class_of, published_spread
from farthing.planner.speed import step_time
from farthing.planner.work import work_of
from farthing.prices.gpus import find_gpu
from plan_rows import NotExpressed, Published, every_of, gpu_of, read_case
from plan_stacks import GIB

FACTS = Path(farthing.__file__).parent / "facts" / "estimate_errors.csv"
SHARE = 0.80
Row = dict[str, Any]


def predict(row: Published) -> tuple[Memory, float]:
    """(memory, tokens a second)."""
    case = row.case
    if row.saves_products:
        case = replace(case, recipe=case.recipe.with_settings(checkpoint_every=1))
    memory = estimate_memory(case)
    if row.beside_bytes:
        memory = replace(memory, parts=memory.parts | {"beside": int(row.beside_bytes)})
    return memory, step_time(work_of(row.case), row.device()).tokens_per_s


def block_of_others(shape: Shape) -> Block:
    """A layer as other trainers compute it: gelu_new is a chain, in fp32 under autocast."""
    block = block_of(shape)
    more = 6 if shape.model_type == "gpt2" else 7 if "wi_1" in str(shape.weights) else 0
    return block._replace(activation=block.activation + more)


def judge(rows: Iterable[dict[str, str]], *, strangers: bool = False) -> dict[str, Any]:
    """Every row predicted, or listed with the reason why not."""
    judged, unexpressed, limits = [], [], []
    for number, raw in enumerate(rows, 2):
        row = {name: value or "" for name, value in raw.items() if name is not None}
        source = re.sub(r"https?://(github\.com/)?", "", row["source"]).split("/blob")[0][:40]
        try:
            if strangers:  # but whether layers are recomputed every table says
                every = every_of(row["grad_ckpt"], row["notes"].lower(), row["source"])
                row |= {"source": "a stranger", "grad_ckpt": ("no", "full", "selective")[every]}
            with mock.patch("farthing.planner.recipe.block_of", block_of_others):
                found = read_case(row)
                memory, tokens_per_s = predict(found)
        except (NotExpressed, FarthingError, ValueError) as error:
            why = str(error).splitlines()[0]
            unexpressed.append({"line": number, "model": row["model"], "why": why})
            continue
        case, recipe = found.case, found.case.recipe
        about = {
            "line": number,
            "source": source,
            "model": row["model"].split("/")[-1],
            "method": row["method"],
            "gpu": found.gpu,
            "n_gpus": recipe.n_gpus,
            "seq_len": row["seq_len"],
        }
        if found.limit:  # what is needed, over what the GPU has: within 9 %, or too much
            error = memory.on_device.n_bytes / gpu_of(found.gpu).usable_bytes - 1
            is_right = error > -0.09 if found.limit == "too much" else abs(error) <= 0.09
            limits.append(about | {"says": found.limit, "error": error, "is_right": is_right})
            continue
        meters: dict[str, Any] = {"allocated": memory.allocated, "reserved": memory.reserved}
        predicted = {**meters, "nvidia-smi": memory.on_device}[found.meter].n_bytes
        architecture = find_gpu(found.gpu).architecture
        ranges = [
            published_spread(quantity, case.shape, architecture, recipe.precision)
            for quantity in ("memory", "speed")
        ]
        bytes_, speed = found.measured_bytes, found.measured_tokens_per_s
        of_rest = None  # of what is not certain, measured over predicted
        if bytes_:
            certain = memory.certain.n_bytes
            if found.meter == "nvidia-smi":
                certain = memory.certain_on_device.n_bytes
            rest = predicted - certain
            of_rest = max(0.05, (bytes_ - certain) / max(rest, 0.01 * predicted))
        judged.append(
            about
            | {
                "class": class_of(case.shape, architecture, recipe.precision),
                "meter": found.meter,
                "moment": memory.moment,
                "measured_gib": bytes_ / GIB if bytes_ else None,
                "predicted_gib": predicted / GIB,
                "memory_error": predicted / bytes_ - 1 if bytes_ else None,
                "memory_times": of_rest,
                "memory_is_held": _held(of_rest, ranges[0]),
                "measured_tokens_per_s": speed,
                "predicted_tokens_per_s": tokens_per_s,
                "speed_error": tokens_per_s / speed - 1 if speed else None,
                "speed_times": tokens_per_s / speed if speed else None,
                "speed_is_held": _held(tokens_per_s / speed if speed else None, ranges[1]),
            }
        )
    return {
        "memory": table(judged, "memory_error"),
        "speed": table(judged, "speed_error"),
        "ranges": {name: coverage(judged, name) for name in ("memory", "speed")},
        "rows": judged,
        "boundaries": limits,
        "not_expressed": unexpressed,
    }


def _held(happened: float | None, spread: Any) -> bool | None:
    """Whether the range that a plan prints holds a row: measured over predicted."""
    return None if happened is None else bool(spread.low <= happened <= spread.high)


def table(rows: Sequence[Row], key: str) -> list[Row]:
    """Median, 90th percentile and bias of all rows, and by source, method and GPU."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            for group in (("all", "", ""), (row["source"], row["method"], row["gpu"])):
                groups[group].append(row[key])
    found = []
    for group, errors in sorted(groups.items(), key=lambda item: item[0] != ("all", "", "")):
        sizes = sorted(abs(error) for error in errors)
        found.append(
            dict(zip(("source", "method", "gpu"), group, strict=True))
            | {
                "n": len(sizes),
                "median_percent": 100 * statistics.median(sizes),
                "p90_percent": 100 * sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
                "bias_percent": 100 * statistics.median(errors),
            }
        )
    return found


def coverage(rows: Sequence[Row], quantity: str) -> list[Row]:
    """How many rows the printed ranges hold: all together, and by class."""
    held: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        is_held = row[f"{quantity}_is_held"]
        if is_held is not None:
            for name in ("all", ", ".join(row["class"])):
                held[name].append(is_held)
    return [{"class": name, "n": len(of), "share": sum(of) / len(of)} for name, of in held.items()]


# ---- the table of errors ----


def width(errors: dict[str, list[float]], share: float = SHARE) -> tuple[float, float]:
    """The middle `share` of ln(measured / predicted), each source alike; with few sources more, by
    Kish's effective number and the correction for a finite sample (Vovk et al. 2005).
    """
    n = sum(1 / len(errors) / len(group) for group in errors.values() for _ in group)
    weighted = sorted((e, n / len(errors) / len(of)) for of in errors.values() for e in of)
    effective = 1 / sum(weight * weight for _, weight in weighted)
    tail = max(0.0, (1 - share * (effective + 1) / effective) / 2)
    return _quantile(weighted, tail), _quantile(weighted, 1 - tail)


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= share - 1e-9:
            return value
    return weighted[-1][0]


def held_out(errors: dict[str, list[float]], wider: float) -> float:
    """Share of rows held when each source has no say in its range, each source alike."""
    shares = []
    for name, own in errors.items():
        low, high = width({other: of for other, of in errors.items() if other != name})
        shares.append(sum(wider * low <= e <= wider * high for e in own) / len(own))
    return statistics.mean(shares)


def error_table(rows: Sequence[Row], today: date) -> list[list[object]]:
    """Rows of `facts/estimate_errors.csv` for the classes with three sources or more."""
    found = []
    for quantity in ("memory", "speed"):
        by_class: dict[tuple[str, ...], dict[str, list[float]]] = {}
        for row in rows:
            if row[f"{quantity}_times"] is None:
                continue
            error = math.log(row[f"{quantity}_times"])
            own = row["class"]
            for of in dict.fromkeys((own, (own[0], "", ""))):
                by_class.setdefault(of, {}).setdefault(row["source"], []).append(error)
        for of, errors in sorted(by_class.items(), key=lambda item: -sum(map(bool, item[0]))):
            if len(errors) < 3:
                continue
            wider = 1.0
            while held_out(errors, wider) < SHARE - 0.005 and wider < 3:
                wider += 0.02
            low, high = (math.exp(wider * edge) for edge in width(errors))
            n = sum(map(len, errors.values()))
            words = f"{n} published runs of {len(errors)} trainers whose code was not read"
            found.append(
                [
                    quantity,
                    *of,
                    f"{low:.3g}",
                    f"{high:.3g}",
                    n,
                    len(errors),
                    words,
                    f"bench/plan_accuracy.py --write; {held_out(errors, wider):.0%} held "
                    "with each source left out",
                    today,
                ]
            )
    return found


def write_errors(rows: Sequence[Row], today: date) -> None:
    """Replace the rows that this command makes; those of other evidence stay, after them."""
    with open(FACTS, encoding="utf-8", newline="") as file:
        head, *old = list(csv.reader(file))
    kept = [row for row in old if "plan_accuracy" not in row[9]]
    with open(FACTS, "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerows([head, *error_table(rows, today), *kept])


def main() -> None:
    parser = argparse.ArgumentParser(description="the planner against published measurements")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--strangers", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows: list[dict[str, str]] = []
    for path in asked.files:
        with open(path, encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    result = judge(rows, strangers=asked.strangers or asked.write)
    if asked.write:
        write_errors(result["rows"], date.today())
    if asked.json:
        print(json.dumps(result, indent=1, default=str))
        return
    for name in ("memory", "speed"):
        print(f"\n{name:44}{'method':8}{'GPU':14}{'rows':>6}{'median':>10}{'p90':>9}{'bias':>9}")
        for row in result[name]:
            print(
                f"  {row['source']:42}{row['method']:8}{row['gpu']:14}{row['n']:6d}"
                f"{row['median_percent']:8.1f} %{row['p90_percent']:7.1f} %"
                f"{row['bias_percent']:+7.1f} %"
            )
        for one in result["ranges"][name]:
            print(f"  range holds {one['share']:6.1%} of {one['n']:4d} rows: {one['class']}")
    for row in result["rows"] if asked.rows else ():
        errors = [f"{100 * (row[f'{n}_error'] or 0):+7.1f} %" for n in ("memory", "speed")]
        print(
            f"  {row['line']:4d} {row['model'][:24]:24} {row['method']:6} {row['gpu']:12}", *errors
        )
    for row in result["boundaries"]:
        words = f"{row['line']:4d} {row['model'][:24]:24} {row['method']:6} {row['gpu']:12}"
        right = "" if row["is_right"] else "!"
        print(f"  {words} {row['seq_len']:>8} {row['says']:9}{100 * row['error']:+6.1f} % {right}")
    reasons = Counter(row["why"] for row in result["not_expressed"])
    print(f"\nnot expressed: {sum(reasons.values())} rows")
    for why, n in reasons.most_common():
        print(f"  {n:4d}  {why}")


if __name__ == "__main__":
    main()
