"""`train.push_to_hub`: the exported model of a finished run goes to the Hub, once. Refuses to
publish what is not finished.
"""

from __future__ import annotations

from pathlib import Path

from farthing.config.job import Job
from farthing.events import Emit, Note, Working
from farthing.export.publish import Publication, noted, publish, wanted_at
from farthing.run.folder import MODEL

FORM = "trained"


def published_as(job: Job) -> Publication | None:
    """Where the job's model goes; None where it stays here. Raises `InputError` where there is no
    token.
    """
    train = job.train
    if not train.push_to_hub:
        return None
    run = Path(job.output_dir)
    name = train.hub_model_id or run.resolve().name
    return wanted_at(
        name, run / MODEL, FORM, is_private=train.hub_private_repo, where="train.push_to_hub"
    )


def is_to_publish(job: Job) -> bool:
    """Whether the model of a finished run is still to be sent."""
    if not job.train.push_to_hub:
        return False
    run = Path(job.output_dir)
    note = noted(run, run / MODEL, FORM)
    return note is None or not note.commit


def publish_finished(job: Job, emit: Emit) -> None:
    """Send the model of a finished run where the job asks for it and the Hub has it not. Raises
    `PublishError`.
    """
    wanted = published_as(job)
    if wanted is not None and is_to_publish(job):
        emit(Working("publishing the model"))
        sent = publish(Path(job.output_dir), wanted)
        emit(Note(f"published as hub:{sent.to}, commit {sent.commit}"))
