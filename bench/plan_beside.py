"""What the code behind a row has in memory beside what a recipe can say: copies, buffers and things
that are kept too long.

Each is counted from the source's own code and the libraries of its day; none is fitted. What a
recipe can say stands in
`plan_stacks.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from farthing.data.lengths import Largest
from farthing.models.shapes import Shape
from farthing.models.weights import Adapters
from farthing.planner.activations import saved_per_token
from farthing.planner.memory import NF4_BYTES
from farthing.planner.recipe import FSDP, Recipe
from plan_stacks import QWEN

# gradients in one of the two buckets that ZeRO-2 fills and sends in turns (Qwen's
# finetune/ds_config_zero2.json)
BUCKET = 2e8
# weights that ZeRO-3 has whole at a time, on one GPU as well (`stage3_max_live_parameters`)
LIVE = 1e9
SUB_GROUP = 1e9  # weights that ZeRO-3 updates at once (its ds_config_zero3.json)


def beside_bytes(
    source: str,
    words: str,
    shape: Shape,
    recipe: Recipe,
    adapters: Adapters | None,
    largest: Largest,
) -> float:
    """Bytes of one GPU at the peak; `source` and `words` in small letters."""
    if QWEN in source:
        return _of_qwen(shape, recipe, adapters)
    n_tokens = largest.n_rows * largest.tokens
    if "gptq-int8" in words:  # twice the bits of what a recipe calls quantized
        return 0.5 * shape.n_packed
    if "litgpt" in source or "lit-gpt" in source:
        return _of_litgpt(source, words, shape, recipe, adapters, n_tokens)
    if saves_products(source, words):
        # of a recomputed layer every second product stays (the first, third ...: q, v, gate, down),
        # and what attention gives (torchtitan/models/llama/parallelize_llama.py)
        q, k = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        return float(
            shape.n_layers
            * n_tokens
            * recipe.compute_bytes
            * (2 * q + k + shape.ffn + shape.hidden)
        )
    return 0.0


def saves_products(source: str, words: str) -> bool:
    """Whether layers are recomputed but for every second product: torchtitan's `selective op`."""
    return "torchtitan" in source and "selective op" in words


def _of_qwen(shape: Shape, recipe: Recipe, adapters: Adapters | None) -> float:
    """Its adapters are fp32 on one GPU (peft 0.5.0, tuners/lora.py: they are moved, not cast);
    DeepSpeed casts all to 16 bits.

    DeepSpeed 0.12 then has a master copy and both moments in fp32, ten bytes more than a recipe in
    16 bits counts, and on the way to the update the gradients once more in both precisions: of all
    adapters, or of a part of the weights (runtime/zero/stage_1_and_2.py and stage3.py, `step`).
    """
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
        not recipe.stack.has_autocast and recipe.sharding != FSDP
    ):  # ZeRO-2: what is fp32 is divided, and the recipe's moments not
        return adapters.n_adapter * (18.0 / recipe.n_gpus - 4.0) + 2 * 2 * BUCKET
    return 8.0 * adapters.n_adapter / recipe.n_gpus


def _of_litgpt(
    source: str, words: str, shape: Shape, recipe: Recipe, adapters: Adapters | None, n_tokens: int
) -> float:
    """Its head is never the embedding. Queries, keys and values are one product, of which the
    values are a view where heads are not grouped, so that all of it stays (litgpt/model.py).
    Quantized, see `_of_lightning_qlora`.
    """
    of_token = 0.0
    if (
        shape.model_type != "gpt_neox" and shape.n_heads == shape.n_kv_heads
    ):  # where the recipe has it not
        of_token = recipe.compute_bytes * 2.0 * shape.n_heads * shape.head_dim
    found = shape.n_layers * n_tokens * of_token
    if adapters is not None and recipe.method == "qlora":
        is_cut = re.search(r"config_hub|cut at", f"{source} {words}") is not None
        return found + _of_lightning_qlora(
            "nf4-dq" in words, is_cut, shape, recipe, adapters, n_tokens
        )
    return found + (recipe.compute_bytes * shape.vocab * shape.hidden if shape.is_tied else 0.0)


def _of_lightning_qlora(
    is_double: bool, is_cut: bool, shape: Shape, recipe: Recipe, adapters: Adapters, n_tokens: int
) -> float:
    """Lightning quantizes the head as well, out of fp16, and leaves the scales of blocks in fp32
    but for `-dq` (fabric/plugins/precision/bitsandbytes.py). So the head is unpacked in fp16 and
    cast when all layers' inputs are there.

    What a quantized layer reads hangs on its node of the graph (bitsandbytes 0.42, `MatMul4Bit`),
    also where its adapter keeps what dropout has left of it. The node lives until the variable
    `loss` is set again, after the next forward pass (litgpt/finetune/lora.py): where lengths are
    cut, one as long came before.
    """
    c, head = recipe.compute_bytes, float(shape.vocab * shape.hidden)
    of_weight = NF4_BYTES if is_double else 0.5 + 4 / 64
    found = shape.n_packed * (of_weight - NF4_BYTES) + head * (
        of_weight - (0 if shape.is_tied else c) + 2 + c
    )
    whole, less = (
        sum(
            saved_per_token(
                shape,
                replace(recipe, stack=replace(recipe.stack, keeps_quantized_inputs=keeps)),
                adapters,
            )
        )
        for keeps in (True, False)
    )
    is_dropped = recipe.lora_dropout > 0 and any(
        w.part == "mlp" and w.n_in == shape.ffn for w, _ in adapters.adapted
    )
    again = c * shape.ffn if is_dropped else 0.0
    return found + shape.n_layers * n_tokens * (again + (whole - less + again if is_cut else 0.0))
