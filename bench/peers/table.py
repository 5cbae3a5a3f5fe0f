"""The tables as text: one of contestants, with farthing's ratio to each, and one of what was aimed
at.
"""

from __future__ import annotations

from typing import Any

from peers.contestant import CONTESTANTS

HEAD = (
    "",
    "tok/s",
    "x",
    "tok/dev-s",
    "x",
    "dev-s/Mtok",
    "useful",
    "MiB",
    "$/run",
    "ex/step",
    "loss",
    "",
)


def draw(table: dict[str, Any]) -> str:
    """A table of `compare`, in text."""
    title = f"\n{table['workload']}, {table['method']}, {table['precision']}"
    lines = [title]
    rows = table.get("rows", {})
    if rows:
        train = table["facts"]["train"]
        lines[0] += (
            f": {train['examples']} examples of {train['mean']:.0f} tokens ({train['longest']} at"
            f" most), {table['epochs']} epoch{'s' * (table['epochs'] > 1)},"
            f" {table['facts']['parameters'] / 1e6:.1f} M parameters"
        )
        lines += _columns([HEAD, *(_row(name, rows) for name in CONTESTANTS if name in rows)])
        lines += [f"  {name}: {_settings(row)}" for name, row in rows.items() if _settings(row)]
    for target in table["targets"]:
        value = "" if target["measured"] is None else f"{target['measured']:.2f}"
        lines.append(
            f"  {target['state']:12} {target['target']}: {value} (aim {target['bound']:g})"
        )
    return "\n".join(lines)


def _row(name: str, rows: dict[str, Any]) -> tuple[str, ...]:
    row = rows[name]
    if "failed" in row:
        return (CONTESTANTS[name], "failed: " + row["failed"].splitlines()[-1][:60])
    return (
        CONTESTANTS[name],
        f"{row['per_s']:.0f}",
        _ratio(name, rows, "per_s"),
        f"{row['speed']:.0f}",
        _ratio(name, rows, "speed"),
        f"{row['device_s_per_million']:.0f}",
        f"{row['useful_share']:.1%}",
        f"{row['peak_bytes'] / 2**20:.0f}",
        f"{row['usd']:.5f}",
        f"{row['examples_per_step']:.1f}",
        f"{row['eval_loss']:.4f}",
        _verdict(row),
    )


def _ratio(name: str, rows: dict[str, Any], figure: str) -> str:
    ours = rows.get("farthing", {}).get(figure)
    return f"{ours / rows[name][figure]:.2f}" if ours and name != "farthing" else ""


def _verdict(row: dict[str, Any]) -> str:
    said = row["verdict"]
    words = said["word"]
    if said["difference"] is not None:
        words += f" ({said['difference']:+.4f}, spread {said['spread']:.4f})"
    return f"VOID: {words}" if row["void"] else words


def _settings(row: dict[str, Any]) -> str:
    if not row.get("settings") and not row.get("swept"):
        return ""
    words = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
    return f"{words or 'as they are'}{' (the best of a sweep)' if row.get('swept') else ''}"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows if len(row) == len(HEAD)) for i in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(widths[i]) if i in (0, len(HEAD) - 1) else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
