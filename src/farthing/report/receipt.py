"""The receipt: what happened, what it cost, where each dollar went, and how true the estimate was.

Built from the files of the run folder only, so a killed run has one too. Spans add up to the wall
time of the attempts and dollars to the bill: each attempt's seconds at that attempt's price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farthing.errors import InputError
from farthing.launch.machines import bill_of
from farthing.launch.still_billed import still_billed
from farthing.planner.estimate import Estimate
from farthing.report.answers_view import answers_of
from farthing.report.diagnosis import diagnose
from farthing.report.receipt_serving import serving_of
from farthing.report.receipt_types import (
    Curves,
    Forecast,
    Pair,
    Promised,
    Receipt,
    Saves,
    Span,
    Trust,
)
from farthing.report.timeline import OF_SPAN, seconds_of, timeline_of
from farthing.report.training_log import TrainingLog, read_log
from farthing.run.accounts import LOST, Account, Found, read_ledger, with_redone
from farthing.run.folder import (
    DATA_NOTES,
    JOB,
    LEDGER,
    LOG,
    PLAN,
    PUBLISHED,
    RECEIPT,
    RUN,
    SCHEDULE,
    SETTINGS,
    STANDARD_TASKS,
    evaluation_of,
    witnesses_of,
)
from farthing.run.ledger import SPANS
from farthing.storage.files import Json, read_json, write_json
from farthing.units import plural, say_seconds, say_usd

N_CURVE_POINTS, N_BANDS = 60, 240
ROW_NAMES = {
    "usd": "cost",
    "wall_s": "time",
    "tokens_per_s": "useful tokens/s",
    "usd_per_million_tokens": "a million tokens",
    "peak_bytes": "peak memory",
    "final_loss": "last training loss",
    "loss": "evaluation loss",
}
"""What the rows of a comparison are called; the others are called as they are."""
FIGURES = ("tokens_per_s", "padded_tokens_per_s", "mfu", "work")


def build_receipt(folder: Path, log: TrainingLog | None = None) -> Receipt:
    """The receipt of the run in `folder`; `log` where it was read already. Raises `InputError` when
    there is none.
    """
    found = read_ledger(folder / LEDGER, witnesses_of(folder))
    if not found.accounts and not (folder / LEDGER).exists():
        raise InputError(
            "not a run folder",
            where=str(folder),
            to_do="name the output_dir of a job that has started",
        )
    accounts, log = with_redone(found.ordered), log or read_log(folder / LOG)
    job, estimate, facts = (
        _read_json(folder / JOB),
        _estimate_in(folder / PLAN),
        _read_json(folder / RUN) or {},
    )
    bill, now = _bill_of(accounts), datetime.now(UTC)
    machines = bill_of(folder, accounts, now.timestamp())
    exported_step = _newest(accounts, lambda a: a.exported)
    best, of_model = _evaluations_of_note(log.evaluations, exported_step)
    receipt = Receipt(
        run=str(folder),
        state=bill.state,
        written=now.isoformat(timespec="seconds"),
        seen_at=accounts[-1].at if accounts else None,
        job=job,
        identity=facts.get("identity"),
        machine=facts.get("machine"),
        data_notes=_read_json(folder / DATA_NOTES) or [],
        schedule=_read_json(folder / SCHEDULE),
        settings=_read_json(folder / SETTINGS),
        steps=log.step,
        steps_per_epoch=facts.get("steps_per_epoch"),
        epochs=log.step / facts["steps_per_epoch"] if facts.get("steps_per_epoch") else None,
        tokens=log.n_tokens,
        target_tokens=log.n_targets,
        final_loss=log.loss,
        skipped_steps=log.n_skipped,
        out_of_memory=[event for a in accounts for event in a.out_of_memory],
        best_step=best["step"] if best else None,
        exported_step=exported_step,
        metrics=of_model["metrics"] if of_model else None,
        **_of_afterwards(folder, exported_step, job if bill.state == "finished" else None, log),
        wall_s=bill.wall_s,
        usd=bill.usd,
        ancestor=facts.get("ancestor"),
        usd_with_ancestor=bill.usd + (facts.get("ancestor") or {}).get("usd", 0.0),
        usd_is_known=any(a.usd_per_hour > 0 for a in accounts),
        usd_per_million_tokens=bill.usd / (log.n_tokens / 1e6) if log.n_tokens else None,
        spans=_spans(bill),
        ledger=_trust(found),
        damaged_log_lines=log.n_damaged,
        checkpoints=_checkpoints(job, estimate, accounts, bill.wall_s),
        attempts=[_attempt(a) for a in accounts],
        notices=[_notice(each, a) for a in accounts for each in a.notices],
        interruptions=sum(a.state != "finished" for a in [a for a in accounts if a.began][:-1]),
        redone_s=sum(a.redone_s for a in accounts),
        redone_usd=sum(a.redone_s / 3600 * a.usd_per_hour for a in accounts),
        restart_s=sum(_start_up_s(a) for a in accounts[1:]),
        restart_usd=sum(_start_up_s(a) / 3600 * a.usd_per_hour for a in accounts[1:]),
        promised=against_estimate(estimate, bill, accounts),
        forecast=_forecast(next((a.forecast for a in accounts if a.forecast), None), bill),
        peak_bytes=bill.peak_bytes,
        machines=machines,
        still_billed=still_billed(job or {}, machines),
        **{name: _newest(accounts, lambda a, name=name: a.facts.get(name)) for name in FIGURES},  # type: ignore[misc]
        curves=_curves(log, accounts),
        answers=answers_of(
            job,
            {name: curve.means(N_CURVE_POINTS) for name, curve in log.figures.items()},
            bill.spans,
            bill.usd_of,
            log.n_tokens,
            _newest(accounts, lambda a: a.facts.get("padded_tokens")),
        ),
        timeline=timeline_of(accounts, [row["step"] for row in log.evaluations]),
    )
    return replace(receipt, diagnosis=diagnose(receipt))


@dataclass(frozen=True)
class Bill:
    """Sums over all attempts; by span in seconds and dollars."""

    state: str
    spans: dict[str, float]
    usd_of: dict[str, float]
    wall_s: float
    usd: float
    peak_bytes: int | None


def _bill_of(accounts: list[Account]) -> Bill:
    return Bill(
        accounts[-1].ended if accounts else "killed",
        {name: sum(a.spans.get(name, 0.0) for a in accounts) for name in SPANS},
        {
            name: sum(a.spans.get(name, 0.0) / 3600 * a.usd_per_hour for a in accounts)
            for name in SPANS
        },
        sum(a.wall_s for a in accounts),
        sum(a.usd for a in accounts),
        max((a.peak_bytes for a in accounts if a.peak_bytes), default=None),
    )


def _of_afterwards(
    folder: Path, exported_step: int | None, job: Json | None, log: TrainingLog
) -> Json:
    """The fields on what becomes of the model."""
    published = _read_json(folder / PUBLISHED)
    sent = published.get("publications", []) if isinstance(published, dict) else []
    measured = {
        "evaluation": evaluation_of(folder, exported_step),
        "standard_tasks": evaluation_of(folder, exported_step, STANDARD_TASKS),
    }
    return {**measured, "published": sent, "serving": serving_of(folder, job, log)}


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
    ends = [point for point in (log.losses.first, log.losses.last) if point is not None]
    bands = log.losses.bands(N_BANDS)
    return Curves(
        log.losses.means(N_CURVE_POINTS), bands, ends, _utilisation(accounts), evaluations
    )


def _newest(accounts: list[Account], value: Callable[[Account], Any]) -> Any:
    """What the last attempt that knows it says."""
    return next(
        (found for account in reversed(accounts) if (found := value(account)) is not None), None
    )


def _evaluations_of_note(rows: list[Json], exported_step: int | None) -> tuple[Any, Any]:
    """The best evaluation, and that of the model which was written."""
    best = next((row for row in reversed(rows) if row.get("is_best")), None)
    of_model = next((row for row in rows if row["step"] == exported_step), best)
    return best, of_model or (rows[-1] if rows else None)


def _trust(found: Found) -> Trust | None:
    """None where all is well."""
    lost = found.accounts.get(LOST)
    if lost is None and not found.n_broken:
        return None
    return Trust(found.n_broken, lost.wall_s if lost else 0.0, lost.usd if lost else 0.0)


def leave_receipt(folder: Path, log: TrainingLog | None = None) -> Receipt:
    """Build the receipt and write it into the run's folder."""
    receipt = build_receipt(folder, log)
    write_json(folder / RECEIPT, receipt.to_json())
    return receipt


@dataclass(frozen=True)
class Compared:
    """A figure of two runs; `ratio` run/baseline, None where they can't be compared."""

    run: Any
    baseline: Any
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Two receipts side by side; what is saved is below 0 where the run took more than the
    baseline.
    """

    run: str
    baseline: str
    rows: dict[str, Compared]
    notes: list[str]
    saved_usd: float | None
    saved_share: float | None
    saved_s: float
    is_same_work: bool
    """Whether both have taken the same steps with the same tokens: else only what a token takes can
    be compared.
    """
    saved_share_per_token: float | None
    """Of the dollars of a token, or of its seconds where there is no price."""

    def in_words(self, run: str = "the run", baseline: str = "the baseline") -> str:
        """What the run saves; where both did not do the same work, by the token; empty where
        nothing is known of that.
        """
        if not self.is_same_work:
            share = self.saved_share_per_token
            what = "costs" if self.saved_usd is not None else "takes"
            less = "" if share is None else f"{abs(share):.0%} {'less' if share >= 0 else 'more'}"
            return f"by the token {run} {what} {less} than {baseline}" if less else ""
        words = [
            f"takes {say_seconds(abs(self.saved_s))} {'less' if self.saved_s >= 0 else 'more'}"
        ]
        if self.saved_usd is not None:
            share_words = "" if self.saved_share is None else f" ({abs(self.saved_share):.0%})"
            more = "less" if self.saved_usd >= 0 else "more"
            words = [f"costs {say_usd(abs(self.saved_usd))}{share_words} {more}", *words]
        return f"{run} {' and '.join(words)} than {baseline}"

    def to_json(self) -> Json:
        """For `--json`."""
        return {"kind": "farthing comparison", **asdict(self)}


def compare(run: Receipt, baseline: Receipt) -> Comparison:
    """What the first saves against the second, and what of it can't be compared.

    Raises `InputError` for runs of different tasks: nothing that they learned can be compared.
    """
    tasks = [(receipt.job or {}).get("task") for receipt in (run, baseline)]
    if None not in tasks and tasks[0] != tasks[1]:
        raise InputError(
            f"one run is {tasks[0]}, the other {tasks[1]}: their losses and metrics can't be"
            " compared",
            where=f"{run.run}, {baseline.run}",
            to_do="compare runs of one task",
        )
    has_prices = run.usd_is_known and baseline.usd_is_known
    unlike = _unlike(run, baseline)

    def both(ours: Any, theirs: Any, *, is_like: bool = True) -> Compared:
        numbers = isinstance(ours, int | float) and isinstance(theirs, int | float) and theirs
        return Compared(ours, theirs, ours / theirs if is_like and numbers else None)

    def figure(name: str, *, is_like: bool = True) -> Compared:
        return both(getattr(run, name), getattr(baseline, name), is_like=is_like)

    def price(name: str) -> Compared:
        ours, theirs = (getattr(r, name) if r.usd_is_known else None for r in (run, baseline))
        return both(ours, theirs, is_like=has_prices and (name != "usd" or "work" not in unlike))

    rows = {
        "usd": price("usd"),
        "wall_s": figure("wall_s", is_like="work" not in unlike),
        **{name: figure(name) for name in ("steps", "tokens", "tokens_per_s")},
        "usd_per_million_tokens": price("usd_per_million_tokens"),
        **{name: figure(name) for name in ("peak_bytes", "interruptions")},
        "final_loss": figure("final_loss", is_like="train" not in unlike),
    }
    theirs = baseline.metrics or {}
    for name, value in (run.metrics or {}).items():
        if isinstance(value, float) and name in theirs:
            rows[name] = both(value, theirs[name], is_like="eval" not in unlike)
    saved_usd = baseline.usd - run.usd if has_prices else None
    spent = [
        (receipt.usd if has_prices else receipt.wall_s, receipt.tokens)
        for receipt in (run, baseline)
    ]
    per_token = [amount / n for amount, n in spent if n and amount]
    return Comparison(
        run=run.run,
        baseline=baseline.run,
        rows=rows,
        notes=list(unlike.values()),
        saved_usd=saved_usd,
        saved_share=saved_usd / baseline.usd if saved_usd is not None and baseline.usd else None,
        saved_s=baseline.wall_s - run.wall_s,
        is_same_work="work" not in unlike,
        saved_share_per_token=1 - per_token[0] / per_token[1] if len(per_token) == 2 else None,
    )


def _unlike(run: Receipt, baseline: Receipt) -> dict[str, str]:
    """In what two runs are not alike, so that some of their figures say nothing about each other:
    key -> words.
    """
    found = {}
    ours, theirs = run.identity or {}, baseline.identity or {}

    def differ(*keys: str) -> bool:
        return any(ours.get(key) != theirs.get(key) for key in keys)

    of_words = [
        key for key in {**ours, **theirs} if key.startswith(("tokenization.", "tokenizer "))
    ]
    if differ("data.train (content)", "data.eval_fraction", "data.max_train_samples", *of_words):
        found["train"] = (
            "they trained on other data, or other tokens of it: the last training loss can't be"
            " compared"
        )
    held_out = ["data.eval (content)", "data.max_eval_samples"]
    if not ours.get("data.eval (content)") or not theirs.get("data.eval (content)"):
        held_out += ["data.train (content)", "data.eval_fraction", "train.seed"]
    if run.metrics and baseline.metrics and differ(*held_out, *of_words):
        found["eval"] = (
            "they were evaluated on other examples, or other tokens of them: the metrics can't be"
            " compared"
        )
    known = [receipt.usd_is_known for receipt in (run, baseline)]
    if known[0] != known[1]:
        found["price"] = (
            f"{'the baseline' if known[0] else 'the run'} has no price: dollars can't be compared"
        )
    if run.steps != baseline.steps or run.tokens != baseline.tokens:
        found["work"] = (
            f"they did not do the same work ({plural(run.steps, 'step')} and"
            f" {plural(baseline.steps, 'step')}): compare their costs a token, not their"
            " totals"
        )
    models = [
        str(((receipt.job or {}).get("model") or {}).get("model_name_or_path", "?"))
        for receipt in (run, baseline)
    ]
    if models[0] != models[1] and differ("model (content)"):
        found["model"] = (
            f"they trained other models ({models[0]} and {models[1]}): a token is not the same work"
            " for both"
        )
    states = {receipt.state for receipt in (run, baseline)}
    if states != {"finished"}:
        found["state"] = "not both have finished: the figures are as far as they came"
    return found


def _attempt(account: Account) -> Json:
    same = (
        "number",
        "spans",
        "usd_per_hour",
        "first_step",
        "began",
        "ended",
        "redone_s",
        "n_saves",
        "wall_s",
        "usd",
    )
    return {name: getattr(account, name) for name in same} | {
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
    notice = said["notice"]
    left_after_s = (
        max(0.0, account.at - notice["at"]) if notice.get("is_certain") and "at" in notice else None
    )
    return {"attempt": account.number, "step": said["step"], **notice, "left_after_s": left_after_s}


def _start_up_s(attempt: Account) -> float:
    """What it took an attempt to get going."""
    return sum(
        attempt.spans.get(name, 0.0) for name in ("start_up", "tokenize", "load_model", "restore")
    )


APART = "restarts and waiting, left out of the ratio"


def _pair(promised: float, happened: float | None, bill: Bill) -> Pair:
    ratio = (
        happened / promised
        if bill.state == "finished" and happened is not None and promised
        else None
    )
    return Pair(promised, happened, ratio)


def _estimate_in(path: Path) -> Estimate | None:
    """What plan.json says; None where it says nothing or is damaged."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return Estimate.from_json(_read_json(path))
    return None


def against_estimate(
    estimate: Estimate | None, bill: Bill, attempts: Sequence[Account]
) -> Promised | None:
    """What the plan had said before the first attempt against what happened, whole and by
    component.

    Restarts, work that was done again and waiting say nothing of the estimate, and are apart.
    """
    if estimate is None:
        return None
    seconds = {
        part: _pair(estimate.seconds.get(part, 0.0), seconds_of(part, bill.spans), bill)
        for part in dict.fromkeys(part for _, part in OF_SPAN.values() if part)
    }
    again_s = (
        sum(_start_up_s(a) for a in attempts[1:])
        + sum(a.redone_s for a in attempts)
        + bill.spans.get("ranks", 0.0)
    )
    promised_s = sum(
        estimate.seconds.get(name, 0.0) for name in ("lost work", "restarts", "waiting")
    )
    sums = _sums(asdict(estimate), bill)
    if again_s or promised_s:
        alone = _pair(estimate.wall_s - promised_s, bill.wall_s - again_s, bill)
        sums["wall_s"] = replace(sums["wall_s"], ratio=alone.ratio)
        seconds[APART] = Pair(promised_s, again_s, None)
    return Promised(estimate.calibration, list(estimate.wall_range_s), **sums, seconds=seconds)


def _forecast(forecast: Json | None, bill: Bill) -> Forecast | None:
    return None if forecast is None else Forecast(forecast["step"], **_sums(forecast, bill))


def _sums(said: Json, bill: Bill) -> dict[str, Pair]:
    """What was said of time, dollars and memory, each with what came of it."""
    return {
        name: _pair(said[name], getattr(bill, name), bill)
        for name in ("wall_s", "usd", "peak_bytes")
    }


def _utilisation(accounts: list[Account]) -> list[list[float]]:
    """How busy the GPU was over all attempts: at most `N_CURVE_POINTS` points [step, mean of its
    stretch].
    """
    points = [point for account in accounts for point in account.utilisation]
    size = -(-len(points) // N_CURVE_POINTS) or 1
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        [stretch[-1][0], sum(mean for _, mean in stretch) / len(stretch)] for stretch in stretches
    ]


def _read_json(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        value = read_json(path)
        return (
            {key: item for key, item in value.items() if key != "sha256"}
            if isinstance(value, dict)
            else value
        )
    return None
