"""What a step costs with adapters on the top layers only, by what is done about the frozen layers,
in CPU-seconds.

    OMP_NUM_THREADS=1 python bench/prefix.py [--layers 8] [--trained 2] [--share 1.0] [--bf16]

Each variant in turn, several rounds, the least of each; the ratio is the first one's time over it.
The first pushes gradients down to the embeddings and recomputes every layer, as trainers do that
call `enable_input_require_grads`. The last begins at the first trained layer with rows read from a
cache on the disk. Random weights, two documents.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch

from farthing.data.packing import collate_packed
from farthing.data.token_set import TokenSet
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.attention import go_packed
from farthing.model.documents import packed_batch
from farthing.model.frozen_cache import open_frozen_cache
from farthing.model.frozen_layers import find_frozen_layers
from farthing.model.hardware import Numerics
from farthing.model.head import language_model_loss
from farthing.model.loss import POSITIONS, TARGETS, find_labelled
from head import compare, small_model


def two_documents(args: argparse.Namespace) -> TokenSet:
    """`--tokens` together, a share of them labelled."""
    draw = np.random.default_rng(0)
    return TokenSet(
        folder=Path(),
        facts={"label_names": [], "sources": []},
        ids=draw.integers(1, args.words, args.tokens).astype(np.int32),
        targets=(draw.random(args.tokens) < args.share).astype(np.uint8),
        offsets=np.array([0, args.tokens // 2, args.tokens]),
        lines=np.arange(2),
        groups=np.arange(2, dtype=np.uint64),
        labels=None,
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=16_000)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--trained", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    top = list(range(args.layers - args.trained, args.layers))
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        r=16, target_modules=linear, layers_to_transform=top, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(small_model(args), config)
    for weight in model.parameters():
        if args.bf16 and not weight.requires_grad:
            weight.data = weight.data.bfloat16()
    go_packed(model)
    frozen = find_frozen_layers(model, "causal-lm")
    assert not isinstance(frozen, str), frozen
    tokens, examples = two_documents(args), np.arange(2)
    numerics = Numerics(torch.device("cpu"), torch.bfloat16 if args.bf16 else None)
    with tempfile.TemporaryDirectory() as folder:
        cache = open_frozen_cache(
            frozen,
            tokens,
            examples,
            Path(folder),
            numerics=numerics,
            micro_batch_tokens=args.tokens,
        )
    assert not isinstance(cache, str), cache
    batch = packed_batch(collate_packed(tokens, examples, "causal-lm"))
    labelled = find_labelled(
        batch["labels"], predicts_next=True, position_ids=batch["position_ids"]
    )
    batch |= {POSITIONS: labelled.positions, TARGETS: labelled.targets}

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with numerics.autocasting():
            loss = language_model_loss(model, batch, "causal-lm")
        (loss / args.tokens).backward()

    def forced(checkpoint_every: int) -> Callable[[], None]:
        def step() -> None:
            hook = model.get_input_embeddings().register_forward_hook(
                lambda _, __, y: y.requires_grad_(True)
            )
            checkpoint_layers(model, checkpoint_every)
            try:
                run()
            finally:
                hook.remove()
                checkpoint_layers(model, 0)

        return step

    def resumed() -> None:
        with frozen.resume(cache.rows(examples)):
            run()

    variants: dict[str, Callable[[], Any]] = {
        "forced gradients, checkpointed": forced(1),
        "forced gradients": forced(0),
        "backward skipped": run,
        "resumed": resumed,
        "the frozen layers alone": lambda: frozen.hidden_states(batch),
    }
    size = (
        f"V {args.words} h {args.hidden}, LoRA on {args.trained} of {args.layers} layers,"
        f" {args.tokens} tokens"
    )
    compare(variants, args.rounds, f"{size}, {args.share:.0%} labelled, {numerics.name}:")


if __name__ == "__main__":
    main()
