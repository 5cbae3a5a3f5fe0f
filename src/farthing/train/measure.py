"""What an attempt ran and what it took, as later plans read it.

Data flows from a run that has ended to one `Measurement`, which `measurements.py` keeps. Refuses to judge it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

import farthing
from farthing.model.hardware import hardware_key, peak_bytes
from farthing.planner.lengths import from_token_set
from farthing.planner.measurements import Measurement

if TYPE_CHECKING:
    from farthing.train.loop import Run


def measurement_of(run: Run) -> Measurement | None:
    """What this attempt ran and what it took; None after too few steps."""
    measured = run.record.measured()
    if measured is None:
        return None
    job, spans, config = run.job, run.meter.spans, run.inputs.config.get_text_config()
    lengths = from_token_set(run.train_examples.tokens, run.train_examples.indices, job.task, source="")
    return Measurement(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        farthing=farthing.__version__,
        torch=torch.__version__,
        hardware=hardware_key(run.numerics.device),
        device=run.numerics.device.type,
        n_devices=1,
        model_type=run.inputs.config.model_type,
        n_parameters=run.parameters["total"] - run.parameters["adapter"],
        n_trainable=run.parameters["trainable"],
        hidden=config.hidden_size,
        n_layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        task=job.task,
        method=job.method.name,
        lora_r=0 if job.method.name == "full" else job.method.lora_r,
        first_layer=run.promise.get("first_layer", 0),
        precision=run.numerics.name,
        optim=job.train.optim,
        micro_batch_tokens=run.steps.most_tokens,
        is_flat=run.forward.is_flat,
        caches_prefix=run.forward.prefix is not None,
        global_batch_size=job.global_batch_size,
        every_n_layers=run.steps.every_n_layers,
        lengths={
            "n_examples": lengths.n_examples,
            "mean": lengths.mean,
            "mean_of_squares": lengths.mean_of_squares,
            "longest": lengths.longest,
            "mean_target": lengths.mean_target,
            "longest_target": lengths.longest_target,
        },
        spans={name: round(seconds, 4) for name, seconds in spans.items()},
        n_eval_examples=0 if run.eval_examples is None else len(run.eval_examples),
        n_eval_padded_tokens=run.n_evaluated,
        has_generated=job.task == "seq2seq" and job.train.predict_with_generate,
        save_s=spans.get("checkpoint", 0.0),
        export_s=spans.get("export", 0.0),
        start_up_s=spans.get("start_up", 0.0),
        tokenize_s=spans.get("tokenize", 0.0),
        was_tokenized_before=run.train_examples.were_tokenized,
        load_model_s=spans.get("load_model", 0.0),
        restore_s=spans.get("restore", 0.0),
        peak_bytes=peak_bytes(run.numerics.device),
        promised=run.promise,
        **measured,
    )
