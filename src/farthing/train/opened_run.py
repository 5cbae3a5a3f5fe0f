"""A run in a folder of its own, to be measured and thrown away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.events import Emit
from farthing.model.load import quiet_libraries
from farthing.run.folder import LEDGER
from farthing.run.ledger import Ledger, Meter, seconds_since_process_start
from farthing.run.signals import Notice
from farthing.storage.files import only_writer
from farthing.train.budget import RunLimits
from farthing.train.build import build
from farthing.train.built import Run
from farthing.train.context import Context
from farthing.train.reference import without_references
from farthing.train.resolve import check_extras, resolve


def short_job(job: Job, folder: str, **train: Any) -> Job:
    """A few steps of a job, in a folder of their own."""
    keys = {"eval_strategy": "no", "report_to": (), **train}
    return job.model_copy(update={"output_dir": folder, "train": job.train.model_copy(update=keys)})


@contextlib.contextmanager
def opened_run(job: Job, emit: Emit) -> Iterator[Run]:
    """A run at step 0, of one process which has all weights."""
    alone = {"gpus": None, "strategy": "ddp", "offload_weights": False}
    job = job.model_copy(update={"where": job.where.model_copy(update=alone)})
    meter, folder = Meter(already_s=seconds_since_process_start()), Path(job.output_dir)
    quiet_libraries()
    with only_writer(folder), Notice() as notice:
        ledger = Ledger(folder / LEDGER, meter, job.usd_per_hour)
        context = Context(folder, meter, ledger, RunLimits(job, ledger), notice, emit, "probe")
        check_extras(job)
        meter.enter("tokenize")
        run = build(resolve(job, emit), context)
        if run.forward.of.needs_reference:
            without_references(run.forward, run.train_examples.tokens)
        run.saver.restore(allow_restart=False)
        with contextlib.closing(run.feed):
            yield run
        ledger.end("finished")
