"""Evaluation: loss and the task's metrics over a set of examples. Changes nothing of the model or of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.data.packing import target_lengths_of
from farthing.data.token_set import TokenSet
from farthing.errors import Interrupted
from farthing.metrics import Metrics
from farthing.model.documents import Batch
from farthing.model.forward import Forward
from farthing.tasks.task import Evaluated


@torch.no_grad()
def evaluate(
    forward: Forward,
    tokens: TokenSet,
    examples: NDArray[np.int64],
    *,
    tokenizer: Any,
    most_tokens: int,
    max_new_tokens: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Metrics:
    """Metrics over `examples` (indices [n] into `tokens`); the loss is None, and alone, when it is not a number.

    A batch has at most `most_tokens` computed tokens, or one example. Where input and target are apart, at most
    `max_new_tokens` are written for each; 0: nothing is. Raises `Interrupted` when asked to stop in between.
    """
    model, task = forward.model, forward.of
    was_training = model.training
    model.eval()
    n_targets, done = 0, 0
    losses: list[Tensor] = []
    of_documents: list[Tensor] = []
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
            if task.labels is not None:
                loss, scores = forward.loss_and_scores(batch)
                chosen.append(task.labels.answers(scores))
                labels.append(batch["labels"])
            else:
                loss, log_probs = forward.loss_and_log_probs(batch)
                n_each = torch.from_numpy(target_lengths_of(tokens, piece)).to(log_probs.device, non_blocking=True)
                of_documents.append(-(log_probs / n_each).double().sum())
            losses.append(loss.double())
            if task.is_pair and max_new_tokens:
                with forward.numerics.autocasting():
                    written = _generate(model, batch, max_new_tokens)
                predictions += tokenizer.batch_decode(written, skip_special_tokens=True)
                targets = np.where(arrays["labels"] >= 0, arrays["labels"], forward.pad_id)
                references += tokenizer.batch_decode(targets, skip_special_tokens=True)
            n_targets += tokens.n_targets(piece)
            done += len(piece)
            progress(done, len(examples))
        total = float(torch.stack(losses).sum()) if losses else 0.0  # the device is waited for here, at the end
        document_loss = float(torch.stack(of_documents).sum()) / len(examples) if of_documents else 0.0
    finally:
        model.train(was_training)
    mean = total / max(1, n_targets)
    if not np.isfinite(mean):  # what such scores choose means nothing
        return {"loss": None, "n_examples": len(examples)}
    metrics: Metrics = {"loss": mean, "n_examples": len(examples)}
    of_examples = (_fetched(labels), _fetched(chosen), tokens.label_names)
    return metrics | task.judge(Evaluated(mean, document_loss, *of_examples, predictions, references))


def _fetched(parts: list[Tensor]) -> NDArray[Any]:
    """One array on the host; a number in bf16, which numpy has not, in fp32."""
    if not parts:
        return np.empty(0)
    whole = torch.cat(parts).cpu()
    return np.asarray(whole.float().numpy() if whole.is_floating_point() else whole.numpy())


def _generate(model: Any, batch: Batch, max_new_tokens: int) -> Any:
    """Greedy continuation [batch, length] of the encoder's input."""
    return model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
    )
