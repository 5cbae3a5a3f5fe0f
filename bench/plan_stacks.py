"""How the code behind a row of published measurements computes, where that is not farthing's way:
what its source and its notes say of kernels, loss and dtypes, and what that changes in a plan.

Each is read from the source's own code or page; none is chosen by how far off a row is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

from farthing.models.blocks import Block, block_of
from farthing.planner import memory as planned
from farthing.planner.activations import Layers, adapts_down, layers_of, scores_per_pair
from farthing.planner.memory import Memory, estimate_memory
from farthing.planner.recipe import FSDP, Case, ModelSupport, Recipe
from farthing.planner.work import LAUNCH_S, OUTER_LAUNCHES, Work, work_of

# what a loss keeps of the logits, see `_logits_bytes`
WHOLE, FUSED, CHUNKED = "whole", "fused", "chunked"
TILED, FREED, UNCAST = "tiled", "freed", "uncast"
TILE_BYTES = 256 << 20  # of a loss that never has more than a tile of the logits


@dataclass(frozen=True)
class OtherStack(ModelSupport):
    """How the code of another trainer computes, where that shows in memory or seconds."""

    has_master_weights: bool = False  # what is trained is fp32; else in the precision of the run
    autocasts: bool = False
    adapters_fp32: bool = True
    loss: str = WHOLE
    fused_norms: bool = False
    fused_mlp: bool = False
    is_eager: bool = False  # attention computes all scores, and keeps them
    masks_padding: bool = True
    upcasts_frozen: bool = False  # `prepare_model_for_kbit_training`: the rest becomes fp32
    # bitsandbytes before 0.43.2 of July 2024: layers in 4 bits keep what they read (pull 1270)
    keeps_quantized_inputs: bool = False
    # weights unpacked by plain operations, in three times bitsandbytes' time (30 to 45 ms for 1e9
    # weights, NF4 10 to 15), and kept for the backward pass
    keeps_unpacked: bool = False
    offloads: bool = False  # what recomputed layers begin with waits in the host's memory
    # with several GPUs and frozen weights, what recomputed layers begin with is there twice: 787 kB
    # for each token of a Mistral-7B over two and four GPUs where one has 541 (fms-acceleration)
    doubles_edges: bool = False
    layer_s: float = 1.5e-3  # of the host for a layer, forward and backward
    adapted_layer_s: float = 1.0e-3  # more, where it has adapters


@dataclass(frozen=True)
class OtherRecipe(Recipe):
    """The dtypes of other trainers. What FSDP1 gathers is a sum of its own: `_standing`."""

    stack: OtherStack = OtherStack()

    @property
    def trained_bytes(self) -> int:
        own = self.stack
        is_fp32 = own.has_master_weights if self.method == "full" else own.adapters_fp32
        return 4 if is_fp32 else self.compute_bytes

    @property
    def has_autocast(self) -> bool:
        return self.stack.autocasts

    @property
    def gathered_bytes(self) -> int:
        return self.compute_bytes

    @property
    def residual_bytes(self) -> int:
        if self.stack.upcasts_frozen:
            return 4
        is_spread = self.method == "full" and self.sharding == FSDP  # which casts what it gathers
        return self.compute_bytes if is_spread else super().residual_bytes

    @property
    def gathers(self) -> bool:
        return False


@dataclass(frozen=True)
class OtherCase(Case):
    recipe: OtherRecipe

    @cached_property
    def block(self) -> Block:
        """gelu_new is a chain, in fp32 under autocast."""
        own, shape = block_of(self.shape), self.shape
        more = 6 if shape.model_type == "gpt2" else 7 if "wi_1" in str(shape.weights) else 0
        has_copies = own.has_norm_copies and not self.recipe.stack.fused_norms
        return own._replace(activation=own.activation + more, has_norm_copies=has_copies)

    @property
    def n_tokens(self) -> int:
        return self.largest.n_rows * self.largest.tokens


def memory_of(case: OtherCase) -> Memory:
    """The planner's sum, of this trainer's layers, weights and loss."""
    others: dict[str, Any] = {"layers_of": _layers, "standing_of": _standing}
    others |= {"logits_bytes": _logits_bytes, "gathered_beside": _gathered_beside}
    with mock.patch.multiple(planned, **others):
        return estimate_memory(case)


def other_work(case: OtherCase) -> Work:
    """The planner's count, with this trainer's loss, unpacking and host."""
    recipe, stack, work = case.recipe, case.recipe.stack, work_of(case)
    c, every, n = recipe.compute_bytes, recipe.settings.checkpoint_every, recipe.n_micro_batches
    known = {TILED: 8.0, FUSED: 16.0, CHUNKED: 24.0, UNCAST: 8.0 * c}
    more = known.get(stack.loss, c + 32.0) - c - 32.0  # bytes of a word and token
    n_scored = recipe.global_batch / recipe.n_gpus * case.padded.tokens * case.shape.scores_tokens
    layer_s = stack.layer_s + (stack.adapted_layer_s if recipe.method != "full" else 0.0)
    layer_s *= 1 + (1 / every / 3 if every else 0)
    if case.adapters is not None and recipe.n_shards > 1:  # adapters are spread too
        more_sent = (1 - recipe.kept_share) * (n - 2) * case.n_trained * recipe.trained_bytes
        work = work._replace(
            sent_bytes=work.sent_bytes + more_sent,
            optimizer_bytes=work.optimizer_bytes * recipe.kept_share,
        )
    return work._replace(
        traffic_bytes=work.traffic_bytes + n_scored * case.shape.vocab * more,
        dequantization_bytes=work.dequantization_bytes * (3 if stack.keeps_unpacked else 1),
        host_s=n * (case.n_layers * layer_s + OUTER_LAUNCHES * LAUNCH_S),
    )


def _layers(case: OtherCase) -> Layers:
    shape, recipe, stack = case.shape, case.recipe, case.recipe.stack
    c, every, n = recipe.compute_bytes, recipe.settings.checkpoint_every, shape.n_layers
    is_qlora, is_full = recipe.method == "qlora", case.adapters is None
    keeps = is_qlora and stack.keeps_quantized_inputs
    # each adapter of a quantized layer casts its own input
    own = layers_of(replace(case, recipe=replace(recipe, method="lora")) if is_qlora else case)
    of_token, of_pair = 0.0, 0.0
    if is_full or keeps:
        of_token = _inputs_bytes(case) - (c * (2 * shape.hidden + shape.ffn) if is_full else 0)
    if stack.fused_mlp and (is_full or keeps or adapts_down(case)):
        of_token -= c * shape.ffn
    if stack.fused_norms and recipe.has_autocast and not stack.has_liger:
        of_token -= case.block.n_norms * shape.hidden * (4 - recipe.residual_bytes)
    if stack.is_eager:  # softmax in fp32, and its copy in the precision of the run
        of_pair = shape.n_heads * (4.0 + c) - scores_per_pair(case)
    elif not (stack.masks_padding or case.block.has_eager_scores):
        of_pair = -scores_per_pair(case)
    layer = case.n_tokens * (of_token + case.largest.tokens * of_pair)
    if is_qlora and stack.keeps_unpacked:
        layer += c * shape.n_packed / n
    saved = own.saved + layer * (n - (-(-n // every) if every else 0))
    edges = 2 if stack.doubles_edges and not is_full and recipe.n_gpus > 1 else 1
    if stack.offloads:
        saved, edges = saved - own.boundaries, 0
    return own._replace(saved=saved, boundaries=edges * own.boundaries, top=own.top + layer)


def _inputs_bytes(case: OtherCase) -> float:
    """Bytes of a token that a layer's products keep of what they read, an adapter's of the last one
    aside.
    """
    recipe, block, c = case.recipe, case.block, case.recipe.compute_bytes
    is_cast = recipe.has_autocast and recipe.residual_bytes > c
    n_inputs = block.n_attention_inputs + block.n_mlp_inputs if is_cast else 2
    return float(c * (n_inputs * case.shape.hidden + (0 if adapts_down(case) else case.shape.ffn)))


_of_farthing = planned.standing_of


def _standing(case: OtherCase) -> planned.FixedBytes:
    """Adapters are spread as frozen weights are."""
    recipe, adapters, found = case.recipe, case.adapters, _of_farthing(case)
    share, is_spread = recipe.kept_share, recipe.n_shards > 1
    gathered = planned.gathered_bytes(case) if is_spread else 0.0
    if adapters is None:
        return found._replace(gathered=gathered)
    weights = found.weights - (1 - share) * case.n_trained * recipe.trained_bytes
    if recipe.stack.upcasts_frozen:
        more = 4 - recipe.compute_bytes
        weights += more * share * (adapters.n_total - adapters.n_trainable - case.shape.n_packed)
        gathered += more * (case.shape.n_parameters - case.in_layers) if is_spread else 0
    gradients, held, state = (share * x for x in (found.gradients, found.held, found.state))
    return found._replace(
        weights=weights, gradients=gradients, held=held, state=state, gathered=gathered
    )


def _gathered_beside(case: OtherCase) -> float:
    """FSDP1 has a layer's gradients whole."""
    is_whole = case.adapters is None and case.recipe.n_shards > 1
    return 4.0 * case.of_layer if is_whole else 0.0


def _logits_bytes(case: OtherCase, is_trained: bool | None) -> float:
    """Logits in the precision of the run, their fp32 copy, its log-softmax, and two gradients: 14
    bytes in bf16 (`whole`); 12 where the loss takes them without a copy (`freed`), three times the
    logits where they are not cast (`uncast`). A fused loss has the logits, one fp32 copy and the
    gradient (8); a chunked one the logits and small copies.
    """
    c, loss = case.recipe.compute_bytes, case.recipe.stack.loss
    if loss == TILED or not case.shape.scores_tokens:
        return float(TILE_BYTES if case.shape.scores_tokens else 0)
    kept = {WHOLE: c + 12.0, FREED: c + 10.0, UNCAST: 3.0 * c, FUSED: 8.0, CHUNKED: float(c)}
    return (kept[loss] + (c if case.block.caps_logits else 0)) * case.shape.vocab * case.n_tokens


# ---- whose code a row is of ----

QWEN = "qwenlm/qwen"
# their scripts prepare quantized models for training; 5.2 ms for an adapted layer recomputed
_OLDER = ("swift", "factory", "huggingface/blog", "ftune")
# the last: its Hugging Face column is TRL's SFTTrainer
_PREPARES = ("factory", "huggingface/blog", "ftune", "unslothai")
_SLOW: dict[str, Any] = {"layer_s": 2.3e-3, "adapted_layer_s": 1.6e-3}
_LIGER: dict[str, Any] = {"fused_norms": True, "fused_mlp": True, "has_liger": True}
_COMPILED: dict[str, Any] = {"fused_norms": True, "has_liger": True}
_IN_16_BITS: dict[str, Any] = {"adapters_fp32": False}
# its checkpoints: unsloth/kernels and its notes on long contexts, April 2024
_UNSLOTH = OtherStack(
    has_master_weights=True, autocasts=True, loss=TILED, is_flash=True, offloads=True, **_LIGER
)
_KNOWN = {
    # Weights in fp32 that FSDP casts to bf16 as it gathers them; keys and values repeated for their
    # groups; a causal kernel without a mask; the loss of fp32 logits
    # (torchtitan/models/llama/model.py and parallelize_llama.py)
    "pytorch/torchtitan": OtherStack(has_master_weights=True, masks_padding=False, loss=FREED),
    # the same weights; its loss takes logits as they are (fms_fsdp/policies/mixed_precision.py,
    # utils/train_utils.py)
    "fms-fsdp": OtherStack(has_master_weights=True, masks_padding=False, loss=FUSED),
    # adapters too (`lora_model.bfloat16()`), flash attention 2 (vectorlm/utils/model_utils.py)
    "vectorlm": OtherStack(is_flash=True, **_IN_16_BITS),
    # transformers' layers with Liger's kernels, adapters in the dtype of what they adapt, the loss
    # of whole logits in fp32 (nemo_automodel/_transformers/auto_model.py, components/_peft/lora.py,
    # components/loss/masked_ce.py)
    "automodel": OtherStack(is_flash=True, **_IN_16_BITS, **_LIGER),
    "llm-foundry": OtherStack(loss=FUSED, is_flash=True, fused_norms=True),
    # a mask by index; logits and their softmax in pieces that all stay, in fp32: Lightning casts
    # what a model gives (fabric/plugins/precision/half.py, `convert_output`); its tables are of
    # 2023 and of May 2024
    "lit-?gpt": OtherStack(
        masks_padding=False, loss=FUSED, keeps_quantized_inputs=True, **_IN_16_BITS
    ),
    "nemo": OtherStack(
        has_master_weights=True, loss=FUSED, fused_norms=True, is_flash=True, **_IN_16_BITS
    ),
    # of March 2024; FSDP1, copies too (train.py)
    "fsdp_qlora": OtherStack(
        is_flash=True, keeps_quantized_inputs=True, doubles_edges=True, **_IN_16_BITS
    ),
}


def stack_of(source: str, words: str, method: str) -> OtherStack:
    """How the code behind a row computes; `source` and `words` in small letters."""
    is_qlora = method == "qlora"
    if is_unsloth(source, words):
        # in April 2024 it had all logits, whose gradient takes their place, and accelerate made an
        # fp32 copy of what it gave
        return replace(_UNSLOTH, loss=UNCAST) if "factory" in source else _UNSLOTH
    if "fms-acceleration" in source:  # accelerate's FSDP1 with peft
        return OtherStack(
            autocasts="bf16 autocast" in words or is_qlora,
            is_flash=True,
            upcasts_frozen=is_qlora and "baseline-peft-bnb" in words,
            doubles_edges=True,
            fused_norms="foak" in words,
            loss=TILED if "liger" in words else FUSED if "foak" in words else WHOLE,
        )
    if "torchtune" in source:
        is_chunked = re.search(r"chunked|\.\.\.\+|\(same\)", words) or "memory-" in source
        return OtherStack(
            masks_padding=False,
            loss=CHUNKED if is_chunked else WHOLE,
            offloads="offload" in words,
            **_IN_16_BITS,
            **(_COMPILED if is_chunked or "compile" in words else {}),
        )
    for name, stack in _KNOWN.items():
        if re.search(name, source):
            if name == "fsdp_qlora":
                return replace(stack, autocasts="autocast" in words)
            return replace(stack, **(_COMPILED if "torch.compile" in words else {}))
    if "universal-llm-trainer" in source:  # its own loss takes logits as they are (src/models)
        return OtherStack(loss=UNCAST, adapters_fp32=is_qlora)
    return _of_transformers(source, words, method)


def is_unsloth(source: str, words: str) -> bool:
    """Its own tables have columns of others, and others' tables have columns of it."""
    is_of_others = "not unsloth" in words or "hf + fa2" in words
    return not is_of_others and "unsloth" in f"{source} {words}"


def _of_transformers(source: str, words: str, method: str) -> OtherStack:
    """The trainer of transformers, and scripts around it.

    Qwen's finetune.py of October 2023 has fp32 adapters of bf16 weights (peft 0.5.0,
    tuners/lora.py: they are moved, not cast), but embeddings that are trained beside them bf16.
    """
    is_older, is_qlora = any(name in source for name in (*_OLDER, QWEN)), method == "qlora"
    is_gptq = is_qlora and is_older and re.search(r"gptq|int4", words) is not None
    is_mixed = re.search(r"master|fp32 states", words) is not None
    is_mixed |= "deepspeed" in words and method == "full"
    stack = OtherStack(
        has_master_weights=is_mixed,
        autocasts=is_mixed or (method != "full" and "no autocast" not in words),
        adapters_fp32=not (QWEN in source and trains_ends(words)),
        upcasts_frozen=is_qlora and any(name in source for name in _PREPARES),
        is_flash=bool(re.search(r"flash|fa2", words)),
        keeps_unpacked=is_gptq,
        # LLaMA-Factory's page is of April 2024; swift has bitsandbytes 0.41.3 by its own page
        keeps_quantized_inputs=not is_gptq and ("factory" in source or "swift" in source),
        **(_SLOW if is_older else {}),
    )
    if "liger" in words or "fused ce" in words:
        stack = replace(stack, loss=TILED, **(_LIGER if "liger" in words else {}))
    if re.search(r"eager attention|attn\w*[=: ]*eager", words):  # "eager" alone: not compiled
        stack = replace(stack, is_flash=False, is_eager=True)
    return stack


def attention_share_of(source: str, architecture: str) -> float | None:
    """Of the GPU's peak, fitted to the rows of llm-foundry: its tables are of 2023, with the Triton
    kernel of FlashAttention 1. None: as in a plan.
    """
    return {"Ampere": 0.30, "Hopper": 0.20}.get(architecture) if "llm-foundry" in source else None


def trains_ends(words: str) -> bool:
    """Whether embeddings and head are trained beside adapters."""
    return re.search(r"\(emb\)|incl\w*\.? (?:the )?embedding|with embedding", words) is not None


# ---- what a published figure of memory is of ----

GIB = 2**30
_DEVICE = r"nvidia-smi|nvml|device memory"


def meter_of(source: str, words: str) -> tuple[str, float]:
    """(allocated, reserved or nvidia-smi; bytes of the unit), from the first words of the notes, or
    where they don't tell from the source's own code or tables. Qwen's are of nvidia-smi, in 1,000
    MiB: in other units its 162.0G of two A100 were more than there is.
    """
    first = words.split(";")[0]
    is_said = re.search(rf"{_DEVICE}|max_memory|allocated|reserved|active", first)
    meter, unit = "allocated", 1e9 if re.match(r"\s*gb\b", words) else float(GIB)
    if re.search(_DEVICE, first) and "max_memory_allocated" not in words:
        meter = "nvidia-smi"
    elif "reserved" in first or "torch reserved" in words or ("swift" in source and not is_said):
        meter = "reserved"  # swift/trainers/trainers.py
    elif QWEN in source and not is_said:
        meter, unit = "nvidia-smi", 1000.0 * 2**20
    # torch.cuda.memory_reserved() / 1E9 (src/trainer/trainer.py)
    return meter, 1e9 if "universal-llm-trainer" in source else unit
