"""Whether it pays to keep what frozen layers compute: bytes and seconds of a cache of their output.

The trained layers on top begin with hidden states that are the same in every epoch. Filling the
cache costs one forward pass of the frozen layers and the writing of it; from then on an epoch reads
instead of computing. Pure arithmetic, for the planner as for the trainer. Refuses to import torch
and to look at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from farthing.units import say_bytes

DISK_SHARE = 0.5  # of what is free: checkpoints and the model need room too


def frozen_cache_bytes(n_tokens: int, hidden: int, bytes_per_number: int) -> int:
    """Bytes of the hidden states of `n_tokens`, one vector of `hidden` numbers each."""
    return n_tokens * hidden * bytes_per_number


@dataclass(frozen=True)
class FrozenCacheCost:
    """What keeping the output of the frozen layers of a run costs and saves."""

    n_epochs: float
    """Passes over the tokens; of evaluation examples: evaluations."""
    n_frozen: int
    n_layers: int
    layers_s_per_token: float
    """Of a forward pass of all layers."""
    rest_s_per_token: float
    """Of a step, without the forward pass of the frozen layers."""
    n_tokens: int
    bytes_per_token: int
    free_bytes: int
    """Of the disk."""
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def frozen_s_per_token(self) -> float:
        """Of a forward pass of the frozen layers."""
        return self.layers_s_per_token * self.n_frozen / self.n_layers

    @property
    def saved_s(self) -> float:
        """Seconds that the run is shorter with a cache; negative where it is longer.

        Rows are written while others are computed, and read while the rest of a step is.
        """
        fill_s = max(self.frozen_s_per_token, self.bytes_per_token / self.write_bytes_per_s)
        with_cache_s = max(self.rest_s_per_token, self.bytes_per_token / self.read_bytes_per_s)
        saved_s = self.n_epochs * (self.frozen_s_per_token + self.rest_s_per_token - with_cache_s)
        return self.n_tokens * (saved_s - fill_s)

    def why_not(self) -> str | None:
        """Why a cache does not pay, in words; None where it does."""
        if self.n_frozen < 1:
            return "no layer is frozen"
        if self.n_epochs <= 1:
            return "every example is seen at most once"
        needed, free = self.n_tokens * self.bytes_per_token, self.free_bytes
        if needed > DISK_SHARE * free:
            return (
                f"it would take {say_bytes(needed)}, and half of the {say_bytes(free)} that are"
                " free may be used"
            )
        if (
            self.bytes_per_token / self.read_bytes_per_s
            >= self.frozen_s_per_token + self.rest_s_per_token
        ):
            return "reading it takes longer than computing it"
        return None if self.saved_s > 0 else "filling it takes longer than it saves"
