"""Whether a language model looks only back: one that sees the token it is to predict learns nothing
from predicting it.

transformers builds a "causal" model of BERT-like encoders too, which looks both ways unless its
config.json says `is_decoder: true`.
"""

from __future__ import annotations

from typing import Any

import torch

from farthing.errors import ModelError

N_TOKENS, N_NUMBERS = 4, 8
_LOOKS_BACK = {"is_decoder": "is_decoder: true", "causal": "causal: true"}
"""A key by which families of encoders look back only, and what it is to be."""
ROUNDING, ROUNDING_HALF = 1e-5, 2e-2  # of the largest score: fp32, and what is shorter


@torch.no_grad()
def refuse_looking_ahead(model: Any, name: str) -> None:
    """Compute two short documents that differ in their last token: what stands before it must be
    predicted alike.

    Raises `ModelError`.
    """
    vocab, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    first = torch.arange(2, 2 + N_TOKENS, device=device).remainder(vocab).unsqueeze(0)
    second = first.clone()
    second[0, -1] = (first[0, -1] + 1) % vocab
    was_training, weights = model.training, _beginnings(model)
    model.eval()
    try:
        ids = torch.cat([first, second])  # [2, N_TOKENS]
        before, after = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
        )
    finally:
        model.train(was_training)
    config = model.config
    if changed := [
        weight
        for weight, now in _beginnings(model).items()
        if not torch.equal(now, weights[weight])
    ]:
        raise ModelError(
            f"a {config.model_type} changes its weights when it is evaluated ({changed[0]}): the"
            " saved model would differ from the trained one",
            where=name,
            to_do="use another model"
            + (
                ", or a copy of this one with `rescale_every: 0` in its config.json"
                * hasattr(config, "rescale_every")
            ),
        )
    # experts are given other numbers of tokens, which rounds otherwise; all else is the same to the
    # bit
    is_half = any(
        p.dtype != torch.float32 for p in model.parameters()
    ) or torch.is_autocast_enabled(device.type)
    share = ROUNDING_HALF if is_half else ROUNDING
    if float((before - after).abs().max()) > share * float(before.abs().max()):
        own = next((words for key, words in _LOOKS_BACK.items() if hasattr(type(config), key)), "")
        raise ModelError(
            f"a {config.model_type} with this config.json looks ahead: it sees the tokens that it"
            " is to predict",
            where=name,
            to_do="use a decoder (Llama, Qwen ...)"
            + (own and f", or a copy of this one with `{own}` in its config.json"),
        )


def _beginnings(model: Any) -> dict[str, torch.Tensor]:
    """A few numbers of every weight by its name: peft's adapters of experts write into weights, and
    put back what was there.
    """
    named = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    return {
        name: p[(0,) * (p.ndim - 1)][:N_NUMBERS].clone() if p.ndim else p.clone()
        for name, p in named.items()
    }
