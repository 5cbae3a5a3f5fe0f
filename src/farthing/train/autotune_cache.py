"""What probes found, for later runs on the same hardware: one line of JSON a probe, in the cache.

Refuses to probe: `autotune` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.data.lengths import from_token_set
from farthing.model.hardware import Numerics, hardware_key
from farthing.objectives.registry import objective_of
from farthing.settings import Settings
from farthing.storage.logs import append_line, newest_lines, read_line
from farthing.train.setup import Examples

PROBES = "probes.jsonl"  # in the cache
_MOST_BYTES = 1 << 20  # of the newest lines that are read
ALIKE = 0.2  # lengths that differ by less ask for the same settings
TRIED = ("micro_batch_tokens", "checkpoint_every", "tile_tokens")


@dataclass(frozen=True)
class Subject:
    """What settings were found for."""

    hardware: str
    model_type: str
    hidden: int
    n_layers: int
    vocab: int
    task: str
    method: str
    lora_r: int
    precision: str
    optim: str
    global_batch_size: int
    mean_tokens: float
    longest: int

    def is_like(self, other: Subject) -> bool:
        """Whether what was found for one holds for the other: the same but for lengths that differ
        a little.
        """
        mine, its = dataclasses.asdict(self), dataclasses.asdict(other)
        for name in ("mean_tokens", "longest"):
            a, b = mine.pop(name), its.pop(name)
            if abs(a - b) > ALIKE * max(a, b):
                return False
        return mine == its


def subject_of(job: Job, config: Any, examples: Examples, numerics: Numerics) -> Subject:
    """What a probe of this job is of."""
    text = config.get_text_config()
    lengths = from_token_set(examples.tokens, examples.indices, job.task, source="")
    return Subject(
        hardware=hardware_key(numerics.device),
        model_type=config.model_type,
        hidden=text.hidden_size,
        n_layers=text.num_hidden_layers,
        vocab=text.vocab_size,
        task=job.task,
        method=job.method.name,
        lora_r=0 if job.method.name == "full" else job.method.lora_r,
        precision=numerics.name,
        optim=job.train.optim,
        global_batch_size=job.global_batch_size,
        mean_tokens=objective_of(job.task).n_tokens(lengths.mean, lengths.mean_target),
        longest=lengths.longest + lengths.longest_target,
    )


def tried(settings: Settings) -> dict[str, int | None]:
    """What a probe tries of settings."""
    return {name: getattr(settings, name) for name in TRIED}


def leave_probe(
    path: Path,
    subject: Subject,
    settings: Settings,
    when: str,
    trials: Sequence[Mapping[str, object]],
) -> None:
    """Add what a probe has found. Raises `OSError`."""
    row = {
        "when": when,
        "subject": dataclasses.asdict(subject),
        "settings": tried(settings),
        "trials": trials,
    }
    append_line(path, row)


def known_settings(path: Path, subject: Subject) -> Settings | None:
    """The newest settings that were found for the like of `subject`; lines that are torn or foreign
    are passed over.
    """
    for line in reversed(newest_lines(path, _MOST_BYTES)):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = read_line(line) or {}
            if Subject(**row["subject"]).is_like(subject):
                return _checked(Settings.from_json(row["settings"]))
    return None


def _checked(settings: Settings) -> Settings:
    """Refuses what no probe writes. Raises `ValueError`."""
    if settings.micro_batch_tokens < 1 or settings.tile_tokens == 0:
        raise ValueError("not found by a probe")
    return settings
