"""A desk with a job on it, and farthing run on it as a command."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from farthing.cli import main
from farthing.tiny import demo_rows, write_jsonl

ROWS = demo_rows(24)


@dataclass
class Desk:
    """A folder with a small model, data and a job: what the person at the keyboard works with."""

    folder: Path
    models: dict[str, Path]
    with_weights: Path
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        write_jsonl(self.folder / "train.jsonl", ROWS)
        self.values = {
            "task": "causal-lm",
            "model": {"model_name_or_path": str(self.models["llama"]), "init": "random"},
            "data": {"train": "train.jsonl", "max_length": 64},
            "method": "full",
            "train": {"max_steps": 2, "global_batch_size": 4, "learning_rate": 0.001},
            "where": {"device": "cpu"},
            "output_dir": "run",
            "cache_dir": "cache",
        }

    def set(self, section: str, **keys):
        """Change keys of a section."""
        self.values[section] = {**self.values.get(section, {}), **keys}

    def rows(self, rows: list[Any], name: str = "train.jsonl"):
        """Other rows."""
        write_jsonl(self.folder / name, rows)

    def bytes(self, content: bytes, name: str = "train.jsonl"):
        """Other bytes."""
        (self.folder / name).write_bytes(content)

    def own_model(self) -> Path:
        """A copy of the model folder with weights, to be spoilt."""
        copy = self.folder / "model"
        shutil.copytree(self.with_weights, copy)
        self.values["model"] = "./model"
        return copy

    def classify(self, family: str = "bert"):
        """Another task, with a model of a family."""
        self.values["task"] = "classification"
        self.set("model", model_name_or_path=str(self.models[family]))

    def job(self) -> Path:
        """Write the job file."""
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self.values, sort_keys=False), encoding="utf-8")
        return path

    def line_of(self, key: str) -> int:
        """The line a key stands on."""
        lines = (self.folder / "job.yaml").read_text().splitlines()
        return 1 + next(
            number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:")
        )


@pytest.fixture
def desk(
    tmp_path,
    tiny_folders,
    with_weights,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, tiny_folders, with_weights)


class Said(NamedTuple):
    """What a command told its caller."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(desk, capsys):
    """Runs a verb, whose exit code must be `code` where one is named."""

    def running(*arguments, verb="train", job=None, code=None):
        capsys.readouterr()
        said = Said(main([verb, job or str(desk.job()), *arguments]), *capsys.readouterr())
        assert code in (None, said.code), said
        return said

    return running


def left_behind(folder: Path) -> set[str]:
    """Checkpoints and models in a run folder."""
    if not folder.is_dir():
        return set()
    found = {path.name for path in folder.rglob("*.safetensors")} | {
        path.name for path in folder.glob("model*")
    }
    return found | {path.name for path in folder.glob("checkpoints/*") if path.is_dir()}
