"""Models, batches and gradients of the output layer."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import farthing.model.head
from every_family import N_WORDS, OWN, small_values
from farthing.model.head import HeadSettings, find_head, head_losses
from farthing.model.lora_kernels import LowRank
from farthing.model.loss import Labelled, decoder_inputs, find_labelled, inner_of

CLOSE, CLOSE_BF16 = 1e-5, 2e-2


def make_model(family: str, **settings):
    """A model of two narrow layers, drawn from a fixed seed."""
    kind, is_pair = CONFIG_MAPPING[family], objective_of(family) == "seq2seq"
    config = kind(**small_values(kind, OWN.get(family, {}) | settings))
    if is_pair:
        config.decoder_start_token_id, config.pad_token_id = 0, 0
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # sharper than fresh weights, so that caps bend and scales matter
        model.get_output_embeddings().weight.mul_(30)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.train()


def make_batch(n_rows: int = 3, n_tokens: int = 11, share: float = 0.4) -> dict[str, Tensor]:
    """Padded rows, with labels at about `share` of the real positions."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, N_WORDS, (n_rows, n_tokens), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(1, n_rows):
        mask[row, n_tokens - 2 * row :] = 0
    labels = ids.masked_fill((torch.rand(ids.shape, generator=draw) > share) | (mask == 0), -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def leave_low_rank(model):
    """Give the LoRA layers of `model` the forward pass of `peft` back."""
    for module in model.modules():
        if isinstance(module, LowRank):
            module.__class__ = type(module).__bases__[1]


def one_mask(monkeypatch: pytest.MonkeyPatch):
    """peft's dropout draws the masks that fused layers draw."""
    monkeypatch.setattr(
        nn.Dropout, "forward", lambda self, x: torch.native_dropout(x, self.p, self.training)[0]
    )


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labelled: Labelled,
    how: HeadSettings | None = None,
) -> Tensor:
    """Sum of the losses of the labelled positions."""
    return head_losses(hidden, weight, bias, labelled, how or HeadSettings())[0]


def summed_loss(
    model, batch: dict[str, Any], task: str, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies in fp32, logits), of whole logits."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    labels = batch["labels"]
    if task == "seq2seq":
        inputs["decoder_input_ids"] = decoder_inputs(inner_of(model), labels)
    logits = model(**inputs).logits
    scores = logits
    if task == "causal-lm":
        scores, labels = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(
        scores.flatten(0, -2).float(),
        labels.flatten(),
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return loss, logits


def labelled(batch: dict[str, Any], task: str) -> dict[str, Any]:
    """The batch, with its labelled positions and whose they are."""
    if "labelled_positions" in batch:
        return batch
    labels, documents = batch["labels"], batch.get("documents")
    found = find_labelled(labels, predicts_next=task == "causal-lm")
    owners, n = found.positions // labels.shape[1], len(labels)
    if documents is not None:
        n = len(documents.lengths)
        owners = torch.bucketize(found.positions, documents.bounds[1:], right=True)
    return {
        **batch,
        "labelled_positions": found.positions,
        "labelled_targets": found.targets,
        "owners_of_targets": owners,
        "n_targets": torch.bincount(owners, minlength=n).float(),
    }


def language_model_loss(
    model,
    batch: dict[str, Any],
    task: str,
    label_smoothing: float = 0.0,
) -> Tensor:
    return find_head(model, task).loss(labelled(batch, task), label_smoothing, 1.0)


def log_probs_of(model, batch: dict[str, Any], task: str) -> Tensor:
    """The log-probability of all targets of each document [D]."""
    batch = labelled(batch, task)
    words = find_head(model, task).log_probs(batch)
    empty = words.new_zeros(len(batch["n_targets"]))
    return empty.index_add(0, batch["owners_of_targets"], words)


def gradients_of(model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], close: float = CLOSE):
    assert ours.keys() == theirs.keys()
    assert theirs
    floor = 1e-3 * float(torch.stack([one.norm() for one in theirs.values()]).norm())
    for name, one in theirs.items():
        difference = float((ours[name] - one).norm()) / max(float(one.norm()), floor, 1e-30)
        assert difference < close, (name, difference)


def in_tiles_of(n: int):
    """The head takes so many positions at once."""
    return mock.patch.object(farthing.model.head, "default_tile_tokens", return_value=n)


def objective_of(family: str) -> str:
    is_pair = AutoConfig.for_model(family).is_encoder_decoder
    return "seq2seq" if is_pair else "causal-lm"
