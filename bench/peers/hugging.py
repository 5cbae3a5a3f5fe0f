"""B1 and B2 (`transformers.Trainer`, defaults and tuned), B3a and B3b (`trl.SFTTrainer`, the same).

Their training arguments, precision and examples are everyone's; the rest is theirs. They count no
tokens here: the harness looks at every micro-batch before the model does. Written for transformers
5.23 and trl 1.16.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from peers import models
from peers.assignment import ADAM, IGNORED, MAX_GRAD_NORM, Assignment
from peers.clock import Clock

DEFAULT_MICRO_BATCH = 8


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """Train by the contestant's trainer; returns where the model is and the loss of the first
    micro-batch.
    """
    import datasets
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    make = _sft_trainer if assignment.contestant.startswith("trl") else _trainer
    trainer = make(assignment, clock)
    trainer.train()
    folder = f"{assignment.out}/model"
    trainer.save_model(folder)
    return {"model": folder, "first_loss": float(trainer.first_losses[0])}


def _trainer(assignment: Assignment, clock: Clock) -> Any:
    import transformers

    is_tuned = assignment.contestant == "hf-tuned"
    settings = assignment.settings
    micro = min(settings.get("micro_batch", DEFAULT_MICRO_BATCH), assignment.batch)
    own: dict[str, Any] = {
        "train_sampling_strategy": "sequential"
    }  # the given order: as dear as a random one
    if is_tuned:
        sampling = settings.get("sampling", "group_by_length")
        own = tuned(assignment) | {
            "train_sampling_strategy": sampling,
            "use_liger_kernel": _has_liger(),
        }
    elif settings.get("checkpointing"):
        own |= {"gradient_checkpointing": True}
    arguments = transformers.TrainingArguments(
        **common(assignment, epochs=assignment.epochs if is_tuned else 1),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=max(1, assignment.batch // micro),
        bf16=assignment.precision == "bf16",
        **own,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(assignment.model)
    model = models.load(assignment)
    if assignment.task == "classification":
        collator: Any = transformers.DataCollatorWithPadding(tokenizer)
    else:
        collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model, padding=True)
    return metered(transformers.Trainer, clock, assignment.task)(
        model=model,
        args=arguments,
        train_dataset=dataset(assignment, once=is_tuned),
        data_collator=collator,
        processing_class=tokenizer,
    )


def _sft_trainer(assignment: Assignment, clock: Clock) -> Any:
    import torch
    import trl

    is_tuned = assignment.contestant == "trl-tuned"
    settings = assignment.settings
    packs = settings.get("packing", True)
    a_step = rows_a_step(assignment) if packs else assignment.batch
    rows = min(settings.get("rows", 1), a_step)
    own: dict[str, Any] = (
        {"packing_strategy": "bfd_split"}
        if packs
        else {"train_sampling_strategy": "group_by_length"}
    )
    if is_tuned:
        # without an adapter the weights are trained, and stay in fp32 as everyone's
        loaded = {
            "dtype": str(models.dtype_of(assignment)).removeprefix("torch."),
            "attn_implementation": "sdpa",
        }
        own |= tuned(assignment) | {"model_init_kwargs": loaded, "use_liger_kernel": _has_liger()}
    arguments = trl.SFTConfig(
        **common(assignment, epochs=assignment.epochs),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(1, a_step // rows),
        max_length=assignment.max_length,
        packing=packs,
        bf16=assignment.precision == "bf16",
        **own,
    )
    torch.manual_seed(assignment.seed)
    return metered(trl.SFTTrainer, clock, assignment.task)(
        model=str(assignment.model),
        args=arguments,
        train_dataset=dataset(assignment, once=True),
        peft_config=models.adapter_config(assignment),
    )


def rows_a_step(assignment: Assignment) -> int:
    """Packed rows that hold about as many examples as everyone's step."""
    mean = float(assignment.examples("train").lengths.mean())
    return max(1, round(assignment.batch * mean / assignment.max_length))


def common(assignment: Assignment, epochs: int) -> dict[str, Any]:
    """What is the same for all contestants."""
    return {
        "output_dir": f"{assignment.out}/trainer",
        "num_train_epochs": epochs,
        "learning_rate": assignment.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "seed": assignment.seed,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": models.device().type == "cpu",
        **ADAM,
    }


def tuned(assignment: Assignment) -> dict[str, Any]:
    """What a sweep may choose, by the names of `TrainingArguments`."""
    settings = assignment.settings
    workers = settings.get("workers", 0)
    loader = (
        {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4} if workers else {}
    )
    on_gpu = models.device().type == "cuda"
    return loader | {
        "gradient_checkpointing": settings.get("checkpointing", False),
        "torch_compile": settings.get("compile", False),
        "dataloader_num_workers": workers,
        "logging_nan_inf_filter": False,
        "logging_steps": 50,
        "optim": "adamw_torch_fused",
        **({"tf32": assignment.precision == "bf16"} if on_gpu else {}),
    }


def _has_liger() -> bool:
    """Its kernels are Triton's: on a GPU only."""
    import importlib.util

    return models.device().type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def dataset(assignment: Assignment, *, once: bool) -> Any:
    """All examples once, for who draws an order of its own; else every step's in the given order,
    all epochs long.
    """
    import datasets

    order = assignment.in_order()
    indices = order[: len(order) // assignment.epochs] if once else order
    return datasets.Dataset.from_list(assignment.examples("train").rows(indices))


def metered(base: Any, clock: Clock, task: str) -> Any:
    """The trainer class with the harness's clock in it."""
    import transformers
    from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

    class Grouped(LengthGroupedSampler):  # type: ignore[misc]
        """Groups among fifty batches, as on a large data set: among few examples the library groups
        hardly at all.
        """

        def __iter__(self) -> Any:
            indices = get_length_grouped_indices(
                self.lengths, self.batch_size, mega_batch_mult=50, generator=self.generator
            )
            return iter(indices)

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    class Metered(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.first_losses: list[Any] = []
            super().__init__(*args, **kwargs)
            self.add_callback(Marks())

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            sampler = super()._get_train_sampler(*args, **kwargs)
            if isinstance(sampler, LengthGroupedSampler):
                sampler.__class__ = Grouped
            return sampler

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            clock.count(*tokens_of(inputs, task))
            return super().training_step(model, inputs, *args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if not self.first_losses:
                self.first_losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    return Metered


def tokens_of(inputs: dict[str, Any], task: str) -> tuple[Any, int]:
    """(tokens of the data, tokens that the model is given) of a micro-batch. Without a mask nothing
    is padded.
    """
    mask = inputs.get("attention_mask")
    computed = math.prod(inputs["input_ids"].shape)
    if mask is None:
        useful = computed
    elif (
        mask.dim() == 4
    ):  # what is added to the scores of rows [rows, 1, length, length]: padding doesn't see itself
        useful = (mask.diagonal(dim1=-2, dim2=-1) == 0).sum()
    else:
        useful = mask.sum()
    if task == "seq2seq":
        useful, computed = (
            useful + (inputs["labels"] != IGNORED).sum(),
            computed + inputs["labels"].numel(),
        )
    return useful, computed
