"""Configurations cut to few layers, for traces of their memory."""

from __future__ import annotations

from typing import Any

from farthing.models.model_config import known_config

NAMES = {
    "llama": "meta-llama/Llama-3.2-3B",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "qwen2": "Qwen/Qwen2.5-0.5B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "gemma": "google/gemma-2b",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-270m",
    "gpt2": "openai-community/gpt2",
    "neox": "EleutherAI/pythia-410m",
    "xlm-r": "FacebookAI/xlm-roberta-base",
    "bert": "google-bert/bert-base-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "flan-t5": "google/flan-t5-base",
    "t5": "google-t5/t5-small",
    "mt5": "google/mt5-small",
}


SIZES = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


FEW, MANY = (
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    {"num_experts": 16, "num_experts_per_tok": 4},
)


MIXTURES = {
    "mixtral": SIZES | FEW | {"intermediate_size": 512},
    "qwen3_moe": SIZES | MANY | {"moe_intermediate_size": 192, "head_dim": 32},
    "qwen2_moe": (
        SIZES | MANY | {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 512}
    ),
    "olmoe": SIZES | MANY | {"intermediate_size": 192},
    "gpt_oss": SIZES | FEW | {"intermediate_size": 256, "head_dim": 32},
}
"""Mixtures of experts, small enough for a test."""


BLOCK_BYTES = (
    16 << 20
)  # of fp32 rows of logits: a step has fewer operations to trace than with a CPU's own


def cut_config(model: str, n_layers: int) -> dict[str, Any]:
    """The config of a known model with a few of its layers."""
    if model in MIXTURES:
        return MIXTURES[model] | {"model_type": model, "num_hidden_layers": n_layers}
    config = known_config(NAMES[model])
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"):
        if key in config:
            config[key] = n_layers
    config.pop("layer_types", None)
    if config["model_type"] in (
        "t5",
        "mt5",
    ):  # transformers ties a model that is made from its configuration alone
        config["tie_word_embeddings"] = True
    return config
