"""The numbers of a config.json by the names and defaults of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farthing.errors import InputError
from farthing.models.families import Family

_OWN_NAME_ONLY = (
    "intermediate_size",
    "window_period",
)  # transformers maps no other name of a family to these


class ConfigSizes:
    """A config.json with the names and defaults of its family."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self.config = config
        self.family = family

    def value(self, key: str) -> Any:
        """What the config says, under the family's own name or the usual one; else the family's
        default.
        """
        own = self.family.keys.get(key, key)
        for name in (own,) if key in _OWN_NAME_ONLY else (own, key):
            if name in self.config:
                return self.config[name]
        return self.family.defaults.get(key)

    def n(self, key: str, otherwise: int | None = None) -> int:
        """A whole number above 0; `otherwise` where the family has no such key or it is null."""
        value = self.value(key) if key in self.family.defaults else None
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = self.family.keys.get(key, key)
            what = f"{name} is {value!r}, not a whole number above 0"
            raise InputError(
                what, where=f"config.json: {name}", to_do="check the model's config.json"
            )
        return value

    def share(self, whole: int, n: int, key: str) -> int:
        """`whole` in `n` equal parts."""
        if whole % n:
            name = self.family.keys.get(key, key)
            what = f"{whole} can't be divided by {name}: {n}"
            raise InputError(
                what, where=f"config.json: {name}", to_do="check the model's config.json"
            )
        return whole // n

    def holds(self, key: str) -> bool:
        """Whether the config says yes."""
        if key in ("gated", "plain"):
            return str(self.value("feed_forward_proj")).startswith("gated") == (key == "gated")
        return bool(self.value(key))

    def among(self, word: str, words: Sequence[str]) -> bool:
        """Whether a row has the word, or has it with a key that holds."""
        return any(
            w == word or (w.startswith(f"{word}:") and self.holds(w[len(word) + 1 :]))
            for w in words
        )


def windows_of(says: ConfigSizes, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer that reads from left to right, in tokens; None without."""
    rule, layer_types = says.family.windows, says.value("layer_types")
    if (
        not rule
        or not says.holds("sliding_window")
        or (rule == "late" and not says.holds("use_sliding_window"))
    ):
        return (None,) * n_layers
    window, period, first = (
        says.n("sliding_window"),
        says.n("window_period", 1),
        says.value("max_window_layers") or 0,
    )
    if rule != "all" and layer_types:
        slides = [kind == "sliding_attention" for kind in layer_types[:n_layers]]
    elif rule == "periodic":
        slides = [(i + 1) % period > 0 for i in range(n_layers)]
    else:
        slides = [rule == "all" or i >= first for i in range(n_layers)]
    return tuple(window if here else None for here in slides)
