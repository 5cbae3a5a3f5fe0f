"""What an attempt ran and what it took, as later plans read it.

Data flows from a run that has ended to one `Measurement`, which `measurements.py` keeps.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import torch

import farthing
from farthing.data.lengths import from_token_set
from farthing.local.measurements import Measurement, leave_measurement
from farthing.model.hardware import peak_bytes
from farthing.train.attempt import Attempt
from farthing.train.run_settings import subject_of

OF_LENGTHS = ("n_examples", "mean", "mean_of_squares", "longest", "mean_target", "longest_target")


def leave_measured(attempt: Attempt) -> None:
    """Write down what was measured, where enough was. Never fails a run: it warns."""
    try:
        measurement = measurement_of(attempt)
        if measurement is not None:
            leave_measurement(measurement, Path(attempt.job.cache_dir or "."), attempt.folder)
    except Exception as error:  # the run is done and safe, whatever is wrong here
        attempt.warn(f"the measurement could not be written: {error}")


def measurement_of(attempt: Attempt) -> Measurement | None:
    """What this attempt ran and what it took; None after too few steps."""
    measured = attempt.record.measured()
    if measured is None:
        return None
    job, spans = attempt.job, attempt.meter.spans
    subject = subject_of(attempt.spec, attempt.train_examples)
    del subject["mean_tokens"], subject["longest"]  # `lengths` say more
    lengths = from_token_set(
        attempt.train_examples.tokens, attempt.train_examples.indices, job.task, source=""
    )
    return Measurement(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        farthing=farthing.__version__,
        torch=torch.__version__,
        device=attempt.numerics.device.type,
        n_devices=attempt.ranks.n,
        n_parameters=attempt.parameters["total"] - attempt.parameters["adapter"],
        n_trainable=attempt.parameters["trainable"],
        first_layer=0 if attempt.estimate is None else attempt.estimate.first_layer,
        micro_batch_tokens=attempt.settings.micro_batch_tokens,
        is_packed=attempt.forward.is_packed,
        checkpoint_every=attempt.settings.checkpoint_every,
        lengths={name: getattr(lengths, name) for name in OF_LENGTHS},
        spans={name: round(seconds, 4) for name, seconds in spans.items()},
        n_eval_examples=0 if attempt.eval_examples is None else len(attempt.eval_examples),
        n_eval_padded_tokens=attempt.n_evaluated_tokens,
        has_generated=job.writes_texts,
        was_tokenized_before=attempt.train_examples.were_tokenized,
        peak_bytes=peak_bytes(attempt.numerics.device),
        promised={} if attempt.estimate is None else attempt.estimate.to_json(),
        **subject,
        **measured,
    )
