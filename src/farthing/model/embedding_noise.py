"""NEFTune (Jain et al. 2023, arXiv 2310.05914): noise on the embeddings of the input while a model
is trained.

Uniform within alpha / sqrt(L d) for a document of L tokens and d numbers each: of documents that
lie end to end, and of padded ones, each has its own L. It is drawn as dropout is, from (seed,
step). Evaluation and the exported model have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farthing.errors import ModelError
from farthing.model.documents import Batch
from farthing.model.loss import inner_of


class EmbeddingNoise:
    """Adds noise behind the input embedding of `model`; told of each batch before it goes
    through.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        inner = inner_of(model)
        if inner.config.is_encoder_decoder:
            raise ModelError(
                f"the embeddings of a {inner.config.model_type} are read by an encoder and a"
                " decoder",
                where="train.neftune_noise_alpha",
                to_do="leave it out: it is for models of one text",
            )
        self.alpha = alpha
        self._lengths: Tensor | None = None
        inner.get_input_embeddings().register_forward_hook(self._add)

    def hear(self, batch: Batch) -> None:
        """How long the documents of the next batch are: [T] of packed tokens, [B, 1] of padded
        ones.
        """
        if "documents" in batch:
            documents = batch["documents"]
            lengths = documents.bounds.diff()
            self._lengths = lengths.repeat_interleave(lengths, output_size=sum(documents.lengths))
        else:
            self._lengths = batch["attention_mask"].sum(1, keepdim=True)

    def _add(self, module: Any, inputs: Any, embedded: Tensor) -> Tensor:
        """[..., d] with noise, in training."""
        if not module.training or self._lengths is None:
            return embedded
        most = self.alpha / (self._lengths * embedded.shape[-1]).sqrt().unsqueeze(-1)
        noise: Tensor = torch.zeros_like(embedded).uniform_(-1.0, 1.0) * most
        return embedded + noise.to(embedded.dtype)
