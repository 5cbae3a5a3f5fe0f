"""How a job is computed: the choices that change memory and seconds and not the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from farthing.data.lengths import Largest, Padded
from farthing.data.packing import MicroBatchCost
from farthing.models.blocks import Block, block_of
from farthing.models.families import ENCODERS, KNOWN_HEADS, PACKED
from farthing.models.shapes import Shape
from farthing.models.weights import Adapters
from farthing.objectives.registry import objective_of
from farthing.planner.optimizers import Optimizer, optimizer
from farthing.settings import Settings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
NONE, DDP, FSDP = "none", "ddp", "fsdp"
TO_SET: dict[str, tuple[str, ...]] = {
    NONE: (),
    DDP: ("where.gpus: all",),
    FSDP: ("where.gpus: all", "where.strategy: fsdp"),
}
"""What a job says for each way of sharing the weights."""


class Kernels(NamedTuple):
    """What a machine has beside torch's own kernels."""

    has_liger: bool = False  # Liger's, and the trainer takes them
    has_flex: bool = False
    """Flex attention takes heads of this size: scores with a soft cap are computed in one pass."""


PLAIN = Kernels()


@dataclass(frozen=True)
class ModelSupport:
    """What farthing's code can do with a model; by default only what it can with any."""

    is_packed: bool = False  # documents end to end: neither padding nor a mask of it
    is_flash: bool = False
    """Attention reads keys and values as they are, not repeated for their groups."""
    reads_first: bool = False
    """The last layer of an encoder is computed for the one token that a classifier reads."""
    scores_positions: bool = False
    """The head takes labelled positions only, a tile at a time; else all logits are there."""
    fuses_adapters: bool = False
    """LoRA layers are one function each: their input is kept once, in the run's precision."""
    has_liger: bool = False
    has_flex: bool = False


def stack_for(
    model_type: str,
    task: str,
    precision: str,
    method: str,
    *,
    may_go_packed: bool = True,
    has_plain_head: bool = True,
    has_plain_adapters: bool = True,
) -> ModelSupport:
    """What `can_go_packed`, `find_head` and `use_low_rank` decide when they see the model.

    A plain head has no adapter and is not trained beside its original; plain adapters are LoRA
    without DoRA.
    """
    kind = objective_of(task)
    is_packed = may_go_packed and model_type in PACKED.get(kind.head, ())
    return ModelSupport(
        is_packed=is_packed,
        reads_first=is_packed and model_type in ENCODERS,
        # old GPUs, which compute in fp16, have no kernel that takes grouped heads as they are
        is_flash=is_packed and precision != "fp16",
        scores_positions=has_plain_head and model_type in KNOWN_HEADS.get(kind.head, ()),
        fuses_adapters=method != "full" and has_plain_adapters,
    )


@dataclass(frozen=True)
class Recipe:
    """A way to compute a job. Examples are those of a step of all GPUs together."""

    method: str  # full, lora or qlora
    settings: Settings
    optim: str
    global_batch: int
    lora_r: int = 0
    lora_dropout: float = 0.0
    use_dora: bool = False
    n_gpus: int = 1
    sharding: str = NONE
    stack: ModelSupport = ModelSupport()
    n_micro_batches: float = 1.0  # forward passes of one GPU in a mean step
    reshards: bool = True
    """fsdp: layers are gathered again for the backward pass, and not kept for it."""
    offloads_weights: bool = False
    """fsdp: rows stay in main memory, with gradients and state of those that are trained."""

    @property
    def precision(self) -> str:
        """Of the forward pass: bf16, fp16 or fp32."""
        assert self.settings.precision is not None, "a recipe has decided"
        return self.settings.precision

    @property
    def optimizer(self) -> Optimizer:
        return optimizer(self.optim)

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.precision]

    @property
    def trained_bytes(self) -> int:
        """Of a trained weight, and of its gradient."""
        return 2 if self.optimizer.has_bf16_weights else 4

    @property
    def has_autocast(self) -> bool:
        """The forward pass casts what it multiplies."""
        return self.precision != "fp32"

    @property
    def gathered_bytes(self) -> int:
        """Of a spread weight while it is whole: rows are cast to bf16 and not to fp16."""
        is_as_kept = self.method == "full" and self.precision == "fp16"
        return self.trained_bytes if is_as_kept else self.compute_bytes

    @property
    def residual_bytes(self) -> int:
        """Of a number in the residual stream, and at the edges of recomputed layers."""
        return self.trained_bytes if self.method == "full" else self.compute_bytes

    @property
    def cost(self) -> MicroBatchCost:
        """What padded work is cut by."""
        return MicroBatchCost(self.settings.least_tokens, self.settings.more_tokens)

    @property
    def n_shards(self) -> int:
        return self.n_gpus if self.sharding == FSDP else 1

    @property
    def kept_share(self) -> float:
        """Of spread weights, what a GPU keeps while it does not compute with them."""
        return 0.0 if self.offloads_weights else 1 / self.n_shards

    @property
    def gathers(self) -> bool:
        """Weights are whole on a GPU for the moment only."""
        return self.offloads_weights or self.n_shards > 1

    @property
    def to_set(self) -> tuple[str, ...]:
        """What the job has to say for it, beside what it says by itself."""
        if not self.offloads_weights:
            return TO_SET[self.sharding]
        gpus = TO_SET[DDP] if self.n_gpus > 1 else ()
        return (*gpus, "where.strategy: fsdp", "where.offload_weights: true")

    def in_words(self) -> str:
        """`lora, bf16, up to 8,192 tokens at a time, every layer checkpointed`."""
        words = [self.method, self.precision, self.settings.in_words()]
        if self.n_gpus > 1:
            how = "weights on each of" if self.sharding == DDP else "weights spread over"
            words.append(f"{how} {self.n_gpus} GPUs")
        if self.offloads_weights:
            words.append("weights in main memory")
        return ", ".join(words)


@dataclass(frozen=True)
class Case:
    """What memory and seconds follow from."""

    shape: Shape
    recipe: Recipe
    adapters: Adapters | None  # what is trained; None: all of the model
    largest: Largest  # the largest micro-batch, for memory
    padded: Padded  # a mean example as it is computed, for seconds
    mean_tokens: float  # of an example without padding
    labelled_share: float = 1.0  # of the tokens, that go through the loss
    is_cuda: bool = True

    @cached_property
    def block(self) -> Block:
        """Flex attention keeps no scores."""
        own = block_of(self.shape)
        is_flex = self.recipe.stack.is_packed and self.recipe.stack.has_flex and not own.has_sinks
        return own._replace(has_eager_scores=False) if is_flex else own

    @cached_property
    def n_trained(self) -> int:
        return self.shape.n_parameters if self.adapters is None else self.adapters.n_trainable

    @cached_property
    def in_layers(self) -> int:
        """Weights of the layers: all but embeddings, last norm, head."""
        return sum(weight.n_parameters for weight in self.shape.weights if "*" in weight.name)

    @cached_property
    def largest_trained(self) -> int:
        """Numbers of the largest trained matrix."""
        if self.adapters is None:
            return max(w.n_weights for w in self.shape.weights)
        return max(self.adapters.r * max(w.n_in, w.n_out) for w, _ in self.adapters.adapted)

    @property
    def state_bytes(self) -> float:
        """Of the optimizer for each trained weight, on the GPU."""
        r = None if self.adapters is None else self.adapters.r
        return self.recipe.optimizer.state_bytes(self.recipe.trained_bytes, r)

    @property
    def n_layers(self) -> int:
        return max(1, self.shape.n_layers + self.shape.n_decoder_layers)

    @property
    def of_layer(self) -> float:
        """Weights of one layer."""
        return self.in_layers / self.n_layers

    @property
    def width(self) -> tuple[int, int]:
        """Features of all queries, and of all keys."""
        return self.shape.n_heads * self.shape.head_dim, self.shape.n_kv_heads * self.shape.head_dim
