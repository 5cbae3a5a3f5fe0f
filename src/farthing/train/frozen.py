"""Whether a run keeps what its frozen lower layers give, and beginning behind them where it does.

Data flows from a run that stands at its first step to its `forward`, which from then on begins
above those layers.
`model/frozen_layers.py` finds them, `model/frozen_cache.py` keeps their output,
`models/frozen_cache_cost.py` has the arithmetic. Refuses to train: the caller's loop does not
change.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farthing.data.token_set import TokenSet
from farthing.events import KeepingFrozen, Note, Working
from farthing.model.frozen_cache import open_frozen_cache
from farthing.model.frozen_layers import FrozenLayers, find_frozen_layers
from farthing.models.frozen_cache_cost import FrozenCacheCost
from farthing.train.attempt import Attempt
from farthing.units import plural

FROZEN_TOKENS = (
    4096  # computed at once for what frozen layers give: part of what makes it the same to the bit
)
DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S = 1e9, 0.4e9  # assumed of a cloud's disk


def begin_behind_frozen_layers(attempt: Attempt) -> bool:
    """Compute what frozen layers below the trained ones give once, where that pays; returns whether
    it is so.

    Decided by the first attempt, as it changes rounding. Raises `RunInterruptedError`.
    """
    decided = attempt.settings.caches_frozen
    frozen = (
        find_frozen_layers(attempt.model, attempt.job.task)
        if attempt.forward.is_packed and decided is not False and attempt.forward.noise is None
        else "not asked"
    )
    if isinstance(frozen, str):
        return False
    sets = [(attempt.train_examples.tokens, attempt.train_examples.indices)]
    if attempt.eval_examples is not None:
        sets.append((attempt.eval_examples.tokens, attempt.eval_examples.indices))
        if sets[0][0] is sets[1][0]:  # one set, divided
            sets = [(sets[0][0], np.concatenate([indices for _, indices in sets]))]
    if any(attempt.forward.mixes(tokens, indices) for tokens, indices in sets):
        return False
    if decided is None and (reason := _why_not_keep(attempt, frozen, sets)):
        attempt.context.emit(
            Note(f"the output of {plural(frozen.n_layers, 'frozen layer')} is not kept: {reason}")
        )
        return False
    caches = []
    for tokens, indices in sets:
        attempt.context.emit(
            Working(f"computing {plural(frozen.n_layers, 'frozen layer')} once for all epochs")
        )
        cache = open_frozen_cache(
            frozen,
            tokens,
            indices,
            Path(attempt.job.cache_dir or "."),
            numerics=attempt.numerics,
            micro_batch_tokens=FROZEN_TOKENS,
            progress=lambda done, total: attempt.context.emit(KeepingFrozen(done, total)),
            should_stop=lambda: bool(attempt.context.notice),
        )
        if isinstance(cache, str):
            attempt.warn(f"the output of frozen layers is not kept: {cache}")
            if decided:
                attempt.warn(
                    "earlier attempts used it: the result is equal to rounding, not to the bit"
                )
            return bool(decided)
        caches.append((tokens, cache))
    attempt.forward.begin_at(frozen, caches)
    return True


def _why_not_keep(
    attempt: Attempt, frozen: FrozenLayers, sets: list[tuple[TokenSet, NDArray[np.int64]]]
) -> str | None:
    """Why the output of frozen layers had better be computed every time; None where keeping it
    pays.
    """
    n_layers, k = attempt.inputs.config.get_text_config().num_hidden_layers, frozen.n_layers
    n_tokens = sum(int(tokens.lengths[indices].sum()) for tokens, indices in sets)
    n_trained = int(attempt.train_examples.tokens.lengths[attempt.train_examples.indices].sum())
    estimate, steps = attempt.estimate, attempt.batches.steps_per_epoch
    step_s = n_trained / steps * 1e-3 if estimate is None else estimate.step_s
    rest_s = step_s * steps / n_trained
    # where the plan counts on it, beside the steps
    once_s = 0.0 if estimate is None else estimate.seconds.get("frozen layers", 0.0)
    if once_s:
        layers_s = once_s / n_tokens * n_layers / k
    else:  # a forward pass of all layers, and a backward pass of the upper ones that takes twice as long  # noqa: E501
        layers_s = rest_s * n_layers / (n_layers + 2 * (n_layers - k))
        rest_s -= layers_s * k / n_layers
    return FrozenCacheCost(
        n_epochs=attempt.n_steps / steps,
        n_frozen=k,
        n_layers=n_layers,
        layers_s_per_token=layers_s,
        rest_s_per_token=rest_s,
        n_tokens=n_tokens,
        bytes_per_token=frozen.width * 4,
        free_bytes=shutil.disk_usage(attempt.job.cache_dir or ".").free,
        read_bytes_per_s=DISK_READ_BYTES_PER_S,
        write_bytes_per_s=DISK_WRITE_BYTES_PER_S,
    ).why_not()
