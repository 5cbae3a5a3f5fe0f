"""What a model is given and asked: its inputs out of a batch, the tokens that are scored, what its
decoder reads.

Shapes: B examples, T tokens, V words, C classes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
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

OF_LOSS = {"labels", POSITIONS, TARGETS, SCORED, OWNERS, N_TARGETS, REFERENCE, VALUES}
"""Keys of a batch that only the loss reads."""


def inner_of(model: Any) -> Any:
    """The model itself, out of its adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def scores_words(model: Any) -> bool:
    """Whether the model has an output layer of words; else its head is for classes or a number."""
    inner = inner_of(model)
    is_classifier = "Classification" in type(inner).__name__
    return inner.get_output_embeddings() is not None or not is_classifier


def has_decoder(model: Any) -> bool:
    """Whether an encoder reads the input, and a decoder writes the target."""
    return inner_of(model).config.is_encoder_decoder and scores_words(model)


def predicts_next(model: Any) -> bool:
    """Whether each word is predicted from those before it in the same text."""
    return scores_words(model) and not has_decoder(model)


def reads_token_types(model: Any) -> bool:
    """Whether a classifier of texts is told which tokens are of a second one: BERT's is, RoBERTa's
    is not.
    """
    inner = inner_of(model)
    is_of_texts = type(inner).__name__.endswith("ForSequenceClassification")
    return is_of_texts and (getattr(inner.config, "type_vocab_size", None) or 0) > 1


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What of a batch the model takes."""
    return {name: value for name, value in batch.items() if name not in OF_LOSS}


def logits_of(model: Any, batch: Batch) -> Tensor:
    """[B, T, V], of the decoder where there is one, or [B, C]: without the library's own loss."""
    inputs, inner = inputs_of(batch), inner_of(model)
    if has_decoder(inner):
        inputs["decoder_input_ids"] = decoder_inputs(inner, batch["labels"])
    if scores_words(inner):
        inputs["use_cache"] = False
    return model(**inputs).logits


@dataclass(frozen=True)
class Labelled:
    """Which hidden states are scored, and against which word: positions [n] into the flattened [N],
    targets [n].
    """

    positions: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Labelled:
        return cls(batch[POSITIONS], batch[TARGETS])


def find_labelled(labels: Tensor, *, predicts_next: bool) -> Labelled:
    """The labelled positions of labels [B, T].

    With `predicts_next` (causal models) each token is scored where the one before it stands, so the
    first token of a row is never scored. To be called on the CPU: on a GPU it would be waited for.
    """
    wanted, shift = labels != IGNORED, int(predicts_next)
    wanted[:, :shift] = False
    rows, columns = wanted.nonzero(as_tuple=True)
    return Labelled(rows * labels.shape[1] + columns - shift, labels[rows, columns])


def drawn_batch(model: Any, n_rows: int, n_tokens: int) -> Batch:
    """Drawn tokens to try a model with, the same each time. The end of a text is the last of each
    row alone: BART looks there for the class.
    """
    text_config = inner_of(model).config.get_text_config()
    n_words, end = text_config.vocab_size, getattr(text_config, "eos_token_id", None)
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(n_words, (n_rows, n_tokens), generator=dice)
    if isinstance(end, int) and 0 <= end < n_words:
        ids[ids == end] = (end + 1) % n_words
        ids[:, -1] = end
    ids = ids.to(next(model.parameters()).device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


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
