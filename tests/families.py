"""Small models of every family, and examples for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drawn_sets import token_set
from every_family import OWN, plain_loss, small_values
from farthing.data.token_set import TokenSet
from farthing.model.forward import Forward

PAD = 1


def small(kind: str, auto, **others):
    """A small model of a family, its weights so large that every token matters."""
    transformers.logging.set_verbosity_error()
    made = CONFIG_MAPPING[kind]
    ids = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
    config = made(**small_values(made, OWN.get(kind, {}) | ids | others))
    if auto is AutoModelForSeq2SeqLM and kind != "mbart":
        config.decoder_start_token_id = 0
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model


def examples_of(lengths: list[int], n_labels: int = 0) -> TokenSet:
    """Random examples of these lengths, which end with the end of a text."""
    tokens = token_set(np.array(lengths), n_labels=n_labels)
    tokens.ids[tokens.offsets[1:] - 1] = 2
    return tokens


def example_of(tokens: TokenSet, index: int) -> list[Tensor]:
    """[1, n] its token ids, and which of them are targets."""
    return [torch.from_numpy(part.astype(np.int64))[None] for part in tokens.example(index)]


def summed(forward: Forward, tokens: TokenSet, examples: Sequence[int] | NDArray[Any]) -> Tensor:
    """The loss of these examples in one micro-batch."""
    return forward.loss(forward.to_device(forward.collate(tokens, np.array(examples))))[0]


def by_itself(model, tokens: TokenSet, index: int, smoothing: float = 0.0) -> Tensor:
    """The loss of one example by the encoder-decoder of plain transformers."""
    ids, is_target = example_of(tokens, index)
    return plain_loss(model, ids[0], is_target[0], None, "seq2seq", smoothing)


CODES = {
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "nllb": ("eng_Latn", "deu_Latn"),
}


def speaking(family: str):
    """A tokenizer of a family that writes languages into texts, with a few words."""
    words = ["▁the", "▁bread", "▁das", "▁Brot", "▁"]
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    if family == "nllb":
        vocabulary = {word: place for place, word in enumerate([*first, *words, *CODES["nllb"]])}
        return transformers.NllbTokenizer(
            vocab=vocabulary, merges=[], additional_special_tokens=[*CODES["nllb"]]
        )
    kind = {"mbart": transformers.MBartTokenizer, "mbart50": transformers.MBart50Tokenizer}[family]
    return kind(vocab=[(word, -1.0) for word in [*first, *words, *CODES[family]]])
