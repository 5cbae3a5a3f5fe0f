"""Small models of each family that GGUF files are written of, with tokenizers of both kinds: for
tests and the benchmark.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "gpt2", {}),
    "llama-3.1": ("llama", "llama-3", {"rope_parameters": LLAMA_3}),
    "llama-linear": (
        "llama",
        "gpt2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-bias": ("llama", "gpt2", {"attention_bias": True, "mlp_bias": True}),
    "llama-2": ("llama", "mistral-7b-v0.1", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", "mistral-7b-v0.1", {"sliding_window": 256}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen2", {}),
    "gemma": ("gemma", "mistral-7b-v0.1", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "mistral-7b-v0.1", GEMMA),
    "gemma3": ("gemma3_text", "mistral-7b-v0.1", {**GEMMA, "num_hidden_layers": 6}),
    "phi3": ("phi3", "mistral-7b-v0.1", {"sliding_window": None}),
    "gpt2": ("gpt2", "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}
"""Name -> (model_type, tokenizer, what its configuration has beside `SMALL`)."""


def regex_tokenizer(texts: list[str], name: str) -> Any:
    """A byte-level BPE tokenizer trained on `texts` that splits them as Llama 3 or Qwen 2 does."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    from farthing.export.gguf_tokens import LLAMA_3 as PATTERN

    is_llama = name == "llama-3"
    pattern = PATTERN if is_llama else PATTERN.replace("{1,3}", "")
    tokenizer = Tokenizer(models.BPE(ignore_merges=is_llama))
    tokenizer.normalizer = None if is_llama else normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (
        ["<|begin_of_text|>", "<|eot_id|>"]
        if is_llama
        else ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if is_llama:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0] if is_llama else None,
        eos_token=special[-1],
        pad_token=special[0],
    )


def tokenizer_named(name: str, texts: list[str]) -> Any:
    """One that is in the folder of test data, or one made of `texts`."""
    if name in ("llama-3", "qwen2"):
        return regex_tokenizer(texts, name)
    folder = Path(os.environ["FARTHING_DATA"]) / "tokenizers" / name
    if (folder / "tokenizer.model").exists():
        return transformers.LlamaTokenizer.from_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def make_family(folder: Path, family: str, texts: list[str], seed: int = 0) -> Path:
    """A folder with a small model of a family, its weights drawn, and its tokenizer."""
    model_type, tokenizer_name, more = FAMILIES[family]
    tokenizer = tokenizer_named(tokenizer_name, texts)
    size = {} if model_type == "gpt2" else SMALL
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids |= {"eos_token_id": tokenizer.eos_token_id}
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer) + 3, **(size | ids | more)
    )
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
