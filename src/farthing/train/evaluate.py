"""Evaluation: loss and the task's metrics over a set of examples, and in a run whether they are the
best so far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

T = TypeVar("T")
Scores = dict[str, tuple[list[float], list[float]]]
"""Metric -> (what each example adds, how much of the mean it is), in the order of the examples."""


def with_room(
    measure: Callable[..., T],
    micro_batch_tokens: int,
    longest: int,
    device: torch.device,
    warn: Callable[[str], None] = lambda text: None,
    what: str = "the evaluation",
) -> T:
    """What `measure(micro_batch_tokens=...)` finds. Where memory runs out it is tried once as
    before, then with half as much at once, down to the `longest` example, in tokens."""
    has_freed = False
    while True:
        try:
            return measure(micro_batch_tokens=micro_batch_tokens)
        except Exception as error:
            if not is_out_of_memory(error) or (has_freed and micro_batch_tokens <= longest):
                raise
        if has_freed:
            micro_batch_tokens = max(longest, micro_batch_tokens // 2)
            warn(
                f"out of memory in {what}; it begins again with {micro_batch_tokens:,}"
                " tokens at a time"
            )
        free_cached(device)
        has_freed = True


def look_at_all(
    ranks: Ranks,
    parts: list[NDArray[np.int64]],
    look: Callable[[NDArray[np.int64]], Found],
    should_stop: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Any]]:
    """What `look` finds in all parts, in order and on the host; ranks share the parts, and all know
    all. Raises `RunInterruptedError` when asked to stop in between.
    """
    own, n_done, n_all = list[tuple[int, Found]](), 0, sum(len(part) for part in parts)
    with ranks.all_or_none():
        for number in range(ranks.index, len(parts), ranks.n):
            if should_stop() and not ranks.is_fsdp:
                raise RunInterruptedError("stopped between micro-batches")
            own.append((number, look(parts[number])))
            n_done += len(parts[number])
            progress(n_done, n_all)
        if ranks.is_fsdp:  # all go through the model as often
            if len(own) < -(-len(parts) // ranks.n):
                look(parts[-1])
            if should_stop():
                raise RunInterruptedError("stopped between micro-batches")
    plain = [(number, {name: _listed(each) for name, each in one.items()}) for number, one in own]
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
def evaluate(
    forward: Forward,
    tokens: TokenSet,
    examples: NDArray[np.int64],
    *,
    micro_batch_tokens: int,
    writing: Writing | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks | None = None,
    each: Scores | None = None,
) -> Metrics:
    """Metrics over `examples` (indices [n] into `tokens`); the loss is None, and alone, when it is
    not a number.

    A batch has at most `micro_batch_tokens` computed tokens, or one example. Where input and target
    are apart, a text is written for each with `writing`. `ranks` share the batches, and all know
    all metrics. `each` gets what every example has added. Raises
    `RunInterruptedError` when asked to stop in between.
    """
    of, n = forward.of, len(examples)
    texts: dict[str, list[str]] = {}
    look = functools.partial(look_at_all, ranks or Ranks(), should_stop=should_stop)
    was_training = forward.model.training
    forward.model.eval()
    try:
        parts = forward.split(tokens, examples, micro_batch_tokens)
        step = forward.of_step(tokens, examples)
        if of.is_mismatched:
            ratios = look(
                parts, lambda part: {"sums": forward.mismatched_ratio(tokens, part)[None]}
            )
            step = step._replace(baseline=max(0.0, sum(ratios["sums"]) / n))

        def measure(part: NDArray[np.int64]) -> Found:
            return forward.measure(forward.to_device(forward.collate(tokens, part)), step)

        found = look(parts, measure, progress=progress)
        if writing is not None and forward.has_decoder:
            most_new = writing.max_new_tokens
            alike = forward.split_to_write(tokens, examples, micro_batch_tokens, most_new)
            texts = look(
                alike, lambda part: write_texts(forward, tokens, part, writing), progress=progress
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


def write_texts(
    forward: Forward, tokens: TokenSet, part: NDArray[np.int64], writing: Writing
) -> Found:
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
        counts = gain > 0 and gain > train.early_stopping_threshold
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
        longest = int(tokens.lengths[indices].max())
        # as much at once as training was seen to have room for
        most_examples = run.spec.train.per_device_eval_batch_size
        most_tokens = min(run.feed.settings.micro_batch_tokens, most_examples * longest)
        measure = functools.partial(
            evaluate,
            run.forward,
            tokens,
            indices,
            writing=run.spec.writing,
            should_stop=context.is_asked_to_leave,
            ranks=context.ranks,
            each=each,
            progress=lambda done, total: context.emit(Evaluating(done, total)),
        )
        return with_room(measure, most_tokens, longest, run.spec.numerics.device, context.warn)
