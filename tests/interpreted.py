"""Liger's own kernels on a CPU: `python tests/interpreted.py llama gemma2 ...` holds small models
against plain ones.

Triton's interpreter runs the kernels; what it has no answer for is supplied here: two functions of
the GPU's library, and numbers as arguments. A process of its own, because Triton decides when it is
imported. Prints one JSON object: for each family what was replaced, the difference of the loss, and
the largest relative difference of a gradient. With `+lora` after a family its layers have adapters,
and attention takes documents laid end to end.
"""

import copy
import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import liger_kernel.transformers  # noqa: F401
import numpy as np
import torch
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention import go_packed, packed_logits
from farthing.model.documents import packed_batch
from farthing.model.liger import patch
from farthing.model.lora_kernels import use_low_rank

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = [7, 1, 10]


def small_model(kind: str, *, with_adapter: bool):
    """With norms whose weights are not 1 (or 0), so that an offset shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL)).train()
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    model.config.use_cache = False
    if with_adapter:
        model = add_adapter(model, Adapter(r=4), "causal-lm", 0).train()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        use_low_rank(model)
        go_packed(model)
    return model


def loss_of(model, *, is_packed: bool) -> torch.Tensor:
    """Of 18 tokens, as two rows or as three documents."""
    ids = np.random.default_rng(0).integers(3, 96, (1, sum(LENGTHS)))
    if not is_packed:
        rows = torch.from_numpy(ids).reshape(2, -1)
        loss = model(input_ids=rows, labels=rows).loss
        return loss
    places = np.concatenate([np.arange(n) for n in LENGTHS])[None]
    batch = packed_batch({"input_ids": ids, "position_ids": places, "lengths": np.array(LENGTHS)})
    logits = packed_logits(model, batch)[0]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(ids[0, 1:]))


def compare(kind: str, *, with_adapter: bool) -> dict[str, Any]:
    """One family, patched and plain."""
    plain = small_model(kind, with_adapter=with_adapter)
    model = copy.deepcopy(plain)
    counts = patch(model)
    losses = [loss_of(one, is_packed=with_adapter) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    errors = [
        float((found.grad - p.grad).norm() / p.grad.norm().clamp_min(1e-6))
        for p, found in zip(plain.parameters(), model.parameters(), strict=True)
        if p.grad is not None
    ]
    return {
        "replaced": counts,
        "loss": float((losses[0] - losses[1]).abs().detach()),
        "gradient": max(errors),
    }


def supply_what_is_missing():
    """Numbers become fp32 scalars, as a GPU's kernels get them; rsqrt and tanh in Triton's own
    words.
    """
    plain = interpreter._implicit_cvt

    def with_numbers(value):
        if not isinstance(value, float):
            return plain(value)
        return tl.tensor(
            interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32
        )

    interpreter._implicit_cvt = with_numbers
    sys.modules["liger_kernel.ops.rms_norm"].rsqrt = lambda x: tl.rsqrt(x)  # type: ignore[attr-defined]
    sys.modules["liger_kernel.ops.geglu"].tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1  # type: ignore[attr-defined]


if __name__ == "__main__":
    supply_what_is_missing()
    asked = [name.partition("+") for name in sys.argv[1:]]
    print(
        json.dumps(
            {
                kind + plus + more: compare(kind, with_adapter=bool(more))
                for kind, plus, more in asked
            }
        )
    )
