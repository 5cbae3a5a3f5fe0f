"""Whether it pays to keep what frozen layers compute: bytes and seconds of a cache of their output.

The trained layers on top begin with hidden states that are the same in every epoch. Filling the cache costs one forward
pass of the frozen layers and the writing of it; from then on an epoch reads instead of computing. Pure arithmetic, for
the planner as for the trainer. Refuses to import torch and to look at the machine.
"""

from __future__ import annotations

from farthing.units import say_bytes

DISK_SHARE = 0.5  # of what is free: checkpoints and the model need room too


def prefix_cache_bytes(n_tokens: int, hidden: int, bytes_per_number: int) -> int:
    """Bytes of the hidden states of `n_tokens`, one vector of `hidden` numbers each."""
    return n_tokens * hidden * bytes_per_number


def prefix_cache_saves_s(
    *,
    n_tokens: int,
    n_epochs: float,
    prefix_s_per_token: float,
    rest_s_per_token: float,
    bytes_per_token: int,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
) -> float:
    """Seconds that a run of `n_epochs` passes over `n_tokens` is shorter with a cache; negative where it is longer.

    `prefix_s_per_token` is a forward pass of the frozen layers, `rest_s_per_token` all else of a step. Rows are written
    while others are computed, and read while the rest of a step is.
    """
    fill_s = max(prefix_s_per_token, bytes_per_token / write_bytes_per_s)
    with_cache_s = max(rest_s_per_token, bytes_per_token / read_bytes_per_s)
    return n_tokens * (n_epochs * (prefix_s_per_token + rest_s_per_token - with_cache_s) - fill_s)


def why_no_prefix_cache(
    *,
    n_epochs: float,
    n_frozen: int,
    n_layers: int,
    layers_s_per_token: float,
    rest_s_per_token: float,
    n_tokens: int,
    bytes_per_token: int,
    free_bytes: int,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
) -> str | None:
    """Why a cache of the `n_frozen` bottom layers of `n_layers` does not pay, in words; None where it does.

    `n_epochs` are passes over the `n_tokens` (evaluations, for evaluation examples), `layers_s_per_token` is a forward
    pass of all layers, `rest_s_per_token` all of a step but the frozen ones, `free_bytes` is of the disk.
    """
    if n_frozen < 1:
        return "no layer is frozen"
    if n_epochs <= 1:
        return "every example is seen at most once"
    needed = n_tokens * bytes_per_token
    if needed > DISK_SHARE * free_bytes:
        return f"it would take {say_bytes(needed)}, and half of the {say_bytes(free_bytes)} that are free may be used"
    prefix_s = layers_s_per_token * n_frozen / n_layers
    if bytes_per_token / read_bytes_per_s >= prefix_s + rest_s_per_token:
        return "reading it takes longer than computing it"
    saved_s = prefix_cache_saves_s(
        n_tokens=n_tokens,
        n_epochs=n_epochs,
        prefix_s_per_token=prefix_s,
        rest_s_per_token=rest_s_per_token,
        bytes_per_token=bytes_per_token,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
    )
    return None if saved_s > 0 else "filling it takes longer than it saves"
