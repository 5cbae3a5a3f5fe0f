"""What comes next in a run, and how many seconds it may take: questions about an attempt that
change nothing.
"""

from __future__ import annotations

import math

from farthing.train.attempt import Attempt

# a guess of what exporting takes until it is measured: files beside the weights, and a slow disk
EXPORT_S, WRITE_BYTES_PER_S = 0.5, 100e6
END_S = 0.3
"""Of the receipt, and of a process that ends."""
MARGIN = 1.15
"""What comes next may take so many times what it took before."""


def evaluation_is_at(attempt: Attempt, step: int) -> bool:
    """Whether `step` is one after which to evaluate: at the end of epochs or every `eval_steps`,
    and at the very end.
    """
    train = attempt.job.train
    if attempt.eval_examples is None or step == 0:
        return False
    if step >= attempt.n_steps:
        return True
    return (
        train.eval_strategy != "no"
        and step % (train.eval_steps or attempt.batches.steps_per_epoch) == 0
    )


def evaluation_is_due(attempt: Attempt) -> bool:
    """Whether the step that the run is at has yet to be evaluated."""
    at = attempt.progress
    return at.evaluated_step != at.step and evaluation_is_at(attempt, at.step)


def is_done(attempt: Attempt) -> bool:
    """Whether nothing is left to be trained or evaluated."""
    at = attempt.progress
    return (at.step >= attempt.n_steps or at.stopped_early) and not evaluation_is_due(attempt)


def evaluation_s(attempt: Attempt) -> float:
    """Seconds of an evaluation: of the last one, or as if a forward pass took a third of a step."""
    if attempt.clocks.evaluation_s or attempt.eval_examples is None:
        return attempt.clocks.evaluation_s
    if before_s := attempt.ledger.takes.get("evaluation_s"):
        return before_s
    return (
        (attempt.pace.step_s or 0.0)
        * len(attempt.eval_examples)
        / attempt.job.global_batch_size
        / 3
    )


def next_s(attempt: Attempt) -> float:
    """Seconds of an evaluation that is due; else of a step and the evaluation after it, at first as
    in earlier attempts.
    """
    if evaluation_is_due(attempt):
        return MARGIN * evaluation_s(attempt)
    return MARGIN * _next_step_s(attempt) + (
        evaluation_s(attempt) if evaluation_is_at(attempt, attempt.progress.step + 1) else 0.0
    )


def _next_step_s(attempt: Attempt) -> float:
    """The longest step so far, and longer where the next has more tokens than any before; at first
    as in earlier attempts, else the least that the plan expects.
    """
    pace, at = attempt.pace, attempt.progress
    if not pace.longest_step_s:
        expected_s = attempt.ledger.takes.get("step_s")
        if not expected_s and attempt.estimate is not None:
            least_s, likely_s, _ = attempt.estimate.wall_range_s
            expected_s = attempt.estimate.step_s * least_s / likely_s
        return expected_s or 0.0
    lengths = attempt.train_examples.tokens.lengths
    n_tokens = int(lengths[attempt.batches.examples_of(at.step)].sum())
    step_s = pace.longest_step_s * max(1.0, n_tokens / max(1, pace.most_tokens))
    return step_s + pace.longest_rest_s


def save_s(attempt: Attempt) -> float:
    """Seconds until a checkpoint is on the disk: of the last one, else a guess."""
    saving = attempt.saving
    known_s = max(saving.took_s, saving.write_s) or attempt.ledger.takes.get("save_s")
    return known_s or 3 * saving.trained_bytes / WRITE_BYTES_PER_S


def export_s(attempt: Attempt) -> float:
    """Seconds of writing the model: of the last time, else a guess."""
    saving = attempt.saving
    known_s = saving.export_s or attempt.ledger.takes.get("export_s")
    return known_s or EXPORT_S + saving.trained_bytes / WRITE_BYTES_PER_S


def leaving_s(attempt: Attempt) -> float:
    """Seconds of saving, exporting, sending both to the store, and ending."""
    replica = attempt.replica
    sent_s = 0.0 if replica is None else replica.delivery_s
    return MARGIN * (2 * save_s(attempt) + export_s(attempt) + sent_s) + END_S


def reserve_s(attempt: Attempt) -> float:
    """What comes next, and leaving after it: seconds that the limits must still have room for."""
    return 0.0 if is_done(attempt) else next_s(attempt) + leaving_s(attempt)


def reserve_with_start_s(attempt: Attempt) -> float:
    """As long as so much is left, a run that is killed now, and again while it starts, can still
    leave its model.
    """
    return reserve_s(attempt) + leaving_s(attempt) + 2 * attempt.clocks.start_s


def remaining_s(attempt: Attempt) -> float | None:
    """Seconds until the end at the present pace; None before a pace is known."""
    if attempt.pace.step_s is None:
        return None
    train, at = attempt.job.train, attempt.progress
    rest = (attempt.n_steps - at.step) * attempt.pace.step_s
    if attempt.eval_examples is not None and train.eval_strategy != "no":
        each = train.eval_steps or attempt.batches.steps_per_epoch
        n_evaluations = math.ceil(attempt.n_steps / each) - at.step // each
        rest += max(0, n_evaluations) * evaluation_s(attempt)
    return rest


def takes(attempt: Attempt) -> dict[str, float]:
    """What parts of this attempt took, for a later one."""
    return {
        "start_s": round(attempt.clocks.start_s, 3),
        "step_s": round(attempt.pace.longest_step_s, 4),
        "save_s": round(save_s(attempt), 4),
        "export_s": round(attempt.saving.export_s, 4),
        "evaluation_s": round(evaluation_s(attempt), 4),
    }
