"""Settings of other tools, imported and read back."""

from __future__ import annotations

from pathlib import Path

from farthing.config.importers.job_text import job_text
from farthing.config.importers.recognise import import_file
from farthing.config.importers.tables import Imported
from farthing.config.job import Job
from farthing.config.load import load_job


def imported(folder: Path, text: str, name: str = "config.yaml") -> Imported:
    (folder / name).write_text(text, encoding="utf-8")
    return import_file(folder / name)


def says(found: Imported, **expected: object) -> bool:
    """Whether the job has these values; `train_learning_rate` is `train.learning_rate`."""
    flat = {key.replace("_", ".", 1) if "_" in key else key: expected[key] for key in expected}
    return found.job | flat == found.job


def job_of(folder: Path, found: Imported) -> Job:
    """The job that is written, read back."""
    assert not found.blockers, found.blockers
    for name, text in found.files.items():
        (folder / name).write_text(text)
    (folder / "job.yaml").write_text(job_text(found, "other"))
    return load_job(folder / "job.yaml")
