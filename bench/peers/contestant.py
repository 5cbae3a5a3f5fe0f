"""One contestant in its own process: `python -m peers.contestant ASSIGNMENT.json ...` (several: one
after the other).

Beside each assignment comes a file `.result.json`: the marks of the clock, where the model is, what
was installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from peers.assignment import Assignment
from peers.clock import Clock

CONTESTANTS = {
    "hf": "HF Trainer, defaults",
    "hf-tuned": "HF Trainer, tuned",
    "trl": "TRL, defaults and packing",
    "trl-tuned": "TRL, tuned",
    "farthing": "farthing",
}
REFERENCE = "hf"
IN_ORDER = (REFERENCE, "farthing")
"""Those that take the steps they are given; the others order or pack for themselves."""
CAUSAL_ONLY = ("trl", "trl-tuned")
"""Those that train no seq2seq model and no classifier here."""
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "trl",
    "liger-kernel",
    "farthing",
)


def run(assignment: Assignment) -> dict[str, Any]:
    """Train; returns what the clock saw and what the contestant left."""
    import torch

    torch.set_num_threads(assignment.threads)
    clock = Clock(torch.cuda.is_available())
    if assignment.contestant == "farthing":
        from peers import ours as runner
    else:
        from peers import hugging as runner  # type: ignore[no-redef]
    started = time.perf_counter()
    trained = runner.train(assignment, clock)
    return {
        **trained,
        **clock.facts(),
        "train_s": time.perf_counter() - started,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What is installed here, of what matters."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(paths: list[str]) -> None:
    """Run each assignment."""
    for path in paths:
        result = run(Assignment.read(Path(path)))
        Path(path).with_suffix(".result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
