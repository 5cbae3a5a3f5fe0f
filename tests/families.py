"""Small models of every family, and examples for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
)

from drawn_sets import token_set
from farthing.data.token_set import TokenSet
from farthing.model.forward import Forward

PAD = 1


# the names that families have for sizes: of each configuration those it knows
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_inner": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_ff": 32,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 2,
    "embedding_size": 32,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "emb_dim": 32,
    "ffn_dim": 32,
    "word_embed_proj_dim": 32,
    "num_decoder_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "n_positions": 128,
    "decoder_start_token_id": 0,
    "attention_window": 8,
    "num_encoder_layers": 1,
    "max_encoder_position_embeddings": 128,
    "max_decoder_position_embeddings": 128,
    "decoder_vocab_size": 100,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
}


def small(kind: str, auto: Any, **others: Any) -> Any:
    """A small model of a family, its weights so large that every token matters."""
    transformers.logging.set_verbosity_error()
    made = type(AutoConfig.for_model(kind))
    known = set(getattr(made, "__dataclass_fields__", {})) | set(
        inspect.signature(made.__init__).parameters
    )
    renamed = set(getattr(made, "attribute_map", None) or {})
    always = {"pad_token_id", "bos_token_id", "eos_token_id"}
    sizes = {key: value for key, value in SIZES.items() if key in (known | always) - renamed}
    config = made(**sizes | others)
    if (
        auto is AutoModelForSeq2SeqLM
        and getattr(config, "decoder_start_token_id", None) is None
        and kind != "mbart"
    ):
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
    source, labels = ids[is_target == 0][None], ids[is_target == 1][None]
    logits = model(
        input_ids=source, attention_mask=torch.ones_like(source), labels=labels, use_cache=False
    ).logits[0]
    return F.cross_entropy(logits, labels[0], reduction="sum", label_smoothing=smoothing)


CODES = {
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "nllb": ("eng_Latn", "deu_Latn"),
}


def speaking(family: str) -> Any:
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
