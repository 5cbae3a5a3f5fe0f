"""B0, the reference: the loop that anybody writes first. Everything is padded to the longest length
allowed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from peers import models
from peers.assignment import ADAM, IGNORED, MAX_GRAD_NORM, Assignment
from peers.clock import Clock

MICRO_BATCH = 8


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """Train in the given order; returns where the model is and the loss of the first step."""
    device = models.device()
    torch.backends.cuda.matmul.allow_tf32 = False
    examples = assignment.examples("train")
    model = models.load(assignment).to(device)
    pad_id = model.config.pad_token_id
    micro = min(MICRO_BATCH, assignment.batch)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded(rows, assignment, pad_id)

    loader = DataLoader(
        examples.rows(assignment.in_order()), batch_size=micro, num_workers=0, collate_fn=collate
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = {"betas": (ADAM["adam_beta1"], ADAM["adam_beta2"]), "eps": ADAM["adam_epsilon"]}
    rate, n_steps = assignment.learning_rate, assignment.n_steps
    optimizer = torch.optim.AdamW(
        trained, lr=rate, weight_decay=0.0, foreach=False, fused=False, **adam
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, (n_steps - step) / n_steps)
    )
    bf16 = (
        torch.autocast(device.type, dtype=torch.bfloat16)
        if assignment.precision == "bf16"
        else None
    )
    losses: list[float] = []
    batches = iter(loader)
    clock.begin()
    for step in assignment.order:
        loss_of_step = 0.0
        n_targets = examples.n_targets(step)
        for _ in range(-(-len(step) // micro)):
            batch = next(batches)
            n_here = _n_targets(batch["labels"], assignment.task)
            clock.count(*_tokens(batch, assignment.task))
            with bf16 or contextlib.nullcontext():
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss = loss * (n_here / n_targets)  # the mean over the whole step, however it is cut
            loss.backward()
            loss_of_step += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_of_step)
        clock.step_done()
    folder = f"{assignment.out}/model"
    model.save_pretrained(folder)
    return {"model": folder, "first_loss": losses[0]}


def padded(
    rows: list[dict[str, Any]], assignment: Assignment, pad_id: int
) -> dict[str, torch.Tensor]:
    """Rows as tensors [rows, max_length]; labels [rows, max_length or max_target_length], or [rows]
    of classes.
    """

    def fill(lists: list[list[int]], length: int, value: int) -> torch.Tensor:
        return torch.tensor([values + [value] * (length - len(values)) for values in lists])

    inputs = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": fill(inputs, assignment.max_length, pad_id),
        "attention_mask": fill([[1] * len(ids) for ids in inputs], assignment.max_length, 0),
    }
    if assignment.task == "classification":
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}
    n_labels = (
        assignment.max_target_length if assignment.task == "seq2seq" else assignment.max_length
    )
    return batch | {"labels": fill([row["labels"] for row in rows], n_labels, IGNORED)}


def _n_targets(labels: torch.Tensor, task: str) -> int:
    return len(labels) if task == "classification" else int((labels != IGNORED).sum())


def _tokens(batch: dict[str, torch.Tensor], task: str) -> tuple[int, int]:
    useful, computed = int(batch["attention_mask"].sum()), batch["input_ids"].numel()
    if task == "seq2seq":
        useful, computed = (
            useful + _n_targets(batch["labels"], task),
            computed + batch["labels"].numel(),
        )
    return useful, computed
