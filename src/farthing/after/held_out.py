"""The held-out examples of a run that has ended, or those of another file, tokenized as the run's
were.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.config.job import Job
from farthing.data.token_set import TokenSet
from farthing.errors import InputError
from farthing.events import ignore
from farthing.export.folders import trusted_job, untrained_model
from farthing.metrics import Metrics
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.train.evaluate import Writing, evaluate, with_room
from farthing.train.reference import references_of
from farthing.train.resolve import RunSpec, numerics_of, open_examples, resolve


@dataclass(frozen=True)
class HeldOut:
    """Examples that a run was not trained on, or, where it held none out and none were given, some
    that it was.
    """

    job: Job
    spec: RunSpec
    tokens: TokenSet
    indices: NDArray[np.int64]
    what: str
    """In words."""
    run: Path
    """Whose reference is meant, where the objective has one."""

    @cached_property
    def _references(self) -> NDArray[np.float64]:
        """[n, k] of all examples of the set; not a number where they are not evaluated."""
        if self.job.model.from_run is not None:
            return self._references_of_ancestor()
        numerics = self.numerics()
        trusts = self.job.model.trust_remote_code
        model = untrained_model(self.run, numerics.base_dtype, trust_remote_code=trusts)
        return self._referred(self._forward(model.to(numerics.device), numerics))

    def _references_of_ancestor(self) -> NDArray[np.float64]:
        """The same of a run that began with another's weights."""
        from farthing.train.run import opened_run

        with tempfile.TemporaryDirectory() as folder:
            job = self.job.model_copy(update={"output_dir": folder})
            with opened_run(job, ignore) as begun:
                begun.begin_as_ancestor()
                begun.model.eval()
                return self._referred(begun.forward)

    def _referred(self, forward: Forward) -> NDArray[np.float64]:
        longest = int(self.tokens.lengths[self.indices].max())
        most_tokens = self.job.train.per_device_eval_batch_size * longest
        measure = partial(references_of, forward, self.tokens, self.indices)
        rows = with_room(measure, most_tokens, longest, forward.numerics.device)
        found = np.full((len(self.tokens), rows.shape[1]), np.nan)
        found[self.indices] = rows
        return found

    @property
    def sha256(self) -> str:
        """Identity of the tokens, and of which are taken."""
        digest = hashlib.sha256(self.tokens.content_sha256.encode())
        digest.update(np.ascontiguousarray(self.indices).tobytes())
        return digest.hexdigest()

    def numerics(self) -> Numerics:
        """What the run computed in, or what this machine has."""
        return numerics_of(self.job, self.spec.config)

    def measure(
        self,
        model: Any,
        numerics: Numerics,
        *,
        generates: bool = False,
        emit: Any = lambda done, total: None,
    ) -> Metrics:
        """Loss and the task's metrics of a model, in the run's own batches of evaluation. It is
        left where it was: another may need the memory of the GPU."""
        before = next(model.parameters()).device
        model.to(numerics.device)
        forward = self._forward(model, numerics)
        if forward.of.needs_reference:
            forward.references[self.tokens.folder] = self._references
        longest = int(self.tokens.lengths[self.indices].max())
        measure = partial(
            evaluate,
            forward,
            self.tokens,
            self.indices,
            writing=Writing(self.spec.tokenizer, self.job.data.max_target_length)
            if generates
            else None,
            progress=emit,
        )
        most_tokens = self.job.train.per_device_eval_batch_size * longest
        found = with_room(measure, most_tokens, longest, numerics.device)
        model.to(before)
        return found

    def _forward(self, model: Any, numerics: Numerics) -> Forward:
        return Forward(
            model,
            self.job.task,
            self.spec.pad_id,
            numerics,
            settings=self.job.objective,
            may_go_packed=self.job.model.attn_implementation is None,
        )


def job_of(run: Path, trust_remote_code: bool = False) -> Job:
    """The job of a run that has ended. Raises `InputError`, as `trusted_job` does."""
    try:
        return Job.model_validate(trusted_job(run, trust_remote_code))
    except ValueError as error:
        raise InputError(
            "its job is that of another version of farthing",
            where=str(run),
            to_do="use the version that trained it",
        ) from error


def held_out_of(
    run: Path,
    data: Path | None = None,
    most: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> HeldOut:
    """At most `most` held-out examples, evenly spread over all; of the file `data` where it is
    given.

    Raises `InputError` and `DataError` where the run's data is gone, or is another.
    """
    job = job_of(run, trust_remote_code)
    if data is not None:
        if not data.exists():
            raise InputError("no such file", where=str(data), to_do="check --data")
        own = job.data.model_copy(
            update={"eval": [str(data.resolve())], "eval_fraction": 0.0, "max_eval_samples": None}
        )
        job = job.model_copy(update={"data": own})
    spec = resolve(job)
    train, held = open_examples(spec, ignore)
    what = (
        "held-out examples" if held is not None else "training examples, as the run held none out"
    )
    chosen = held if held is not None else train
    if data is not None:
        what = f"examples of {data.name}"
    indices = chosen.indices
    if most is not None and len(indices) > most:
        indices = indices[np.linspace(0, len(indices) - 1, most).round().astype(np.int64)]
    return HeldOut(job, spec, chosen.tokens, indices, f"{len(indices):,} {what}", run)
