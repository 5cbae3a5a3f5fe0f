"""What the head and the LoRA path cost, against the plain head and peft's path, in CPU-seconds of
one thread.

    OMP_NUM_THREADS=1 python bench/head.py head [--words 16000] [--hidden 384] [--tiles 64,256,1024]
    OMP_NUM_THREADS=1 python bench/head.py step [--words 16000]
    OMP_NUM_THREADS=1 python bench/head.py lora

Each variant in turn, several rounds, the least of each; the ratio is the plain one's time over
ours. Weights and states are random, 30 % of the positions are labelled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from farthing.model.head import How, default_tile_tokens, head_loss, language_model_loss
from farthing.model.loss import Labelled, summed_loss

SHARE = 0.3


def cpu_s(function: Callable[[], None]) -> float:
    """CPU-seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def compare(variants: dict[str, Callable[[], None]], rounds: int, title: str) -> None:
    """Print the least time of each variant, and how many times the first takes it."""
    least = dict.fromkeys(variants, float("inf"))
    for number in range(rounds + 1):  # the first round warms up
        for name, function in variants.items():
            seconds = cpu_s(function)
            if number:
                least[name] = min(least[name], seconds)
    first = next(iter(least.values()))
    print(
        title,
        *(f"{name} {seconds:.3f} s ({first / seconds:.2f}x)" for name, seconds in least.items()),
        sep="  ",
    )


def head(args: argparse.Namespace) -> None:
    """The head alone: all positions and whole logits, labelled ones by tile, and the labelled ones
    undivided.
    """
    n_all, h, n_words = args.tokens, args.hidden, args.words
    picked = torch.randperm(n_all)[: int(SHARE * n_all)].sort()[0]
    labelled = Labelled(picked, torch.randint(0, n_words, (len(picked),)))
    for is_trained in (True, False):
        for is_bf16 in (False, True):
            own = default_tile_tokens(n_words, "cpu", h if is_trained else 0)
            tiles = [int(tile) for tile in args.tiles.split(",")] if args.tiles else [own]
            kept = torch.bfloat16 if is_bf16 and not is_trained else torch.float32
            hidden = torch.randn(n_all, h, requires_grad=True)
            weight = (torch.randn(n_words, h, dtype=kept) / h**0.5).requires_grad_(is_trained)

            def run(
                loss: Callable[[], Tensor],
                is_bf16: bool = is_bf16,
                leaves: tuple[Tensor, ...] = (hidden, weight),
            ) -> None:
                for one in leaves:
                    one.grad = None
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
                    value = loss()
                (value / n_all).backward()

            def plain(hidden: Tensor = hidden, weight: Tensor = weight) -> Tensor:
                scores = nn.functional.linear(hidden, weight)[labelled.positions]
                return nn.functional.cross_entropy(
                    scores.float(), labelled.targets, reduction="sum"
                )

            def gathered(hidden: Tensor = hidden, weight: Tensor = weight) -> Tensor:
                scores = nn.functional.linear(hidden[labelled.positions], weight)
                return nn.functional.cross_entropy(
                    scores.float(), labelled.targets, reduction="sum"
                )

            def ours(tile: int, hidden: Tensor = hidden, weight: Tensor = weight) -> Tensor:
                return head_loss(hidden, weight, None, labelled, How(tile))

            variants: dict[str, Callable[[], None]] = {
                "plain": lambda run=run, plain=plain: run(plain),
                "labelled, undivided": lambda run=run, gathered=gathered: run(gathered),
            }
            for tile in tiles:
                variants[f"tile {tile}"] = lambda run=run, ours=ours, tile=tile: run(
                    lambda: ours(tile)
                )
            kind = f"{'trained' if is_trained else 'frozen'} {'bf16' if is_bf16 else 'fp32'}"
            compare(variants, args.rounds, f"V {n_words} h {h} n {len(picked)} {kind}:")


def small_model(args: argparse.Namespace) -> Any:
    """A Llama of `--layers` layers of width `--hidden`."""
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=args.words,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def batch_of(args: argparse.Namespace) -> dict[str, Tensor]:
    """Two full rows."""
    ids = torch.randint(1, args.words, (2, args.tokens // 2))
    labels = ids.masked_fill(torch.rand(ids.shape) > SHARE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(args: argparse.Namespace) -> None:
    """Forward and backward of a whole small model, all weights trained."""
    model, batch = small_model(args), batch_of(args)
    for is_bf16 in (False, True):

        def run(loss: Callable[[], Tensor], is_bf16: bool = is_bf16) -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
                value = loss()
            (value / args.tokens).backward()

        variants: dict[str, Callable[[], None]] = {
            "plain": lambda run=run: run(lambda: summed_loss(model, batch, "causal-lm")[0]),
            "head": lambda run=run: run(lambda: language_model_loss(model, batch, "causal-lm")),
        }
        size = f"V {args.words} h {args.hidden} L {args.layers} {args.tokens} tokens"
        compare(variants, args.rounds, f"step {size} {'bf16' if is_bf16 else 'fp32'}:")


def lora(args: argparse.Namespace) -> None:
    """Forward and backward with LoRA on all linear layers: peft's path and ours, both with the
    labelled-only head.
    """
    import peft

    from farthing.model.lora_kernels import leave_low_rank, use_low_rank

    batch = batch_of(args)
    for is_bf16 in (False, True):
        model = peft.get_peft_model(
            small_model(args),
            peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        for weight in model.parameters():
            if is_bf16 and not weight.requires_grad:
                weight.data = weight.data.bfloat16()

        def run(
            swap: Callable[[Any], Any], loss: Any, is_bf16: bool = is_bf16, model: Any = model
        ) -> None:
            swap(model)
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
                value = loss(model, batch, "causal-lm")
            (value / args.tokens).backward()

        variants: dict[str, Callable[[], None]] = {
            "peft, plain head": lambda run=run: run(leave_low_rank, lambda *a: summed_loss(*a)[0]),
            "peft, our head": lambda run=run: run(leave_low_rank, language_model_loss),
            "ours": lambda run=run: run(use_low_rank, language_model_loss),
        }
        size = f"V {args.words} h {args.hidden} L {args.layers} {args.tokens} tokens"
        compare(variants, args.rounds, f"lora {size} {'bf16' if is_bf16 else 'fp32'}:")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["head", "step", "lora"])
    parser.add_argument("--words", type=int, default=16_000)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiles", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    {"head": head, "step": step, "lora": lora}[args.what](args)


if __name__ == "__main__":
    main()
