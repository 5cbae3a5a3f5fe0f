"""Small models of the three tasks, made on the spot: what `farthing.tiny` makes for the demo, and
T5 and BERT beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farthing import tiny

FRAMES = {"t5": "$A </s>", "bert": "<s> $A </s>"}
"""What their tokenizers put around a text."""


def make_tokenizer(
    folder: Path, texts: Iterable[str], vocab_size: int = 1000, family: str = "llama"
) -> Any:
    """Train a byte-level BPE tokenizer on `texts` and save it."""
    from tokenizers import processors

    tokenizer = tiny.make_tokenizer(folder, texts, vocab_size)
    if family in FRAMES:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=FRAMES[family], special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.save_pretrained(folder)
    return tokenizer


def make_model_folder(
    folder: Path,
    texts: Iterable[str],
    family: str = "llama",
    *,
    hidden: int = 64,
    layers: int = 2,
    dropout: float = 0.0,
) -> Path:
    """A folder with a tokenizer and the `config.json` of a small Llama, T5 or BERT, for
    `model.init: random`.
    """
    if family == "llama":
        return tiny.make_model_folder(folder, texts, hidden=hidden, layers=layers, dropout=dropout)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, texts, family=family)
    heads = max(1, hidden // 32)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "t5":
        config |= {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": hidden,
            "d_ff": hidden * 2,
            "d_kv": 32,
            "num_layers": layers,
            "num_heads": heads,
            "dropout_rate": dropout,
            "decoder_start_token_id": 0,
        }
    else:
        config |= {
            "model_type": "bert",
            "architectures": ["BertForSequenceClassification"],
            "hidden_size": hidden,
            "intermediate_size": hidden * 2,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
