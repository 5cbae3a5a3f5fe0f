"""What holds a run back, in dollars: from its receipt alone, so for a run that continues, has ended
or was killed.

Each check looks at one cause, and says with figures why it thinks so, which key to set, and what
that saves: in a whole run of this kind, and in the rest of this one. Pure: same receipt, same
diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from farthing.report.receipt_types import Advice, Diagnosis, Finding, Receipt
from farthing.run.ledger import SPANS
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

WORTH = 0.03
"""A finding is worth telling when it takes this share of the run's time."""
EVALUATION_SHARE, SAVE_SHARE, START_SHARE = 0.05, 0.02, 0.15
"""What evaluations, saves and the start may take of a run."""
FEW_EVALUATIONS = 3
"""Fewer say little of where a run goes: where they take too much, the examples are too many, not
the evaluations.
"""
MFU_TARGET = 0.40
_START_FIXES = {
    "start_up": ("", "use an image in which the packages are installed, and train more in one run"),
    "load_model": (
        "",
        "keep the model on a local disk (HF_HOME, or model.model_name_or_path of a folder there)",
    ),
    "restore": ("", "keep output_dir on a local disk, or the store in the region of the machine"),
    "probe": (
        "train.probe=false",
        "settings are probed for longer than it gains in so short a run",
    ),
    "compile": (
        "train.torch_compile=false",
        "layers are compiled for longer than it gains in so short a run",
    ),
}
"""The spans of a start in their order, and what is to be done where one of them takes long."""


class _Run:
    """A receipt with the sums that several checks need."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt, self.work = receipt, receipt.work or {}
        self.spans = {span.name: span.seconds for span in receipt.spans}
        self.wall_s = receipt.wall_s
        self.usd_per_s = receipt.usd / receipt.wall_s if receipt.wall_s else 0.0
        self.train: dict[str, Any] = (receipt.job or {}).get("train") or {}
        self.n_steps = max(int(self.work.get("n_steps", 0)), receipt.steps)
        self.is_over = receipt.state == "finished"
        self.whole = self.n_steps / receipt.steps if receipt.steps else 1.0
        """By how much a whole run is longer than what was done."""

    def span(self, *names: str) -> float:
        """Seconds under these names."""
        return sum(self.spans.get(name, 0.0) for name in names)

    def share(self, seconds: float) -> str:
        """Seconds, and what share of the run that is."""
        return (
            f"{say_seconds(seconds)} of {say_seconds(self.wall_s)}"
            f" ({seconds / (self.wall_s or 1):.0%})"
        )

    def found(
        self,
        cause: str,
        evidence: str,
        fix: str,
        to_do: str,
        seconds: float,
        *,
        recurs: bool = True,
    ) -> Iterator[Finding]:
        """What `seconds` of the time so far went to, where it is worth telling.

        `recurs`: the rest of the run can be spared it too; else it was spent once, at the start.
        """
        if seconds < WORTH * self.wall_s:
            return
        saves_s = seconds * (self.whole if recurs else 1.0)
        rest_s = 0.0 if self.is_over or not recurs else seconds * max(0.0, self.whole - 1)
        usd = [each * self.usd_per_s for each in (saves_s, rest_s)]
        yield Finding("", cause, evidence, fix, to_do, saves_s, usd[0], rest_s, usd[1])


def diagnose(receipt: Receipt) -> Diagnosis:
    """The diagnosis of a run; without findings where nothing stands out or too little has
    happened.
    """
    run = _Run(receipt)
    found = [
        replace(finding, area=area) for area, check in CHECKS.items() for finding in check(run)
    ]
    largest = max(found, key=lambda finding: finding.saves_s, default=None)
    return Diagnosis(found, largest.cause if largest else "", list(_advice(run)))


# ---- the checks ----


def _data(run: _Run) -> Iterator[Finding]:
    waited_s, tokenized_s = run.span("data_wait"), run.span("tokenize")
    yield from run.found(
        "slow storage",
        f"training waited {run.share(waited_s)} for batches",
        "cache_dir",
        "set cache_dir to a folder on a local disk: tokens are read from there in every step",
        waited_s,
    )
    n_tokens = run.work.get("n_tokens", 0)
    pace = (
        f", {say_count(n_tokens / tokenized_s)} tokens a second"
        if n_tokens and tokenized_s > 1
        else ""
    )
    yield from run.found(
        "slow tokenizer",
        f"reading and tokenizing took {run.share(tokenized_s)}{pace}",
        "cache_dir",
        "keep cache_dir on a disk that outlives the machine: the next run with this data and"
        " tokenizer finds its tokens there; model.tokenizer_name_or_path may name a fast tokenizer"
        " (one with a tokenizer.json)",
        tokenized_s,
        recurs=False,
    )


def _memory(run: _Run) -> Iterator[Finding]:
    work, compute_s = run.work, run.span("compute")
    need, free = work.get("need_without_checkpointing_bytes"), work.get("free_bytes", 0)
    if work.get("checkpoint_every") and need and need <= 0.9 * free:
        of_forward = work.get("recomputed_of_forward", 0.0) * work.get("forward_share", 0.0)
        share = of_forward or work.get("recomputed_share", 0.0)
        yield from run.found(
            "checkpointing not needed",
            f"activations are computed twice, {share:.0%} of forward and backward; without that"
            f" {say_bytes(need)} would be needed and {say_bytes(free)} were free",
            "train.gradient_checkpointing=false",
            "switch activation checkpointing off",
            share * compute_s,
        )
    if redone := [event for event in run.receipt.out_of_memory if "micro_batch_tokens" in event]:
        last = redone[-1]
        yield Finding(  # what it cost is not measured
            "",
            "memory ran out",
            f"memory ran out {plural(len(redone), 'time')}, and the step was taken again with less",
            f"train.micro_batch_tokens={last['micro_batch_tokens']}",
            "begin with the micro-batch that fits",
            0.0,
            0.0,
            0.0,
            0.0,
        )


def _compute(run: _Run) -> Iterator[Finding]:
    work, compute_s = run.work, run.span("compute")
    share, longest, long = (work.get(name, 0) for name in ("share_beyond_long", "longest", "long"))
    if longest > 1.5 * long > 0 and share:
        yield from run.found(
            "max_length too long",
            f"the longest 5 % of the examples (over {long:,} tokens, up to {longest:,}) hold"
            f" {share:.0%} of all tokens beyond that length",
            f"data.max_length={long}",
            "cut examples at a shorter length; this changes training on the long ones",
            share * compute_s,
        )
    receipt = run.receipt
    useful, padded = receipt.tokens_per_s or 0.0, receipt.padded_tokens_per_s or 0.0
    if useful and padded > 1.1 * useful:
        yield from run.found(
            "padding",
            f"{1 - useful / padded:.0%} of the computed tokens are padding",
            "",
            "leave model.attn_implementation out where it is set, so that examples are laid end"
            " to end",
            (1 - useful / padded) * compute_s,
        )
    if receipt.mfu and receipt.mfu < MFU_TARGET:
        wasted_s = (1 - receipt.mfu / MFU_TARGET) * compute_s
        yield from run.found(
            "utilisation under target",
            f"{receipt.mfu:.0%} of the device's peak, where {MFU_TARGET:.0%} can be had",
            "train.probe=true",
            "let a probe find quicker settings; `farthing profile` shows which operations take the"
            " time",
            wasted_s,
        )


def _host(run: _Run) -> Iterator[Finding]:
    copies_s, idle_s = run.span("host_to_device"), run.span("idle")
    to_do = (
        "`farthing profile` shows the work between steps; other programs may take the machine's"
        " cores"
    )
    yield from run.found(
        "copies to the device", f"copies took {run.share(copies_s)}", "", to_do, copies_s
    )
    yield from run.found(
        "the host is busy",
        f"{run.share(idle_s)} went to none of the parts that are measured",
        "",
        to_do,
        idle_s,
    )


def _communication(run: _Run) -> Iterator[Finding]:
    """Ranks meet once a step, to add their gradients: a step of twice as many examples waits half
    as often.
    """
    waited_s, batch = run.span("ranks"), int(run.train.get("global_batch_size") or 0)
    yield from run.found(
        "waiting for other ranks",
        f"the first rank waited {run.share(waited_s)} until the others had computed and sent their"
        " gradients",
        f"train.global_batch_size={2 * batch}" if batch else "",
        "a larger train.global_batch_size: ranks wait once a step (fit train.learning_rate to it);"
        " or use fewer, larger GPUs, or a machine whose GPUs are joined by NVLink",
        waited_s / 2,
    )


def _checkpoints(run: _Run) -> Iterator[Finding]:
    saves, spent_s = run.receipt.checkpoints, run.span("checkpoint")
    steps = run.receipt.steps
    if saves.n < 2 or not spent_s or not steps or spent_s <= SAVE_SHARE * run.wall_s:
        return
    each_s, left = (
        spent_s / saves.n,
        max(1, math.ceil(SAVE_SHARE / 2 * run.wall_s * saves.n / spent_s)),
    )
    fix = f"train.save_steps={math.ceil(steps / left)}"
    yield from run.found(
        "saves too often",
        f"{plural(saves.n, 'checkpoint')} stopped training for {run.share(spent_s)},"
        f" {say_seconds(each_s)} each",
        fix,
        "save more seldom; without train.save_steps and train.save_minutes the planned interval is"
        " used",
        spent_s - left * each_s,
    )


def _evaluation(run: _Run) -> Iterator[Finding]:
    """Evaluations that are too many; or, where they are few, too many examples in each."""
    spent_s, n, steps = (
        run.span("evaluation"),
        len(run.receipt.curves.evaluation),
        run.receipt.steps,
    )
    if not n or not steps or spent_s <= EVALUATION_SHARE * run.wall_s:
        return
    each_s, may_take_s = spent_s / n, EVALUATION_SHARE * (run.wall_s - spent_s)
    n_examples = int((run.receipt.metrics or {}).get("n_examples", 0))
    fewer = math.floor(n_examples * may_take_s / (each_s * min(n, FEW_EVALUATIONS)))
    evidence = f"{plural(n, 'evaluation')} took {run.share(spent_s)}, {say_seconds(each_s)} each"
    if n > FEW_EVALUATIONS:
        left = max(FEW_EVALUATIONS, math.floor(may_take_s / each_s))
        also = (
            f" and on fewer examples (data.max_eval_samples={fewer})"
            if 0 < fewer < n_examples
            else ""
        )
        yield from run.found(
            "evaluation too often",
            evidence,
            f"train.eval_steps={math.ceil(steps / left)}",
            f"evaluate more seldom{also}",
            (n - left) * each_s,
        )
    elif 0 < fewer < n_examples:
        yield from run.found(
            "evaluation on too many examples",
            f"{evidence}, on {plural(n_examples, 'example')}",
            f"data.max_eval_samples={fewer}",
            "evaluate on fewer examples",
            spent_s - may_take_s,
        )


def _start_up(run: _Run) -> Iterator[Finding]:
    first = run.receipt.attempts[0]["spans"] if run.receipt.attempts else {}
    parts = {name: first.get(name, 0.0) for name in _START_FIXES}
    total_s = sum(parts.values())
    if not total_s or total_s <= START_SHARE * run.wall_s:
        return
    worst = max(parts, key=lambda name: parts[name])
    fix, to_do = _START_FIXES[worst]
    words = ", ".join(
        f"{SPANS[name]} {say_seconds(s)}" for name, s in parts.items() if s > 0.1 * total_s
    )
    evidence = f"the start took {run.share(total_s)}: {words}"
    yield from run.found("start-up", evidence, fix, to_do, parts[worst], recurs=False)


def _waiting(run: _Run) -> Iterator[Finding]:
    receipt = run.receipt
    lost_s = receipt.restart_s + receipt.redone_s
    if not receipt.interruptions:
        return
    share = receipt.redone_s > receipt.restart_s
    yield from run.found(
        "interruptions",
        f"{plural(receipt.interruptions, 'interruption')}: starting again and redoing work took"
        f" {run.share(lost_s)}",
        "where.spot=true" if share else "",
        "set where.spot: true to save more often, or rent on demand",
        lost_s,
    )


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


# ---- more training, or less ----


def _advice(run: _Run) -> Iterator[Advice]:
    """Whether another epoch is worth its dollars, and what early stopping would have spared."""
    receipt = run.receipt
    name = (run.train.get("metric_for_best_model") or "loss").removeprefix("eval_")
    rows = [(row["step"], row["loss"]) for row in receipt.curves.evaluation if "loss" in row]
    if not run.is_over or len(rows) < 2 or not receipt.steps:
        return
    step_s = (
        run.span("data_wait", "host_to_device", "compute", "optimizer", "evaluation", "checkpoint")
        / receipt.steps
    )
    best = min(rows, key=lambda row: row[1])
    gain = (rows[-2][1] - rows[-1][1]) / max(1e-9, abs(rows[-2][1]))
    if best == rows[-1] and gain > 0.005 and receipt.steps_per_epoch:
        usd = receipt.steps_per_epoch * step_s * run.usd_per_s
        words = (
            f"evaluation loss was still falling ({rows[-2][1]:.4g} to {rows[-1][1]:.4g}): another"
            " epoch costs about"
        )
        yield Advice(
            f"{words} {_price(run, usd, receipt.steps_per_epoch * step_s)}",
            usd,
            _another_epoch(receipt),
        )
    patience = 3
    after = [row for row in rows if row[0] > best[0]]
    if len(after) > patience and not run.train.get("early_stopping_patience") and name == "loss":
        seconds = (receipt.steps - after[patience - 1][0]) * step_s
        usd = seconds * run.usd_per_s
        words = (
            f"evaluation loss was best after step {best[0]:,} of {receipt.steps:,}: early stopping"
            f" would have saved {_price(run, usd, seconds)}"
        )
        yield Advice(words, usd, f"--set train.early_stopping_patience={patience}")


def _price(run: _Run, usd: float, seconds: float) -> str:
    return (
        f"{say_usd(usd)} ({say_seconds(seconds)})"
        if run.receipt.usd_is_known
        else say_seconds(seconds)
    )


def _another_epoch(receipt: Receipt) -> str:
    """The command that trains the result further: a finished run is never changed."""
    run = receipt.run
    method = ((receipt.job or {}).get("method") or {}).get("name", "full")
    model, first = f"{run}/model", ""
    if method != "full":
        model, first = (
            f"{run}-merged",
            f"farthing export {run} --format merged --output {run}-merged && ",
        )
    return (
        f"{first}farthing train {run}/job.json --set model.model_name_or_path={model} --set"
        f" model.init=pretrained --set train.num_train_epochs=1 --set output_dir={run}-more"
    )
