"""The initial model of a contestant that does not load its own: the same bytes, the same adapter,
for all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peers.assignment import Assignment

CLASSES = {
    "causal-lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "classification": ("AutoModelForSequenceClassification", "SEQ_CLS"),
}
"""Of a task: the class of transformers, and its name in peft."""


def auto_class(task: str) -> Any:
    """The transformers class that loads a model for a task."""
    import transformers

    return getattr(transformers, CLASSES[task][0])


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
        lora_alpha=2 * assignment.lora_r,
        lora_dropout=0.0,
        target_modules=list(assignment.targets),
        task_type=CLASSES[assignment.task][1],
    )


def dtype_of(assignment: Assignment) -> str:
    """What weights are loaded in: trained ones in fp32 always, the frozen ones under an adapter in
    the run's precision.
    """
    is_half = assignment.precision == "bf16" and assignment.method != "full"
    return "bfloat16" if is_half else "float32"


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

        model = peft.PeftModel.from_pretrained(model, trained)
    return model.to(device()).eval()
