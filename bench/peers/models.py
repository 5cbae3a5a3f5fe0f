"""The initial model of a contestant that does not load its own: the same bytes, the same adapter,
for all of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from peers.assignment import Assignment

PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}


def auto_class(task: str) -> Any:
    """The transformers class that loads a model for a task."""
    import transformers

    return {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "classification": transformers.AutoModelForSequenceClassification,
    }[task]


def device() -> torch.device:
    """Where everyone computes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def adapter_config(assignment: Assignment) -> Any:
    """The adapter of all contestants, without dropout; None for a full fine-tune."""
    if assignment.method == "full":
        return None
    import peft

    return peft.LoraConfig(
        r=assignment.lora_r,
        lora_alpha=assignment.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(assignment.targets),
        task_type=PEFT_TASKS[assignment.task],
    )


def dtype_of(assignment: Assignment) -> torch.dtype:
    """What weights are loaded in: trained ones in fp32 always, the frozen ones under an adapter in
    the run's precision.
    """
    return (
        torch.bfloat16
        if assignment.precision == "bf16" and assignment.method != "full"
        else torch.float32
    )


def load(assignment: Assignment) -> Any:
    """The initial model, with its adapter by peft, in training mode."""
    model = auto_class(assignment.task).from_pretrained(
        assignment.folder + "/model", dtype=dtype_of(assignment), attn_implementation="sdpa"
    )
    model.config.use_cache = False
    config = adapter_config(assignment)
    if config is not None:
        import peft

        torch.manual_seed(assignment.seed)  # the adapter's first weights
        model = peft.get_peft_model(model, config)
    return model.train()


def load_trained(initial: Path, trained: Path, task: str) -> Any:
    """A trained model in fp32 for evaluation: a whole one, or the initial one with the adapter in
    `trained`.
    """
    is_adapter = (trained / "adapter_config.json").exists()
    model = auto_class(task).from_pretrained(
        initial if is_adapter else trained, dtype=torch.float32
    )
    if is_adapter:
        import peft

        with (
            warnings.catch_warnings()
        ):  # of names that will change, between versions of the libraries
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.PeftModel.from_pretrained(model, trained)
    return model.to(device()).eval()
