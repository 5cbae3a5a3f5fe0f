"""How a run is computed from its first step on: settings.json, which its later attempts follow so
that they go on to the bit.

An attempt begins with what earlier ones settled on; the first one with what was planned, or what a
probe of the like has found. Refuses to try settings: `autotune` does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from farthing.config.job import Job
from farthing.events import Warned
from farthing.model.hardware import Numerics
from farthing.planner.estimate import Estimate
from farthing.run.folder import SETTINGS, keep, kept, kept_as
from farthing.settings import Settings
from farthing.train.attempt import Attempt, Context
from farthing.train.autotune_cache import PROBES, known_settings, subject_of
from farthing.train.setup import Examples, Inputs


def first_settings(
    job: Job,
    context: Context,
    inputs: Inputs,
    numerics: Numerics,
    examples: Examples,
    estimate: Estimate | None,
) -> Settings:
    """How an attempt computes its first step: as earlier attempts did, as a probe has found, or as
    planned.

    What the job says of micro-batches comes before, and memory that ran out lowers it. Raises
    `RunDamagedError`.
    """
    planned = Settings() if estimate is None else estimate.settings
    settings = kept_as(
        context.folder / SETTINGS, Settings.from_json, lambda text: context.emit(Warned(text))
    )
    if settings is None:
        settings, may_look = planned, job.train.probe is not False and not job.says_micro_batch
        if estimate is not None and may_look and not settings.probed:
            subject = subject_of(job, inputs.config, examples, numerics)
            found = known_settings(Path(job.cache_dir or ".") / PROBES, subject)
            settings = settings if found is None else settings.with_probed(found)
    if not settings.probed:  # the least that fits is measured anew: it changes no bit
        settings = replace(settings, checkpoint_every=0)
    lengths = examples.tokens.lengths[examples.indices]
    longest = int(lengths.max()) * min(job.micro_batch_size, len(lengths))
    n_tokens = job.train.micro_batch_tokens or settings.micro_batch_tokens or longest
    settings = replace(settings, micro_batch_tokens=n_tokens, precision=numerics.name)
    # of attempts before the job was corrected nothing holds
    events = [event for event in context.ledger.out_of_memory if event["job"] == job.fingerprint]
    return settings.lowered_by(events)


def keep_settings(attempt: Attempt) -> None:
    """Write down how the run is computed from here on, before a step is taken so. Raises
    `OSError`.
    """
    path, now = attempt.context.folder / SETTINGS, attempt.settings
    values = kept(path)
    before = Settings() if values is None else Settings.from_json(values)
    for name in ("kernels", "compiled"):
        was, has = getattr(before, name), getattr(now, name)
        if was not in (None, has):
            attempt.warn(
                f"{name}: earlier attempts had {was}, this one {has}: equal to rounding, not to"
                " the bit"
            )
    if now != before:
        keep(path, now.to_json())
