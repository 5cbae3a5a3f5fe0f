"""The loss of a micro-batch as a sum, so that the caller can divide by the targets of the whole step.

Shapes: B examples, T tokens, V words, C classes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from farthing.errors import ModelError
from farthing.tasks.registry import task_of
from farthing.tasks.task import IGNORED

# keys of a batch that only the loss reads
POSITIONS, TARGETS = "labelled_positions", "labelled_targets"


def inner_of(model: Any) -> Any:
    """The model itself, out of its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def summed_loss(model: Any, batch: dict[str, Tensor], task: str, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies in fp32, logits).

    Logits are [B, T, V], of the decoder where input and target are apart, else one ahead of the token that they predict; or
    [B, C], one label an example. Positions labelled -100 add nothing. A GPU is waited for unless the batch says which
    positions are labelled.
    """
    logits = logits_of(model, batch, task)
    labels = batch["labels"]
    of = task_of(task)
    if of.labels is not None:
        return of.labels.loss(logits, labels, label_smoothing), logits
    if POSITIONS in batch:
        scores, labels = logits.flatten(0, 1).index_select(0, batch[POSITIONS]), batch[TARGETS]
    else:
        if of.predicts_next:
            scores, labels = logits[:, :-1], labels[:, 1:]
        else:
            scores = logits
        wanted = labels != IGNORED
        scores, labels = scores[wanted], labels[wanted]  # [n_targets, V], [n_targets]
    return F.cross_entropy(scores.float(), labels, reduction="sum", label_smoothing=label_smoothing), logits


def logits_of(model: Any, batch: dict[str, Tensor], task: str) -> Tensor:
    """Forward pass without the library's own loss."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    of = task_of(task)
    if of.is_pair:
        inner = inner_of(model)
        inputs["decoder_input_ids"] = decoder_inputs(inner, batch["labels"])
        inputs["use_cache"] = False
    elif of.predicts_next:
        inputs["use_cache"] = False
    logits: Tensor = model(**inputs).logits
    return logits


def decoder_inputs(inner: Any, labels: Tensor) -> Tensor:
    """Decoder inputs [B, T] for labels [B, T] with -100 as padding, by the model's own function.

    Families differ: most begin with `decoder_start_token_id`, mBART with the last token of the target. Raises `ModelError` for
    a model that has no such function, or not the tokens that it needs.
    """
    config = inner.config
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    arguments: tuple[Any, ...] = ()
    if shift is None:  # some have it in their module alone: (ids, padding, start)
        shift = getattr(sys.modules[type(inner).__module__], "shift_tokens_right", None)
        arguments = (config.pad_token_id, config.decoder_start_token_id)
    try:
        if shift is None:
            raise ValueError("transformers has no function that makes its decoder's inputs of labels")
        inputs: Tensor = shift(labels.clone(), *arguments)  # a copy: some write into what they are given
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"a {config.model_type} for seq2seq can't be trained: {why}",
            where=str(config.name_or_path or config.model_type),
            to_do="set decoder_start_token_id and pad_token_id in its config.json",
        ) from error
    return inputs
