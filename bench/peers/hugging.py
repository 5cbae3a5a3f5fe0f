"""B1 and B2 (`transformers.Trainer`, defaults and tuned) and B3 (`trl.SFTTrainer`, tuned).

Their training arguments, precision and examples are everyone's; the rest is theirs. They count no
tokens here: the harness looks at every micro-batch before the model does. Written for transformers
5.23 and trl 1.16.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import warnings
from typing import Any

from peers import models
from peers.assignment import ADAM, IGNORED, MAX_GRAD_NORM, Assignment
from peers.clock import Clock


def quieten() -> None:
    """Nothing that libraries say of their own."""
    import datasets
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """Train by the contestant's trainer; returns where the model is."""
    quieten()
    make = sft_trainer if assignment.contestant == "trl-tuned" else trainer
    made = make(assignment, clock)
    made.train()
    folder = f"{assignment.out}/model"
    made.save_model(folder)
    return {"model": folder}


def trainer(assignment: Assignment, clock: Clock) -> Any:
    """Trainer as it comes, or tuned."""
    import transformers

    settings, is_tuned = assignment.settings, assignment.contestant == "hf-tuned"
    micro = min(settings.get("micro_batch", 8), assignment.batch)
    own: dict[str, Any] = {  # the given order: as dear as a random one
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": settings.get("checkpointing", False),
    }
    if is_tuned:
        own = tuned(assignment)
        own["train_sampling_strategy"] = settings.get("sampling", "group_by_length")
    arguments = transformers.TrainingArguments(
        **common(assignment),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=max(1, assignment.batch // micro),
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
        train_dataset=dataset(assignment),
        data_collator=collator,
        processing_class=tokenizer,
    )


def sft_trainer(assignment: Assignment, clock: Clock) -> Any:
    """TRL's trainer, tuned."""
    import torch
    import trl

    settings = assignment.settings
    packs = settings.get("packing", True)
    a_step = rows_a_step(assignment) if packs else assignment.batch
    rows = min(settings.get("rows", 1), a_step)
    way = {"packing_strategy": "bfd_split"}
    arguments = trl.SFTConfig(
        **common(assignment),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(1, a_step // rows),
        max_length=assignment.max_length,
        packing=packs,
        **(way if packs else {"train_sampling_strategy": "group_by_length"}),
        **tuned(assignment),
        model_init_kwargs={"dtype": models.dtype_of(assignment), "attn_implementation": "sdpa"},
    )
    torch.manual_seed(assignment.seed)
    return metered(trl.SFTTrainer, clock, assignment.task)(
        model=str(assignment.model),
        args=arguments,
        train_dataset=dataset(assignment),
        peft_config=models.adapter_config(assignment),
    )


def rows_a_step(assignment: Assignment) -> int:
    """Packed rows that hold about as many examples as everyone's step."""
    mean = float(assignment.examples("train").lengths.mean())
    return max(1, round(assignment.batch * mean / assignment.max_length))


def common(assignment: Assignment) -> dict[str, Any]:
    """What is the same for all contestants."""
    return {
        "output_dir": f"{assignment.out}/trainer",
        "num_train_epochs": 1,
        "learning_rate": assignment.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "seed": assignment.seed,
        "bf16": assignment.precision == "bf16",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": models.device().type == "cpu",
        **ADAM,
    }


def tuned(assignment: Assignment) -> dict[str, Any]:
    """What a sweep may choose, by the names of `TrainingArguments`."""
    settings, on_gpu = assignment.settings, models.device().type == "cuda"
    workers = settings.get("workers", 0)
    loader = {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4}
    return {
        **(loader if workers else {}),
        **({"tf32": assignment.precision == "bf16"} if on_gpu else {}),
        "gradient_checkpointing": settings.get("checkpointing", False),
        "torch_compile": settings.get("compile", False),
        "dataloader_num_workers": workers,
        "logging_nan_inf_filter": False,
        "logging_steps": 50,
        "optim": "adamw_torch_fused",
        # its kernels are Triton's: on a GPU only
        "use_liger_kernel": on_gpu and importlib.util.find_spec("liger_kernel") is not None,
    }


def dataset(assignment: Assignment) -> Any:
    """All examples, in the given order."""
    import datasets

    order = [index for step in assignment.order for index in step]
    return datasets.Dataset.from_list([*map(assignment.examples("train").row, order)])


def metered(base: Any, clock: Clock, task: str) -> Any:
    """The trainer class with the harness's clock in it."""
    import transformers
    from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

    class Grouped(LengthGroupedSampler):  # type: ignore[misc]
        """Groups among fifty batches, as on a large data set: among few examples the library groups
        hardly at all.
        """

        def __iter__(self) -> Any:
            given = self.lengths, self.batch_size
            drawn = {"mega_batch_mult": 50, "generator": self.generator}
            return iter(get_length_grouped_indices(*given, **drawn))

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    class Metered(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
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

    return Metered


def tokens_of(inputs: dict[str, Any], task: str) -> tuple[Any, int]:
    """(tokens of the data, tokens that the model is given) of a micro-batch. Without a mask nothing
    is padded.
    """
    mask = inputs.get("attention_mask")
    computed = math.prod(inputs["input_ids"].shape)
    if mask is None:
        useful = computed
    elif mask.dim() == 4:  # added to the scores [rows, 1, length, length]: padding is not seen
        useful = (mask.diagonal(dim1=-2, dim2=-1) == 0).sum()
    else:
        useful = mask.sum()
    if task == "seq2seq":
        useful = useful + (inputs["labels"] != IGNORED).sum()
        computed += inputs["labels"].numel()
    return useful, computed
