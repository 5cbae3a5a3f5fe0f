"""How the code behind a row of published measurements computes: what its source and its notes say
of kernels, loss and dtypes.

Each is read from the source's own code or page; none is chosen by how far off a row is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from farthing.planner.recipe import CHUNKED, FREED, FUSED, TILED, UNCAST, WHOLE, Stack

# their scripts prepare quantized models for training: what is not quantized becomes fp32
_OLDER = ("swift", "factory", "huggingface/blog", "ftune")
_PREPARES = (
    "factory",
    "huggingface/blog",
    "ftune",
    "unslothai",
)  # the last: its Hugging Face column is TRL's SFTTrainer
QWEN = "qwenlm/qwen"
_PLAIN = Stack(
    "hf", has_master_weights=False, has_autocast=False, loss=WHOLE, keeps_adapters_whole=False
)


def stack_of(source: str, words: str, method: str) -> Stack:
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
            has_autocast=is_mixed,
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
        return Stack(
            "nemo",
            has_autocast=False,
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
            has_autocast="autocast" in words,
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


def _of_unsloth() -> Stack:
    """Its checkpoints are in the host's memory (unsloth/kernels and its notes on long contexts,
    April 2024).
    """
    return Stack(
        "unsloth",
        has_autocast=True,
        loss=TILED,
        fused_norms=True,
        fused_mlp=True,
        is_flash=True,
        offloads_activations=True,
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


def _of_torchtune(source: str, words: str) -> Stack:
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
        frees_gradients="in bwd" in words or "in-backward" in words,
        offloads_activations="offload" in words,
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


def _of_qwen(words: str, method: str) -> Stack:
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
        has_autocast=not has_deepspeed,
        adapters_fp32=not has_deepspeed and not trains_ends(words),
        loss=UNCAST if has_deepspeed else FREED,
        is_flash=bool(re.search(r"flash|fa2", words)),
        host_s_per_layer=2.3e-3,
        host_s_per_adapted_layer=1.6e-3,
    )
    return replace(plain, keeps_unpacked=True, unpacking=3.0) if method == "qlora" else plain


def _of_transformers(source: str, words: str, method: str) -> Stack:
    """The trainer of transformers, and scripts around it."""
    plain = _PLAIN
    if (
        "universal-llm-trainer" in source
    ):  # no autocast and a loss of its own, which takes logits as they are (src/models)
        return replace(
            plain,
            name="universal",
            has_autocast=False,
            loss=UNCAST,
            adapters_fp32=method == "qlora",
        )
    if QWEN in source:
        return _of_qwen(words, method)
    upcasts = method == "qlora" and any(name in source for name in _PREPARES)
    if any(
        name in source for name in _OLDER
    ):  # 5.2 ms for a layer with adapters that is recomputed
        plain = replace(plain, host_s_per_layer=2.3e-3, host_s_per_adapted_layer=1.6e-3)
    if (
        method == "qlora"
        and any(name in source for name in _OLDER)
        and re.search(r"gptq|int4", words)
    ):
        plain = replace(
            plain, unpacking=3.0, keeps_unpacked=True
        )  # 30 to 45 ms for 1e9 weights, NF4 10 to 15
    elif (
        "factory" in source or "swift" in source
    ):  # its page is of April 2024; bitsandbytes 0.41.3 by its own page
        plain = replace(plain, keeps_quantized_inputs=True)
    has_autocast = method != "full" and "no autocast" not in words
    stack = replace(
        plain,
        has_autocast=has_autocast,
        upcasts_frozen=upcasts,
        is_flash=bool(re.search(r"flash|fa2", words)),
    )
    if "liger" in words or "fused ce" in words:
        stack = replace(stack, loss=TILED, fused_norms="liger" in words, fused_mlp="liger" in words)
    if re.search(r"\beager\b|no flash|without flash|flash[- ]attn?[=: ]*(?:false|no|off)", words):
        stack = replace(stack, is_flash=False, is_eager=True)
    if "master" in words or "fp32 states" in words or ("deepspeed" in words and method == "full"):
        stack = replace(stack, has_master_weights=True, has_autocast=True)
    return stack
