"""How the code behind a row of published measurements computes: what its source and its notes say
of kernels, loss and dtypes.

Each is read from the source's own code or page; none is chosen by how far off a row is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from farthing.planner.activations import saved_per_token
from farthing.planner.memory import NF4_BYTES
from farthing.planner.recipe import CACHED_LOGITS, FSDP, Case, Recipe, Stack

# what a loss keeps of the logits, see `OtherStack.logits_bytes`
LABELLED, WHOLE, FUSED, CHUNKED, TILED = "labelled", "whole", "fused", "chunked", "tiled"
FREED, UNCAST = "freed", "uncast"
TILE_BYTES = 256 << 20  # of a loss that never has more than a tile of the logits


@dataclass(frozen=True)
class OtherStack(Stack):
    """How the code of another trainer computes, where that shows in memory or seconds."""

    name: str = "hf"
    has_master_weights: bool = False
    """Trained weights, gradients and state are fp32; else all is in the precision of the run."""
    autocasts: bool = False
    adapters_fp32: bool = True
    loss: str = WHOLE
    fused_norms: bool = False
    fused_mlp: bool = False
    is_compiled: bool = False
    is_eager: bool = False
    """Attention computes all scores, and keeps them."""
    masks_padding: bool = True
    upcasts_frozen: bool = False
    """`prepare_model_for_kbit_training`: whatever is not quantized becomes fp32."""
    keeps_quantized_inputs: bool = False
    """bitsandbytes before 0.43.2 of July 2024: layers in 4 bits keep what they read
    (github.com/bitsandbytes-foundation/bitsandbytes/pull/1270).
    """
    keeps_unpacked: bool = False
    """Quantized weights are unpacked by plain operations, and kept for the backward pass."""
    steps_in_backward: bool = False
    offloads: bool = False
    doubles_edges: bool = False
    """With several GPUs and frozen weights, what recomputed layers begin with is there twice: 787
    kB for each token of a Mistral-7B over two and four GPUs where one has 541 (fms-acceleration).
    """
    times: float = 1.0
    layer_s: float = 1.5e-3
    adapted_layer_s: float = 1.0e-3

    def has_autocast(self, precision: str) -> bool:
        return self.autocasts

    def trained_bytes(self, method: str, compute_bytes: int) -> int:
        is_fp32 = self.has_master_weights if method == "full" else self.adapters_fp32
        return 4 if is_fp32 else compute_bytes

    def frozen_bytes(self, method: str, compute_bytes: int) -> int:
        return 4 if method == "qlora" and self.upcasts_frozen else compute_bytes

    fuses_norms = property(  # type: ignore[assignment]
        lambda self: self.fused_norms or self.is_compiled
    )
    has_lean_mlp = property(lambda self: self.fused_mlp or self.is_compiled)  # type: ignore[assignment]
    has_fused_mlp = property(lambda self: self.fused_mlp)  # type: ignore[assignment]
    shares_inputs = property(lambda self: False)  # type: ignore[assignment]
    spreads_adapters = property(lambda self: True)  # type: ignore[assignment]
    is_traced = property(lambda self: False)  # type: ignore[assignment]
    frees_gradients = property(lambda self: self.steps_in_backward)  # type: ignore[assignment]
    offloads_checkpoints = property(lambda self: self.offloads)  # type: ignore[assignment]
    unpacking = property(lambda self: self.times)  # type: ignore[assignment]
    cached_logits = property(  # type: ignore[assignment]
        lambda self: 0.0 if self.loss in (TILED, CHUNKED) else CACHED_LOGITS
    )

    def keeps_inputs(self, method: str) -> bool:
        return self.keeps_quantized_inputs and method == "qlora"

    def kept_of_layer(self, case: Case) -> float:
        if not self.keeps_unpacked or case.recipe.method != "qlora":
            return 0.0
        return case.recipe.compute_bytes * case.shape.n_packed / max(1, case.shape.n_layers)

    def edge_copies(self, recipe: Recipe) -> int:
        return 2 if recipe.method != "full" and recipe.n_gpus > 1 and self.doubles_edges else 1

    def mask_bytes(self, case: Case) -> float:
        if self.is_eager:  # softmax in fp32, and its copy in the precision of the run
            return case.shape.n_heads * (4.0 + case.recipe.compute_bytes)
        return super().mask_bytes(case) if self.masks_padding else 0.0

    def logits_bytes(self, case: Case, n_tokens: float, is_trained: bool | None) -> float:
        """Logits in the precision of the run, their fp32 copy, its log-softmax, and two gradients:
        14 bytes in bf16 (`whole`); 12 where the loss takes them without a copy (`freed`), three
        times the logits where they are not cast (`uncast`). A fused loss has the logits, one fp32
        copy and the gradient (8); a chunked one the logits and small copies.
        """
        c = case.recipe.compute_bytes
        if self.loss == TILED:
            return float(TILE_BYTES)
        if self.loss == LABELLED:
            return super().logits_bytes(case, n_tokens, is_trained)
        kept = {WHOLE: c + 12.0, FREED: c + 10.0, UNCAST: 3.0 * c, FUSED: 8.0, CHUNKED: float(c)}
        caps = c if case.block.caps_logits else 0.0
        return (kept[self.loss] + caps) * case.shape.vocab * n_tokens

    def loss_traffic(self, compute_bytes: int, labelled_share: float) -> float:
        known = {TILED: 8.0, FUSED: 16.0, CHUNKED: 24.0, UNCAST: 8.0 * compute_bytes}
        return known.get(self.loss, compute_bytes + 32.0 * labelled_share)

    def host_s(self, recipe: Recipe, launches: float, adapted: float, launch_s: float) -> float:
        return self.layer_s + (self.adapted_layer_s if recipe.method != "full" else 0.0)


# their scripts prepare quantized models for training: what is not quantized becomes fp32
_OLDER = ("swift", "factory", "huggingface/blog", "ftune")
_PREPARES = (
    "factory",
    "huggingface/blog",
    "ftune",
    "unslothai",
)  # the last: its Hugging Face column is TRL's SFTTrainer
QWEN = "qwenlm/qwen"
_PLAIN = OtherStack()


def stack_of(source: str, words: str, method: str) -> OtherStack:
    """How the code behind a row computes; `source` and `words` in small letters."""
    if is_unsloth(source, words):
        # in April 2024 it had all logits, whose gradient takes their place, and accelerate made an
        # fp32 copy of what it gave
        return replace(_of_unsloth(), loss=UNCAST) if "factory" in source else _of_unsloth()
    for name, stack in _OF_PYTORCH.items():
        if name in source:
            return replace(stack, is_compiled="torch.compile" in words)
    if "fms-acceleration" in source:
        is_mixed = "bf16 autocast" in words or method == "qlora"
        stack = replace(
            _PLAIN,
            autocasts=is_mixed,
            is_flash=True,
            upcasts_frozen="baseline-peft-bnb" in words,
        )
        stack = replace(stack, doubles_edges=True)  # accelerate's FSDP1 with peft
        if "foak" in words:
            stack = replace(stack, loss=FUSED, fused_norms=True)
        return replace(stack, loss=TILED) if "liger" in words else stack
    if "torchtune" in source:
        return _of_torchtune(source, words)
    if "llm-foundry" in source:
        return replace(_PLAIN, name="llm-foundry", loss=FUSED, is_flash=True, fused_norms=True)
    if (
        "lit-gpt" in source or "litgpt" in source
    ):  # bf16-true; a mask by index; logits and their softmax in pieces
        # that all stay, in fp32: Lightning casts what a model gives
        # (fabric/plugins/precision/half.py, `convert_output`)
        plain = replace(_PLAIN, name="litgpt", adapters_fp32=False, masks_padding=False, loss=FUSED)
        return replace(plain, keeps_quantized_inputs=True)  # its tables are of 2023 and of May 2024
    if "nemo" in source:
        return OtherStack(
            name="nemo",
            has_master_weights=True,
            autocasts=False,
            adapters_fp32=False,
            loss=FUSED,
            fused_norms=True,
            is_flash=True,
        )
    if "fsdp_qlora" in source:
        plain = replace(
            _PLAIN,
            name="fsdp_qlora",
            adapters_fp32=False,
            autocasts="autocast" in words,
            is_flash=True,
        )
        return replace(
            plain, keeps_quantized_inputs=True, doubles_edges=True
        )  # of March 2024; FSDP1, copies too (train.py)
    return _of_transformers(source, words, method)


def attention_share_of(source: str, architecture: str) -> float | None:
    """Of the GPU's peak, where a source's attention is older than today's: fitted to its rows;
    None: as in a plan.

    llm-foundry's tables are of 2023, with the Triton kernel of FlashAttention 1 (`attn_impl:
    triton` in its scripts).
    """
    return {"Ampere": 0.30, "Hopper": 0.20}.get(architecture) if "llm-foundry" in source else None


def is_unsloth(source: str, words: str) -> bool:
    """Whether Unsloth computed a row: its own tables have columns of others, and others' tables
    have columns of it.
    """
    if "not unsloth" in words or "hf + fa2" in words:
        return False
    return "unsloth" in source or "unsloth" in words


def _of_unsloth() -> OtherStack:
    """Its checkpoints are in the host's memory (unsloth/kernels and its notes on long contexts,
    April 2024).
    """
    return OtherStack(
        name="unsloth",
        has_master_weights=True,
        autocasts=True,
        loss=TILED,
        fused_norms=True,
        fused_mlp=True,
        is_flash=True,
        offloads=True,
    )


# Weights in fp32 that FSDP casts to bf16 as it gathers them; keys and values repeated for their
# groups; a causal kernel without a mask; the loss of fp32 logits (torchtitan/models/llama/model.py
# and parallelize_llama.py).
_OF_PYTORCH = {
    "pytorch/torchtitan": replace(
        _PLAIN, name="torchtitan", has_master_weights=True, masks_padding=False, loss=FREED
    ),
    # the same weights; its loss takes logits as they are (fms_fsdp/policies/mixed_precision.py,
    # utils/train_utils.py)
    "fms-fsdp": replace(
        _PLAIN, name="fms-fsdp", has_master_weights=True, masks_padding=False, loss=FUSED
    ),
    # all in bf16, adapters too (`lora_model.bfloat16()`), flash attention 2
    # (vectorlm/utils/model_utils.py)
    "vectorlm": replace(_PLAIN, name="vectorlm", adapters_fp32=False, is_flash=True),
    # transformers' layers with Liger's kernels, adapters in the dtype of what they adapt, the loss
    # of whole logits in fp32 (nemo_automodel/_transformers/auto_model.py, components/_peft/lora.py,
    # components/loss/masked_ce.py)
    "automodel": replace(
        _PLAIN,
        name="automodel",
        adapters_fp32=False,
        fused_norms=True,
        fused_mlp=True,
        is_flash=True,
    ),
}


def _of_torchtune(source: str, words: str) -> OtherStack:
    stack = replace(
        _PLAIN,
        name="torchtune",
        adapters_fp32=False,
        masks_padding=False,
        is_compiled="compile" in words,
    )
    if re.search(r"chunked|\.\.\.\+|\(same\)", words) or "memory-" in source:
        stack = replace(stack, loss=CHUNKED, is_compiled=True)
    return replace(
        stack,
        steps_in_backward="in bwd" in words or "in-backward" in words,
        offloads="offload" in words,
    )


def takes_logits_as_they_are(source: str, model: str, n_rows: int) -> bool:
    """Whether the loss of transformers' trainer of 2023 and 2024 copies no fp32 logits of all words
    but those it casts.

    All but the last token of one row are in one piece, and of several rows are copied. The first
    Qwen and Baichuan 2 bring code that copies them before they are cast (modeling_qwen.py,
    modeling_baichuan.py); transformers' own casts them first.
    """
    is_old = any(name in source for name in ("swift", "factory"))
    return is_old and (
        n_rows == 1 or re.search(r"qwen-|qwen1_|baichuan", model.lower()) is not None
    )


def trains_ends(words: str) -> bool:
    """Whether embeddings and head are trained beside adapters."""
    return re.search(r"\(emb\)|incl\w*\.? (?:the )?embedding|with embedding", words) is not None


def deepspeed_of_qwen(model: str, method: str, n_gpus: int) -> str:
    """What Qwen's scripts use of DeepSpeed, in a row's words: ZeRO-3 for full training
    (finetune_ds.sh) and, by its README, for adapters of 72B on four GPUs, ZeRO-2 for other adapters
    on several (finetune_lora_ds.sh) and for quantized models."""
    if method == "full" or (method == "lora" and "72b" in model):
        return " deepspeed zero3"
    return " deepspeed zero-2" if n_gpus > 1 or method == "qlora" else ""


def _of_qwen(words: str, method: str) -> OtherStack:
    """Its finetune.py, of October 2023: transformers' trainer, one row at a time, whose logits the
    loss takes without a copy.

    Alone, adapters of bf16 weights are fp32 (peft 0.5.0, tuners/lora.py: they are moved, not cast),
    but embeddings that are trained beside them bf16. DeepSpeed makes all of it 16 bits, what was
    upcast too (runtime/engine.py), and there is no autocast; what it has in fp32 stands in
    `plan_beside.py`. GPTQ's products unpack by plain operations (auto_gptq 0.5,
    qlinear_cuda_old.py).
    """
    has_deepspeed = method != "lora" or "deepspeed" in words
    plain = replace(
        _PLAIN,
        name="qwen",
        autocasts=not has_deepspeed,
        adapters_fp32=not has_deepspeed and not trains_ends(words),
        loss=UNCAST if has_deepspeed else FREED,
        is_flash=bool(re.search(r"flash|fa2", words)),
        layer_s=2.3e-3,
        adapted_layer_s=1.6e-3,
    )
    return replace(plain, keeps_unpacked=True, times=3.0) if method == "qlora" else plain


def _of_transformers(source: str, words: str, method: str) -> OtherStack:
    """The trainer of transformers, and scripts around it."""
    plain = _PLAIN
    if (
        "universal-llm-trainer" in source
    ):  # no autocast and a loss of its own, which takes logits as they are (src/models)
        return replace(
            plain,
            name="universal",
            autocasts=False,
            loss=UNCAST,
            adapters_fp32=method == "qlora",
        )
    if QWEN in source:
        return _of_qwen(words, method)
    upcasts = method == "qlora" and any(name in source for name in _PREPARES)
    if any(
        name in source for name in _OLDER
    ):  # 5.2 ms for a layer with adapters that is recomputed
        plain = replace(plain, layer_s=2.3e-3, adapted_layer_s=1.6e-3)
    if (
        method == "qlora"
        and any(name in source for name in _OLDER)
        and re.search(r"gptq|int4", words)
    ):
        plain = replace(
            plain, times=3.0, keeps_unpacked=True
        )  # 30 to 45 ms for 1e9 weights, NF4 10 to 15
    elif (
        "factory" in source or "swift" in source
    ):  # its page is of April 2024; bitsandbytes 0.41.3 by its own page
        plain = replace(plain, keeps_quantized_inputs=True)
    has_autocast = method != "full" and "no autocast" not in words
    stack = replace(
        plain,
        autocasts=has_autocast,
        upcasts_frozen=upcasts,
        is_flash=bool(re.search(r"flash|fa2", words)),
    )
    if "liger" in words or "fused ce" in words:
        stack = replace(stack, loss=TILED, fused_norms="liger" in words, fused_mlp="liger" in words)
    if re.search(r"eager attention|attn\w*[=: ]*eager", words):  # "eager" alone: not compiled
        stack = replace(stack, is_flash=False, is_eager=True)
    if "master" in words or "fp32 states" in words or ("deepspeed" in words and method == "full"):
        stack = replace(stack, has_master_weights=True, autocasts=True)
    return stack


# ---- what a published figure of memory is of ----

GIB = 2**30


def meter_of(words: str) -> tuple[str, float]:
    """(allocated, reserved or nvidia-smi; bytes of the unit), from the first words of the notes."""
    first = words.split(";")[0]
    meter = "allocated"
    if re.search(r"nvidia-smi|nvml|device memory", first) and "max_memory_allocated" not in words:
        meter = "nvidia-smi"
    elif "reserved" in first or "torch reserved" in words:
        meter = "reserved"
    return meter, 1e9 if re.match(r"\s*gb\b", words) else float(GIB)


def meter_of_source(source: str, words: str) -> tuple[str, float]:
    """`meter_of`, where a source's own code or tables tell what its pages don't.

    Qwen's are of nvidia-smi, in 1,000 MiB: in any other unit its 76.8G of full training
    (recipes/finetune/deepspeed) were less than bf16 weights, gradients, moments and the update
    have, or the 162.0G of two A100 more than there is.
    """
    meter, unit = meter_of(words)
    is_said = re.search(
        r"nvidia-smi|nvml|device memory|max_memory|allocated|reserved|active", words.split(";")[0]
    )
    if (
        "swift" in source and not is_said
    ):  # torch.cuda.max_memory_reserved (swift/trainers/trainers.py)
        meter = "reserved"
    if QWEN in source and not is_said:
        meter, unit = "nvidia-smi", 1000.0 * 2**20
    if (
        "universal-llm-trainer" in source
    ):  # torch.cuda.memory_reserved() / 1E9 (src/trainer/trainer.py)
        unit = 1e9
    return meter, unit


# ---- copies, buffers and things that are kept too long, beside what a recipe can say ----

# gradients in one of the two buckets that ZeRO-2 fills and sends in turns (Qwen's
# finetune/ds_config_zero2.json)
BUCKET = 2e8
# weights that ZeRO-3 has whole at a time, on one GPU as well (`stage3_max_live_parameters`)
LIVE = 1e9
SUB_GROUP = 1e9  # weights that ZeRO-3 updates at once (its ds_config_zero3.json)


def beside_bytes(source: str, words: str, case: Case) -> float:
    """Bytes of one GPU at the peak; `source` and `words` in small letters."""
    shape, recipe = case.shape, case.recipe
    if QWEN in source:
        return _beside_qwen(case)
    n_tokens = case.largest.n_rows * case.largest.tokens
    if "gptq-int8" in words:  # twice the bits of what a recipe calls quantized
        return 0.5 * shape.n_packed
    if "litgpt" in source or "lit-gpt" in source:
        return _of_litgpt(source, words, case, n_tokens)
    if saves_products(source, words):
        # of a recomputed layer every second product stays (the first, third ...: q, v, gate, down),
        # and what attention gives (torchtitan/models/llama/parallelize_llama.py)
        of_token = 2 * case.width[0] + case.width[1] + shape.ffn + shape.hidden
        return float(shape.n_layers * n_tokens * recipe.compute_bytes * of_token)
    return 0.0


def saves_products(source: str, words: str) -> bool:
    """Whether layers are recomputed but for every second product: torchtitan's `selective op`."""
    return "torchtitan" in source and "selective op" in words


def _beside_qwen(case: Case) -> float:
    """Its adapters are fp32 on one GPU (peft 0.5.0, tuners/lora.py: they are moved, not cast);
    DeepSpeed casts all to 16 bits.

    DeepSpeed 0.12 then has a master copy and both moments in fp32, ten bytes more than a recipe in
    16 bits counts, and on the way to the update the gradients once more in both precisions: of all
    adapters, or of a part of the weights (runtime/zero/stage_1_and_2.py and stage3.py, `step`).
    """
    shape, recipe, adapters = case.shape, case.recipe, case.adapters
    assert isinstance(recipe.stack, OtherStack)
    if recipe.stack.adapters_fp32 and adapters is not None:  # which the recipe has counted
        return 0.0
    if adapters is None:
        own = shape.n_parameters / recipe.n_gpus
        foreach = 2.0 * own  # that the recipe's optimizer has, and DeepSpeed's has not
        gathered = (
            2.0 * min(own, LIVE) if recipe.n_gpus == 1 else 0.0
        )  # of several GPUs the recipe has it
        return 8.0 * own - foreach + 6.0 * min(own, SUB_GROUP) + gathered
    if (
        not recipe.has_autocast and recipe.sharding != FSDP
    ):  # ZeRO-2: what is fp32 is divided, and the recipe's moments not
        return adapters.n_adapter * (18.0 / recipe.n_gpus - 4.0) + 2 * 2 * BUCKET
    return 8.0 * adapters.n_adapter / recipe.n_gpus


def _of_litgpt(source: str, words: str, case: Case, n_tokens: int) -> float:
    """Its head is never the embedding. Queries, keys and values are one product, of which the
    values are a view where heads are not grouped, so that all of it stays (litgpt/model.py).
    Quantized, see `_of_lightning_qlora`.
    """
    shape, recipe, of_token = case.shape, case.recipe, 0.0
    if (
        shape.model_type != "gpt_neox" and shape.n_heads == shape.n_kv_heads
    ):  # where the recipe has it not
        of_token = recipe.compute_bytes * 2.0 * shape.n_heads * shape.head_dim
    found = shape.n_layers * n_tokens * of_token
    if recipe.method == "qlora":
        is_cut = re.search(r"config_hub|cut at", f"{source} {words}") is not None
        return found + _of_lightning_qlora("nf4-dq" in words, is_cut, case, n_tokens)
    return found + (recipe.compute_bytes * shape.vocab * shape.hidden if shape.is_tied else 0.0)


def _of_lightning_qlora(is_double: bool, is_cut: bool, case: Case, n_tokens: int) -> float:
    """Lightning quantizes the head as well, out of fp16, and leaves the scales of blocks in fp32
    but for `-dq` (fabric/plugins/precision/bitsandbytes.py). So the head is unpacked in fp16 and
    cast when all layers' inputs are there.

    What a quantized layer reads hangs on its node of the graph (bitsandbytes 0.42, `MatMul4Bit`),
    also where its adapter keeps what dropout has left of it. The node lives until the variable
    `loss` is set again, after the next forward pass (litgpt/finetune/lora.py): where lengths are
    cut, one as long came before.
    """
    shape, recipe, adapters = case.shape, case.recipe, case.adapters
    assert adapters is not None
    c, head = recipe.compute_bytes, float(shape.vocab * shape.hidden)
    of_weight = NF4_BYTES if is_double else 0.5 + 4 / 64
    found = shape.n_packed * (of_weight - NF4_BYTES) + head * (
        of_weight - (0 if shape.is_tied else c) + 2 + c
    )
    whole, less = (
        sum(saved_per_token(replace(case, recipe=replace(recipe, stack=stack))))
        for stack in (replace(recipe.stack, keeps_quantized_inputs=x) for x in (True, False))
    )
    is_dropped = recipe.lora_dropout > 0 and any(
        w.part == "mlp" and w.n_in == shape.ffn for w, _ in adapters.adapted
    )
    again = c * shape.ffn if is_dropped else 0.0
    return found + shape.n_layers * n_tokens * (again + (whole - less + again if is_cut else 0.0))
