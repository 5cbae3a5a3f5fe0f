"""What the importers make of a folder of other tools' configurations: keys mapped, named, lost.

    python bench/import_matrix.py --configs DIR [--json]

The keys of each file are counted here, apart from the importer: the leaves of a YAML or JSON file;
for a script the keyword arguments of its configuration calls, or else the flags of its command
lines. A key is lost that is neither mapped nor named. A file that can't be read is listed with the
reason; each job that is written is read back as a job.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from farthing.config.importers.job_text import job_text
from farthing.config.importers.recognise import import_file
from farthing.config.importers.tables import UNKNOWN, Imported
from farthing.config.load import load_job
from farthing.errors import FarthingError

ENDINGS = (".yaml", ".yml", ".json", ".py", ".ipynb", ".sh")
CALLS = """SFTConfig TrainingArguments Seq2SeqTrainingArguments UnslothTrainingArguments LoraConfig
BitsAndBytesConfig SFTTrainer load_dataset"""


def leaves(value: Any, at: str = "") -> list[str]:
    """Dotted names of all leaves of a mapping."""
    if isinstance(value, dict) and value:
        return [
            leaf
            for key, each in value.items()
            for leaf in leaves(each, f"{at}.{key}" if at else str(key))
        ]
    if isinstance(value, list) and value and all(isinstance(each, dict) and each for each in value):
        return [leaf for i, each in enumerate(value) for leaf in leaves(each, f"{at}[{i}]")]
    return [at]


def keys_of(path: Path) -> list[str]:
    """The keys that an importer has to account for; for scripts only names, as a call may be read
    once.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".yaml", ".yml"):
        return leaves(yaml.safe_load(text))
    if path.suffix == ".json":
        return leaves(json.loads(text))
    if path.suffix == ".sh":
        return []
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join("".join(cell["source"]) for cell in cells).split("\n")
        text = "\n".join("pass" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if name in CALLS.split():
            found += [f"{name}.{k.arg}" for k in node.keywords if k.arg]  # type: ignore[attr-defined]
    return found


def lost_of(imported: Imported, path: Path) -> list[str]:
    """Keys that the importer has not dealt with."""
    dealt = set(imported.lines)
    if path.suffix in (".py", ".ipynb"):
        if not any("." in key and key[0].isupper() for key in dealt):  # read by its command
            return []
        dealt = {re.sub(r"#.*\.", ".", key) for key in dealt}
        dealt |= {".".join(key.split(".")[:2]) for key in dealt}
        return sorted(set(keys_of(path)) - dealt)
    parents = {key for line in dealt for key in _prefixes(line)}
    lost = set(keys_of(path)) - dealt - parents
    return sorted(key for key in lost if not dealt & set(_prefixes(key)))


def _prefixes(key: str) -> list[str]:
    return [key[:i] for i, sign in enumerate(key) if sign in ".["]


def look_at(path: Path, folder: Path) -> dict[str, Any]:
    """One file's row."""
    row: dict[str, Any] = {"file": str(path)}
    try:
        imported = import_file(path)
    except FarthingError as error:
        return row | {"unread": str(error).splitlines()[0]}
    refused = []
    if not imported.blockers:
        job = folder / "job.yaml"
        job.write_text(job_text(imported, path.name), encoding="utf-8")
        try:
            load_job(job)
        except FarthingError as error:
            refused = [str(error)]
    return row | {
        "source": imported.source,
        "mapped": [line.key for line in imported.mapped],
        "named": [line.key for line in imported.named],
        "lost": lost_of(imported, path),
        "unknown": [line.key for line in imported.named if line.why == UNKNOWN],
        "not_trainable": [f"{line.key}: {line.why}" for line in imported.blockers],
        "job_refused": refused,
    }


def main() -> int:
    """Prints the table; 1 where a key is lost or a job is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    files = sorted(p for p in arguments.configs.rglob("*") if p.suffix in ENDINGS and p.is_file())
    with tempfile.TemporaryDirectory() as folder:
        rows = [look_at(path, Path(folder)) for path in files]
    read = [row for row in rows if "source" in row]
    total: dict[str, Any] = {"files": len(rows), "unread": len(rows) - len(read)}
    total["by_source"] = Counter(row["source"] for row in read)
    for name in ("mapped", "named", "lost"):
        total[name] = sum(len(row[name]) for row in read)
    total["unknown"] = Counter(key for row in read for key in row["unknown"])
    for name in ("not_trainable", "job_refused"):
        total[name] = sum(bool(row[name]) for row in read)
    for row in [] if arguments.json else rows:
        if why := row.get("unread") or [*row["lost"], *row["job_refused"]]:
            print(row["file"], why)
    print(json.dumps({"total": total, "files": rows} if arguments.json else total, indent=1))
    return 1 if total["lost"] or total["job_refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
