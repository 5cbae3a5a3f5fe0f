"""The gradients of one step of a run, added up as its loop does."""

from farthing.data.loader import micro_batches
from farthing.train.built import Run
from farthing.train.step_result import Sums


def added_up(run: Run, step: int, lanes=None) -> Sums:
    """Losses of a step, whose gradients the weights have; cut into `lanes`, or as the run does."""
    tokens, examples = run.train_examples.tokens, run.feed.batches.examples_of(step)
    ready = micro_batches(
        step,
        step + 1,
        run.feed.batches.examples_of,
        lambda _: run.feed.table_of(examples) if lanes is None else lanes,
        lambda piece: run.forward.collate(tokens, piece),
    )
    sums = Sums(examples, tokens.n_targets(examples))
    run.steps.step.accumulate(sums, ready)
    return sums
