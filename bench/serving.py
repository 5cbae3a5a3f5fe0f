"""Hold what the planner says of serving against published tokens a second.

    python bench/serving.py [--rows FILE.csv] [--json] [--list]

FILE has the columns source, date, model, gpu, n_gpus, precision, batch (empty: as many as fit),
input, output and tokens_per_s (output tokens of all streams and GPUs). Errors are |predicted /
published - 1|. A row whose one stream reads the weights faster than the memory can is refused: no
engine does that.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from farthing.models.model_config import known_config
from farthing.models.shapes import read_shape
from farthing.planner.serving import Server, Traffic
from farthing.prices.gpus import find_gpu

ROWS = Path(__file__).with_name("serving_rows.csv")


def judge(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Every row predicted, or refused with its reason."""
    judged, refused = [], []
    for number, row in enumerate(rows, 2):
        config = known_config(row["model"])
        if config is None:
            refused.append({"line": number, "why": f"no sizes of {row['model']}"})
            continue
        server = Server(
            read_shape(config), find_gpu(row["gpu"]), int(row["n_gpus"]), row["precision"]
        )
        traffic = Traffic(1.0, float(row["input"]), float(row["output"]))
        n_streams = int(row["batch"]) if row["batch"] else server.streams(traffic)
        published = float(row["tokens_per_s"])
        bound = server.n_gpus * server.gpu.bandwidth_bytes_per_s / server.weights_bytes
        if n_streams == 1 and published > bound:
            refused.append(
                {
                    "line": number,
                    "why": f"one stream reads the weights {published / bound:.1f} times too fast",
                }
            )
            continue
        if n_streams < 1:
            refused.append({"line": number, "why": "does not fit"})
            continue
        predicted = server.tokens_per_s(traffic, n_streams)
        judged.append(
            row
            | {
                "line": number,
                "n_streams": n_streams,
                "predicted": predicted,
                "error": predicted / published - 1,
            }
        )
    groups: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        for group in ("all", f"{one['source'].split(' (')[0]}, {one['gpu']}"):
            groups[group].append(one["error"])
    return {
        "table": [_summary(*item) for item in groups.items()],
        "rows": judged,
        "refused": refused,
    }


def _summary(name: str, errors: list[float]) -> dict[str, Any]:
    sizes = sorted(map(abs, errors))
    p90 = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return {
        "rows": name,
        "n": len(sizes),
        "median_percent": 100 * statistics.median(sizes),
        "p90_percent": 100 * p90,
        "bias_percent": 100 * statistics.median(errors),
    }


def main() -> None:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(
        description="serving: the planner against published tokens a second"
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--list", action="store_true", help="print every row")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with open(asked.rows, encoding="utf-8", newline="") as file:
        result = judge(list(csv.DictReader(file)))
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    for one in result["table"]:
        figures = (
            f"{one['median_percent']:7.1f} % {one['p90_percent']:7.1f} %"
            f" {one['bias_percent']:+7.1f} %"
        )
        print(f"{one['rows']:52} {one['n']:4d} {figures}")
    if asked.list:
        for row in result["rows"]:
            what = f"{row['model'][-18:]:18} {row['n_gpus']}x {row['gpu']:10} {row['precision']:5}"
            speeds = f"{row['n_streams']:5d} {row['predicted']:8.0f} / {row['tokens_per_s']:>6}"
            print(
                f"{row['line']:4d} {what} {row['input']:>6}/{row['output']:<5} {speeds}"
                f" {100 * row['error']:+6.1f} %"
            )
    for row in result["refused"]:
        print(f"refused: line {row['line']}: {row['why']}")


if __name__ == "__main__":
    main()
