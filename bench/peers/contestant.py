"""One contestant in its own process: `python -m peers.contestant ASSIGNMENT.json`.

Beside the assignment comes a file `.result.json`: the marks of the clock, where the model is, what
was installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.assignment import Assignment
from peers.clock import Clock

CONTESTANTS = {
    "hf": "HF Trainer, defaults",
    "hf-tuned": "HF Trainer, tuned",
    "trl-tuned": "TRL, tuned",
    "farthing": "farthing",
}
REFERENCE = "hf"
IN_ORDER = (REFERENCE, "farthing")
"""Those that take the steps they are given; the others order or pack for themselves."""
CAUSAL_ONLY = ("trl-tuned",)
"""Those that train no seq2seq model and no classifier here."""
PACKAGES = "torch transformers peft accelerate datasets trl liger-kernel farthing"


def run(assignment: Assignment) -> dict[str, Any]:
    """Train; returns what the clock saw and what the contestant left."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    clock = Clock(torch.cuda.is_available())
    is_own = assignment.contestant == "farthing"
    runner = importlib.import_module("peers.ours" if is_own else "peers.hugging")
    return {**runner.train(assignment, clock), **clock.facts(), "versions": versions()}


def versions() -> dict[str, str]:
    """What is installed here, of what matters."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES.split():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    result = run(Assignment.read(path))
    path.with_suffix(".result.json").write_text(json.dumps(result), encoding="utf-8")
