"""How a job is computed: the choices that change memory and seconds and not the result.

The planner makes recipes and prices them; the trainer runs the one it is given. A `Stack` says how the code computes:
the trainer's own way is `FARTHING`, others are there to hold the formulas against what other tools measured.

Refuses to choose: `plan` does.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# what the loss keeps of the logits, see memory.logits_bytes
LABELLED, WHOLE, FUSED, CHUNKED, SAVED, TILED = "labelled", "whole", "fused", "chunked", "saved", "tiled"


@dataclass(frozen=True)
class Stack:
    """How the code of a trainer computes, where that shows in memory or seconds."""

    name: str
    has_master_weights: bool = True
    """Trained weights, their gradients and the optimizer's state are fp32; else all is in the precision of the run."""
    has_autocast: bool = True
    """The forward pass casts what it multiplies; without, everything runs in the dtype of the weights."""
    adapters_fp32: bool = True
    loss: str = LABELLED
    fused_norms: bool = False
    fused_mlp: bool = False
    is_compiled: bool = False
    is_flash: bool = False
    """Attention without a padding mask: keys and values are not repeated for their groups."""
    masks_padding: bool = True
    """Attention gets a mask of the padding, a number for each pair of tokens, if it is not flash."""
    upcasts_frozen: bool = False
    """`prepare_model_for_kbit_training`: whatever is not quantized becomes fp32, hidden states too."""
    frees_gradients: bool = False
    """The optimizer steps within the backward pass: one layer's gradients at a time."""
    offloads_activations: bool = False
    host_s_per_layer: float = 1.5e-3
    """Seconds of the host for the kernels of one layer, forward and backward: a GPU can't be faster than that."""
    host_s_per_adapted_layer: float = 1.0e-3
    """What adapters add to it. Together 1.85 ms were measured on a processor of 2025; those of rented GPUs are slower."""


FARTHING = Stack("farthing")


@dataclass(frozen=True)
class Recipe:
    """A way to compute a job. Numbers of examples are per optimizer step of all GPUs together."""

    method: str
    """full, lora or qlora."""
    precision: str
    """bf16, fp16 or fp32: of the forward pass."""
    optim: str
    global_batch: int
    micro_batch: int
    """Most examples in one forward pass of one GPU."""
    every_n_layers: int = 0
    """Activation checkpointing: 0 none, 1 every layer, k every k-th."""
    lora_r: int = 0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    n_gpus: int = 1
    sharding: str = "none"
    """none, ddp (every GPU has everything) or fsdp (weights, gradients and state are divided)."""
    stack: Stack = FARTHING

    @property
    def n_micro_batches(self) -> int:
        """Forward passes of one GPU in a step: the gradient accumulation."""
        per_gpu = -(-self.global_batch // self.n_gpus)
        return -(-per_gpu // self.micro_batch)

    @property
    def compute_bytes(self) -> int:
        """Of a number in the forward pass."""
        return BYTES[self.precision]

    @property
    def trained_bytes(self) -> int:
        """Of a trained weight, and of its gradient."""
        is_adapter = self.method != "full"
        is_fp32 = self.stack.adapters_fp32 if is_adapter else self.stack.has_master_weights
        return 4 if is_fp32 else self.compute_bytes

    @property
    def frozen_bytes(self) -> int:
        """Of a frozen weight that is not quantized."""
        return 4 if self.method == "qlora" and self.stack.upcasts_frozen else self.compute_bytes

    @property
    def residual_bytes(self) -> int:
        """Of a number in the residual stream: that of the embedding it begins with."""
        return self.trained_bytes if self.method == "full" else self.frozen_bytes

    def in_words(self) -> str:
        """`lora, bf16, 8 x 2 examples, every layer checkpointed`."""
        kept = {0: "no checkpointing", 1: "every layer checkpointed", 2: "every 2nd layer checkpointed"}
        words = [self.method, self.precision, f"{self.micro_batch} x {self.n_micro_batches} examples"]
        words.append(kept.get(self.every_n_layers, f"every {self.every_n_layers}th layer checkpointed"))
        if self.sharding != "none":
            words.append(f"{self.sharding} over {self.n_gpus}")
        return ", ".join(words)
