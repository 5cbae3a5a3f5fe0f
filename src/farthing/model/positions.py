"""How long a text a model takes, and rotary positions of a job instead of its own:
`model.rope_scaling`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farthing.errors import ModelError
from farthing.models.families import POSITIONS_AFTER_PADDING


def max_positions(config: Any) -> int | None:
    """Longest input the position embeddings allow; None where they have no end (T5)."""
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None or limit <= 0:
        return None
    return int(limit) - first_position(config)


def first_position(config: Any) -> int:
    """The position of a text's first token."""
    if config.model_type in POSITIONS_AFTER_PADDING:
        return int(config.pad_token_id or 0) + 1
    return 0


def stretch(wanted: dict[str, Any]) -> float:
    """How many times the positions of the model such a rule is for.

    Once where it is dynamic: beyond them its angles follow from the longest text that a process has
    seen.
    """
    if str(wanted.get("rope_type", wanted.get("type"))) == "dynamic":
        return 1.0
    return max(1.0, float(wanted.get("factor") or 1.0))


def scale_positions(config: Any, wanted: dict[str, Any]) -> None:
    """Give a configuration other rotary positions. Raises `ModelError` where it has none, or
    several rules.
    """
    where, kind = "model.rope_scaling", str(wanted.get("rope_type", wanted.get("type", "")))
    now = getattr(config, "rope_parameters", None)
    if not isinstance(now, dict) or "rope_theta" not in now:
        why = "has a rule for each kind of layer" if now else "has no rotary positions"
        raise ModelError(
            f"a {config.model_type} {why}", where=where, to_do="leave it out for this model"
        )
    # how much of each head is turned is the model's
    kept = {key: now[key] for key in ("rope_theta", "partial_rotary_factor") if key in now}
    own = {key: value for key, value in wanted.items() if key != "type"}
    config.rope_parameters = {**kept, **own, "rope_type": kind}
    try:
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(ROPE_INIT_FUNCTIONS)
            raise ValueError(f"transformers has no rope_type '{kind}', only {known}")
        config.validate_rope()
        ROPE_INIT_FUNCTIONS.get(kind, lambda *_: None)(config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"cannot scale positions with rope_type '{kind}': {why}",
            where=where,
            to_do="see rope_scaling of transformers",
        ) from error
