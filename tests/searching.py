"""Small searches, and what of them must not depend on kills."""

import hashlib
from pathlib import Path

from farthing.config.load import load_job
from farthing.search.run import search
from workshop import job_file

RATES = [1.0e-9, 3.0e-3, 3.0e-4, 1.0e9]


SEARCH = {
    "trials": 4,
    "vary": {"train.learning_rate": RATES},
    "sampler": "grid",
    "reduction_factor": 2,
    "min_fraction": 0.25,
}


def job_of(folder: Path, section=SEARCH, **keys) -> Path:
    """A job of four settings, of which one fails and one learns nothing."""
    keys = {"max_steps": 8, "data": {"eval_fraction": 0.2}, "limits": {"max_usd": 5}, **keys}
    return job_file(folder, search=section, **keys)


def searched(path: Path, *overrides: str, **how):
    """What comes of the search of a job file."""
    return search(load_job(path, [*overrides]), path, **how)


def weights_of(folder: Path):
    """SHA-256 of the weights of every checkpoint and model of a search."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("trials/*/model/*.safetensors"))
    }


def told(receipt):
    """What must not depend on kills."""
    keys = ("trial", "settings", "state", "score", "fraction", "curve")
    return [{key: each[key] for key in keys} for each in receipt["trials"]]
