"""A small job to launch, and keys that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "no key")


def job_at(folder: Path, tiny_folders: dict[str, Path], **more: Any) -> Path:
    """A job file with a small model and data, both here."""
    (folder / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": str(tiny_folders["llama"]), "init": "random"},
        "data": "./data.jsonl",
        "method": "full",
        "limits": {"max_usd": 2},
        "output_dir": "./run",
        "cache_dir": "./cache",
        **more,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return folder / "job.yaml"
