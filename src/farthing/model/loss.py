"""The loss of a micro-batch as a sum, so that the caller can divide by the targets of the whole
step.

Shapes: B examples, T tokens, V words, C classes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farthing.data.units import (
    N_TARGETS,
    OWNERS,
    POSITIONS,
    REFERENCE,
    SCORED,
    TARGETS,
    VALUES,
)
from farthing.errors import ModelError
from farthing.model.documents import Batch
from farthing.objectives.objective import IGNORED
from farthing.objectives.registry import objective_of

OF_LOSS = {"labels", POSITIONS, TARGETS, SCORED, OWNERS, N_TARGETS, REFERENCE, VALUES}
"""Keys of a batch that only the loss reads."""


def inner_of(model: Any) -> Any:
    """The model itself, out of its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def summed_loss(
    model: Any, batch: Batch, task: str, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies in fp32, logits).

    Logits are [B, T, V], of the decoder where input and target are apart, else one ahead of the
    token that they predict; or [B, C], one label an example. Positions labelled -100 add nothing. A
    GPU is waited for unless the batch says which positions are labelled.
    """
    logits = logits_of(model, batch, task)
    labels = batch["labels"]
    of = objective_of(task)
    if of.labels is not None:
        return of.labels.loss(logits, labels, label_smoothing), logits
    labelled = labelled_of(batch, task)
    scores = logits.flatten(0, 1).index_select(0, labelled.positions)
    return (
        F.cross_entropy(
            scores.float(), labelled.targets, reduction="sum", label_smoothing=label_smoothing
        ),
        logits,
    )


def logits_of(model: Any, batch: Batch, task: str) -> Tensor:
    """Forward pass without the library's own loss."""
    inputs, of = inputs_of(batch), objective_of(task)
    if of.is_pair:
        inputs["decoder_input_ids"] = decoder_inputs(inner_of(model), batch["labels"])
    if of.labels is None:
        inputs["use_cache"] = False
    logits: Tensor = model(**inputs).logits
    return logits


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What of a batch the model takes."""
    return {name: value for name, value in batch.items() if name not in OF_LOSS}


@dataclass(frozen=True)
class Labelled:
    """Which hidden states are scored, and against which word: positions [n] into the flattened [N],
    targets [n].
    """

    positions: Tensor
    targets: Tensor


def find_labelled(
    labels: Tensor, *, predicts_next: bool, position_ids: Tensor | None = None
) -> Labelled:
    """The labelled positions of labels [B, T].

    With `predicts_next` (causal models) each token is scored where the one before it stands, so the
    first token of a row is never scored; nor is the first of a document in a packed batch, which
    `position_ids` [B, T] of 0 tells. To be called on the CPU: on a GPU it would be waited for.
    """
    n_tokens = labels.shape[1]
    if predicts_next:
        wanted = labels[:, 1:] != IGNORED
        if position_ids is not None:
            wanted &= position_ids.expand_as(labels)[:, 1:] != 0
        rows, columns = wanted.nonzero(as_tuple=True)
        return Labelled(rows * n_tokens + columns, labels[rows, columns + 1])
    rows, columns = (labels != IGNORED).nonzero(as_tuple=True)
    return Labelled(rows * n_tokens + columns, labels[rows, columns])


def labelled_of(batch: Batch, task: str) -> Labelled:
    """The labelled positions of a batch: those that it says, or those of its labels."""
    if POSITIONS in batch:
        return Labelled(batch[POSITIONS], batch[TARGETS])
    predicts_next = objective_of(task).predicts_next
    return find_labelled(
        batch["labels"], predicts_next=predicts_next, position_ids=batch.get("position_ids")
    )


def drawn_ids(config: Any, n_rows: int, n_tokens: int) -> Tensor:
    """[n_rows, n_tokens]: tokens to try a model with, the same each time. The end of a text is the
    last of each row alone: BART looks there for the class.
    """
    text_config = config.get_text_config()
    n_words, end = text_config.vocab_size, text_config.eos_token_id
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(n_words, (n_rows, n_tokens), generator=dice)
    if isinstance(end, int) and 0 <= end < n_words:
        ids[ids == end] = (end + 1) % n_words
        ids[:, -1] = end
    return ids


def decoder_inputs(inner: Any, labels: Tensor) -> Tensor:
    """Decoder inputs [B, T] for labels [B, T] with -100 as padding, by the model's own function.

    Families differ: most begin with `decoder_start_token_id`, mBART with the last token of the
    target. Raises `ModelError` for a model that has no such function, or not the tokens that it
    needs.
    """
    config = inner.config
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    of_module: Any = getattr(sys.modules[type(inner).__module__], "shift_tokens_right", None)
    to_do = "set decoder_start_token_id and pad_token_id in its config.json"
    try:
        if shift is None and of_module is None:
            to_do = (
                "use one with an encoder for text (T5, BART ...), or task: causal-lm where it has"
                " none"
            )
            raise ValueError(
                "transformers has no function that makes its decoder's inputs of labels"
            )
        given = labels.clone()  # some write into what they are given
        inputs: Tensor = (
            of_module(given, config.pad_token_id, config.decoder_start_token_id)
            if shift is None
            else shift(given)
        )
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"a {config.model_type} for seq2seq can't be trained: {why}",
            where=str(config.name_or_path or config.model_type),
            to_do=to_do,
        ) from error
    return inputs
