"""What an attempt ran and what it took, as later plans read it.

Data flows from a run that has ended to one `Measurement`, which `measurements.py` keeps.
"""

from __future__ import annotations

from datetime import UTC, datetime

import torch

import farthing
from farthing.local.measurements import Measurement, leave_measurement
from farthing.model.adapters import count_parameters
from farthing.model.hardware import peak_bytes
from farthing.train.built import Run
from farthing.train.run_settings import lengths_of, subject_of


def leave_measured(run: Run) -> None:
    """Write down what was measured, where enough was. Never fails a run: it warns."""
    try:
        measurement = measurement_of(run)
        if measurement is not None:
            leave_measurement(measurement, run.spec.cache_dir, run.context.folder)
    except Exception as error:  # the run is done and safe, whatever is wrong here
        run.context.warn(f"the measurement could not be written: {error}")


def measurement_of(run: Run) -> Measurement | None:
    """What this attempt ran and what it took; None after too few steps."""
    measured = run.record.measured()
    if measured is None:
        return None
    spans, counts = run.context.meter.spans, count_parameters(run.model)
    return Measurement(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        farthing=farthing.__version__,
        torch=torch.__version__,
        device=run.spec.numerics.device.type,
        n_devices=run.context.ranks.n,
        n_parameters=counts["total"] - counts["adapter"],
        n_trainable=counts["trainable"],
        first_layer=0 if run.estimate is None else run.estimate.first_layer,
        micro_batch_tokens=run.feed.settings.micro_batch_tokens,
        is_packed=run.forward.is_packed,
        has_liger=run.feed.settings.kernels == "liger",
        checkpoint_every=run.feed.settings.checkpoint_every,
        lengths=lengths_of(run.spec, run.train_examples),
        spans={name: round(seconds, 4) for name, seconds in spans.items()},
        n_eval_examples=0 if run.eval_examples is None else len(run.eval_examples),
        n_eval_padded_tokens=0 if run.evaluator is None else run.evaluator.n_tokens,
        has_generated=run.evaluator is not None and run.spec.writing is not None,
        peak_bytes=peak_bytes(run.spec.numerics.device),
        promised={} if run.estimate is None else run.estimate.to_json(),
        probed=run.feed.settings.probed,
        **subject_of(run.spec),
        **measured,
    )
