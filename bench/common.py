"""What benches share: their command line, jobs as a person writes them, and JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml


def command(
    doc: str | None, count: str = "--seeds", n: int = 10, **of_json: Any
) -> argparse.ArgumentParser:
    """A parser with how many seeds (`count`, `n` by default), the first of them, and --json."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(count, dest="n", type=int, default=n, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
    parser.add_argument("--json", **of_json or {"action": "store_true"})
    return parser


def seeds_of(arguments: argparse.Namespace) -> range:
    """The seeds that were asked for."""
    return range(arguments.first_seed, arguments.first_seed + arguments.n)


def write_job(folder: Path, text: str, name: str = "job", **sections: Any) -> Path:
    """The YAML of `text` with `sections` merged into it; a key that is None is left out."""
    job = yaml.safe_load(text)
    for section, given in sections.items():
        if isinstance(given, dict):
            merged = {**job.get(section, {}), **given}
            given = {key: value for key, value in merged.items() if value is not None}
        job[section] = given
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def lines_of(path: Path, key: str = "") -> list[dict[str, Any]]:
    """The rows of a JSONL file, those that have a key; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return [row for row in map(json.loads, lines) if not key or key in row]


def play(cases: Iterable[Any], of_one: Callable[[Any], dict[str, Any]], as_json: bool) -> int:
    """Try each case, whose row says with `ok` whether all is well and tells of itself in `said`;
    one object of JSON at the end, or the sum. The exit code: 1 where one is not.
    """
    rows = []
    for case in cases:
        rows.append(of_one(case))
        verdict = "" if rows[-1]["ok"] else "NOT OK: "
        print(verdict + rows[-1]["said"], file=sys.stderr if as_json else sys.stdout, flush=True)
    n_bad = sum(not row["ok"] for row in rows)
    print(json.dumps({"n_bad": n_bad, "cases": rows}) if as_json else f"{len(rows)}, {n_bad} bad")
    return 1 if n_bad or not rows else 0


def aligned(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Columns of equal width, words to the left and numbers to the right."""
    every = [list(line) for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if text[:1] in tuple("0123456789-+") else text.ljust(width)
            for text, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in every
    )
