"""A case -> bytes by component, at the moment of a step that takes most.

The moments: the forward pass, the loss (all activations and the logits), the backward pass of the
top layer, that of the last one (nearly all gradients), that of the embeddings (all gradients; in a
model of two stacks the decoder's come before the encoder's layers), and the optimizer's own. Each
is a sum of named parts; the largest sum is the peak.

Three meters measure a GPU, and are never compared with each other: what torch has allocated
(`max_memory_allocated`), what its allocator has reserved (`max_memory_reserved`), and what the
device shows (nvidia-smi). Counted is the first. `SLACK`, `CUDA_CONTEXT_BYTES`, `CACHED_LOGITS` and
`COMMUNICATION_BYTES` lead to the others: what nvidia-smi showed above torch's own peak in published
runs (foundation-model-stack/fms-acceleration, A100-80GB, 1 to 4 GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from farthing.data.lengths import Largest
from farthing.models.tiles import head_bytes
from farthing.planner.activations import Layers, layers_of
from farthing.planner.recipe import DDP, FSDP, Case

SLACK = 0.05  # of what torch has allocated: blocks that the allocator can't use
CUDA_CONTEXT_BYTES = int(0.8 * 2**30)
# of whole logits: blocks that are too large for anything else, and are kept. Between 0.47 of one
# source (fms-acceleration, nvidia-smi) and nothing of another (PEFT, reserved)
CACHED_LOGITS = 0.25
CPU_CODE_BYTES = 256 << 20  # that oneDNN makes for products in bf16, of as many shapes as there are
COMMUNICATION_BYTES = {  # what gathered layers leave in the pools of streams; buffers of NCCL
    FSDP: int(4.6 * 2**30),
    DDP: 2**29,
}
# of a weight in QLoRA, double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3)
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
MEASURED = "measured beside the formula"
CERTAIN = ("weights", "gradients", "optimizer")
Parts = dict[str, float]


@dataclass(frozen=True, order=True)
class Allocated:
    """By torch's tensors; of a CPU, by the whole process."""

    n_bytes: int


@dataclass(frozen=True, order=True)
class Reserved:
    n_bytes: int


@dataclass(frozen=True, order=True)
class OnDevice:
    """On the device, whoever has it; of a CPU, by the whole process."""

    n_bytes: int


@dataclass(frozen=True)
class Memory:
    """Peak memory of one GPU, or of a process on a CPU."""

    parts: dict[str, int]
    """What torch has at the peak: weights, gradients, optimizer, activations, logits, ..."""
    moment: str
    is_cuda: bool = True
    beside_bytes: int = 0
    """That the allocator or a library keeps beside its slack; of a CPU, the process itself."""

    @property
    def allocated(self) -> Allocated:
        return Allocated(sum(self.parts.values()) + (0 if self.is_cuda else self.beside_bytes))

    @property
    def reserved(self) -> Reserved:
        n_bytes = sum(self.parts.values())
        return Reserved(n_bytes + int(SLACK * n_bytes if self.is_cuda else 0))

    @property
    def on_device(self) -> OnDevice:
        more = CUDA_CONTEXT_BYTES if self.is_cuda else 0
        return OnDevice(self.reserved.n_bytes + more + self.beside_bytes)

    @property
    def certain(self) -> Allocated:
        """Weights, gradients and an optimizer's state: their numbers and dtypes are known."""
        return Allocated(sum(self.parts.get(name, 0) for name in CERTAIN))

    @property
    def certain_on_device(self) -> OnDevice:
        """They with their slack, and the context."""
        n_bytes = self.certain.n_bytes
        more = SLACK * n_bytes + CUDA_CONTEXT_BYTES if self.is_cuda else 0
        return OnDevice(int(n_bytes + more))

    def with_measured(self, extra_bytes: int) -> Memory:
        """With what runs were seen to have allocated beside the formula."""
        beside = self.beside_bytes if self.is_cuda else 0  # the process was measured with it
        return replace(self, parts=self.parts | {MEASURED: extra_bytes}, beside_bytes=beside)

    def as_dict(self) -> dict[str, int]:
        """All parts, slack and context included; they add up to what is on the device."""
        slack = self.reserved.n_bytes - sum(self.parts.values())
        context = self.on_device.n_bytes - self.reserved.n_bytes - self.beside_bytes
        beside = "cache" if self.is_cuda else "the process itself"
        more = {"allocator slack": slack, beside: self.beside_bytes, "CUDA context": context}
        return {**self.parts, **{name: value for name, value in more.items() if value}}


def estimate_memory(case: Case) -> Memory:
    """Peak of a step. Sharding divides what it divides evenly."""
    recipe, is_cuda = case.recipe, case.is_cuda
    standing, layers = standing_of(case), layers_of(case)
    logits = logits_bytes(case, is_trained=case.adapters is None)
    moments = _moments(case, standing, layers, logits)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    beside = 0 if recipe.stack.scores_positions else int(CACHED_LOGITS * logits)
    beside += COMMUNICATION_BYTES.get(recipe.sharding, 0)
    if not is_cuda:
        beside = 0 if recipe.compute_bytes == 4 else CPU_CODE_BYTES
    return Memory(_whole(moments[moment]), moment, is_cuda, beside)


def _whole(parts: Parts) -> dict[str, int]:
    return {name: int(value) for name, value in parts.items() if value >= 1}


class FixedBytes(NamedTuple):
    """Bytes of one GPU that a micro-batch has no say in."""

    weights: float
    gradients: float  # when all are there
    held: float  # of them, while the next micro-batch is computed
    state: float
    casts: float
    gathered: float  # weights that are spread and whole for the moment
    head_gradients: float


def standing_of(case: Case) -> FixedBytes:
    shape, recipe = case.shape, case.recipe
    is_full, n_trained = case.adapters is None, case.n_trained
    # of trained weights: what this GPU keeps
    own = recipe.kept_share if is_full else 1.0
    of_trained = n_trained * recipe.trained_bytes
    weights = own * of_trained + recipe.kept_share * (_weights_bytes(case) - of_trained)
    gradients = of_trained * own
    head_gradients = 0.0
    if is_full:
        head_gradients = shape.n_head_matmul * recipe.trained_bytes / recipe.n_shards
        if recipe.gathers:  # whole until the backward pass is over
            head_gradients = float(shape.n_head_matmul * recipe.gathered_bytes)
    held = gradients if recipe.n_micro_batches > 1 else 0.0
    state, gathered = n_trained * case.state_bytes * own, gathered_bytes(case)
    gathered = gathered if recipe.gathers else 0.0
    casts = _casts_bytes(case)
    return FixedBytes(weights, gradients, held, state, casts, gathered, head_gradients)


def _moments(case: Case, standing: FixedBytes, layers: Layers, logits: float) -> dict[str, Parts]:
    shape, recipe, largest = case.shape, case.recipe, case.largest
    every, is_full = recipe.settings.checkpoint_every, case.adapters is None
    weights, gradients, held, state, casts, gathered, of_head = standing
    saved = layers.saved
    # made in the forward pass; where the embeddings share its weight it waits for theirs
    in_loss = of_head if recipe.stack.scores_positions and shape.scores_tokens else 0.0
    in_backward = in_loss if shape.is_tied and held else 0.0
    if recipe.gathers and is_full:  # beside the rows; in the loss in fp32, without a cast
        in_backward = of_head if held else 0.0
    n_last = largest.n_rows * (largest.targets or largest.tokens)
    last = n_last * shape.hidden * (4 + recipe.residual_bytes)
    more = _embeddings_working(case, held > 0) if is_full else 0.0
    step = gradients if recipe.optim == "adamw_torch" else 0.0
    if recipe.optimizer.is_factored:  # the update and its factors, of the largest weight
        step = 3.0 * recipe.trained_bytes * case.largest_trained
    beside = _dora_working(case) + _merging_bytes(case)
    of_rows = recipe.trained_bytes * recipe.kept_share
    before_last = gradients
    if is_full:
        before_last = of_head + shape.n_matmul * of_rows * (1 - 1 / case.n_layers)
    base = {"weights": weights, "optimizer": state}
    at_work = base | {"gathered weights": gathered}
    going_back = base | {"gathered weights": gathered + gathered_beside(case)}
    forward = at_work | {"gradients": held, "casts": casts}
    top = saved if every != 1 else layers.boundaries + layers.top
    works = max(layers.working, beside)
    moments: dict[str, Parts] = {
        "forward": forward | {"activations": saved, "working": beside},
        "loss": forward
        | {"gradients": held + in_loss, "activations": saved + last, "logits": logits},
        "backward": going_back
        | {
            "gradients": (held or of_head) + in_backward,
            "casts": 0.0 if every == 1 else casts,
            "activations": top,
            "working": works if every else layers.working,
        },
        "last layer": going_back
        | {
            "gradients": (held or before_last) + in_backward,
            "activations": layers.top,
            "working": works,
        },
        "embeddings": at_work | {"gradients": gradients, "working": more},
        "optimizer": base | {"gradients": gradients, "working": step},
    }
    # of several micro-batches copies of weights are kept to the end of the step (model/casts.py)
    if case.is_cuda and recipe.sharding != FSDP and held:
        for name in ("backward", "last layer", "embeddings"):
            moments[name]["casts"] = casts
    if shape.n_decoder_layers and shape.is_tied and is_full:  # before the encoder's layers
        of_decoder = sum(
            w.copies * w.n_weights for w in shape.linear_layers if w.name.startswith("decoder.")
        )
        so_far = held or of_head + of_decoder * of_rows
        both = {"gradients": so_far, "activations": layers.of_encoder, "working": more}
        moments["decoder's embeddings"] = at_work | both
    return moments


def gathered_beside(case: Case) -> float:
    """Bytes that spread weights take in the backward pass alone: the next layer's, gathered
    meanwhile; and of a trained layer its gradient, whole in fp32 as it is summed, while those of
    the next one are made.
    """
    recipe = case.recipe
    if not recipe.gathers:
        return 0.0
    c = recipe.gathered_bytes
    of_gradients = 4.0 + c if case.adapters is None else 0.0
    return case.of_layer * ((c if recipe.reshards else 0) + of_gradients)


def _embeddings_working(case: Case, adds_up: bool) -> float:
    """Beside the gradients of the embeddings: tied ones' two, and what is added to those before."""
    shape, recipe = case.shape, case.recipe
    if recipe.gathers:  # embeddings and head whole, as computed and in fp32 as they are summed
        return (4.0 + recipe.gathered_bytes) * (shape.n_parameters - case.in_layers)
    embedding = shape.vocab * shape.hidden * recipe.trained_bytes / recipe.n_shards
    return embedding * ((2 if shape.is_tied else 0) + (1 if adds_up else 0))


def evaluation_memory(case: Case) -> Memory:
    """Peak of an evaluation: the optimizer's state stays, and no layer keeps anything."""
    standing, layer = standing_of(case), layers_of(case).top
    logits = logits_bytes(case, is_trained=None)
    found: Parts = {"weights": standing.weights, "gathered weights": standing.gathered}
    found |= {"optimizer": standing.state, "casts": standing.casts}
    found |= {"logits": logits} if logits > layer else {"activations": layer}
    return Memory(_whole(found), "evaluation", case.is_cuda)


def writing_memory(case: Case, written: Largest) -> Memory:
    """Peak while a model of two stacks writes `written.targets` tokens for each of `n_rows`
    sources.

    Keys and values of all layers are kept, of the source and of what is written (as it grows, one
    layer's are there twice), and the encoder's output, padded; each new token is scored against all
    words, in fp32 once more.
    """
    shape, recipe, n = case.shape, case.recipe, written.n_rows
    standing, c = standing_of(case), recipe.compute_bytes
    n_kept = shape.n_decoder_layers * (written.tokens + written.targets) + written.targets
    kept = n * 2.0 * c * case.width[1] * n_kept
    states = float(n * written.tokens * shape.hidden * recipe.residual_bytes)
    working = 0.0
    if recipe.stack.is_packed:  # end to end before, in as many passes as training would take
        states *= 2.0
    else:
        working = layers_of(replace(case, largest=written._replace(targets=0))).top
    found: Parts = {"weights": standing.weights, "optimizer": standing.state}
    found |= {"casts": standing.casts, "activations": states + max(working, kept)}
    found |= {"logits": float(n * shape.vocab * (c + 4))}
    return Memory(_whole(found), "evaluation", case.is_cuda)


def host_bytes(case: Case) -> int:
    """Main memory for rows that are kept there (with gradients and state of trained ones), and for
    an off-loaded optimizer: copies of weights and gradients, and two moments.
    """
    recipe, adapters, n_trained = case.recipe, case.adapters, case.n_trained
    of_state = 16.0 * n_trained if recipe.optimizer.is_on_host else 0.0
    if not recipe.offloads_weights:
        is_spread = recipe.sharding == FSDP and adapters is None
        return int(of_state * (1 if is_spread else recipe.n_gpus))
    if adapters is not None:  # adapters stay on the GPU
        frozen = (adapters.n_total - adapters.n_trainable) * recipe.compute_bytes
        return int(frozen + of_state * recipe.n_gpus)
    return int(n_trained * (2.0 * recipe.trained_bytes + case.state_bytes) + of_state)


def _casts_bytes(case: Case) -> float:
    """Autocast's copies of weights: kept until the forward pass is over, by autograd longer."""
    shape, recipe, adapters = case.shape, case.recipe, case.adapters
    c, every = recipe.compute_bytes, recipe.settings.checkpoint_every
    if not recipe.has_autocast or recipe.trained_bytes <= c:
        return 0.0
    if recipe.sharding == FSDP and adapters is None and recipe.gathered_bytes == c:
        return 0.0  # gathered in the precision of the run, and given back layer by layer
    if adapters is not None:  # fused layers keep casts of their thin matrices, unless recomputed
        kept = 1 - (1 / every if every else 0)
        return adapters.n_adapter * c * kept if recipe.stack.fuses_adapters else 0.0
    of_head = 0 if recipe.stack.scores_positions else shape.n_head_matmul  # for its tiles only
    of_experts = sum(w.copies * w.n_weights for w in shape.experts)  # autocast leaves them alone
    return float((shape.n_matmul - of_experts + of_head) * c)


def gathered_bytes(case: Case) -> float:
    """What is whole on a GPU that computes with spread weights: embeddings, last norm and head from
    the forward to the end of the backward pass, and the layer at work (FSDP2; held against
    fms-acceleration's runs on 2 and 4 GPUs).
    """
    recipe, root = case.recipe, case.shape.n_parameters - case.in_layers
    of_layer = case.of_layer if recipe.reshards else float(case.in_layers)
    if recipe.method == "qlora":
        return root * recipe.compute_bytes + of_layer * NF4_BYTES
    copied = 0.0
    if recipe.offloads_weights:  # rows as the host has them, until they are cast and gathered
        kept = recipe.trained_bytes if recipe.method == "full" else recipe.compute_bytes
        copied = of_layer / recipe.n_gpus * kept
    return float((root + of_layer) * recipe.gathered_bytes) + copied


def _weights_bytes(case: Case) -> float:
    recipe, adapters = case.recipe, case.adapters
    if adapters is None:
        return float(case.shape.n_parameters * recipe.trained_bytes)
    trained = adapters.n_trainable * recipe.trained_bytes + 4.0 * adapters.n_start
    # peft keeps the original of a module that is trained whole
    frozen = adapters.n_total - adapters.n_trainable
    frozen += sum(n * (w.n_weights + w.n_bias) for w, n in adapters.saved)
    n_packed = case.shape.n_packed if recipe.method == "qlora" else 0
    return n_packed * NF4_BYTES + float((frozen - n_packed) * recipe.compute_bytes + trained)


def logits_bytes(case: Case, is_trained: bool | None) -> float:
    """What the loss has at its worst. `is_trained` is None where nothing is (evaluation).

    Of all positions the logits, of labelled ones an fp32 copy, its log-softmax and two gradients;
    in fp32 the gradient of all positions comes on top of what is left.
    """
    shape, recipe = case.shape, case.recipe
    c, share, has_cap = recipe.compute_bytes, case.labelled_share, case.block.caps_logits
    if not shape.scores_tokens:
        return 0.0
    n_tokens = case.largest.n_rows * (case.largest.targets or case.largest.tokens)
    if not recipe.stack.scores_positions:
        of_each = 8.0 + 4.0 * share if c == 4 else c + (c + 8.0) * share
        return (of_each + (c if has_cap else 0)) * shape.vocab * n_tokens
    n_scored = -int(-n_tokens * share // 1)
    found = head_bytes(
        n_scored,
        shape.vocab,
        shape.hidden,
        recipe.precision,
        trained_bytes=recipe.trained_bytes if is_trained else 0,
        is_cuda=case.is_cuda,
        is_one_kernel=case.is_cuda and recipe.precision != "fp16",  # from Ampere on
        has_cap=has_cap,
    )
    return found + (0.0 if is_trained is None else c * n_scored * shape.hidden)


def _dora_working(case: Case) -> float:
    """For the norm of one adapted weight: peft multiplies the adapters with a unit matrix."""
    recipe = case.recipe
    if case.adapters is None or not recipe.use_dora:
        return 0.0
    c, a = recipe.compute_bytes, recipe.trained_bytes
    of_unit = a + (c if a > c else 0)
    linear = [w for w, _ in case.adapters.adapted if w.kind == "linear"]
    return max((of_unit * w.n_in**2 + 3.0 * c * w.n_weights for w in linear), default=0.0)


def _merging_bytes(case: Case) -> float:
    """What the last layer's experts give, weighed in fp32 and ordered, where they have adapters."""
    if case.adapters is None or not case.adapters.n_merged:
        return 0.0
    n_tokens = case.largest.n_rows * case.largest.tokens
    return 8.0 * case.shape.hidden * case.shape.n_active * n_tokens
