"""What holds a run back, in dollars, from its receipt alone: of any run, also one that was killed.

A check looks at one cause: why farthing thinks so, which key to set, and what that saves in a whole
run and in the rest of this one. `templates/diagnosis.txt` has their words.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from farthing.report.receipt_types import Advice, Diagnosis, Finding, RunReceipt
from farthing.report.words import pairs, say
from farthing.run.ledger import SPANS
from farthing.units import say_seconds, say_usd

WORTH = 0.03  # a finding is worth telling when it takes this share of the run's time
EVALUATION_SHARE, SAVE_SHARE, START_SHARE = 0.05, 0.02, 0.15  # what these may take of a run
FEW_EVALUATIONS = 3
"""Fewer say little of a run; where they take too long, it is for too many examples."""
MFU_TARGET = 0.40
CACHED_TOKENS_PER_S = 1e7
"""Tokens that come so quickly were read from the cache."""
PATIENCE = 3
_START = ("start_up", "load_model", "restore", "probe", "compile")


class _Run:
    """A receipt with the sums that several checks need."""

    def __init__(self, receipt: RunReceipt) -> None:
        self.receipt, self.work, self.wall_s = receipt, receipt.work or {}, receipt.wall_s
        self.spans = {span.name: span.seconds for span in receipt.spans}
        self.usd_per_s = receipt.usd / receipt.wall_s if receipt.wall_s else 0.0
        self.is_over = receipt.state == "finished"
        n_steps = max(int(self.work.get("n_steps", 0)), receipt.steps)
        self.whole = n_steps / receipt.steps if receipt.steps else 1.0
        """By how much a whole run is longer than what was done."""

    def span(self, *names: str) -> float:
        return sum(self.spans.get(name, 0.0) for name in names)

    def found(
        self, cause: str, seconds: float, *, of_s: float = 0.0, once: bool = False, **facts: Any
    ) -> Iterator[Finding]:
        """What `seconds` of the time so far went to, of `of_s` that it took, where it is worth
        telling. `once`: at the start, so that the rest of the run can't be spared it.
        """
        if seconds <= 0 or seconds < WORTH * self.wall_s:
            return
        of_s = of_s or seconds
        share = f"({of_s / (self.wall_s or 1):.0%})"
        took = f"{say_seconds(of_s)} of {say_seconds(self.wall_s)} {share}"
        saves_s = seconds if once else seconds * self.whole
        rest_s = 0.0 if self.is_over or once else seconds * max(0.0, self.whole - 1)
        price = self.usd_per_s
        yield finding(cause, saves_s, saves_s * price, rest_s, rest_s * price, took=took, **facts)


def finding(cause: str, *saves: float, **facts: Any) -> Finding:
    name = cause.replace(" ", "_").replace("-", "_")
    words = dict(pairs("diagnosis.txt", name, facts).rows)
    return Finding("", cause, words["evidence"], words.get("fix", ""), words["to_do"], *saves)


def diagnose(receipt: RunReceipt) -> Diagnosis:
    """Without findings where nothing stands out or too little has happened."""
    run = _Run(receipt)
    found = [replace(one, area=area) for area, check in CHECKS.items() for one in check(run)]
    largest = max(found, key=lambda one: one.saves_s, default=None)
    return Diagnosis(found, largest.cause if largest else "", list(_advice(run)))


def _data(run: _Run) -> Iterator[Finding]:
    n_tokens, tokenized_s = run.work.get("n_tokens", 0), run.span("tokenize")
    pace = n_tokens / tokenized_s if tokenized_s > 1 else 0
    yield from run.found("slow storage", run.span("data_wait"))
    if pace < CACHED_TOKENS_PER_S:
        yield from run.found("slow tokenizer", tokenized_s, once=True, pace=pace)


def _memory(run: _Run) -> Iterator[Finding]:
    work, free = run.work, run.work.get("free_bytes", 0)
    need = work.get("need_without_checkpointing_bytes")
    if work.get("checkpoint_every") and need and need <= 0.9 * free:
        share = work.get("recomputed_share", 0.0)
        seconds, facts = share * run.span("compute"), {"need": need, "free": free}
        yield from run.found("checkpointing not needed", seconds, recomputed=share, **facts)
    if redone := [event for event in run.receipt.out_of_memory if "micro_batch_tokens" in event]:
        fits, no_cost = redone[-1]["micro_batch_tokens"], (0.0, 0.0, 0.0, 0.0)  # none is measured
        yield finding("memory ran out", *no_cost, n=len(redone), fits=fits)


def _compute(run: _Run) -> Iterator[Finding]:
    receipt, compute_s = run.receipt, run.span("compute")
    share, longest, long = (
        run.work.get(name, 0) for name in ("share_beyond_long", "longest", "long")
    )
    if longest > 1.5 * long > 0 and share:
        seconds = share * compute_s
        yield from run.found(
            "max_length too long", seconds, long=long, longest=longest, beyond=share
        )
    useful, padded = receipt.tokens_per_s or 0.0, receipt.padded_tokens_per_s or 0.0
    if useful and padded > 1.1 * useful:
        share = 1 - useful / padded
        yield from run.found("padding", share * compute_s, padded=share)
    if receipt.mfu and receipt.mfu < MFU_TARGET:
        wasted_s = (1 - receipt.mfu / MFU_TARGET) * compute_s
        facts: dict[str, Any] = {"mfu": receipt.mfu, "target": MFU_TARGET}
        yield from run.found("utilisation under target", wasted_s, **facts)


def _host(run: _Run) -> Iterator[Finding]:
    yield from run.found("copies to the device", run.span("host_to_device"))
    yield from run.found("the host is busy", run.span("idle"))


def _communication(run: _Run) -> Iterator[Finding]:
    """Ranks meet once a step: a step of twice as many examples waits half as often."""
    waited_s, batch = run.span("ranks"), run.receipt.asked("train", "global_batch_size")
    yield from run.found("waiting for other ranks", waited_s / 2, of_s=waited_s, batch=batch)


def _checkpoints(run: _Run) -> Iterator[Finding]:
    n, spent_s, steps = run.receipt.checkpoints.n, run.span("checkpoint"), run.receipt.steps
    if not (n and steps and spent_s):
        return
    left = max(1, math.ceil(SAVE_SHARE / 2 * run.wall_s * n / spent_s))
    facts: dict[str, Any] = {"n": n, "each_s": spent_s / n, "every": math.ceil(steps / left)}
    yield from run.found("saves too often", spent_s * (1 - left / n), of_s=spent_s, **facts)


def _evaluation(run: _Run) -> Iterator[Finding]:
    receipt, spent_s = run.receipt, run.span("evaluation")
    n, steps = len(receipt.curves.evaluation), receipt.steps
    if not (n and steps and spent_s):
        return
    each_s, may_take_s = spent_s / n, EVALUATION_SHARE * (run.wall_s - spent_s)
    n_examples = int((receipt.metrics or {}).get("n_examples", 0))
    fewer = math.floor(n_examples * may_take_s / (each_s * min(n, FEW_EVALUATIONS)))
    facts: dict[str, Any] = {"n": n, "each_s": each_s, "n_examples": n_examples}
    facts["fewer"] = fewer = fewer if fewer < n_examples else 0
    if n > FEW_EVALUATIONS:
        left = max(FEW_EVALUATIONS, math.floor(may_take_s / each_s))
        facts["every"] = math.ceil(steps / left)
        yield from run.found("evaluation too often", (n - left) * each_s, of_s=spent_s, **facts)
    elif fewer > 0:
        seconds = spent_s - may_take_s
        yield from run.found("evaluation on too many examples", seconds, of_s=spent_s, **facts)


def _start_up(run: _Run) -> Iterator[Finding]:
    first = run.receipt.attempts[0]["spans"] if run.receipt.attempts else {}
    parts = {name: first.get(name, 0.0) for name in _START}
    total_s, worst = sum(parts.values()), max(parts, key=lambda name: parts[name])
    if not total_s or total_s <= START_SHARE * run.wall_s:
        return
    named = (f"{SPANS[name]} {say_seconds(s)}" for name, s in parts.items() if s > 0.1 * total_s)
    facts = {"parts": ", ".join(named), "worst": worst}
    yield from run.found("start-up", parts[worst], of_s=total_s, once=True, **facts)


def _waiting(run: _Run) -> Iterator[Finding]:
    receipt = run.receipt
    if receipt.interruptions:
        is_redone = receipt.redone_s > receipt.restart_s
        seconds, n = receipt.restart_s + receipt.redone_s, receipt.interruptions
        yield from run.found("interruptions", seconds, n=n, is_redone=is_redone)


CHECKS: dict[str, Callable[[_Run], Iterator[Finding]]] = {
    "data": _data,
    "memory": _memory,
    "compute": _compute,
    "host": _host,
    "communication": _communication,
    "checkpoints": _checkpoints,
    "evaluation": _evaluation,
    "start-up": _start_up,
    "waiting": _waiting,
}
"""The check of each area, in their order."""


def _advice(run: _Run) -> Iterator[Advice]:
    """Whether another epoch is worth its dollars, and what early stopping would have spared."""
    receipt, parts = run.receipt, ("data_wait", "host_to_device", "compute", "optimizer")
    rows = [(row["step"], row["loss"]) for row in receipt.curves.evaluation if "loss" in row]
    if not run.is_over or len(rows) < 2 or not receipt.steps:
        return
    step_s = run.span(*parts, "evaluation", "checkpoint") / receipt.steps

    def price(n_steps: float) -> tuple[float, str]:
        usd, time = n_steps * step_s * run.usd_per_s, say_seconds(n_steps * step_s)
        return usd, f"{say_usd(usd)} ({time})" if receipt.usd_is_known else time

    best, before, last = min(rows, key=lambda row: row[1]), rows[-2][1], rows[-1][1]
    gain = (before - last) / max(1e-9, abs(before))
    if best == rows[-1] and gain > 0.005 and receipt.steps_per_epoch:
        usd, words = price(receipt.steps_per_epoch)
        method = receipt.asked("method", "name") or "full"
        command = say("diagnosis.txt", "train_further", shlex.quote(receipt.run), method)
        yield Advice(say("diagnosis.txt", "another_epoch", before, last, words), usd, command)
    after = [step for step, _ in rows if step > best[0]]
    patience = receipt.asked("train", "early_stopping_patience")
    if len(after) > PATIENCE and not patience and receipt.metric == "loss":
        usd, words = price(receipt.steps - after[PATIENCE - 1])
        words = say("diagnosis.txt", "early_stopping", best[0], receipt.steps, words)
        yield Advice(words, usd, f"--set train.early_stopping_patience={PATIENCE}")
