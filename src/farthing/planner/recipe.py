"""How a job is computed: the choices that change memory and seconds and not the result.

The planner makes recipes and prices them; the trainer runs the one it is given. A `Stack` says how
the code computes: the trainer's own ways are `stack_for` a model, others are there to hold the
formulas against what other tools measured.

Refuses to choose: `plan` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from farthing.data.packing import MicroBatchCost
from farthing.models.families import ENCODERS, KNOWN_HEADS, PACKED
from farthing.objectives.registry import objective_of
from farthing.settings import Settings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
BF16_WEIGHTS = "adamw_bf16_stochastic_round"
"""The optimizer without fp32 masters: weights, gradients and moments are bf16."""

# what the loss keeps of the logits, see memory.logits_bytes
LABELLED, WHOLE, FUSED, CHUNKED, TILED = "labelled", "whole", "fused", "chunked", "tiled"
FREED, UNCAST = "freed", "uncast"
POSITIONS = "positions"  # the trainer's own: logits of labelled positions only, a tile at a time


NONE, DDP, FSDP = "none", "ddp", "fsdp"
"""How GPUs share the weights: one has them; each has them all; they are spread, and gathered layer
by layer.
"""
TO_SET: dict[str, tuple[str, ...]] = {
    NONE: (),
    DDP: ("where.gpus: all",),
    FSDP: ("where.gpus: all", "where.strategy: fsdp"),
}
"""What a job says for each."""


@dataclass(frozen=True)
class Stack:
    """How the code of a trainer computes, where that shows in memory or seconds."""

    name: str
    has_master_weights: bool = True
    """Trained weights, their gradients and the optimizer's state are fp32; else all is in the
    precision of the run.
    """
    has_autocast: bool = True
    """The forward pass casts what it multiplies; without, everything runs in the dtype of the
    weights.
    """
    adapters_fp32: bool = True
    loss: str = LABELLED
    fused_norms: bool = False
    fused_mlp: bool = False
    is_compiled: bool = False
    lean_mlp: bool = False
    """A gated activation is one node: of what is as wide as the feed-forward both halves are kept,
    and their product.
    """
    is_flash: bool = False
    """Attention without a padding mask: keys and values are not repeated for their groups."""
    is_eager: bool = False
    """Attention computes all scores, and keeps them."""
    is_packed: bool = False
    """Documents end to end: neither padding nor a mask of it. Comes with `is_flash`, which a CPU
    does in its own way.
    """
    reads_first: bool = False
    """Documents end to end through an encoder: its last layer is computed for the tokens that a
    classifier reads.
    """
    fuses_adapters: bool = False
    """LoRA layers are one function each: what they read is kept once, in the precision of the run.
    """
    masks_padding: bool = True
    """Attention gets a mask of the padding, a number for each pair of tokens, if it is not flash.
    """
    upcasts_frozen: bool = False
    """`prepare_model_for_kbit_training`: whatever is not quantized becomes fp32, hidden states too.
    """
    keeps_quantized_inputs: bool = False
    """bitsandbytes before 0.43.2 of July 2024: layers in 4 bits keep what they read, as if their
    weights were trained (github.com/bitsandbytes-foundation/bitsandbytes/pull/1270)."""
    shares_inputs: bool = False
    """One copy of an input in the run's precision serves all layers that read it (model/casts.py),
    on GPUs; adapters of layers in 4 bits read the input as autocast leaves it (peft's
    `Linear4bit`)."""
    keeps_unpacked: bool = False
    """A layer's quantized weights are unpacked by plain operations, and what comes of them is kept
    for its backward pass.
    """
    frees_gradients: bool = False
    """The optimizer steps within the backward pass: one layer's gradients at a time."""
    offloads_activations: bool = False
    keeps_adapters_whole: bool = True
    """Several GPUs: adapters are on each, and their gradients are added up in parts of a step; else
    they are spread as well.
    """
    doubles_edges: bool = False
    """With several GPUs and frozen weights, what recomputed layers begin with is there twice."""
    unpacking: float = 1.0
    """Times as long as bitsandbytes' kernels for NF4 take to unpack quantized weights."""
    host_s_per_layer: float = 1.5e-3
    """Seconds of the host for the kernels of one layer, forward and backward: a GPU can't be faster
    than that.
    """
    host_s_per_adapted_layer: float = 1.0e-3
    """What adapters add to it. Together 1.85 ms were measured on a processor of 2025; those of
    rented GPUs are slower.
    """

    @property
    def n_read(self) -> float | None:
        """Tokens of an example for which alone the last layer is computed; None: for all."""
        return 1.0 if self.reads_first else None


FARTHING = Stack("farthing")
"""The trainer's way with a model that it can neither lay flat nor score by positions; `stack_for`
has the others.
"""


def stack_for(
    model_type: str,
    task: str,
    precision: str,
    method: str,
    *,
    may_go_packed: bool = True,
    has_plain_head: bool = True,
    has_plain_adapters: bool = True,
) -> Stack:
    """How the trainer computes a model: what `can_go_packed`, `find_head` and `use_low_rank` decide
    when they see it.

    A plain head has no adapter and is not trained beside its original; plain adapters are LoRA
    without dropout or DoRA.
    """
    is_packed = may_go_packed and model_type in PACKED.get(objective_of(task).head, ())
    return replace(
        FARTHING,
        has_autocast=precision != "fp32",
        is_packed=is_packed,
        reads_first=is_packed and model_type in ENCODERS,
        # old GPUs, which compute in fp16, have no kernel that takes grouped heads as they are
        is_flash=is_packed and precision != "fp16",
        loss=POSITIONS
        if has_plain_head and model_type in KNOWN_HEADS.get(objective_of(task).head, ())
        else LABELLED,
        fuses_adapters=method == "lora" and has_plain_adapters,
        shares_inputs=True,
    )


@dataclass(frozen=True)
class Recipe:
    """A way to compute a job. Numbers of examples are per optimizer step of all GPUs together."""

    method: str
    """full, lora or qlora."""
    settings: Settings
    """Tokens of a micro-batch, checkpointing and precision."""
    optim: str
    global_batch: int
    micro_batch: int | None = None
    """Most examples in one forward pass of one GPU, as other trainers cut; None where tokens are
    counted.
    """
    lora_r: int = 0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    n_gpus: int = 1
    sharding: str = "none"
    """none, ddp (every GPU has everything) or fsdp (weights, gradients and state are divided)."""
    stack: Stack = FARTHING
    mean_passes: float = 1.0
    """Forward passes of one GPU in a mean step, where tokens are counted: what `Lengths.cut` makes
    of them.
    """
    reshards: bool = True
    """fsdp: layers are gathered again for the backward pass, and not kept for it."""
    offloads_weights: bool = False
    """fsdp: rows of the spread weights stay in main memory, with gradients and state of those that
    are trained.
    """

    @property
    def n_micro_batches(self) -> float:
        """Forward passes of one GPU in a step: the gradient accumulation."""
        if self.micro_batch is None:
            return self.mean_passes
        per_gpu = -(-self.global_batch // self.n_gpus)
        return float(-(-per_gpu // self.micro_batch))

    @property
    def compute_bytes(self) -> int:
        """Of a number in the forward pass."""
        return BYTES[self.precision]

    @property
    def precision(self) -> str:
        """Of the forward pass: bf16, fp16 or fp32."""
        assert self.settings.precision is not None, "a recipe has decided"
        return self.settings.precision

    @property
    def trained_bytes(self) -> int:
        """Of a trained weight, and of its gradient."""
        is_adapter = self.method != "full"
        has_masters = self.stack.has_master_weights and self.optim != BF16_WEIGHTS
        is_fp32 = self.stack.adapters_fp32 if is_adapter else has_masters
        return 4 if is_fp32 else self.compute_bytes

    @property
    def frozen_bytes(self) -> int:
        """Of a frozen weight that is not quantized."""
        return 4 if self.method == "qlora" and self.stack.upcasts_frozen else self.compute_bytes

    @property
    def gathered_bytes(self) -> int:
        """Of a weight that is spread, while it is whole: the trainer casts rows of trained ones to
        bf16, and not to fp16.
        """
        is_as_kept = (
            self.method == "full" and self.precision == "fp16" and self.stack.keeps_adapters_whole
        )
        return self.trained_bytes if is_as_kept else self.compute_bytes

    @property
    def cost(self) -> MicroBatchCost:
        """What padded work is cut by."""
        return MicroBatchCost(self.settings.least_tokens, self.settings.more_tokens)

    @property
    def edge_copies(self) -> int:
        """How often the backward pass holds what recomputed layers begin with.

        FSDP1 does so twice where the layers are frozen: 787 kB for each token of a Mistral-7B over
        two and four GPUs where one has 541 (foundation-model-stack/fms-acceleration, LoRA and
        QLoRA).
        """
        return 2 if self.method != "full" and self.n_gpus > 1 and self.stack.doubles_edges else 1

    @property
    def residual_bytes(self) -> int:
        """Of a number in the residual stream, and at the edges of recomputed layers."""
        return self.trained_bytes if self.method == "full" else self.frozen_bytes

    def with_settings(self, **changed: Any) -> Recipe:
        """The same recipe with other settings."""
        return replace(self, settings=replace(self.settings, **changed))

    @property
    def share_of_gpu(self) -> float:
        """Of a step, that one GPU computes."""
        return 1 / self.n_gpus

    @property
    def to_set(self) -> tuple[str, ...]:
        """What the job has to say for it, beside what it says by itself."""
        if not self.offloads_weights:
            return TO_SET[self.sharding]
        gpus = TO_SET[DDP] if self.n_gpus > 1 else ()
        return (*gpus, "where.strategy: fsdp", "where.offload_weights: true")

    def in_words(self) -> str:
        """`lora, bf16, up to 8,192 tokens at a time, every layer checkpointed`."""
        at_once = (
            []
            if self.micro_batch is None
            else [f"{self.micro_batch} x {self.n_micro_batches:g} examples"]
        )
        words = [self.method, self.precision, *at_once, self.settings.in_words()]
        if self.n_gpus > 1 and self.sharding != NONE:
            how = "weights on each of" if self.sharding == DDP else "weights spread over"
            words.append(f"{how} {self.n_gpus} GPUs")
        if self.offloads_weights:
            words.append("weights in main memory")
        return ", ".join(words)
