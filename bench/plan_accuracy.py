"""Hold the planner's memory and speed against what others measured.

    python bench/plan_accuracy.py --measurements FILE.csv [--json] [--rows] [--all-gpus]

FILE has the columns source, model, params_b, method, precision, quant, optimizer, seq_len,
micro_batch, grad_ckpt, gpu, n_gpu, peak_gb, tokens_per_s, notes. Each row is read into the way its
code computes (kernels, loss, dtypes, adapters) from its source and notes; a row that says too
little, or does what the planner can't express, is listed with the reason.

Speed is judged twice: as predicted, and with one row of the same source and GPU calibrating the
others (each in turn; the mean error over all choices of that row). Errors are |predicted / measured
- 1|.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from farthing.errors import FarthingError
from farthing.planner.confidence import memory_error, published_error, speed_error
from farthing.planner.memory import Memory, estimate_memory
from farthing.planner.speed import device_of, step_time, work_of
from farthing.planner.types import Place
from farthing.prices.gpus import find_gpu
from farthing.prices.offers import Billing, Offer
from plan_coverage import held_by, left_out
from plan_meters import GIB
from plan_rows import Case, NotExpressed, gpu_of, read_case


def predict(case: Case) -> tuple[Memory, float]:
    """(memory, tokens a second)."""
    recipe = case.recipe.with_settings(checkpoint_every=1) if case.saves_products else case.recipe
    memory = estimate_memory(case.shape, recipe, case.largest, case.adapters)
    if case.beside_bytes:
        memory = replace(memory, parts=memory.parts | {"beside": int(case.beside_bytes)})
    work = work_of(case.shape, case.recipe, case.padded, case.mean_tokens, case.adapters)
    return memory, step_time(work, case.device()).tokens_per_s


def judge(rows: list[dict[str, str]], all_gpus: bool = False) -> dict[str, Any]:
    """Every row predicted, or listed with the reason why not."""
    judged, unexpressed, limits = [], [], []
    for number, row in enumerate(rows, 2):
        row = {name: value or "" for name, value in row.items() if name is not None}
        if not all_gpus and row["n_gpu"].strip() not in ("1", "1.0", ""):
            unexpressed.append(
                {
                    "line": number,
                    "model": row["model"],
                    "why": "more than one GPU (judged with --all-gpus)",
                }
            )
            continue
        try:
            case = read_case(row)
            memory, tokens_per_s = predict(case)
        except (NotExpressed, FarthingError, ValueError) as error:
            why = str(error).splitlines()[0]
            unexpressed.append({"line": number, "model": row["model"], "why": why})
            continue
        if case.limit:
            limits.append(_limit_row(number, row, case, memory))
            continue
        by_meter = {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes,
            "nvidia-smi": memory.total_bytes,
        }[case.meter]
        judged.append(
            {
                "line": number,
                "source": (
                    re.sub(r"https?://(github\.com/)?", "", row["source"]).split("/blob")[0][:40]
                ),
                "model": row["model"].split("/")[-1],
                "method": row["method"],
                "family": case.shape.model_type,
                "gpu": case.gpu,
                "n_gpus": case.recipe.n_gpus,
                "meter": case.meter,
                "recipe": (
                    f"{case.recipe.stack.name}, {case.recipe.micro_batch} x {row['seq_len']},"
                    f" {case.recipe.stack.loss}"
                ),
                "moment": memory.moment,
                "measured_gib": case.measured_bytes / GIB if case.measured_bytes else None,
                "predicted_gib": by_meter / GIB,
                "memory_error": by_meter / case.measured_bytes - 1 if case.measured_bytes else None,
                "measured_tokens_per_s": case.measured_tokens_per_s,
                "predicted_tokens_per_s": tokens_per_s,
                "speed_error": (
                    tokens_per_s / case.measured_tokens_per_s - 1
                    if case.measured_tokens_per_s
                    else None
                ),
            }
        )
    return {
        "memory": table(judged, "memory_error"),
        "speed": table(judged, "speed_error"),
        "speed, one row of the source calibrates": calibrated_table(judged),
        "coverage": coverage_of(judged),
        "rows": judged,
        "boundaries": limits,
        "not_expressed": unexpressed,
    }


def _limit_row(number: int, row: dict[str, str], case: Case, memory: Memory) -> dict[str, Any]:
    """A row that says what fits: what is needed, over what the GPU has. `is_right`: within 9 % of
    it, or above where it did not fit."""
    usable = gpu_of(case.gpu).usable_bytes
    error = memory.total_bytes / usable - 1
    return {
        "line": number,
        "model": row["model"].split("/")[-1],
        "method": row["method"],
        "gpu": case.gpu,
        "seq_len": row["seq_len"],
        "says": case.limit,
        "needs_gib": memory.total_bytes / GIB,
        "usable_gib": usable / GIB,
        "error": error,
        "is_right": error > -0.09 if case.limit == "too much" else abs(error) <= 0.09,
    }


def coverage_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rows the 80 % ranges hold: of sources left out, of families left out, and those that
    a plan prints today.
    """

    def place(row: dict[str, Any]) -> Place:
        offer = Offer(
            "", "", row["gpu"], 1, "", "", False, "machine_hour", 1.0, "", date.min, Billing("")
        )
        device = device_of(find_gpu(row["gpu"]), "fp32")
        assert device is not None
        return Place(offer, device, "fp32", 1)

    shipped = {"memory": memory_error, "speed": published_error}
    said = {"memory": memory_error, "speed": speed_error}
    found: dict[str, Any] = {}
    for name, error in shipped.items():
        key = f"{name}_error"
        found[name] = {
            "source left out": left_out(rows, key),
            "family left out": left_out(rows, key, "family"),
            "by facts/estimate_errors.csv": held_by(
                rows, key, lambda row, error=error: error(place(row), row["family"])
            ),  # type: ignore[misc]
            "as plans say it": held_by(
                rows, key, lambda row, error=said[name]: error(place(row), row["family"])
            ),  # type: ignore[misc]
        }
    return found


def print_coverage(found: dict[str, Any]) -> None:
    """The share of rows in their ranges."""
    for name, ways in found.items():
        whole = ways["source left out"][0] if ways["source left out"] else None
        said = (
            f": {whole['share_of_groups']:.1%}, each source alike ({whole['share']:.1%} of rows)"
            if whole
            else ""
        )
        print(f"\n80 % ranges of {name}{said}")
        for way in ("source left out", "family left out"):
            for one in ways[way]:
                held = f"{one['n_held']:4d} of {one['n']:3d} = {one['share']:.1%}"
                alike = (
                    f"; each {way.split()[0]} alike {one['share_of_groups']:.1%}"
                    if "share_of_groups" in one
                    else ""
                )
                print(f"  {way}: {one['left_out']:42} within {one['width']:6.1%}: {held}{alike}")
        for way in ("by facts/estimate_errors.csv", "as plans say it"):
            print(f"  {way}: {ways[way]['n_held']} of {ways[way]['n']} = {ways[way]['share']:.1%}")


def table(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Median and 90th percentile of the error: of all rows, and by source, method and GPU."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            for group in (("all", "", ""), (row["source"], row["method"], row["gpu"])):
                groups[group].append(row[key])
    return [
        _summary(group, errors)
        for group, errors in sorted(groups.items(), key=lambda item: item[0] != ("all", "", ""))
    ]


def calibrated_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for tokens/s when each row in turn sets the pace for the others of its source and
    GPU.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["speed_error"] is not None:
            groups[row["source"], row["gpu"]].append(row)
    all_errors, found = [], []
    for (source, gpu), members in sorted(groups.items()):
        if len(members) < 2:
            continue
        errors = []
        for reference in members:
            factor = 1 + reference["speed_error"]
            errors += [
                (1 + row["speed_error"]) / factor - 1 for row in members if row is not reference
            ]
        all_errors += errors
        found.append(_summary((source, "", gpu), errors))
    return [_summary(("all", "", ""), all_errors), *found] if all_errors else []


def _summary(group: tuple[str, str, str], errors: list[float]) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "source": group[0],
        "method": group[1],
        "gpu": group[2],
        "n": len(sizes),
        "median_percent": 100 * statistics.median(sizes),
        "p90_percent": 100 * sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
        "bias_percent": 100 * statistics.median(errors),
    }


def main() -> None:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(
        description="the planner's memory and speed against published measurements"
    )
    parser.add_argument("--measurements", type=Path, required=True)
    parser.add_argument("--all-gpus", action="store_true", help="rows with several GPUs too")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with open(asked.measurements, encoding="utf-8", newline="") as file:
        result = judge(list(csv.DictReader(file)), asked.all_gpus)
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("memory", "speed", "speed, one row of the source calibrates"):
        print(f"\n{name}")
        print(
            f"  {'source':42}{'method':8}{'GPU':14}{'rows':>6}{'median':>10}{'p90':>9}{'bias':>9}"
        )
        for row in result[name]:
            print(
                f"  {row['source']:42}{row['method']:8}{row['gpu']:14}{row['n']:6d}{row['median_percent']:8.1f}"  # noqa: E501
                f" %{row['p90_percent']:7.1f} %{row['bias_percent']:+7.1f} %"
            )
    print_coverage(result["coverage"])
    if asked.rows:
        print("\nrows")
        for row in result["rows"]:
            gib = f"{row['predicted_gib']:6.1f} / {row['measured_gib'] or 0:6.1f} GiB"
            gib += f" {100 * (row['memory_error'] or 0):+6.1f} %"
            speed = (
                f"{row['predicted_tokens_per_s']:8.0f} / {row['measured_tokens_per_s'] or 0:8.0f}"
                " tok/s"
            )
            error = 100 * (row["speed_error"] or 0)
            print(
                f"  {row['line']:4d} {row['model'][:20]:20} {row['method']:5}"
                f" {row['recipe'][:34]:34} {row['moment'][:9]:9} {gib}  {speed} {error:+6.1f} %"
            )
    if result["boundaries"]:
        print(
            "\nboundaries: what a row says to be the longest that fits, or too much; what it needs"
            " over what there is"
        )
        for row in result["boundaries"]:
            model = f"{row['line']:4d} {row['model'][:24]:24} {row['method']:6} {row['gpu']:12}"
            needs = (
                f"{row['needs_gib']:7.1f} / {row['usable_gib']:5.1f} GiB"
                f" {100 * row['error']:+6.1f} %"
            )
            print(
                f"  {model} {row['seq_len']:>8} {row['says']:9}{needs}"
                f" {'' if row['is_right'] else '!'}"
            )
    reasons = Counter(row["why"] for row in result["not_expressed"])
    print(f"\nnot expressed: {sum(reasons.values())} rows")
    for why, n in reasons.most_common():
        print(f"  {n:4d}  {why}")


if __name__ == "__main__":
    main()
