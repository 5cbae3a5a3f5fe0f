"""Evaluation: loss and the task's metrics over a set of examples. Changes nothing of the model or of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from farthing.data.batches import collate, cut
from farthing.data.tokens import TokenSet
from farthing.errors import Interrupted
from farthing.hardware import Numerics
from farthing.metrics import classification_metrics, perplexity, text_metrics
from farthing.model.loss import summed_loss


@torch.no_grad()
def evaluate(
    model: Any,
    tokens: TokenSet,
    examples: NDArray[np.int64],
    *,
    task: str,
    tokenizer: Any,
    pad_id: int,
    batch_size: int,
    numerics: Numerics,
    most_tokens: int | None = None,
    generate: bool = False,
    max_new_tokens: int = 128,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Metrics over `examples` (indices [n] into `tokens`); the loss is None, and alone, when it is not a number.

    A batch has at most `batch_size` examples and, where that is more than one, at most `most_tokens` padded tokens: as many
    as training was seen to have room for. Raises `Interrupted` when asked to stop in between.
    """
    was_training = model.training
    model.eval()
    total, n_targets, done = 0.0, 0, 0
    n_labels = len(tokens.label_names)
    confusion = np.zeros((n_labels, n_labels), dtype=np.int64)
    predictions: list[str] = []
    references: list[str] = []
    try:
        for piece in _pieces(examples, tokens.lengths, batch_size, most_tokens):
            if should_stop():
                raise Interrupted("stopped while evaluating")
            arrays = collate(tokens, piece, task, pad_id)
            batch = {name: torch.from_numpy(array).to(numerics.device) for name, array in arrays.items()}
            with numerics.autocasting():
                loss, logits = summed_loss(model, batch, task)
                total += float(loss)
                if task == "classification":
                    np.add.at(confusion, (arrays["labels"], logits.float().argmax(-1).cpu().numpy()), 1)
                elif task == "seq2seq" and generate:
                    written = _generate(model, batch, max_new_tokens)
                    predictions += tokenizer.batch_decode(written, skip_special_tokens=True)
                    labels = np.where(arrays["labels"] >= 0, arrays["labels"], pad_id)
                    references += tokenizer.batch_decode(labels, skip_special_tokens=True)
            n_targets += tokens.n_targets(piece)
            done += len(piece)
            progress(done, len(examples))
    finally:
        model.train(was_training)
    mean = total / max(1, n_targets)
    if not np.isfinite(mean):  # what such scores choose means nothing
        return {"loss": None, "n_examples": len(examples)}
    metrics: dict[str, Any] = {"loss": mean, "n_examples": len(examples)}
    if task == "causal-lm":
        metrics["perplexity"] = perplexity(mean)
    if task == "classification":
        metrics |= classification_metrics(confusion, tokens.label_names)
    if predictions:
        metrics |= text_metrics(predictions, references)
    return metrics


def _pieces(
    examples: NDArray[np.int64], lengths: NDArray[np.int64], batch_size: int, most_tokens: int | None
) -> Iterator[NDArray[np.int64]]:
    """Similar lengths together, the longest first in each piece."""
    for piece in cut(examples, lengths, batch_size):
        n_rows = len(piece) if most_tokens is None else max(1, most_tokens // max(1, int(lengths[piece[0]])))
        for start in range(0, len(piece), n_rows):
            yield piece[start : start + n_rows]


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
