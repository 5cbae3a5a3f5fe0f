"""How fast a run goes, and what its steps consist of, for the person and for a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.model.activation_checkpointing import MemoryNeed, checkpointed_layers
from farthing.model.flops import flops_per_token, recomputed_share
from farthing.model.hardware import Utilisation, peak_flops
from farthing.train.resolve import Examples
from farthing.train.step_feed import StepFeed
from farthing.train.step_result import Sums

LONG_QUANTILE = 0.95
FADES = 0.98  # of the longest step, with every step after it


class Pace:
    """The steps of this attempt in sum. The first step is warm-up and is left out."""

    def __init__(self, feed: StepFeed, examples: Examples, memory: MemoryNeed) -> None:
        forward, numerics = feed.forward, feed.forward.numerics
        model, tokens, indices = forward.model, examples.tokens, examples.indices
        self.meter = feed.meter
        # less where the last layer is computed of the tokens that are read
        self.flops_per_token = flops_per_token(model, *forward.last_layer_read(tokens, indices))
        layers, every = checkpointed_layers(model), memory.checkpoint_every
        kept_bytes = memory.layer.at(memory.n_tokens) * len(layers)
        self.known: dict[str, Any] = {
            "recomputed_share": round(recomputed_share(model, layers, every), 4),
            "need_bytes": memory.total_bytes,
            "need_without_checkpointing_bytes": (
                int(memory.total_bytes + kept_bytes) if every else None
            ),
            "free_bytes": memory.free_bytes,
            **facts_of_lengths(tokens.lengths[indices]),
        }
        """Of a step, before any was taken: plain numbers for the ledger."""
        self._utilisation = Utilisation(numerics.device)
        self._percent: float | None = None
        self._sampled_at_s = -10.0
        self._peak_flops = peak_flops(numerics.device, numerics.name)
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self.n_steps = self.most_tokens = 0
        self.longest_step_s = self.longest_rest_s = self._last_s = 0.0
        self._sums = defaultdict[str, float](float)

    @property
    def step_s(self) -> float | None:
        return self._sums["seconds"] / (self.n_steps - 1) if self.n_steps > 1 else None

    def step_done(self, n_tokens: int, seconds: float, sums: Sums) -> None:
        """Count a step of `n_tokens` without padding."""
        self.n_steps += 1
        self.longest_step_s = max(seconds, self.longest_step_s * FADES)
        self._last_s = seconds
        self.most_tokens = max(n_tokens, self.most_tokens)
        if self.n_steps > 1:
            self._sums["seconds"] += seconds
            self._sums["tokens"] += n_tokens
            self._sums["padded"] += sums.n_computed
            self._sums["micro_batches"] += len(sums.computed)
            self._sums["computed"] += sum(sums.computed)

    def turn_done(self, seconds: float) -> None:
        """Count a turn of the loop: what a step takes beside its own seconds, as telling trackers
        of it.
        """
        self.longest_rest_s = max(seconds - self._last_s, self.longest_rest_s * FADES)

    def figures(self) -> dict[str, float | None]:
        """Useful and padded tokens/s, model FLOPs utilisation (None without a known peak), device
        utilisation.
        """
        if self.meter.wall_s - self._sampled_at_s >= 1:
            self._percent, self._sampled_at_s = self._utilisation.percent(), self.meter.wall_s
        seconds, mfu = self._sums["seconds"], None
        useful = self._sums["tokens"] / seconds if seconds else None
        if useful and self._peak_flops:
            mfu = useful * self.flops_per_token / self._peak_flops
        return {
            "tokens_per_s": useful,
            "padded_tokens_per_s": self._sums["padded"] / seconds if seconds else None,
            "mfu": mfu,
            "utilisation_percent": self._percent,
        }

    def facts(self, **now: Any) -> dict[str, Any]:
        """What a step consists of, as far as it is known, `now` with it."""
        n = max(0, self.n_steps - 1)
        found = {**self.known, **now, "n_measured_steps": n}
        if n:
            found["micro_batches_per_step"] = round(self._sums["micro_batches"] / n, 3)
            found["computed_tokens_per_step"] = round(self._sums["computed"] / n, 1)
        return found


def facts_of_lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """How long examples are, and what share of their tokens lies beyond the 95th percentile of
    their lengths.
    """
    if not len(lengths):
        return {}
    long = int(np.quantile(lengths, LONG_QUANTILE))
    total = int(lengths.sum())
    return {
        "n_examples": len(lengths),
        "n_tokens": total,
        "longest": int(lengths.max()),
        "long": long,
        "share_beyond_long": round(float(np.maximum(lengths - long, 0).sum()) / max(1, total), 4),
    }
