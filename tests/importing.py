"""Settings of other tools, imported and read back."""

from pathlib import Path

from farthing.config.importers.job_text import job_text
from farthing.config.importers.recognise import import_file
from farthing.config.importers.tables import Imported
from farthing.config.job import Job
from farthing.config.load import load_job


def imported(folder: Path, text: str, name: str = "config.yaml") -> Imported:
    (folder / name).write_text(text)
    return import_file(folder / name)


def job_of(folder: Path, found: Imported) -> Job:
    """The job that is written, read back."""
    assert not found.blockers, found.blockers
    for name, text in found.files.items():
        (folder / name).write_text(text)
    (folder / "job.yaml").write_text(job_text(found, "other"))
    return load_job(folder / "job.yaml")
