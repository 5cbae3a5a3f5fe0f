"""The receipt: what happened, what it cost, where each dollar went, and how true the promise was.

Built from the files of the run folder only, so a killed run has one too. Spans add up to the wall time of the attempts
and dollars to the bill: each attempt's seconds at that attempt's price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farthing.durability.accounts import LOST, Account, Attempt, Found, attempts_of, read_ledger
from farthing.durability.files import parse_json, write_json
from farthing.durability.ledger import SPANS
from farthing.durability.run_folder import DATA_NOTES, JOB, LEDGER, LOG, PLAN, RECEIPT, RUN, SCHEDULE, witnesses_of
from farthing.errors import UserMistake
from farthing.report.training_log import TrainingLog, read_log
from farthing.units import plural

N_CURVE_POINTS = 60
FIGURES = ("tokens_per_s", "padded_tokens_per_s", "mfu")


def build_receipt(folder: Path, log: TrainingLog | None = None) -> dict[str, Any]:
    """The receipt of the run in `folder`; `log` where it was read already. Raises `UserMistake` when there is none."""
    found = read_ledger(folder / LEDGER, witnesses_of(folder))
    if not found.accounts and not (folder / LEDGER).exists():
        raise UserMistake("not a run folder", where=str(folder), to_do="name the output_dir of a job that has started")
    accounts, log = found.ordered, log or read_log(folder / LOG)
    attempts = attempts_of(accounts)
    job, plan = _read_json(folder / JOB), _read_json(folder / PLAN)
    spans = {name: sum(a.spans.get(name, 0.0) for a in attempts) for name in SPANS}
    usd = {name: sum(a.spans.get(name, 0.0) / 3600 * a.usd_per_hour for a in attempts) for name in SPANS}
    wall_s, total_usd = sum(a.wall_s for a in attempts), sum(a.usd for a in attempts)
    peak_bytes = max((a.peak_bytes for a in accounts if a.peak_bytes), default=None)
    state = accounts[-1].ended if accounts else "killed"
    exported_step = _newest(accounts, lambda a: a.exported)
    best, of_model = _evaluations_of_note(log.evaluations, exported_step)
    facts = _read_json(folder / RUN) or {}
    steps_per_epoch = facts.get("steps_per_epoch")
    return {
        "kind": "farthing receipt",
        "version": 1,
        "run": str(folder),
        "state": state,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": job,
        "identity": facts.get("identity"),
        "machine": facts.get("machine"),
        "data_notes": _read_json(folder / DATA_NOTES) or [],
        "schedule": _read_json(folder / SCHEDULE),
        "steps": log.step,
        "steps_per_epoch": steps_per_epoch,
        "epochs": log.step / steps_per_epoch if steps_per_epoch else None,
        "tokens": log.n_tokens,
        "target_tokens": log.n_targets,
        "final_loss": log.loss,
        "skipped_steps": log.n_skipped,
        "out_of_memory": [event for a in accounts for event in a.out_of_memory],
        "best_step": best["step"] if best else None,
        "exported_step": exported_step,
        "metrics": of_model["metrics"] if of_model else None,
        "wall_s": wall_s,
        "usd": total_usd,
        "ancestor": facts.get("ancestor"),
        "usd_with_ancestor": total_usd + (facts.get("ancestor") or {}).get("usd", 0.0),
        "usd_is_known": any(a.usd_per_hour > 0 for a in attempts),
        "usd_per_million_tokens": total_usd / (log.n_tokens / 1e6) if log.n_tokens else None,
        "spans": [
            {
                "name": name,
                "what": what,
                "seconds": spans[name],
                "usd": usd[name],
                "share": spans[name] / wall_s if wall_s else 0.0,
            }
            for name, what in SPANS.items()
            if name != "lost" or spans[name]
        ],
        "ledger": _trust(found),
        "checkpoints": _checkpoints(job, plan, attempts, wall_s),
        "attempts": [_attempt(a) for a in attempts],
        "notices": [_notice(each, a) for a in accounts for each in a.notices],
        "interruptions": max(0, len([a for a in attempts if a.began]) - 1),
        "redone_s": sum(a.redone_s for a in attempts),
        "redone_usd": sum(a.redone_s / 3600 * a.usd_per_hour for a in attempts),
        "restart_s": sum(_start_up_s(a) for a in attempts[1:]),
        "restart_usd": sum(_start_up_s(a) / 3600 * a.usd_per_hour for a in attempts[1:]),
        "promised": _promised(plan, spans, wall_s, total_usd, peak_bytes, state),
        "forecast": _forecast(
            next((a.forecast for a in accounts if a.forecast), None), wall_s, total_usd, peak_bytes, state
        ),
        "peak_bytes": peak_bytes,
        **{name: _newest(accounts, lambda a, name=name: a.facts.get(name)) for name in FIGURES},  # type: ignore[misc]
        "curves": {
            "loss": _curve(log.steps, log.losses),
            "utilisation_percent": _utilisation(accounts),
            "evaluation": [
                {"step": row["step"], **{k: v for k, v in row["metrics"].items() if isinstance(v, float)}}
                for row in log.evaluations
            ],
        },
    }


def _newest(accounts: list[Account], value: Callable[[Account], Any]) -> Any:
    """What the last attempt that knows it says."""
    return next((found for account in reversed(accounts) if (found := value(account)) is not None), None)


def _evaluations_of_note(rows: list[dict[str, Any]], exported_step: int | None) -> tuple[Any, Any]:
    """The best evaluation, and that of the model which was written."""
    best = next((row for row in reversed(rows) if row.get("is_best")), None)
    of_model = next((row for row in rows if row["step"] == exported_step), best)
    return best, of_model or (rows[-1] if rows else None)


def _trust(found: Found) -> dict[str, Any] | None:
    """What was wrong with the ledger, and how much of the bill is known in sum only; None where all is well."""
    lost = found.accounts.get(LOST)
    if lost is None and not found.n_broken:
        return None
    return {
        "n_broken_lines": found.n_broken,
        "lost_s": lost.wall_s if lost else 0.0,
        "lost_usd": lost.usd if lost else 0.0,
    }


def leave_receipt(folder: Path, log: TrainingLog | None = None) -> dict[str, Any]:
    """Build the receipt and write it into the run's folder."""
    receipt = build_receipt(folder, log)
    write_json(folder / RECEIPT, receipt)
    return receipt


def compare(run: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Two receipts side by side, what the first saves against the second, and what of it can't be compared.

    Raises `UserMistake` for runs of different tasks: nothing that they learned can be compared.
    """
    tasks = [(receipt["job"] or {}).get("task") for receipt in (run, baseline)]
    if None not in tasks and tasks[0] != tasks[1]:
        raise UserMistake(
            f"one run is {tasks[0]}, the other {tasks[1]}: their losses and metrics can't be compared",
            where=f"{run['run']}, {baseline['run']}",
            to_do="compare runs of one task",
        )
    has_prices = run["usd_is_known"] and baseline["usd_is_known"]
    unlike = _unlike(run, baseline)

    def both(value: Callable[[dict[str, Any]], Any], *, is_like: bool = True) -> dict[str, Any]:
        ours, theirs = value(run), value(baseline)
        numbers = isinstance(ours, int | float) and isinstance(theirs, int | float) and theirs
        return {"run": ours, "baseline": theirs, "ratio": ours / theirs if is_like and numbers else None}

    def price(key: str) -> dict[str, Any]:
        return both(lambda r: r[key] if r["usd_is_known"] else None, is_like=has_prices)

    rows = {
        "usd": price("usd"),
        "wall_s": both(lambda r: r["wall_s"]),
        "steps": both(lambda r: r["steps"]),
        "tokens": both(lambda r: r["tokens"]),
        "tokens_per_s": both(lambda r: r["tokens_per_s"]),
        "usd_per_million_tokens": price("usd_per_million_tokens"),
        "peak_bytes": both(lambda r: r["peak_bytes"]),
        "interruptions": both(lambda r: r["interruptions"]),
        "final_loss": both(lambda r: r["final_loss"], is_like="train" not in unlike),
    }
    names = [k for k, v in (run["metrics"] or {}).items() if isinstance(v, float) and k in (baseline["metrics"] or {})]
    for name in names:
        rows[name] = both(lambda r, name=name: r["metrics"][name], is_like="eval" not in unlike)  # type: ignore[misc]
    saved_usd = baseline["usd"] - run["usd"] if has_prices else None
    return {
        "kind": "farthing comparison",
        "run": run["run"],
        "baseline": baseline["run"],
        "rows": rows,
        "notes": list(unlike.values()),
        "saved_usd": saved_usd,
        "saved_share": saved_usd / baseline["usd"] if saved_usd is not None and baseline["usd"] else None,
        "saved_s": baseline["wall_s"] - run["wall_s"],
    }


def _unlike(run: dict[str, Any], baseline: dict[str, Any]) -> dict[str, str]:
    """In what two runs are not alike, so that some of their figures say nothing about each other: key -> words."""
    found = {}
    ours, theirs = run.get("identity") or {}, baseline.get("identity") or {}

    def differ(*keys: str) -> bool:
        return any(ours.get(key) != theirs.get(key) for key in keys)

    of_words = [key for key in {**ours, **theirs} if key.startswith(("tokenization.", "tokenizer "))]
    if differ("data.train (content)", "data.eval_fraction", "data.max_train_samples", *of_words):
        found["train"] = "they trained on other data, or other tokens of it: the last training loss can't be compared"
    held_out = ["data.eval (content)", "data.max_eval_samples"]
    if not ours.get("data.eval (content)") or not theirs.get("data.eval (content)"):
        held_out += ["data.train (content)", "data.eval_fraction", "train.seed"]
    if run["metrics"] and baseline["metrics"] and differ(*held_out, *of_words):
        found["eval"] = "they were evaluated on other examples, or other tokens of them: the metrics can't be compared"
    known = [receipt["usd_is_known"] for receipt in (run, baseline)]
    if known[0] != known[1]:
        found["price"] = f"{'the baseline' if known[0] else 'the run'} has no price: dollars can't be compared"
    if run["steps"] != baseline["steps"] or run["tokens"] != baseline["tokens"]:
        found["work"] = (
            f"they did not do the same work ({plural(run['steps'], 'step')} and {plural(baseline['steps'], 'step')}): "
            "cost and time are of all that each has done"
        )
    states = {receipt["state"] for receipt in (run, baseline)}
    if states != {"finished"}:
        found["state"] = "not both have finished: the figures are as far as they came"
    return found


def _attempt(attempt: Attempt) -> dict[str, Any]:
    values = asdict(attempt)
    values["started_at"] = datetime.fromtimestamp(attempt.started_at, UTC).isoformat(timespec="seconds")
    return {**values, "wall_s": attempt.wall_s, "usd": attempt.usd}


def _checkpoints(job: Any, plan: Any, attempts: list[Attempt], wall_s: float) -> dict[str, Any]:
    """How many, how often, and for how long they have held the run up: its share is that of all the time.

    `interval_s` None: they were asked for by steps, or there was no plan.
    """
    train = job["train"] if isinstance(job, dict) else {}
    interval_s = 60 * train["save_minutes"] if train.get("save_minutes") else None
    if interval_s is None and not train.get("save_steps") and isinstance(plan, dict):
        interval_s = plan.get("interval_s")
    held_up_s = sum(attempt.save_held_up_s for attempt in attempts)
    return {
        "n": sum(attempt.n_saves for attempt in attempts),
        "interval_s": interval_s,
        "held_up_s": held_up_s,
        "share": held_up_s / wall_s if wall_s else 0.0,
    }


def _notice(said: dict[str, Any], account: Account) -> dict[str, Any]:
    """What was heard, in which attempt, and how long after it the process had left."""
    notice = said["notice"]
    left_after_s = max(0.0, account.at - notice["at"]) if notice.get("is_certain") and "at" in notice else None
    return {"attempt": account.number, "step": said["step"], **notice, "left_after_s": left_after_s}


def _start_up_s(attempt: Attempt) -> float:
    """What it took an attempt to get going."""
    return sum(attempt.spans.get(name, 0.0) for name in ("start_up", "tokenize", "load_model", "restore"))


# what a plan promises seconds for, and the spans that they go to
PROMISED_SPANS = {
    "start-up": ("start_up", "load_model", "restore", "probe"),
    "tokenizing": ("tokenize",),
    "training": ("prefix", "compile", "data_wait", "host_to_device", "compute", "optimizer", "idle"),
    "evaluation": ("evaluation",),
    "checkpoints": ("checkpoint",),
    "export": ("export",),
}


def _pair(promised: float, happened: float | None, state: str) -> dict[str, Any]:
    """A promise and what came of it; the ratio only when the run went to its end."""
    ratio = happened / promised if state == "finished" and happened is not None and promised else None
    return {"promised": promised, "happened": happened, "ratio": ratio}


def _promised(
    plan: Any, spans: dict[str, float], wall_s: float, usd: float, peak_bytes: int | None, state: str
) -> dict[str, Any] | None:
    """What the plan had said before the first attempt against what happened, whole and by component."""
    if not isinstance(plan, dict) or "wall_s" not in plan:
        return None
    seconds = plan["seconds"]
    return {
        "calibration": plan["calibration"],
        "wall_range_s": plan["wall_range_s"],
        "wall_s": _pair(plan["wall_s"], wall_s, state),
        "usd": _pair(plan["usd"], usd, state),
        "peak_bytes": _pair(plan["peak_bytes"], peak_bytes, state),
        "seconds": {
            name: _pair(seconds.get(name, 0.0), sum(spans.get(span, 0.0) for span in of), state)
            for name, of in PROMISED_SPANS.items()
        },
    }


def _forecast(
    forecast: dict[str, Any] | None, wall_s: float, usd: float, peak_bytes: int | None, state: str
) -> dict[str, Any] | None:
    """The forecast made after the first steps against what happened."""
    if forecast is None:
        return None
    return {
        "made_after_step": forecast["step"],
        "wall_s": _pair(forecast["wall_s"], wall_s, state),
        "usd": _pair(forecast["usd"], usd, state),
        "peak_bytes": _pair(forecast["peak_bytes"], peak_bytes, state),
    }


def _curve(steps: Sequence[int], values: Sequence[float]) -> list[list[float]]:
    """At most `N_CURVE_POINTS` points [step, mean of its stretch]."""
    size = -(-len(values) // N_CURVE_POINTS) or 1
    starts = range(0, len(values), size)
    return [
        [
            steps[min(start + size, len(values)) - 1],
            sum(values[start : start + size]) / len(values[start : start + size]),
        ]
        for start in starts
    ]


def _utilisation(accounts: list[Account]) -> list[list[float]]:
    """How busy the GPU was, as a curve over all attempts."""
    stretches = [stretch for account in accounts for stretch in account.utilisation]
    return _curve([int(step) for step, *_ in stretches], [mean for _, mean, _ in stretches])


def _read_json(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        value = parse_json(path.read_text(encoding="utf-8"))
        return {key: item for key, item in value.items() if key != "sha256"} if isinstance(value, dict) else value
    return None
