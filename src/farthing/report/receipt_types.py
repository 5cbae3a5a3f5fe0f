"""What a receipt consists of: frozen values with their units, as `receipt.json` holds them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from farthing.report.timeline import Timeline
from farthing.storage.files import Json


@dataclass(frozen=True)
class Finding:
    """Something that holds a run back, and what to do about it."""

    area: str
    """data, memory, compute, host, communication, checkpoints, evaluation, start-up or waiting"""
    cause: str
    evidence: str
    fix: str  # the key to set, as `--set` takes it; empty where no key helps
    to_do: str
    saves_s: float  # in a whole run like this one
    saves_usd: float
    rest_s: float  # in what is left of this run, 0 where nothing can be saved
    rest_usd: float


@dataclass(frozen=True)
class Advice:
    words: str
    usd: float
    command: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What holds a run back, in the order of the areas; `largest` saves most."""

    findings: list[Finding]
    largest: str  # the cause of that finding; empty where nothing stands out
    advice: list[Advice]


@dataclass(frozen=True)
class Span:
    name: str
    what: str
    seconds: float
    usd: float
    share: float


@dataclass(frozen=True)
class Pair:
    """An estimate and what came of it; `ratio` happened/promised, None until the run has ended."""

    promised: float
    happened: float | None
    ratio: float | None


@dataclass(frozen=True)
class Promised:
    """What the plan said before the first attempt, against what happened."""

    calibration: str
    wall_range_s: list[float]
    wall_s: Pair
    usd: Pair
    peak_bytes: Pair
    seconds: dict[str, Pair]


@dataclass(frozen=True)
class Forecast:
    made_after_step: int
    wall_s: Pair
    usd: Pair
    peak_bytes: Pair


@dataclass(frozen=True)
class Saves:
    """Checkpoints, and how long training waited for them; `share` is of all the time."""

    n: int
    interval_s: float | None  # None: they were asked for by steps, or there was no plan
    held_up_s: float
    share: float


@dataclass(frozen=True)
class Trust:
    """What was wrong with the ledger, and how much of the bill is known in sum only."""

    n_broken_lines: int
    lost_s: float
    lost_usd: float


@dataclass(frozen=True)
class Curves:
    """Points [step, mean of its stretch]; evaluations: step and metrics."""

    loss: list[list[float]]
    loss_bands: list[list[float]]
    """The same finer: [last step, steps, their sum, the lowest, the highest] of a stretch."""
    loss_ends: list[list[float]]  # [step, loss] of the first and the last step
    utilisation_percent: list[list[float]]
    evaluation: list[dict[str, float]]


@dataclass(frozen=True)
class OfAnswers:
    """Of a run that compares answers. `shared`: what prompts that are computed once have saved;
    `reference`: what references that are scored once have, against a live reference model.
    """

    figures: dict[str, list[list[float]]]  # points [step, mean of its stretch] by name
    notes: list[str]
    shared_share: float  # of all tokens
    shared_s: float
    shared_usd: float
    reference_s: float
    reference_usd: float


@dataclass(frozen=True)
class RunReceipt:
    """Everything that a run folder says; dictionaries are as its files have them."""

    run: str
    state: str  # finished, limit, interrupted, failed or killed: how the last attempt ended
    written: str
    seen_at: float | None  # seconds since 1970 of the newest line of the ledger
    job: Json | None
    identity: Json | None
    machine: Json | None
    data_notes: list[str]
    schedule: Json | None
    settings: Json | None
    steps: int
    steps_per_epoch: int | None
    epochs: float | None
    tokens: int
    target_tokens: int
    final_loss: float | None
    skipped_steps: int
    out_of_memory: list[Json]
    best_step: int | None
    exported_step: int | None
    metrics: Json | None
    evaluation: Json | None
    standard_tasks: Json | None
    """Both as `farthing eval` measured them: on examples, and by lm-eval's tasks."""
    wall_s: float
    usd: float
    ancestor: Json | None  # run, run_id, step, wall_s, usd, usd_is_known
    usd_with_ancestor: float
    usd_is_known: bool
    usd_per_million_tokens: float | None
    spans: list[Span]
    ledger: Trust | None
    damaged_log_lines: int  # or missing
    damaged_files: list[str]  # of the run folder, and left out: which, and in what way
    checkpoints: Saves
    attempts: list[Json]
    notices: list[Json]
    interruptions: int
    redone_s: float
    redone_usd: float
    restart_s: float
    restart_usd: float
    promised: Promised | None
    forecast: Forecast | None
    peak_bytes: int | None
    machines: list[Json]  # that were rented: what each has cost, training in it
    still_billed: list[Json]  # what still costs money, and what ends it
    tokens_per_s: float | None
    padded_tokens_per_s: float | None
    mfu: float | None
    curves: Curves
    answers: OfAnswers | None
    timeline: Timeline
    work: Json | None  # of a step, as in `train/throughput.py`
    published: list[Json]  # on the Hub, with its commit, or still to be sent
    diagnosis: Diagnosis | None = None  # None only while the rest is put together

    def asked(self, *keys: str) -> Any:
        """A value of the job, such as `asked("model", "model_name_or_path")`; None without one."""
        value: Any = self.job
        for key in keys:
            value = (value or {}).get(key)
        return value

    @property
    def metric(self) -> str:
        """The name of the metric by which the best model is chosen."""
        return str(self.asked("train", "metric_for_best_model") or "loss").removeprefix("eval_")

    @property
    def against_estimate(self) -> Pair | None:
        """The estimated dollars, or seconds where no price is known."""
        if self.promised is None:
            return None
        return self.promised.usd if self.usd_is_known else self.promised.wall_s

    def to_json(self) -> Json:
        return {"kind": "farthing receipt", "version": 1, **asdict(self)}
