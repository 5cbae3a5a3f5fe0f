"""The held-out examples of a run that has ended, or those of another file, tokenized as the run's
were.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.config.job import Job
from farthing.errors import HardwareError, InputError
from farthing.events import ignore
from farthing.export.folders import trusted_job, untrained_model
from farthing.metrics import Metrics
from farthing.model.forward import Forward
from farthing.train.evaluate import Sweep, evaluate
from farthing.train.reference import references_of
from farthing.train.resolve import (
    Examples,
    RunSpec,
    Writing,
    numerics_of,
    open_examples,
    resolve,
)


@dataclass(frozen=True)
class HeldOut:
    """Examples to measure models of a run on."""

    spec: RunSpec
    examples: Examples
    what: str
    """In words."""
    run: Path

    def measure(
        self,
        model: Any,
        *,
        generates: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Metrics:
        """Loss and the task's metrics of a model, in the run's own batches of evaluation. It is
        left where it was: another may need the memory of the GPU."""
        before, spec = next(model.parameters()).device, self.spec
        forward = self._forward(model)
        if forward.of.needs_reference:
            forward.references[self.examples.tokens.folder] = self._references
        writing = Writing(spec.tokenizer, spec.data.max_target_length) if generates else None
        found = evaluate(self._sweep(forward, progress=progress), writing)
        model.to(before)
        return found

    def _forward(self, model: Any) -> Forward:
        spec = self.spec
        return Forward(
            model.to(spec.numerics.device),
            spec.task,
            spec.pad_id,
            spec.numerics,
            settings=spec.objective_settings,
            may_go_packed=spec.choice.attn_implementation is None,
        )

    def _sweep(self, forward: Forward, **how: Any) -> Sweep:
        tokens, indices = self.examples.tokens, self.examples.indices
        most_examples = self.spec.train.per_device_eval_batch_size
        most_tokens = most_examples * int(tokens.lengths[indices].max())
        return Sweep(forward, tokens, indices, most_tokens, **how)

    @cached_property
    def _references(self) -> NDArray[np.float64]:
        """[n, k] of the model that the run began with; NaN where not evaluated."""
        spec = self.spec
        if spec.from_run is None:
            dtype, trusts = spec.numerics.base_dtype, spec.choice.trust_remote_code
            base = untrained_model(self.run, dtype, trust_remote_code=trusts)
            return self._referred(self._forward(base))
        from farthing.train.opened_run import opened_run

        with tempfile.TemporaryDirectory() as folder:
            job = spec.job.model_copy(update={"output_dir": folder})
            with opened_run(job, ignore) as begun:
                begun.begin_as_ancestor()
                begun.model.eval()
                return self._referred(begun.forward)

    def _referred(self, forward: Forward) -> NDArray[np.float64]:
        rows = references_of(self._sweep(forward))
        found = np.full((len(self.examples.tokens), rows.shape[1]), np.nan)
        found[self.examples.indices] = rows
        return found


def _here(job: Job) -> Job:
    """The job; computed as this machine can, where it can't as the run was."""
    try:
        numerics_of(job)
    except HardwareError:
        where = job.where.model_copy(update={"device": "auto"})
        train = job.train.model_copy(update={"bf16": None, "fp16": None})
        return job.model_copy(update={"where": where, "train": train})
    return job


def held_out_of(
    run: Path,
    data: Path | None = None,
    most: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> HeldOut:
    """At most `most` held-out examples of a run, evenly spread, or of the file `data`; training
    examples where the run held none out.

    Raises `InputError` and `DataError` where the run's data is gone, or is another.
    """
    job = _here(trusted_job(run, trust_remote_code))
    if data is not None:
        if not data.exists():
            raise InputError("no such file", where=str(data), to_do="check --data")
        own = {"eval": [str(data.resolve())], "eval_fraction": 0.0, "max_eval_samples": None}
        job = job.model_copy(update={"data": job.data.model_copy(update=own)})
    spec = resolve(job)
    train, held = open_examples(spec, ignore)
    what = f"examples of {data.name}" if data is not None else "held-out examples"
    if held is None:
        what = "training examples, as the run held none out"
    chosen = train if held is None else held
    if most is not None and len(chosen) > most:
        places = np.linspace(0, len(chosen) - 1, most).round().astype(np.int64)
        chosen = replace(chosen, indices=chosen.indices[places])
    return HeldOut(spec, chosen, f"{len(chosen):,} {what}", run)
