"""Whether a language model looks only back: one that sees the token it is to predict learns nothing
from predicting it.

transformers builds a "causal" model of BERT-like encoders too, which looks both ways unless its
config.json says `is_decoder: true`.
"""

from __future__ import annotations

from typing import Any

import torch

from farthing.errors import ModelError
from farthing.model.loss import drawn_batch, logits_of

N_TOKENS = 4
ROUNDING, ROUNDING_HALF = 1e-5, 2e-2  # of the largest score: fp32, and what is shorter


@torch.no_grad()
def refuse_looking_ahead(model: Any, name: str) -> None:
    """Compute two short documents that differ in their last token: what stands before it must be
    predicted alike. Raises `ModelError`.
    """
    config, batch = model.config, drawn_batch(model, 2, N_TOKENS)
    ids = batch["input_ids"]
    ids[1, :-1] = ids[0, :-1]
    ids[1, -1] = (ids[0, -1] + 1) % config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        logits = logits_of(model, batch)
    finally:
        model.train(was_training)
    before, after = logits[:, :-1].float()
    # experts are given other numbers of tokens, which rounds otherwise; all else is the same to the
    # bit
    is_half = any(
        p.dtype != torch.float32 for p in model.parameters()
    ) or torch.is_autocast_enabled(ids.device.type)
    share = ROUNDING_HALF if is_half else ROUNDING
    if float((before - after).abs().max()) > share * float(before.abs().max()):
        raise ModelError(
            f"a {config.model_type} with this config.json looks ahead: it sees the tokens that it"
            " is to predict",
            where=name,
            to_do="use a decoder (Llama, Qwen ...), or set the key of its family that makes it one",
        )
