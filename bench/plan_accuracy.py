"""Hold the planner's memory and speed against what others measured.

    python bench/plan_accuracy.py FILE.csv ... [--json] [--strangers] [--write]

A FILE has the columns source, model, method, precision, quant, optimizer, seq_len, micro_batch,
grad_ckpt, gpu, n_gpu, peak_gb, tokens_per_s, notes. Each row is read into the way its code computes
(kernels, loss, dtypes, adapters) from its source and notes; a row that says too little, or does
what the planner can't express, is listed with the reason. Errors are predicted / measured - 1.

`--strangers` reads every row as if nobody had read its trainer's code, from its own words alone.
Each file is judged apart. `--write` makes `facts/estimate_errors.csv`, the ranges that plans print,
of all files together, read as strangers: for each class of models and GPUs the middle 80 % of
measured / predicted, stretched until the range of one half of the sources holds 80 % of the rows of
the other half.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farthing
from farthing.errors import FarthingError
from farthing.planner.ranges import class_of, spread_of
from farthing.planner.speed import step_time
from plan_rows import NotExpressed, every_of, read_case
from plan_stacks import GIB, memory_of, other_work

FACTS = Path(farthing.__file__).parent / "facts" / "estimate_errors.csv"
SHARE, N_HALVES = 0.80, 200
Errors = dict[str, NDArray[np.float64]]  # ln(measured / predicted) by source
Row = dict[str, Any]


def judge(rows: Iterable[dict[str, str]], *, strangers: bool = False) -> dict[str, Any]:
    """Every row of a file predicted, or listed with the reason why not."""
    judged, unexpressed, limits = [], [], []
    for number, raw in enumerate(rows, 2):
        row = {name: value or "" for name, value in raw.items() if name is not None}
        source = re.sub(r"https?://(github\.com/)?", "", row["source"]).split("/blob")[0][:40]
        try:
            if strangers:  # but whether layers are recomputed every table says
                every = every_of(row["grad_ckpt"], row["notes"].lower(), row["source"])
                row |= {"source": "a stranger", "grad_ckpt": ("no", "full", "selective")[every]}
            found = read_case(row)
            memory = memory_of(found.case)
            tokens_per_s = step_time(other_work(found.case), found.device()).tokens_per_s
        except (NotExpressed, FarthingError, ValueError) as error:
            why = str(error).splitlines()[0]
            unexpressed.append({"line": number, "model": row["model"], "why": why})
            continue
        shape, precision = found.case.shape, found.case.recipe.precision
        of = shape, found.gpu.architecture, precision
        about = {"line": number, "source": source, "model": row["model"].split("/")[-1]}
        about |= {"method": row["method"], "gpu": found.gpu.name, "seq_len": row["seq_len"]}
        if found.limit:  # what is needed, over what the GPU has: within 9 %, or too much
            error = memory.on_device.n_bytes / found.gpu.usable_bytes - 1
            is_right = error > -0.09 if found.limit == "too much" else abs(error) <= 0.09
            limits.append(about | {"says": found.limit, "error": error, "is_right": is_right})
            continue
        meter = {"nvidia-smi": "on_device"}.get(found.meter, found.meter)
        predicted = getattr(memory, meter).n_bytes
        bytes_, speed = found.measured_bytes, found.measured_tokens_per_s
        of_rest = None  # of what is not certain, measured over predicted
        if bytes_:
            is_smi = found.meter == "nvidia-smi"
            certain = (memory.certain_on_device if is_smi else memory.certain).n_bytes
            rest = max(predicted - certain, 0.01 * predicted)
            of_rest = max(0.05, (bytes_ - certain) / rest)
        faster = tokens_per_s / speed if speed else None
        about |= {"class": class_of(*of), "meter": found.meter, "moment": memory.moment}
        about |= {"predicted_gib": predicted / GIB, "predicted_tokens_per_s": tokens_per_s}
        about |= {"memory_error": predicted / bytes_ - 1 if bytes_ else None}
        about |= {"speed_error": faster - 1 if faster else None}
        for name, happened in (("memory", of_rest), ("speed", faster)):
            low, high, *_ = spread_of(name, *of, gpu="")
            is_held = None if happened is None else low <= happened <= high
            about |= {f"{name}_times": happened, f"{name}_is_held": is_held}
        judged.append(about)
    return {
        "memory": table(judged, "memory_error"),
        "speed": table(judged, "speed_error"),
        "ranges": {name: coverage(judged, name) for name in ("memory", "speed")},
        "rows": judged,
        "boundaries": limits,
        "not_expressed": unexpressed,
    }


def table(rows: Sequence[Row], key: str) -> list[Row]:
    """Of all rows, and by source, method and GPU."""
    groups: dict[tuple[str, str, str], list[float]] = {("all", "", ""): []}
    for row in rows:
        if row[key] is not None:
            for group in (("all", "", ""), (row["source"], row["method"], row["gpu"])):
                groups.setdefault(group, []).append(row[key])
    found = []
    for (source, method, gpu), errors in groups.items():
        sizes = sorted(abs(error) for error in errors) or [math.nan]
        of = {"median": statistics.median(sizes), "p90": sizes[round(0.9 * (len(sizes) - 1))]}
        of["bias"] = statistics.median(errors or sizes)
        about = {"source": source, "method": method, "gpu": gpu, "n": len(errors)}
        found.append(about | {f"{name}_percent": 100 * share for name, share in of.items()})
    return found


def coverage(rows: Sequence[Row], quantity: str) -> list[Row]:
    """How many rows the printed ranges hold: all together, and by class."""
    held: dict[str, list[bool]] = defaultdict(list)
    for row in (row for row in rows if row[f"{quantity}_is_held"] is not None):
        for name in ("all", ", ".join(row["class"])):
            held[name].append(row[f"{quantity}_is_held"])
    return [{"class": name, "n": len(of), "share": sum(of) / len(of)} for name, of in held.items()]


# ---- the table of errors ----


def width(errors: Errors) -> NDArray[np.float64]:
    """The ends of the middle `SHARE` of ln(measured / predicted). A source counts with the root of
    its rows: they are alike, and not one row.
    """
    values = np.concatenate(list(errors.values()))
    weights = np.concatenate([np.full(len(of), len(of) ** -0.5) for of in errors.values()])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    tail = (1 - SHARE) / 2
    return values[order[np.searchsorted(reached, [tail - 1e-9, 1 - tail - 1e-9])]]


def stretched(errors: Errors) -> tuple[float, float, float]:
    """(low, high, share): the range whose halves, each made of half of the sources, hold at least
    `SHARE` of the rows of the other sources, mean of drawn halves.
    """
    draw, halves = random.Random(0), []
    for _ in range(N_HALVES):
        says = set(draw.sample(sorted(errors), -(-len(errors) // 2)))
        ends = width({name: errors[name] for name in says})
        halves.append((ends, np.concatenate([errors[name] for name in errors if name not in says])))
    for times in np.arange(0.4, 3, 0.02):
        held = [((ends[0] * times <= of) & (of <= ends[1] * times)).mean() for ends, of in halves]
        if (share := float(np.mean(held))) >= SHARE:
            break
    low, high = np.exp(times * width(errors)).tolist()
    return low, high, share


def error_table(rows: Sequence[Row], today: date) -> list[list[object]]:
    """Rows of `facts/estimate_errors.csv` for the classes with three sources or more."""
    found = []
    for quantity in ("memory", "speed"):
        by_class: dict[tuple[str, ...], dict[str, list[float]]] = {}
        for row in rows:
            if row[f"{quantity}_times"] is not None:
                error, own = math.log(row[f"{quantity}_times"]), row["class"]
                for of in dict.fromkeys((own, (own[0], "", ""))):
                    by_class.setdefault(of, {}).setdefault(row["source"], []).append(error)
        for of, by_source in sorted(by_class.items(), key=lambda item: -sum(map(bool, item[0]))):
            if len(by_source) < 3:
                continue
            errors = {name: np.array(each) for name, each in by_source.items()}
            low, high, share = stretched(errors)
            n = sum(map(len, errors.values()))
            known = f"{n} published runs of {len(errors)} trainers whose code was not read"
            held = f"{share:.0%} held by the range of half of the sources"
            row = [quantity, *of, f"{low:.3g}", f"{high:.3g}", n, len(errors), known]
            found.append([*row, f"bench/plan_accuracy.py --write; {held}", today])
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
    parser.add_argument("--strangers", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = {}
    for path in asked.files:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        results[path.name] = judge(rows, strangers=asked.strangers or asked.write)
    if asked.write:
        write_errors([row for each in results.values() for row in each["rows"]], date.today())
    if asked.json:
        print(json.dumps(results, indent=1, default=str))
        return
    for name, result in results.items():
        print(f"\n# {name}")
        say(result)


def say(result: dict[str, Any]) -> None:
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
    for row in result["boundaries"]:
        words = f"{row['line']:4d} {row['model'][:24]:24} {row['method']:6} {row['gpu']:12}"
        print(f"  {words} {row['says']:9}{row['error']:+7.1%} {'' if row['is_right'] else '!'}")
    print(f"\nnot expressed: {len(result['not_expressed'])} rows")
    for why, n in Counter(row["why"] for row in result["not_expressed"]).most_common():
        print(f"  {n:4d}  {why}")


if __name__ == "__main__":
    main()
