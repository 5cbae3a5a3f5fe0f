"""Which examples must not be computed together, so that each counts as if it were computed alone.

Two kinds: models that read the padding beside a shorter example (XLNet takes its last position for
the class, FNet mixes all positions), whose micro-batches hold inputs of one length; and models
whose rotary factors follow from the longest input of a forward pass (LongRoPE, arXiv 2402.13753,
section 3.3), whose long and short examples go apart.

What can't be kept apart is lifted or refused: NLLB-MoE's experts take so many tokens of a
micro-batch and drop the rest, and batch norms mix all examples. Refuses to know token sets and
devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from farthing.errors import ModelError
from farthing.models.families import PADS_SAFELY
from farthing.tasks.registry import task_of

UNLIMITED_TOKENS = 1 << 40


class Apart(NamedTuple):
    """How a model's examples are kept apart."""

    why: str
    """In words, for people."""
    above: int | None
    """Inputs of more tokens than this go apart from the others; None: every length goes by itself.
    """

    def classes(
        self, lengths: NDArray[np.int64], targets: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """[n] from the input tokens of each example [n] and, for seq2seq, its target tokens [n],
        which are padded too.

        Examples with equal numbers may be computed together.
        """
        if self.above is not None:
            return (lengths > self.above).astype(np.int64)
        return lengths if targets is None else lengths * (1 + int(targets.max())) + targets


def kept_apart(inner: Any, task: str, *, is_packed: bool) -> Apart | None:
    """What keeps the examples of a model (without its adapter) apart; None: nothing does."""
    config = inner.config
    kind = config.model_type
    head = task_of(task).head
    if (
        not is_packed
        and head in PADS_SAFELY
        and (kind not in PADS_SAFELY[head] or _is_blocked(config))
    ):
        return Apart(f"examples of one length at a time: a {kind} may read padding", None)
    limit = longrope_limit(config)
    if limit is not None:
        return Apart(f"inputs above {limit:,} tokens apart: their rotary factors are others", limit)
    return None


def lift_capacity(inner: Any) -> bool:
    """Let each expert of an NLLB-MoE take all tokens that are routed to it; whether the model is
    one.

    By themselves its experts drop what is above a number, counted over the whole micro-batch and
    kept from the evaluation before: an answer would depend on its neighbours and on when a run was
    resumed. None is dropped by transformers either where the trained model answers, with
    `moe_eval_capacity_token_fraction: 1.0` as the published ones have it. Switch Transformers count
    each example by itself. Raises `ModelError` for batch norms, which can't be computed example by
    example.
    """
    mixing = [
        name
        for name, module in inner.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if mixing:
        raise ModelError(
            f"a {inner.config.model_type} has batch norms ({mixing[0]}): what is learned of an"
            " example would depend on which others are computed with it",
            where=str(inner.config.name_or_path or inner.config.model_type),
            to_do="use a model without them, as all current language models are",
        )
    routers = [
        module for module in inner.modules() if hasattr(module, "moe_eval_capacity_token_fraction")
    ]
    for router in routers:
        router.expert_capacity, router.moe_eval_capacity_token_fraction = UNLIMITED_TOKENS, 0.0
    return bool(routers)


def longrope_limit(config: Any) -> int | None:
    """The most tokens that LongRoPE's short factors are for; None for other models."""
    text_config = config.get_text_config()
    rope = (
        getattr(text_config, "rope_parameters", None)
        or getattr(text_config, "rope_scaling", None)
        or {}
    )
    of_layers = [
        each for each in rope.values() if isinstance(each, dict)
    ]  # some have one for each type of layer
    limits = []
    for each in of_layers or [rope]:
        if each.get("rope_type", each.get("type")) in ("longrope", "su"):
            limit = each.get("original_max_position_embeddings")
            limits.append(
                int(limit or getattr(text_config, "original_max_position_embeddings", 0) or 0)
            )
    return min(limits) if limits and min(limits) > 0 else None


def _is_blocked(config: Any) -> bool:
    """Whether attention is sparse in blocks of the padded input."""
    return getattr(config, "attention_type", None) == "block_sparse"
