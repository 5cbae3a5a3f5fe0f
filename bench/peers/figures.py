"""From the marks of a clock to figures, and these as text. Plain numbers only."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from common import aligned
from peers.contestant import CONTESTANTS

Table = dict[str, dict[str, Any]]
"""The rows of one workload, method and precision, by contestant."""


def rates(run: dict[str, Any], first: int, last: int) -> dict[str, float]:
    """Figures of the steps `first` to `last` (counted from 0, `last` not included).

    `run` has the marks `wall` and `cpu` [steps + 1] and the tokens `useful` and `computed` [steps]
    of a `Clock`. `useful_share` is over 1 where a shared prefix was computed once.
    """
    useful, computed = sum(run["useful"][first:last]), sum(run["computed"][first:last])
    wall_s, cpu_s = (run[name][last] - run[name][first] for name in ("wall", "cpu"))
    return {
        "wall_s": wall_s,
        "tokens_per_s": useful / wall_s,
        "tokens_per_device_s": useful / (wall_s if run["on_gpu"] else cpu_s),
        "useful_share": useful / computed,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one contestant as one row: medians, and the highest memory."""
    return {
        **{
            name: median(run["steady"][name] for run in runs)
            for name in ("tokens_per_device_s", "tokens_per_s")
        },
        "useful_share": median(run["whole"]["useful_share"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "usd": median(run["usd"] for run in runs),
        "examples_per_step": median(run["examples_per_step"] for run in runs),
        "eval_loss": mean(run["eval_loss"] for run in runs),
        "losses": {run["seed"]: run["eval_loss"] for run in runs},
        "settings": runs[-1]["settings"],
    }


def draw(table: dict[str, Any]) -> str:
    """A table of `compare`, in text: contestants with farthing's ratio to each."""
    rows, train = table["rows"], table["facts"]["train"]
    title = (
        f"\n{table['workload']}, {table['method']}, {table['precision']}: {train['examples']}"
        f" examples of {train['mean']:.0f} tokens ({train['longest']} at most),"
        f" {table['facts']['parameters'] / 1e6:.1f} M parameters"
    )
    head = ["", "tok/s", "x", "tok/dev-s", "x", "useful", "MiB", "$/run", "ex/step", "loss", ""]
    good = {name: row for name, row in rows.items() if "failed" not in row}
    lines = [title, aligned(head, [_row(name, good) for name in CONTESTANTS if name in good])]
    for name, row in rows.items():
        words = ", ".join(f"{key} {value}" for key, value in (row.get("settings") or {}).items())
        if words or "failed" in row:
            lines.append(f"  {name}: {row.get('failed') or words}")
    return "\n".join(lines)


def _row(name: str, rows: Table) -> list[str]:
    row, ours = rows[name], rows.get("farthing")

    def speed(figure: str) -> list[str]:
        ratio = f"{ours[figure] / row[figure]:.2f}" if ours and name != "farthing" else ""
        return [f"{row[figure]:.0f}", ratio]

    verdict = row["verdict"]
    words = verdict["word"]
    if verdict["difference"] is not None:
        words += f" ({verdict['difference']:+.4f}, spread {verdict['spread']:.4f})"
    return [
        CONTESTANTS[name],
        *speed("tokens_per_s"),
        *speed("tokens_per_device_s"),
        f"{row['useful_share']:.1%}",
        f"{row['peak_bytes'] / 2**20:.0f}",
        f"{row['usd']:.5f}",
        f"{row['examples_per_step']:.1f}",
        f"{row['eval_loss']:.4f}",
        f"VOID: {words}" if row["void"] else words,
    ]
