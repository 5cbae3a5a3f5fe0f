"""The loss of a micro-batch as a sum, so that the caller can divide by the targets of the whole step.

One function for the three tasks. Shapes: B examples, T tokens, V words, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farthing.data.batches import IGNORED

# keys of a batch that only the loss reads
POSITIONS, TARGETS = "labelled_positions", "labelled_targets"


def summed_loss(model: Any, batch: dict[str, Tensor], task: str, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies in fp32, logits).

    causal-lm: each labelled token is predicted from the one before it, logits [B, T, V]; seq2seq: decoder logits
    [B, T, V]; classification: logits [B, C], one target an example. Positions labelled -100 add nothing. A GPU is waited for
    unless the batch says which positions are labelled.
    """
    logits = logits_of(model, batch, task)
    labels = batch["labels"]
    if task == "classification":
        scores = logits
    elif POSITIONS in batch:
        scores, labels = logits.flatten(0, 1).index_select(0, batch[POSITIONS]), batch[TARGETS]
    else:
        if task == "causal-lm":
            scores, labels = logits[:, :-1], labels[:, 1:]
        else:
            scores = logits
        wanted = labels != IGNORED
        scores, labels = scores[wanted], labels[wanted]  # [n_targets, V], [n_targets]
    return F.cross_entropy(scores.float(), labels, reduction="sum", label_smoothing=label_smoothing), logits


def logits_of(model: Any, batch: dict[str, Tensor], task: str) -> Tensor:
    """Forward pass without the library's own loss."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if task == "seq2seq":
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inputs["decoder_input_ids"] = shifted_right(batch["labels"], inner.config)
        inputs["use_cache"] = False
    elif task == "causal-lm":
        inputs["use_cache"] = False
    logits: Tensor = model(**inputs).logits
    return logits


def shifted_right(labels: Tensor, config: Any) -> Tensor:
    """Decoder inputs [B, T]: the start token, then the labels without their last; -100 becomes padding."""
    start = config.decoder_start_token_id
    if start is None:
        start = config.pad_token_id
    inputs = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return inputs.masked_fill(inputs == IGNORED, config.pad_token_id)
