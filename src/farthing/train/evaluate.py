"""Evaluation: loss and the task's metrics over a set of examples. Changes nothing of the model or of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.data.token_set import TokenSet
from farthing.errors import Interrupted
from farthing.metrics import classification_metrics, perplexity, text_metrics
from farthing.model.forward import Forward


@torch.no_grad()
def evaluate(
    forward: Forward,
    tokens: TokenSet,
    examples: NDArray[np.int64],
    *,
    tokenizer: Any,
    most_tokens: int,
    generate: bool = False,
    max_new_tokens: int = 128,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Metrics over `examples` (indices [n] into `tokens`); the loss is None, and alone, when it is not a number.

    A batch has at most `most_tokens` computed tokens, or one example. Raises `Interrupted` when asked to stop in between.
    """
    model, task = forward.model, forward.task
    was_training = model.training
    model.eval()
    n_targets, done = 0, 0
    losses: list[Tensor] = []
    labels: list[Tensor] = []
    chosen: list[Tensor] = []
    predictions: list[str] = []
    references: list[str] = []
    try:
        for piece in forward.cut(tokens, examples, most_tokens):
            if should_stop():
                raise Interrupted("stopped while evaluating")
            arrays = forward.collate(tokens, piece)
            batch = forward.to_device(arrays)
            if task == "classification":
                loss, scores = forward.loss_and_scores(batch)
                chosen.append(scores.argmax(-1))
                labels.append(batch["labels"])
            else:
                loss = forward.loss(batch)
            losses.append(loss.double())
            if task == "seq2seq" and generate:
                with forward.numerics.autocasting():
                    written = _generate(model, batch, max_new_tokens)
                predictions += tokenizer.batch_decode(written, skip_special_tokens=True)
                targets = np.where(arrays["labels"] >= 0, arrays["labels"], forward.pad_id)
                references += tokenizer.batch_decode(targets, skip_special_tokens=True)
            n_targets += tokens.n_targets(piece)
            done += len(piece)
            progress(done, len(examples))
        total = float(torch.stack(losses).sum()) if losses else 0.0  # the device is waited for once, here
    finally:
        model.train(was_training)
    mean = total / max(1, n_targets)
    if not np.isfinite(mean):  # what such scores choose means nothing
        return {"loss": None, "n_examples": len(examples)}
    metrics: dict[str, Any] = {"loss": mean, "n_examples": len(examples)}
    if task == "causal-lm":
        metrics["perplexity"] = perplexity(mean)
    if task == "classification":
        confusion = np.zeros((len(tokens.label_names),) * 2, dtype=np.int64)
        np.add.at(confusion, (torch.cat(labels).cpu().numpy(), torch.cat(chosen).cpu().numpy()), 1)
        metrics |= classification_metrics(confusion, tokens.label_names)
    if predictions:
        metrics |= text_metrics(predictions, references)
    return metrics


def _generate(model: Any, batch: dict[str, Any], max_new_tokens: int) -> Any:
    """Greedy continuation [batch, length] of the encoder's input."""
    return model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
    )
