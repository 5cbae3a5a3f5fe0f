"""How a run is computed from its first step on: settings.json, which its later attempts follow so
that they continue to the bit.

An attempt begins with what earlier ones settled on; the first one with what was planned, or what a
probe of the like has found: one line of JSON a probe, in the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from farthing.data.lengths import from_token_set
from farthing.model.hardware import hardware_key
from farthing.planner.estimate import Estimate
from farthing.run.folder import SETTINGS, keep, kept, kept_as
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.storage.logs import append_line, newest_lines, read_line
from farthing.train.context import Context
from farthing.train.resolve import Examples, RunSpec

PROBES = "probes.jsonl"  # in the cache
_MOST_BYTES = 1 << 20  # of the newest lines that are read
ALIKE = 0.2  # lengths that differ by less ask for the same settings
TRIED = ("micro_batch_tokens", "checkpoint_every")


def is_like(one: Json, other: Json) -> bool:
    """Whether what was found for one run holds for another: the same but for lengths that differ a
    little.
    """
    if one.keys() != other.keys():
        return False
    lengths = ("mean_tokens", "longest")
    are_close = all(abs(one[n] - other[n]) <= ALIKE * max(one[n], other[n]) for n in lengths)
    return are_close and all(one[n] == other[n] for n in one if n not in lengths)


def subject_of(spec: RunSpec, examples: Examples) -> Json:
    """What settings of this run are found for, or measured."""
    job, numerics, text = spec.job, spec.numerics, spec.config.get_text_config()
    lengths = from_token_set(examples.tokens, examples.indices, job.task, source="")
    return {
        "hardware": hardware_key(numerics.device),
        "model_type": spec.config.model_type,
        "hidden": text.hidden_size,
        "n_layers": text.num_hidden_layers,
        "vocab": text.vocab_size,
        "task": job.task,
        "method": job.method.name,
        "lora_r": 0 if job.method.name == "full" else job.method.lora_r,
        "precision": numerics.name,
        "optim": job.train.optim,
        "global_batch_size": job.global_batch_size,
        "mean_tokens": spec.objective.n_tokens(lengths.mean, lengths.mean_target),
        "longest": lengths.longest + lengths.longest_target,
    }


def tried(settings: Settings) -> dict[str, int | None]:
    """What a probe tries of settings."""
    return {name: getattr(settings, name) for name in TRIED}


def leave_probe(
    path: Path,
    subject: Json,
    settings: Settings,
    when: str,
    trials: Sequence[Mapping[str, object]],
) -> None:
    """Add what a probe has found. Raises `OSError`."""
    row = {"when": when, "subject": subject, "settings": tried(settings), "trials": trials}
    append_line(path, row)


def known_settings(path: Path, subject: Json) -> Settings | None:
    """The newest settings that were found for the like of `subject`; lines that are torn or foreign
    are passed over.
    """
    for line in reversed(newest_lines(path, _MOST_BYTES)):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = read_line(line) or {}
            if is_like(row["subject"], subject):
                found = Settings.from_json(row["settings"])
                # else it is no probe's
                return found if found.micro_batch_tokens >= 1 else None
    return None


def first_settings(
    spec: RunSpec, context: Context, examples: Examples, estimate: Estimate | None
) -> Settings:
    """How an attempt computes its first step: as earlier attempts did, as a probe has found, or as
    planned.

    What the job says of micro-batches comes before, and memory that ran out lowers it. Raises
    `RunDamagedError`.
    """
    job, planned = spec.job, Settings() if estimate is None else estimate.settings
    settings = kept_as(context.folder / SETTINGS, Settings.from_json, context.warn)
    if settings is None:
        settings, may_look = planned, job.train.probe is not False and not job.says_micro_batch
        if estimate is not None and may_look and not settings.probed:
            cache = Path(job.cache_dir or ".") / PROBES
            found = known_settings(cache, subject_of(spec, examples))
            settings = settings if found is None else settings.with_probed(found)
    if not settings.probed:  # the least that fits is measured anew: it changes no bit
        settings = replace(settings, checkpoint_every=0)
    lengths = examples.tokens.lengths[examples.indices]
    longest = int(lengths.max()) * min(job.micro_batch_size, len(lengths))
    n_tokens = job.train.micro_batch_tokens or settings.micro_batch_tokens or longest
    settings = replace(settings, micro_batch_tokens=n_tokens, precision=spec.numerics.name)
    # of attempts before the job was corrected nothing holds
    events = [event for event in context.ledger.out_of_memory if event["job"] == job.fingerprint]
    return settings.lowered_by(events)


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
