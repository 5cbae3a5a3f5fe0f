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
CALLS = (
    "SFTConfig",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "UnslothTrainingArguments",
    "LoraConfig",
    "BitsAndBytesConfig",
    "SFTTrainer",
    "load_dataset",
)


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
        if name in CALLS:
            found += [f"{name}.{k.arg}" for k in node.keywords if k.arg]  # type: ignore[attr-defined]
    return found


def accounted(imported: Imported, path: Path) -> tuple[list[str], list[str]]:
    """(keys that the importer has dealt with, keys that are lost)."""
    dealt = set(imported.lines)
    if path.suffix in (".py", ".ipynb"):
        without_number = {
            key.partition("#")[0] + "." + key.rpartition(".")[2] if "#" in key else key
            for key in dealt
        }
        without_depth = without_number | {".".join(key.split(".")[:2]) for key in without_number}
        is_by_command = not any("." in key and key[0].isupper() for key in dealt)
        wanted = [] if is_by_command else keys_of(path)
        return sorted(dealt), sorted({key for key in wanted if key not in without_depth})
    parents = {key for line in dealt for key in _prefixes(line)}
    lost = {key for key in keys_of(path) if key not in dealt and key not in parents}
    return sorted(dealt), sorted(key for key in lost if not dealt & set(_prefixes(key)))


def _prefixes(key: str) -> list[str]:
    return [key[:i] for i, sign in enumerate(key) if sign in ".["]


def reads_back(imported: Imported, path: Path, folder: Path) -> str:
    """Why the written job is not accepted; nothing where it is."""
    job = folder / "job.yaml"
    job.write_text(job_text(imported, path.name), encoding="utf-8")
    try:
        load_job(job)
    except FarthingError as error:
        return str(error)
    return ""


def look_at(path: Path, folder: Path) -> dict[str, Any]:
    """One file's row."""
    row: dict[str, Any] = {"file": str(path)}
    try:
        imported = import_file(path)
    except FarthingError as error:
        return row | {"unread": str(error).splitlines()[0]}
    dealt, lost = accounted(imported, path)
    blockers = [f"{line.key}: {line.why}" for line in imported.blockers]
    return row | {
        "source": imported.source,
        "n_keys": len(dealt) + len(lost),
        "mapped": len(imported.mapped),
        "named": len(imported.named),
        "lost": lost,
        "unknown": [line.key for line in imported.named if line.why == UNKNOWN],
        "differs": [line.key for line in imported.named if line.effect == "differs"],
        "not_trainable": blockers,
        "job_refused": "" if blockers else reads_back(imported, path, folder),
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
    total = {
        "files": len(rows),
        "read": len(read),
        "unread": len(rows) - len(read),
        "by_source": dict(Counter(row["source"] for row in read)),
        "mapped": sum(row["mapped"] for row in read),
        "named": sum(row["named"] for row in read),
        "lost": sum(len(row["lost"]) for row in read),
        "unknown": dict(Counter(key for row in read for key in row["unknown"]).most_common()),
        "not_trainable": sum(bool(row["not_trainable"]) for row in read),
        "jobs_accepted": sum(not row["not_trainable"] and not row["job_refused"] for row in read),
        "jobs_refused": sum(bool(row["job_refused"]) for row in read),
    }
    if arguments.json:
        print(json.dumps({"total": total, "files": rows}, indent=1))
    else:
        for row in rows:
            if row.get("unread") or row.get("lost") or row.get("job_refused"):
                print(
                    row["file"],
                    row.get("unread") or f"lost {row['lost']} refused {row['job_refused']}",
                )
        print(json.dumps(total, indent=1))
    return 1 if total["lost"] or total["jobs_refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
