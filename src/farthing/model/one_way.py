"""Whether a language model looks only back: one that sees the token it is to predict learns nothing from predicting it.

transformers builds a "causal" model of BERT-like encoders too, which looks both ways unless its config.json says
`is_decoder: true`. Refuses to guess by the name of the family: the model itself is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from farthing.errors import ModelError

N_TOKENS = 4
ROUNDING, ROUNDING_HALF = 1e-5, 2e-2  # of the largest score: fp32, and what is shorter


@torch.no_grad()
def refuse_looking_ahead(model: Any, name: str) -> None:
    """Compute two short documents that differ in their last token: what stands before it must be predicted alike.

    Raises `ModelError`.
    """
    vocab, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    first = torch.arange(2, 2 + N_TOKENS, device=device).remainder(vocab).unsqueeze(0)
    second = first.clone()
    second[0, -1] = (first[0, -1] + 1) % vocab
    was_training = model.training
    model.eval()
    try:
        ids = torch.cat([first, second])  # [2, N_TOKENS]
        before, after = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
    finally:
        model.train(was_training)
    # experts are given other numbers of tokens, which rounds otherwise; all else is the same to the bit
    share = ROUNDING if next(model.parameters()).dtype == torch.float32 else ROUNDING_HALF
    if float((before - after).abs().max()) > share * float(before.abs().max()):
        raise ModelError(
            f"a {model.config.model_type} with this config.json looks ahead: it sees the tokens that it is to predict",
            where=name,
            to_do="use a decoder (Llama, Qwen ...), or a copy of this one with `is_decoder: true` in its config.json",
        )
