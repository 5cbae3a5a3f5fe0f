"""Every model family of `transformers` that farthing names: a forward and backward pass, its
adapters, its loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapters import Adapter, add_adapter, count_parameters
from farthing.model.load import auto_class
from farthing.model.positions import max_positions
from heads import summed_loss
from thinned import thinned

SMALL: dict[str, Any] = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ENCODER = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")} | {
    "type_vocab_size": 1
}
SEQ2SEQ = SMALL | {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = SMALL | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("causal-lm", name, DECODER)
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
    ),
    ("causal-lm", "gpt2", SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("causal-lm", "gpt_neox", ENCODER),
    *(
        ("seq2seq", name, SEQ2SEQ | {"feed_forward_proj": gate})
        for name, gate in (("t5", "relu"), ("t5", "gated-gelu"))
    ),
    ("seq2seq", "mt5", SEQ2SEQ | {"feed_forward_proj": "gated-gelu"}),
    ("seq2seq", "bart", BART),
    *(("classification", name, ENCODER) for name in ("bert", "roberta", "xlm-roberta")),
    (
        "classification",
        "distilbert",
        SMALL | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    ("classification", "qwen2", DECODER),
]


def model_of(task: str, family: str, settings: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(family, **settings)
    if task == "classification":
        config.num_labels = 5
    torch.manual_seed(0)
    model = auto_class(task).from_config(config)
    model.eval()  # no dropout: the losses are compared
    return model


def batch_of(task: str) -> dict[str, torch.Tensor]:
    """Two rows of unlike length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    ids[1, 8:] = 0
    if task == "classification":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 4])}
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 8:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("task", "family", "settings"), FAMILIES, ids=[f"{t}-{f}" for t, f, _ in FAMILIES]
)
def test_the_summed_loss_is_the_librarys_own(task, family, settings):
    model, batch = model_of(task, family, settings), batch_of(task)
    loss, _ = summed_loss(model, batch, task)
    shifted = batch["labels"][:, 1:] if task == "causal-lm" else batch["labels"]
    n_targets = int((shifted != -100).sum())
    assert float(loss.detach()) / n_targets == pytest.approx(
        float(model(**batch).loss.detach()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("task", "family", "settings"), thinned(FAMILIES, 2), ids=[f"{t}-{f}" for t, f, _ in FAMILIES]
)
def test_default_adapters_train_and_checkpointed_layers_change_nothing(task, family, settings):
    model, batch = model_of(task, family, settings), batch_of(task)
    tuned = add_adapter(model, Adapter(r=2), task, seed=0)
    counts = count_parameters(tuned)
    assert 0 < counts["adapter"] <= counts["trainable"] < counts["total"]
    assert (counts["saved_modules"] > 0) == (task == "classification"), (
        "a new head is trained whole"
    )
    tuned.train()
    for module in tuned.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients(every):
        checkpoint_layers(tuned, every)
        tuned.zero_grad()
        torch.manual_seed(3)
        summed_loss(tuned, batch, task)[0].backward()
        return {name: p.grad.clone() for name, p in tuned.named_parameters() if p.grad is not None}

    plain, recomputed = gradients(0), gradients(1)
    assert plain.keys() == recomputed.keys()
    assert any(float(gradient.abs().sum()) > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name
    assert all(p.grad is None for p in tuned.parameters() if not p.requires_grad)


def test_positions_after_the_padding_index_are_not_counted():
    roberta = ENCODER | {"max_position_embeddings": 514, "pad_token_id": 1}
    assert max_positions(AutoConfig.for_model("roberta", **roberta)) == 512
    assert (
        max_positions(AutoConfig.for_model("bert", **ENCODER | {"max_position_embeddings": 512}))
        == 512
    )
    assert max_positions(AutoConfig.for_model("t5", **SEQ2SEQ)) is None
