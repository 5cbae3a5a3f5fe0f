"""Evaluation: loss and the task's metrics over a set of examples, and in a run whether they are the
best so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.arrays import Ints
from farthing.data.batches import collate
from farthing.data.token_set import TokenSet
from farthing.device_memory import is_out_of_memory
from farthing.dist.ranks import Ranks
from farthing.errors import RunInterruptedError
from farthing.events import Evaluated, Evaluating
from farthing.metrics import Metrics, stderr_of_mean
from farthing.model.forward import Forward
from farthing.model.hardware import free_cached
from farthing.model.load import PLAIN
from farthing.objectives.objective import EvaluationSums, Found
from farthing.train.context import Training
from farthing.train.resolve import Examples, Writing

Scores = dict[str, tuple[list[float], list[float]]]
"""Metric -> (what each example adds, how much of the mean it is), in the order of the examples."""


@dataclass(frozen=True)
class Sweep:
    """How a set of examples goes through a model, one micro-batch after the other: each has at most
    `micro_batch_tokens` computed tokens, or one example.
    """

    forward: Forward
    tokens: TokenSet
    examples: Ints
    """Indices [n] into the tokens."""
    micro_batch_tokens: int
    ranks: Ranks = field(default_factory=Ranks)
    """They share the micro-batches, and all know all that is found."""
    should_stop: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda done, total: None
    warn: Callable[[str], None] = lambda text: None
    what: str = "the evaluation"

    def look(
        self,
        look: Callable[[Ints], Found],
        split: Callable[[int], list[Ints]] | None = None,
    ) -> tuple[list[Ints], dict[str, list[Any]]]:
        """(the micro-batches of `split`, what `look` finds in all of them, in order and on the
        host). Where memory runs out they are looked at once more as before, then in halves. Raises
        `RunInterruptedError` when asked to stop in between.
        """
        n_tokens, has_freed = self.micro_batch_tokens, False
        while True:
            parts = self._split(n_tokens) if split is None else split(n_tokens)
            try:
                return parts, self._found(parts, look)
            except Exception as error:
                is_least = len(parts) == len(self.examples) or n_tokens == 1
                if not is_out_of_memory(error) or (has_freed and is_least):
                    raise
            if has_freed:
                n_tokens //= 2
                again = f"it begins again with {n_tokens:,} tokens at a time"
                self.warn(f"out of memory in {self.what}; {again}")
            free_cached(self.forward.numerics.device)
            has_freed = True

    def _split(self, n_tokens: int) -> list[Ints]:
        return self.forward.split(self.tokens, self.examples, n_tokens)

    def _found(self, parts: list[Ints], look: Callable[[Ints], Found]) -> dict[str, list[Any]]:
        ranks, own, n_done = self.ranks, list[tuple[int, Found]](), 0
        with ranks.all_or_none():
            for number in range(ranks.index, len(parts), ranks.n):
                if self.should_stop() and not ranks.is_fsdp:
                    raise RunInterruptedError("stopped between micro-batches")
                own.append((number, look(parts[number])))
                n_done += len(parts[number])
                self.progress(n_done, len(self.examples))
            if ranks.is_fsdp:  # all go through the model as often
                if len(own) < -(-len(parts) // ranks.n):
                    look(parts[-1])
                if self.should_stop():
                    raise RunInterruptedError("stopped between micro-batches")
        plain = [(at, {name: _listed(each) for name, each in one.items()}) for at, one in own]
        of_all = sorted(
            (pair for told in ranks.gather(plain) for pair in told), key=lambda pair: pair[0]
        )
        found: dict[str, list[Any]] = {}
        for _, one in of_all:
            for name, values in one.items():
                found.setdefault(name, []).extend(values)
        return found


def _listed(values: Any) -> Any:
    return values.tolist() if isinstance(values, Tensor) else values


@torch.no_grad()
def evaluate(sweep: Sweep, writing: Writing | None = None, each: Scores | None = None) -> Metrics:
    """Metrics over the examples of a sweep; the loss is None, and alone, when it is not a number.

    Where input and target are apart, a text is written for each with `writing`. `each` gets what
    every example has added. Raises `RunInterruptedError` when asked to stop in between.
    """
    forward, tokens, examples = sweep.forward, sweep.tokens, sweep.examples
    of, n = forward.of, len(examples)
    texts: dict[str, list[str]] = {}
    was_training = forward.model.training
    forward.model.eval()
    try:
        step = forward.of_step(tokens, examples)
        if of.is_mismatched:
            quiet = replace(sweep, progress=lambda done, total: None)
            _, ratios = quiet.look(
                lambda part: {"sums": forward.mismatched_ratio(tokens, part)[None]}
            )
            step = step._replace(baseline=max(0.0, sum(ratios["sums"]) / n))

        def measure(part: Ints) -> Found:
            return forward.measure(forward.to_device(forward.collate(tokens, part)), step)

        parts, found = sweep.look(measure)
        if writing is not None and forward.has_decoder:
            _, texts = sweep.look(
                lambda part: write_texts(forward, tokens, part, writing),
                lambda n: forward.split_to_write(tokens, examples, n, writing.max_new_tokens),
            )
    finally:
        forward.model.train(was_training)
    mean = sum(found["loss"]) / max(1, tokens.n_targets(examples))
    if not np.isfinite(mean):  # what such scores choose means nothing
        return {"loss": None, "n_examples": n}
    metrics: Metrics = {"loss": mean, "n_examples": n}
    if of.figures:
        sums = np.sum(found["figures"], axis=0).T.tolist()
        named = zip(of.figures, sums, strict=True)
        return metrics | {name: value / count for name, (value, count) in named if count}
    in_parts = np.concatenate(parts)
    order, n_each = np.argsort(in_parts, kind="stable"), tokens.target_lengths[in_parts]
    weights = np.ones(n) if of.counts_units else n_each[order].astype(float)
    losses, labels, answers = (
        np.array(found.get(name, ())) for name in ("each", "labels", "answers")
    )
    if len(losses):
        metrics["loss_stderr"] = stderr_of_mean(losses[order], weights)
        if each is not None:
            each["loss"] = losses[order].tolist(), weights.tolist()
    if each is not None and "accuracy" in of.metrics and len(answers):
        hits = (labels == answers).reshape(len(answers), -1).all(1).astype(float)
        if len(hits) > n:  # of words
            hits = np.add.reduceat(hits, np.cumsum(n_each) - n_each)
        each["accuracy"] = hits[order].tolist(), weights.tolist()
    of_task = EvaluationSums(
        mean,
        sum(found.get("documents", ())) / max(1, n),
        labels,
        answers,
        tokens.label_names,
        texts.get("predictions", []),
        texts.get("references", []),
        n_each,
    )
    return metrics | of.judge(of_task)


def write_texts(forward: Forward, tokens: TokenSet, part: Ints, writing: Writing) -> Found:
    """What the model writes for a micro-batch, and what it should write."""
    arrays = collate(tokens, part, forward.task, forward.pad_id)
    device = forward.numerics.device
    batch = {
        name: torch.from_numpy(arrays[name]).to(device) for name in ("input_ids", "attention_mask")
    }
    with forward.numerics.autocasting():
        written = forward.model.generate(
            **batch,
            max_new_tokens=writing.max_new_tokens,
            do_sample=False,
            **PLAIN,
        )
    targets = np.where(arrays["labels"] >= 0, arrays["labels"], forward.pad_id)
    both = {"predictions": written, "references": targets}
    decode = writing.tokenizer.batch_decode
    return {name: decode(ids, skip_special_tokens=True) for name, ids in both.items()}


# ---- of a run ----


class Evaluator:
    """Evaluates a run as it trains, and judges whether a step is the best so far."""

    def __init__(self, training: Training, examples: Examples) -> None:
        spec, train = training.spec, training.spec.train
        self.training, self.examples = training, examples
        every = train.eval_steps or training.feed.batches.steps_per_epoch
        self.every_steps = None if train.eval_strategy == "no" else every  # None: at the end alone
        wanted = train.greater_is_better
        self.greater_is_better = spec.objective.metrics[spec.metric] if wanted is None else wanted
        self.took_s = 0.0  # seconds of the last evaluation
        self.n_tokens = 0  # of the last evaluation, as computed

    def is_at(self, step: int, n_steps: int) -> bool:
        """Whether to evaluate after `step` of so many: every `every_steps`, and at the very end."""
        each = self.every_steps
        return step > 0 and (step >= n_steps or (each is not None and step % each == 0))

    @property
    def n_steps_like(self) -> float:
        return len(self.examples) / self.training.feed.batches.global_batch_size

    def run(self) -> bool:
        """Measure the model as it is; whether this is the best so far. Raises
        `RunInterruptedError`.
        """
        run, meter, at = self.training, self.training.context.meter, self.training.progress
        started_s, n_before = meter.wall_s, run.forward.n_sent_tokens
        each: Scores = {}
        with meter.span("evaluation"):
            metrics = self.measure(each)
        at.evaluated_step = at.step
        self.n_tokens = run.forward.n_sent_tokens - n_before
        value = metrics.get(run.spec.metric)
        is_best = self._judge(value if isinstance(value, float | int) else None)
        self.took_s = meter.wall_s - started_s
        run.record.evaluations_s.append(self.took_s)
        event = Evaluated(at.step, metrics, is_best, each.get(run.spec.metric))
        run.log_file.append(event.log_row())
        run.context.emit(event)
        return is_best

    def _judge(self, value: float | None) -> bool:
        """Whether the step is the best so far; counts the patience of early stopping.

        Best is best, by however little; the threshold only says how much better than the best so
        far counts for the patience (as `EarlyStoppingCallback` of transformers has it). Of equal
        ones the first is the best.
        """
        at, train, gain = self.training.progress, self.training.spec.train, -math.inf
        if value is not None:
            sign = 1 if self.greater_is_better else -1
            gain = math.inf if at.best_metric is None else (value - at.best_metric) * sign
        counts = gain > train.early_stopping_threshold
        at.n_evaluations_without_gain = 0 if counts else at.n_evaluations_without_gain + 1
        if gain > 0:
            at.best_metric, at.best_step = value, at.step
        patience = train.early_stopping_patience
        at.stopped_early = patience is not None and at.n_evaluations_without_gain >= patience
        return gain > 0

    def measure(self, each: Scores) -> Metrics:
        """Metrics of the model as it is; `each` gets those of every example."""
        run, context = self.training, self.training.context
        tokens, indices = self.examples.tokens, self.examples.indices
        # as much at once as training was seen to have room for
        most_examples = run.spec.train.per_device_eval_batch_size
        most_tokens = most_examples * int(tokens.lengths[indices].max())
        sweep = Sweep(
            run.forward,
            tokens,
            indices,
            min(run.feed.settings.micro_batch_tokens, most_tokens),
            context.ranks,
            context.is_asked_to_leave,
            lambda done, total: context.emit(Evaluating(done, total)),
            context.warn,
        )
        return evaluate(sweep, run.spec.writing, each)
