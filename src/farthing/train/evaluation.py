"""Evaluations of a run: measured where it stands, and judged against the best so far. Refuses to
say when one is due.
"""

from __future__ import annotations

from functools import partial

from farthing.events import Evaluated, Evaluating
from farthing.metrics import Metrics
from farthing.train.attempt import Attempt
from farthing.train.evaluate import Scores, Writing, evaluate, with_room
from farthing.train.step_log import settle


def evaluate_run(attempt: Attempt) -> None:
    """Measure, and judge whether this is the best so far. Raises `RunInterruptedError`."""
    settle(attempt)
    meter, at = attempt.context.meter, attempt.progress
    started_s, n_before = meter.wall_s, attempt.forward.n_sent_tokens
    each: Scores = {}
    with meter.span("evaluation"):
        metrics = _measured(attempt, each)
    at.evaluated_step = at.step
    attempt.n_evaluated_tokens = attempt.forward.n_sent_tokens - n_before
    value = metrics.get(attempt.metric)
    is_best = _judge(attempt, value if isinstance(value, float | int) else None)
    attempt.clocks.evaluation_s = meter.wall_s - started_s
    attempt.record.evaluations_s.append(attempt.clocks.evaluation_s)
    event = Evaluated(at.step, metrics, is_best, each.get(attempt.metric))
    attempt.log.append(event.log_row())
    attempt.context.emit(event)


def _judge(attempt: Attempt, value: float | None) -> bool:
    """Whether the step is the best so far; counts the patience of early stopping.

    Best is best, by however little; the threshold only says how much better than the best so far
    counts for the patience (as `EarlyStoppingCallback` of transformers has it). Of equal ones the
    first is the best.
    """
    at, train = attempt.progress, attempt.job.train
    greater = train.greater_is_better
    better = attempt.forward.of.metrics[attempt.metric] if greater is None else greater
    gain = (
        None
        if value is None or at.best_metric is None
        else (value - at.best_metric) * (1 if better else -1)
    )
    is_best = value is not None and (gain is None or gain > 0)
    counts = is_best and (gain is None or gain > train.early_stopping_threshold)
    at.n_evaluations_without_gain = 0 if counts else at.n_evaluations_without_gain + 1
    if is_best:
        at.best_metric, at.best_step = value, at.step
        attempt.saving.is_due_now = True
    patience = train.early_stopping_patience
    at.stopped_early = patience is not None and at.n_evaluations_without_gain >= patience
    return is_best


def _measured(attempt: Attempt, each: Scores) -> Metrics:
    """Metrics of the model as it is; `each` gets those of every example. Raises
    `RunInterruptedError`.
    """
    held_out, train, ranks = attempt.eval_examples, attempt.job.train, attempt.context.ranks
    assert held_out is not None
    writing = Writing(attempt.inputs.tokenizer, attempt.job.data.max_target_length)
    longest = int(held_out.tokens.lengths[held_out.indices].max())
    # as much at once as training was seen to have room for
    most_tokens = min(
        attempt.settings.micro_batch_tokens, train.per_device_eval_batch_size * longest
    )
    measure = partial(
        evaluate,
        attempt.forward,
        held_out.tokens,
        held_out.indices,
        writing=writing if train.predict_with_generate else None,
        should_stop=lambda: bool(attempt.context.notice) or ranks.others_ask_to_leave,
        ranks=ranks,
        each=each,
        progress=lambda done, total: attempt.context.emit(Evaluating(done, total)),
    )
    return with_room(measure, most_tokens, longest, attempt.numerics.device, attempt.warn)
