"""How a run is computed from its first step on: settings.json, which its later attempts follow so
that they continue to the bit.

An attempt begins with what earlier ones settled on; the first one with what was planned, or what
runs of the like have measured after a probe.
"""

from __future__ import annotations

from dataclasses import replace

from farthing.data.lengths import from_token_set
from farthing.local.measurements import MEASUREMENTS, matching, read_measurements
from farthing.model.hardware import hardware_key
from farthing.planner.estimate import Estimate
from farthing.run.folder import SETTINGS, keep, kept, kept_as
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.train.context import Context
from farthing.train.resolve import Examples, RunSpec

ALIKE = 0.2  # lengths that differ by less ask for the same settings
OF_LENGTHS = ("n_examples", "mean", "mean_of_squares", "longest", "mean_target", "longest_target")


def subject_of(spec: RunSpec) -> Json:
    """What settings of this run are found for, or measured."""
    text = spec.config.get_text_config()
    return {
        "hardware": hardware_key(spec.numerics.device),
        "model_type": spec.config.model_type,
        "hidden": text.hidden_size,
        "n_layers": text.num_hidden_layers,
        "vocab": text.vocab_size,
        "task": spec.task,
        "method": spec.method.name,
        "lora_r": 0 if spec.method.name == "full" else spec.method.lora_r,
        "precision": spec.numerics.name,
        "optim": spec.train.optim,
        "global_batch_size": spec.global_batch_size,
    }


def lengths_of(spec: RunSpec, examples: Examples) -> dict[str, float]:
    """Of the examples, as a measurement has them."""
    found = from_token_set(examples.tokens, examples.indices, spec.task, source="")
    return {name: getattr(found, name) for name in OF_LENGTHS}


def tried(settings: Settings) -> dict[str, int]:
    return {
        "micro_batch_tokens": settings.micro_batch_tokens,
        "checkpoint_every": settings.checkpoint_every,
    }


def probed_settings(spec: RunSpec, lengths: dict[str, float]) -> Settings | None:
    """What the last run of the like was computed with, of those that were probed."""
    known = read_measurements(spec.cache_dir / MEASUREMENTS)
    for found in matching(known, probed=True, **subject_of(spec)):
        pairs = [(lengths[name], found.lengths[name]) for name in ("mean", *OF_LENGTHS[3:])]
        if all(abs(one - other) <= ALIKE * max(one, other) for one, other in pairs):
            return Settings(found.micro_batch_tokens, found.checkpoint_every)
    return None


def first_settings(
    spec: RunSpec, context: Context, examples: Examples, estimate: Estimate | None
) -> Settings:
    """How an attempt computes its first step: as earlier attempts did, as a probe has found, or as
    planned.

    What the job says of micro-batches comes before, and memory that ran out lowers it. Raises
    `RunDamagedError`.
    """
    planned = Settings() if estimate is None else estimate.settings
    settings = kept_as(context.folder / SETTINGS, Settings.from_json, context.warn)
    if settings is None:
        settings, may_look = planned, spec.train.probe is not False and not spec.says_micro_batch
        if estimate is not None and may_look and not settings.probed:
            found = probed_settings(spec, lengths_of(spec, examples))
            settings = settings if found is None else settings.with_probed(found)
    if not settings.probed:  # the least that fits is measured anew: it changes no bit
        settings = replace(settings, checkpoint_every=0)
    lengths = examples.tokens.lengths[examples.indices]
    longest = int(lengths.max()) * min(spec.micro_batch_size, len(lengths))
    n_tokens = spec.train.micro_batch_tokens or settings.micro_batch_tokens or longest
    settings = replace(settings, micro_batch_tokens=n_tokens, precision=spec.numerics.name)
    # of attempts before the job was corrected nothing holds
    ran_out = context.ledger.out_of_memory
    return settings.lowered_by([each for each in ran_out if each["job"] == spec.fingerprint])


def keep_settings(context: Context, now: Settings) -> None:
    """Write down how the run is computed from here on, before a step is taken so. Raises
    `OSError`.
    """
    path = context.folder / SETTINGS
    before = Settings.from_json(kept(path) or {})
    for name in ("kernels", "compiled"):
        was, has = getattr(before, name), getattr(now, name)
        if was not in (None, has):
            context.warn(
                f"{name}: earlier attempts had {was}, this one {has}: equal to rounding, not to"
                " the bit"
            )
    if now != before:
        keep(path, now.to_json())
