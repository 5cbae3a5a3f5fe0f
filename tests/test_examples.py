"""The pages of examples/, run as they are written: scaled down, offline, folders for buckets.

A block that begins with `# needs` is not run. A line `# prints TEXT` says what its block prints.
"""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from farthing.tiny import write_jsonl
from workshop import TOPICS, make_folder, read_json, rows_of

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = ROOT / "docs/notebooks/complaints.ipynb"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Its blocks that need neither an account nor the network."""
    found = BLOCK.findall(page.read_text())
    return [text for text in found if not text.startswith("# needs")]


def write_csv(path: Path, rows: list[dict[str, str]]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def complaints(folder: Path):
    """As the bureau publishes them, with a complaint without a text."""
    rows = [
        {"Consumer complaint narrative": f"{row['text']} {i}", "Sub-issue": row["label"]}
        for i, row in enumerate(rows_of("bert", 80))
    ]
    empty = {"Consumer complaint narrative": "", "Sub-issue": "food"}
    write_csv(folder / "complaints.csv", [*rows, empty])


def restaurants(folder: Path):
    rows = [{"mr": row["input"], "ref": row["target"]} for row in rows_of("t5", 72)]
    write_csv(folder / "bucket/e2e/train.csv", rows[:64])
    write_csv(folder / "bucket/e2e/devel.csv", rows[64:])


def prompts(folder: Path):
    write_jsonl(folder / "train.jsonl", rows_of("llama", 96))


Scale = tuple[str, Callable[[Path], object], Mapping[str, str]]
"""Family of the small model, what makes the data, and words to replace in files."""
SCALED: dict[str, Scale] = {
    "flan-t5-on-vertex": (
        "t5",
        restaurants,
        {"google/flan-t5-base": "./small", "gs://my-bucket": "./bucket"},
    ),
    "bill-before-the-start": ("", lambda folder: None, {}),
    "spot-with-a-store": (
        "llama",
        prompts,
        {"Qwen/Qwen2.5-0.5B": "./small", "s3://my-bucket": "./bucket"},
    ),
    "own-config": ("llama", prompts, {"Qwen/Qwen2.5-0.5B": "./small"}),
    "complaints-in-214-classes": ("bert", complaints, {"FacebookAI/xlm-roberta-large": "./small"}),
}


def scaled(name: str, folder: Path) -> Path:
    """A copy of an example with a small model and small data."""
    family, make_data, changes = SCALED[name]
    copy = folder / name
    shutil.copytree(EXAMPLES / name, copy)
    if family:
        make_folder(copy / "small", family, pretrained=True)
    make_data(copy)
    for path in [*copy.glob("*.yaml")]:
        text = path.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    return copy


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "c")}


def run(block: str, folder: Path) -> str:
    """What a block prints; every command of it ends with 0."""
    done = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return " ".join((done.stdout + done.stderr).split())


def check(block: str, run: Callable[[str], str]):
    """Run a block; every `# prints` line is in the output of the command above it."""
    said = ""
    for line in block.splitlines():
        if line.startswith("# prints "):
            assert line.removeprefix("# prints ") in said, said
        else:
            said = run(line)


def test_every_example_has_a_page_and_a_test():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == set(SCALED)
    for name in SCALED:
        words = (EXAMPLES / name / "README.md").read_text().split()
        assert len(words) <= 400, f"{name}: {len(words)} words, commands included"


@pytest.mark.slow
def test_the_bill_before_the_start_prints_what_its_page_says(monkeypatch, cli):
    monkeypatch.chdir(EXAMPLES / "bill-before-the-start")
    for block in blocks(Path("README.md")):
        check(block, lambda line: " ".join(cli.out(*shlex.split(line)[1:]).split()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCALED if name != "bill-before-the-start"])
def test_an_example_runs_as_written(name, tmp_path):
    folder = scaled(name, tmp_path)
    for block in blocks(folder / "README.md"):
        check(block, partial(run, folder=folder))
    run_folder = folder / "checkpoints" if name == "own-config" else next(folder.glob("runs/*"))
    found = read_json(run_folder / "receipt.json")
    assert found["state"] == "finished"
    if name == "spot-with-a-store":
        assert len(found["attempts"]) == 2, "the second machine went on with the first one's run"
    if name == "complaints-in-214-classes":
        labelled = (folder / "labelled.jsonl").read_text().splitlines()
        assert len(labelled) == 4, "5 % of 80"
        assert set(json.loads(labelled[0])["scores"]) == set(TOPICS)
        assert (folder / "merged/model.safetensors").exists()


def test_the_notebook_has_only_python():
    assert compile(notebook(), "complaints", "exec")


def notebook(**changes: str) -> str:
    """The cells of code as one program."""
    cells = read_json(NOTEBOOK)["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


@pytest.mark.slow
def test_the_notebook_runs_from_data_to_compute_units(tmp_path):
    complaints(tmp_path)
    make_folder(tmp_path / "small", "bert", pretrained=True)
    program = notebook(**{"FacebookAI/xlm-roberta-large": "./small"})
    (tmp_path / "notebook.py").write_text(program, encoding="utf-8")
    said = run(f"{sys.executable} notebook.py", tmp_path)
    assert "80 complaints, 3 classes, 4 held out" in said
    assert "macro F1" in said
    assert "compute units" in said
    assert (tmp_path / "merged/model.safetensors").exists()
