"""The receipt: what happened, what it cost, where each dollar went, and how true the estimate was.

Built from the files of the run folder only, so a killed run has one too. Spans add up to the wall
time of the attempts and dollars to the bill: each attempt's seconds at that attempt's price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farthing.errors import InputError, RunDamagedError
from farthing.launch.machines import bill_of
from farthing.launch.still_billed import still_billed
from farthing.planner.estimate import Estimate
from farthing.report.answers_view import answers_of
from farthing.report.diagnosis import diagnose
from farthing.report.plan_types import view_of
from farthing.report.receipt_types import (
    Curves,
    Forecast,
    Pair,
    Promised,
    RunReceipt,
    Saves,
    Span,
    Trust,
)
from farthing.report.timeline import OF_SPAN, foretold, timeline_of
from farthing.report.training_log import Curve, TrainingLog, read_log
from farthing.report.words import lines, say
from farthing.run import folder as files
from farthing.run.accounts import LOST, Account, read_ledger, with_redone
from farthing.run.ledger import SPANS
from farthing.storage.files import DamagedFileError, Json

N_CURVE_POINTS, N_BANDS = 60, 240
COMPARED = {
    "usd": "price work",
    "wall_s": "work",
    "steps": "",
    "tokens": "",
    "tokens_per_s": "",
    "usd_per_million_tokens": "price",
    "peak_bytes": "",
    "interruptions": "",
    "final_loss": "train",
}
"""Figures of two runs, and what must be alike in them for a ratio, see `_unlike`."""
MODEL_KEY = ("model", "model_name_or_path")
FIGURES = ("tokens_per_s", "padded_tokens_per_s", "mfu", "work")


def build_receipt(folder: Path, log: TrainingLog | None = None) -> RunReceipt:
    """`log`: where it was read already. Raises `InputError` where `folder` has no run."""
    found = read_ledger(folder / files.LEDGER, files.witnesses_of(folder))
    if not found.accounts and not (folder / files.LEDGER).exists():
        to_do = "name the output_dir of a job that has started"
        raise InputError("not a run folder", where=str(folder), to_do=to_do)
    accounts, log = with_redone(found.accounts), log or read_log(folder / files.LOG)
    copies = (files.newest_with_copies(folder) or {}).get(files.COPIES, {})
    damaged: list[str] = []

    def kept(name: str) -> Json | None:
        found = None
        try:
            found = files.kept(folder / name)
            if found is None and copies.get(name) is not None:
                damaged.append(f"{name} is gone")
        except DamagedFileError as error:
            damaged.append(str(error))
        return found

    def measured(name: str) -> Json | None:
        values = kept(name) or {}
        return values if values.get("exported_step", -1) == exported_step else None

    facts, job = kept(files.RUN) or {}, None
    try:
        if (folder / files.JOB).exists() or "job_sha256" in facts:
            job = files.kept_job(folder)
    except RunDamagedError as error:
        damaged += {error.what} - {*damaged}
    estimate, n_in_epoch = None, facts.get("steps_per_epoch")
    with contextlib.suppress(ValueError, TypeError, KeyError):
        estimate = Estimate.from_json(kept(files.PLAN))
    bill, now = _bill_of(accounts), datetime.now(UTC)
    machines = bill_of(folder, accounts, now.timestamp(), damaged)
    exported = [account.exported for account in accounts if account.exported is not None]
    exported_step = exported[-1] if exported else None
    best = next((row for row in reversed(log.evaluations) if row.get("is_best")), None)
    of_model = next((row for row in log.evaluations if row["step"] == exported_step), best)
    if of_model is None and log.evaluations:
        of_model = log.evaluations[-1]
    lost = next((each for each in accounts if each.number == LOST), Account(LOST))
    is_broken, forecasts = found.n_broken > 0 or lost in accounts, [a.forecast for a in accounts]
    figures: dict[str, Any] = {}
    for account in accounts:
        figures |= account.facts
    attempt = next((account for account in reversed(accounts) if account.began), lost)
    receipt = view_of(
        RunReceipt,
        bill,
        run=str(folder),
        written=now.isoformat(timespec="seconds"),
        seen_at=accounts[-1].at if accounts else None,
        job=job,
        identity=facts.get("identity"),
        machine=facts.get("machine"),
        data_notes=(kept(files.DATA_NOTES) or {}).get("notes", []),
        schedule=kept(files.SCHEDULE),
        settings=kept(files.SETTINGS),
        steps=log.step,
        steps_per_epoch=n_in_epoch,
        epochs=log.step / n_in_epoch if n_in_epoch else None,
        tokens=log.n_tokens,
        target_tokens=log.n_targets,
        final_loss=log.loss,
        skipped_steps=log.n_skipped,
        out_of_memory=[event for a in accounts for event in a.out_of_memory],
        best_step=best["step"] if best else None,
        exported_step=exported_step,
        metrics=of_model["metrics"] if of_model else None,
        evaluation=measured(files.EVALUATION),
        standard_tasks=measured(files.STANDARD_TASKS),
        published=(kept(files.PUBLISHED) or {}).get("publications", []),
        ancestor=facts.get("ancestor"),
        usd_with_ancestor=bill.usd + (facts.get("ancestor") or {}).get("usd", 0.0),
        usd_is_known=any(a.usd_per_hour > 0 for a in accounts),
        usd_per_million_tokens=bill.usd / (log.n_tokens / 1e6) if log.n_tokens else None,
        spans=_spans(bill),
        ledger=Trust(found.n_broken, lost.wall_s, lost.usd) if is_broken else None,
        damaged_log_lines=max(log.n_damaged, attempt.committed - log.step),
        damaged_files=damaged,
        checkpoints=_checkpoints(job, estimate, accounts, bill.wall_s),
        attempts=[_attempt(a) for a in accounts],
        notices=[_notice(each, a) for a in accounts for each in a.notices],
        interruptions=sum(a.state != "finished" for a in [a for a in accounts if a.began][:-1]),
        redone_s=sum(a.redone_s for a in accounts),
        redone_usd=sum(a.redone_s / 3600 * a.usd_per_hour for a in accounts),
        restart_s=sum(_start_up_s(a) for a in accounts[1:]),
        restart_usd=sum(_start_up_s(a) / 3600 * a.usd_per_hour for a in accounts[1:]),
        promised=against_estimate(estimate, bill, accounts),
        forecast=next(
            (Forecast(said["step"], **_sums(said, bill)) for said in forecasts if said), None
        ),
        machines=machines,
        still_billed=still_billed(job or {}, machines),
        **{name: figures.get(name) for name in FIGURES},
        curves=_curves(log, accounts),
        answers=answers_of(
            job,
            {name: curve.means(N_CURVE_POINTS) for name, curve in log.figures.items()},
            bill.spans,
            bill.usd_of,
            log.n_tokens,
            figures.get("padded_tokens"),
        ),
        timeline=timeline_of(accounts, [row["step"] for row in log.evaluations]),
    )
    return replace(receipt, diagnosis=diagnose(receipt))


@dataclass(frozen=True)
class Bill:
    state: str
    spans: dict[str, float]
    usd_of: dict[str, float]
    wall_s: float
    usd: float
    peak_bytes: int | None


def _bill_of(accounts: list[Account]) -> Bill:
    seconds = {name: sum(a.spans.get(name, 0.0) for a in accounts) for name in SPANS}
    usd_of = {
        name: sum(a.spans.get(name, 0.0) / 3600 * a.usd_per_hour for a in accounts)
        for name in SPANS
    }
    return Bill(
        accounts[-1].ended if accounts else "killed",
        seconds,
        usd_of,
        sum(a.wall_s for a in accounts),
        sum(a.usd for a in accounts),
        max((a.peak_bytes for a in accounts if a.peak_bytes), default=None),
    )


def _spans(bill: Bill) -> list[Span]:
    return [
        Span(name, what, seconds, bill.usd_of[name], seconds / bill.wall_s if bill.wall_s else 0.0)
        for name, what in SPANS.items()
        if (seconds := bill.spans[name]) or name != "lost"
    ]


def _curves(log: TrainingLog, accounts: list[Account]) -> Curves:
    evaluations = [
        {"step": row["step"], **{k: v for k, v in row["metrics"].items() if isinstance(v, float)}}
        for row in log.evaluations
    ]
    losses, busy = log.losses, Curve()
    for account in accounts:
        for stretch in account.stretches:
            if stretch.n_busy > 0:
                busy.add(stretch.step, stretch.busy / stretch.n_busy)
    means, of_device = (curve.means(N_CURVE_POINTS) for curve in (losses, busy))
    ends = [point for point in (losses.first, losses.last) if point is not None]
    return Curves(means, losses.bands(N_BANDS), ends, of_device, evaluations)


def leave_receipt(folder: Path, log: TrainingLog | None = None) -> RunReceipt:
    receipt = build_receipt(folder, log)
    files.keep(folder / files.RECEIPT, receipt.to_json())
    return receipt


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of two runs; `ratio` run/baseline, None where they can't be compared."""

    run: Any
    baseline: Any
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Two receipts side by side; savings below 0 are what the run took more."""

    run: str
    baseline: str
    rows: dict[str, ComparedFigure]
    notes: list[str]
    saved_usd: float | None
    saved_share: float | None
    saved_s: float
    is_same_work: bool  # same steps and tokens; else only tokens can be compared
    saved_share_per_token: float | None  # seconds where no price is known

    def in_words(self, run: str = "the run", baseline: str = "the baseline") -> str:
        """What the run saves, by the token where the work differs; empty where unknown."""
        return say("receipt.txt", "compared", self, run, baseline)


def compare(run: RunReceipt, baseline: RunReceipt) -> Comparison:
    """What the first saves against the second, and what of it can't be compared.

    Raises `InputError` for runs of different tasks: nothing that they learned can be compared.
    """
    tasks = [receipt.asked("task") for receipt in (run, baseline)]
    if None not in tasks and tasks[0] != tasks[1]:
        what = f"one run is {tasks[0]}, the other {tasks[1]}"
        raise InputError(
            f"{what}: their losses and metrics can't be compared",
            where=f"{run.run}, {baseline.run}",
            to_do="compare runs of one task",
        )
    has_prices = run.usd_is_known and baseline.usd_is_known
    models = [str(each.asked(*MODEL_KEY) or "?") for each in (run, baseline)]
    unlike, metrics = set(_unlike(run, baseline)), baseline.metrics or {}
    rows = {
        name: _compared(
            _figure(run, name), _figure(baseline, name), unlike.isdisjoint(kinds.split())
        )
        for name, kinds in COMPARED.items()
    } | {
        name: _compared(value, metrics[name], "eval" not in unlike)
        for name, value in (run.metrics or {}).items()
        if isinstance(value, float) and name in metrics
    }
    saved_usd = baseline.usd - run.usd if has_prices else None
    spent = [(r.usd if has_prices else r.wall_s, r.tokens) for r in (run, baseline)]
    per_token = [amount / n for amount, n in spent if n and amount]
    return Comparison(
        run=run.run,
        baseline=baseline.run,
        rows=rows,
        notes=lines("receipt.txt", "unlike", unlike, run, baseline, models),
        saved_usd=saved_usd,
        saved_share=saved_usd / baseline.usd if saved_usd is not None and baseline.usd else None,
        saved_s=baseline.wall_s - run.wall_s,
        is_same_work="work" not in unlike,
        saved_share_per_token=1 - per_token[0] / per_token[1] if len(per_token) == 2 else None,
    )


def _figure(receipt: RunReceipt, name: str) -> Any:
    return getattr(receipt, name) if receipt.usd_is_known or "usd" not in name else None


def _compared(ours: Any, theirs: Any, is_like: bool) -> ComparedFigure:
    has_ratio = is_like and isinstance(ours, int | float) and isinstance(theirs, int | float)
    return ComparedFigure(ours, theirs, ours / theirs if has_ratio and theirs else None)


def _unlike(run: RunReceipt, baseline: RunReceipt) -> Iterator[str]:
    """In what two runs differ: train, eval, price, work, model, state."""
    ours, theirs = run.identity or {}, baseline.identity or {}

    def differ(*keys: str) -> bool:
        return any(ours.get(key) != theirs.get(key) for key in keys)

    keys = {**ours, **theirs}
    words = [key for key in keys if key.startswith(("tokenization.", "tokenizer "))]
    if differ("data.train (content)", "data.eval_fraction", "data.max_train_samples", *words):
        yield "train"
    held_out = ["data.eval (content)", "data.max_eval_samples"]
    if not all(one.get("data.eval (content)") for one in (ours, theirs)):
        held_out += ["data.train (content)", "data.eval_fraction", "train.seed"]
    if run.metrics and baseline.metrics and differ(*held_out, *words):
        yield "eval"
    if run.usd_is_known != baseline.usd_is_known:
        yield "price"
    if (run.steps, run.tokens) != (baseline.steps, baseline.tokens):
        yield "work"
    if run.asked(*MODEL_KEY) != baseline.asked(*MODEL_KEY) and differ("model (content)"):
        yield "model"
    if {run.state, baseline.state} != {"finished"}:
        yield "state"


def _attempt(account: Account) -> Json:
    same = "number machine spans usd_per_hour first_step began ended redone_s n_saves wall_s usd"
    return {name: getattr(account, name) for name in same.split()} | {
        "started_at": datetime.fromtimestamp(account.started_at, UTC).isoformat(timespec="seconds"),
        "last_step": account.step,
        "save_held_up_s": account.held_up_s,
    }


def _checkpoints(
    job: Any, estimate: Estimate | None, attempts: list[Account], wall_s: float
) -> Saves:
    train = job["train"] if isinstance(job, dict) else {}
    interval_s = 60 * train["save_minutes"] if train.get("save_minutes") else None
    if interval_s is None and not train.get("save_steps") and estimate is not None:
        interval_s = estimate.interval_s
    held_up_s = sum(attempt.held_up_s for attempt in attempts)
    n = sum(attempt.n_saves for attempt in attempts)
    return Saves(n, interval_s, held_up_s, held_up_s / wall_s if wall_s else 0.0)


def _notice(said: Json, account: Account) -> Json:
    """What was heard, in which attempt, and how long after it the process had left."""
    notice, left_after_s = said["notice"], None
    if notice.get("is_certain") and "at" in notice:
        left_after_s = max(0.0, account.at - notice["at"])
    return {"attempt": account.number, "step": said["step"], **notice, "left_after_s": left_after_s}


def _start_up_s(attempt: Account) -> float:
    names = ("start_up", "tokenize", "load_model", "restore")
    return sum(attempt.spans.get(name, 0.0) for name in names)


APART = "restarts and waiting, left out of the ratio"


def _pair(promised: float, happened: float | None, bill: Bill) -> Pair:
    if bill.state != "finished" or not promised or happened is None:
        return Pair(promised, happened, None)
    return Pair(promised, happened, happened / promised)


def against_estimate(
    estimate: Estimate | None, bill: Bill, attempts: Sequence[Account]
) -> Promised | None:
    """What the plan had said before the first attempt against what happened, whole and by
    component.

    Restarts, work that was done again and waiting say nothing of the estimate, and are apart.
    """
    if estimate is None:
        return None
    happened = foretold(bill.spans)
    seconds = {
        part: _pair(estimate.seconds.get(part, 0.0), happened.get(part, 0.0), bill)
        for part in dict.fromkeys(part for _, part in OF_SPAN.values() if part)
    }
    again_s = sum(_start_up_s(a) for a in attempts[1:]) + sum(a.redone_s for a in attempts)
    again_s += bill.spans.get("ranks", 0.0)
    apart = ("lost work", "restarts", "waiting")
    promised_s = sum(estimate.seconds.get(name, 0.0) for name in apart)
    sums = _sums(asdict(estimate), bill)
    if again_s or promised_s:
        alone = _pair(estimate.wall_s - promised_s, bill.wall_s - again_s, bill)
        sums["wall_s"] = replace(sums["wall_s"], ratio=alone.ratio)
        seconds[APART] = Pair(promised_s, again_s, None)
    return Promised(estimate.calibration, list(estimate.wall_range_s), **sums, seconds=seconds)


def _sums(said: Json, bill: Bill) -> dict[str, Pair]:
    return {
        name: _pair(said[name], getattr(bill, name), bill)
        for name in ("wall_s", "usd", "peak_bytes")
    }
