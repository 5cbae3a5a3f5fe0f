"""The held-out examples of a run that has ended, or those of another file, tokenized as the run's
were.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.config.job import Job
from farthing.data.token_set import TokenSet
from farthing.errors import HardwareError, InputError
from farthing.events import ignore
from farthing.export.folders import trusted_job, untrained_model
from farthing.metrics import Metrics
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.train.evaluate import Sweep, evaluate
from farthing.train.reference import references_of
from farthing.train.resolve import RunSpec, Writing, numerics_of, open_examples, resolve


@dataclass(frozen=True)
class HeldOut:
    """Examples to measure models of a run on."""

    job: Job
    spec: RunSpec
    tokens: TokenSet
    indices: NDArray[np.int64]
    what: str
    """In words."""
    run: Path

    @cached_property
    def numerics(self) -> Numerics:
        """Those of the job."""
        return numerics_of(self.job, self.spec.config)

    @property
    def sha256(self) -> str:
        """Identity of the tokens, and of which are taken."""
        digest = hashlib.sha256(self.tokens.content_sha256.encode())
        digest.update(np.ascontiguousarray(self.indices).tobytes())
        return digest.hexdigest()

    def measure(
        self,
        model: Any,
        *,
        generates: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Metrics:
        """Loss and the task's metrics of a model, in the run's own batches of evaluation. It is
        left where it was: another may need the memory of the GPU."""
        before, job = next(model.parameters()).device, self.job
        forward = self._forward(model)
        if forward.of.needs_reference:
            forward.references[self.tokens.folder] = self._references
        writing = Writing(self.spec.tokenizer, job.data.max_target_length) if generates else None
        found = evaluate(self._sweep(forward, progress=progress), writing)
        model.to(before)
        return found

    def _forward(self, model: Any) -> Forward:
        return Forward(
            model.to(self.numerics.device),
            self.job.task,
            self.spec.pad_id,
            self.numerics,
            settings=self.job.objective,
            may_go_packed=self.job.model.attn_implementation is None,
        )

    def _sweep(self, forward: Forward, **how: Any) -> Sweep:
        longest = int(self.tokens.lengths[self.indices].max())
        most_tokens = self.job.train.per_device_eval_batch_size * longest
        return Sweep(forward, self.tokens, self.indices, most_tokens, **how)

    @cached_property
    def _references(self) -> NDArray[np.float64]:
        """[n, k] of the model that the run began with; NaN where not evaluated."""
        if self.job.model.from_run is None:
            trusts = self.job.model.trust_remote_code
            base = untrained_model(self.run, self.numerics.base_dtype, trust_remote_code=trusts)
            return self._referred(self._forward(base))
        from farthing.train.opened_run import opened_run

        with tempfile.TemporaryDirectory() as folder:
            job = self.job.model_copy(update={"output_dir": folder})
            with opened_run(job, ignore) as begun:
                begun.begin_as_ancestor()
                begun.model.eval()
                return self._referred(begun.forward)

    def _referred(self, forward: Forward) -> NDArray[np.float64]:
        rows = references_of(self._sweep(forward))
        found = np.full((len(self.tokens), rows.shape[1]), np.nan)
        found[self.indices] = rows
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
    indices = chosen.indices
    if most is not None and len(indices) > most:
        indices = indices[np.linspace(0, len(indices) - 1, most).round().astype(np.int64)]
    return HeldOut(job, spec, chosen.tokens, indices, f"{len(indices):,} {what}", run)
