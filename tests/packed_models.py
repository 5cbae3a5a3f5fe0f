"""Models and layers whose packed answers are compared with those of documents alone."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import every_family
from every_family import small_values
from farthing.model import attention_kernels
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention_kernels import AttentionSettings
from farthing.model.documents import Documents
from farthing.model.lora_kernels import use_low_rank
from token_sets import token_set

CLOSE = 1e-5
assert_close = partial(torch.testing.assert_close, rtol=CLOSE, atol=CLOSE)


WINDOW = 5


MAIN = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "gpt2",
]


SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


OWN = {
    "cohere2": SLIDING,
    "exaone4": SLIDING,
    "gemma2": {**SLIDING, "attn_logit_softcapping": 2.0},
    "gemma3_text": SLIDING,
    "ministral": SLIDING,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "olmo3": SLIDING,
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {**SLIDING, "use_sliding_window": True},
    "qwen3": {**SLIDING, "use_sliding_window": True},
    "starcoder2": {"sliding_window": WINDOW},
}


def model_of(family: str, task: str = "causal-lm", seed: int = 0, **keys):
    """A tiny random model of a family, in training mode, with its library's own attention."""
    kind, own = CONFIG_MAPPING[family], every_family.OWN.get(family, {}) | OWN.get(family, {})
    own |= {"vocab_size": 99, "max_position_embeddings": 48, "pad_token_id": 1, "bos_token_id": 0}
    config = kind(**small_values(kind, own | {"num_labels": 3, **keys}))
    auto = AutoModelForCausalLM if task == "causal-lm" else AutoModelForSequenceClassification
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager" if family == "gemma2" else "sdpa")
    for parameter in (
        model.parameters()
    ):  # norms and biases too, and steep enough that attention is not an average
        parameter.data += torch.randn_like(parameter) * 0.1
    return model.train()


def with_adapter(model, task: str = "causal-lm", **how):
    """Fused adapters that do something: fresh ones multiply by zero."""
    model = add_adapter(model, Adapter(r=4, **how), task, seed=0).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert use_low_rank(model).n_left == 0
    return model


class Layer:
    """As much of an attention module as is looked at."""

    is_causal = True
    num_key_value_groups = 2
    training = True


def heads(n_tokens: int) -> list[Tensor]:
    """query [1, 4, T, 16], key and value [1, 2, T, 16], that want gradients."""
    torch.manual_seed(0)
    return [torch.randn(1, n, n_tokens, 16, requires_grad=True) for n in (4, 2, 2)]


def documents():
    """A token set of texts of several lengths, the last tokens of each labelled."""
    draw = np.random.default_rng(0)
    lengths = [12, 12, 7, 3, 3, 9]
    texts = [draw.integers(3, 99, n).tolist() for n in lengths]
    return token_set(texts, [n // 2 for n in lengths], [n % 3 for n in range(len(lengths))])


def by_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch, flex=flex_attention):
    """Attention takes this kernel, and flex is not compiled: it runs on a CPU."""
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_: kernel)
    monkeypatch.setattr(attention_kernels, "_flex", lambda: flex)


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """Softmax attention of each document, one after another: [T, H, D]."""
    found, groups = [], query.shape[1] // key.shape[1]
    parts = zip(
        query.split(documents.lengths),
        key.repeat_interleave(groups, 1).split(documents.key_lengths),
        value.repeat_interleave(groups, 1).split(documents.key_lengths),
        strict=True,
    )
    for q, k, v in parts:
        scores = torch.einsum("qhd,khd->hqk", q, k) * how.scale
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        if how.bias is not None:
            scores = scores + how.bias[0, :, : len(q), : len(k)]
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (behind < 0) & how.causal
        if how.window is not None:
            hidden |= behind >= how.window
        scores = scores.masked_fill(hidden, -torch.inf)
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(found)


def assert_close_with_gradients(ours: Tensor, theirs: Tensor, inputs):
    """And gradients of `inputs`, where `ours` has any: flex has none on a CPU."""
    assert_close(ours, theirs)
    if ours.requires_grad:
        weight = torch.randn_like(theirs)
        found, wanted = (
            torch.autograd.grad((each * weight).sum(), inputs) for each in (ours, theirs)
        )
        assert_close(found, wanted)
