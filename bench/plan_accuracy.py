"""Hold the planner's memory and speed against what others measured.

    python bench/plan_accuracy.py FILE.csv ... [--json] [--strangers] [--write]

A FILE has the columns source, model, method, precision, quant, optimizer, seq_len, micro_batch,
grad_ckpt, gpu, n_gpu, peak_gb, tokens_per_s, notes. Each row is read into the way its code computes
(kernels, loss, dtypes, adapters) from its source and notes; a row that says too little, or does
what the planner can't express, is listed with the reason. Errors are predicted / measured - 1.

`--strangers` reads every row as if nobody had read its trainer's code, from its own words alone.
Each file is judged apart. `--write` makes `facts/estimate_errors.csv`, the ranges that plans print,
of all files together, read as strangers: for each class of models and GPUs the middle 80 % of
measured / predicted over sources, each alike, widened until it holds 80 % of each source when that
has no say in it.
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
from datetime import date
from pathlib import Path
from typing import Any

import farthing
from farthing.errors import FarthingError
from farthing.planner.memory import Memory
from farthing.planner.ranges import class_of, published_spread
from farthing.planner.speed import step_time
from plan_rows import NotExpressed, Published, every_of, read_case
from plan_stacks import GIB, memory_of, other_work

FACTS = Path(farthing.__file__).parent / "facts" / "estimate_errors.csv"
SHARE = 0.80
Row = dict[str, Any]


def predict(row: Published) -> tuple[Memory, float]:
    """(memory, tokens a second)."""
    return memory_of(row.case), step_time(other_work(row.case), row.device()).tokens_per_s


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
            memory, tokens_per_s = predict(found)
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
        meters: dict[str, Any] = {"allocated": memory.allocated, "reserved": memory.reserved}
        predicted = {**meters, "nvidia-smi": memory.on_device}[found.meter].n_bytes
        bytes_, speed = found.measured_bytes, found.measured_tokens_per_s
        of_rest = None  # of what is not certain, measured over predicted
        if bytes_:
            is_smi = found.meter == "nvidia-smi"
            certain = (memory.certain_on_device if is_smi else memory.certain).n_bytes
            rest = max(predicted - certain, 0.01 * predicted)
            of_rest = max(0.05, (bytes_ - certain) / rest)
        faster = tokens_per_s / speed if speed else None
        judged.append(
            about
            | {
                "class": class_of(*of),
                "meter": found.meter,
                "moment": memory.moment,
                "predicted_gib": predicted / GIB,
                "memory_error": predicted / bytes_ - 1 if bytes_ else None,
                "memory_times": of_rest,
                "memory_is_held": _held(of_rest, published_spread("memory", *of)),
                "predicted_tokens_per_s": tokens_per_s,
                "speed_error": faster - 1 if faster else None,
                "speed_times": faster,
                "speed_is_held": _held(faster, published_spread("speed", *of)),
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
    groups: dict[tuple[str, str, str], list[float]] = {("all", "", ""): []}
    for row in rows:
        if row[key] is not None:
            for group in (("all", "", ""), (row["source"], row["method"], row["gpu"])):
                groups.setdefault(group, []).append(row[key])
    found = []
    for (source, method, gpu), errors in groups.items():
        sizes = sorted(abs(error) for error in errors) or [math.nan]
        percents = {
            "median_percent": 100 * statistics.median(sizes),
            "p90_percent": 100 * sizes[round(0.9 * (len(sizes) - 1))],
            "bias_percent": 100 * statistics.median(errors or sizes),
        }
        about = {"source": source, "method": method, "gpu": gpu, "n": len(errors)}
        found.append(about | percents)
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
            known = f"{n} published runs of {len(errors)} trainers whose code was not read"
            held = f"{held_out(errors, wider):.0%} held with each source left out"
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
    """Print the errors of a file, and what its rows were not judged by."""
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
        right = "" if row["is_right"] else "!"
        print(f"  {words} {row['seq_len']:>8} {row['says']:9}{row['error']:+7.1%} {right}")
    reasons = Counter(row["why"] for row in result["not_expressed"])
    print(f"\nnot expressed: {sum(reasons.values())} rows")
    for why, n in reasons.most_common():
        print(f"  {n:4d}  {why}")


if __name__ == "__main__":
    main()
