"""What an attempt ran and what it took, as later plans read it.

Data flows from a run that has ended to one `Measurement`, which `measurements.py` keeps. Refuses to judge it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import torch

import farthing
from farthing.model.hardware import hardware_key, peak_bytes
from farthing.planner.lengths import from_token_set
from farthing.planner.measurements import Measurement, leave_measurement
from farthing.tasks.registry import task_of
from farthing.train.attempt import Attempt


def leave_measured(attempt: Attempt) -> None:
    """Write down what was measured, where enough was. Never fails a run: it warns."""
    try:
        measurement = measurement_of(attempt)
        if measurement is not None:
            leave_measurement(measurement, Path(attempt.job.cache_dir or "."), attempt.context.folder)
    except Exception as error:  # the run is done and safe, whatever is wrong here
        attempt.warn(f"the measurement could not be written: {error}")


def measurement_of(attempt: Attempt) -> Measurement | None:
    """What this attempt ran and what it took; None after too few steps."""
    measured = attempt.record.measured()
    if measured is None:
        return None
    job, spans, config = attempt.job, attempt.context.meter.spans, attempt.inputs.config.get_text_config()
    lengths = from_token_set(attempt.train_examples.tokens, attempt.train_examples.indices, job.task, source="")
    return Measurement(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        farthing=farthing.__version__,
        torch=torch.__version__,
        hardware=hardware_key(attempt.numerics.device),
        device=attempt.numerics.device.type,
        n_devices=attempt.context.ranks.n,
        model_type=attempt.inputs.config.model_type,
        n_parameters=attempt.parameters["total"] - attempt.parameters["adapter"],
        n_trainable=attempt.parameters["trainable"],
        hidden=config.hidden_size,
        n_layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        task=job.task,
        method=job.method.name,
        lora_r=0 if job.method.name == "full" else job.method.lora_r,
        first_layer=0 if attempt.estimate is None else attempt.estimate.first_layer,
        precision=attempt.numerics.name,
        optim=job.train.optim,
        micro_batch_tokens=attempt.settings.micro_batch_tokens,
        is_packed=attempt.forward.is_packed,
        caches_frozen=attempt.forward.frozen_layers is not None,
        global_batch_size=job.global_batch_size,
        checkpoint_every=attempt.settings.checkpoint_every,
        lengths={
            "n_examples": lengths.n_examples,
            "mean": lengths.mean,
            "mean_of_squares": lengths.mean_of_squares,
            "longest": lengths.longest,
            "mean_target": lengths.mean_target,
            "longest_target": lengths.longest_target,
        },
        spans={name: round(seconds, 4) for name, seconds in spans.items()},
        n_eval_examples=0 if attempt.eval_examples is None else len(attempt.eval_examples),
        n_eval_padded_tokens=attempt.n_evaluated_tokens,
        has_generated=task_of(job.task).is_pair and job.train.predict_with_generate,
        save_s=spans.get("checkpoint", 0.0),
        export_s=spans.get("export", 0.0),
        start_up_s=spans.get("start_up", 0.0),
        tokenize_s=spans.get("tokenize", 0.0),
        was_tokenized_before=attempt.train_examples.were_tokenized,
        load_model_s=spans.get("load_model", 0.0),
        restore_s=spans.get("restore", 0.0),
        peak_bytes=peak_bytes(attempt.numerics.device),
        promised={} if attempt.estimate is None else attempt.estimate.to_json(),
        **measured,
    )
