"""Configurations cut to few layers, for traces of their memory."""

from typing import Any

import pytest
import torch

import farthing.model.head
import farthing.models.tiles
from farthing.models.model_config import known_config

NAMES = {
    "mistral": "mistralai/Mistral-7B-v0.1",
    "llama": "meta-llama/Llama-3.2-3B",
    "qwen2": "Qwen/Qwen2.5-0.5B",
    "gemma2": "google/gemma-2-2b",
    "gpt2": "openai-community/gpt2",
    "bert": "google-bert/bert-base-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "flan-t5": "google/flan-t5-base",
}


SIZES = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


FEW, MANY = (
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    {"num_experts": 16, "num_experts_per_tok": 4},
)


MIXTURES = {
    "mixtral": SIZES | FEW | {"intermediate_size": 512},
    "qwen2_moe": (
        SIZES | MANY | {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 512}
    ),
    "gpt_oss": SIZES | FEW | {"intermediate_size": 256, "head_dim": 32},
}
"""Mixtures of experts, small enough for a test."""


@pytest.fixture
def large_blocks(monkeypatch):
    """16 MiB of fp32 rows of logits: fewer operations to trace than with a CPU's own blocks."""
    monkeypatch.setattr(farthing.models.tiles, "CPU_BLOCK_BYTES", 16 << 20)
    of_thread = (16 << 20) // torch.get_num_threads()
    monkeypatch.setattr(farthing.model.head, "CPU_BLOCK_BYTES", of_thread)


def cut_config(model: str, n_layers: int) -> dict[str, Any]:
    """The config of a known model with a few of its layers."""
    if model in MIXTURES:
        return MIXTURES[model] | {"model_type": model, "num_hidden_layers": n_layers}
    config = known_config(NAMES[model])
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"):
        if key in config:
            config[key] = n_layers
    config.pop("layer_types", None)
    return config
