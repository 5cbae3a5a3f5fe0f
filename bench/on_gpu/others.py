"""The rows of Hugging Face's Trainer and of TRL on the same random weights, tokens and steps.

"hf" is the Trainer as people run it: 8 examples at once, as they come, padded to the longest.
"trl-tuned" has Liger, fused AdamW and flash attention, and packs; two settings are tried and the
quicker is kept. Where nothing fits, the same with checkpointing. The trainers are those of
bench/compare.py (`peers.hugging`); only where the weights come from is replaced. torch.compile is
not tried: it would take a minute a row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from on_gpu.clocks import clean
from on_gpu.ours import Emit, Row, failing, row_of
from on_gpu.work import LORA_R, SEED, SHAPES, TARGETS, WARM_UP, facts_of
from peers import hugging, models
from peers.assignment import Assignment
from peers.clock import Clock

NEEDS = ("transformers", "accelerate", "datasets", "peft")


def missing(who: str) -> list[str]:
    """Packages that a contestant needs and that are not installed."""
    needs = (*NEEDS, "trl") if who.startswith("trl") else NEEDS
    return [name for name in needs if importlib.util.find_spec(name) is None]


def candidates(who: str, batch: int, checkpointing: bool) -> Iterator[dict[str, Any]]:
    """Settings to try, the quickest to be kept."""
    if who == "hf":
        yield {"checkpointing": checkpointing}
        return
    for n_rows in (batch, 2):  # all of a step at once, or a few
        workers = 2 if torch.cuda.is_available() else 0
        yield {"checkpointing": checkpointing, "rows": n_rows, "workers": workers}


def rows(who: str, shape: str, work: Path, emit: Emit) -> None:
    """Every method, on lengths that vary."""
    lengths = SHAPES[shape]["lengths"][0]
    for method in SHAPES[shape]["methods"]:
        what = {"kind": "row", "who": who, "shape": shape, "method": method, "lengths": lengths}
        with failing(what, emit):
            if lacking := missing(who):
                raise ModuleNotFoundError(f"{', '.join(lacking)} not installed")
            assignment = assignment_of(who, shape, method, work / f"{shape}-{lengths}")
            found, why = list[Row](), list[Row]()
            for checkpointing in (False, True):
                tried = [*candidates(who, assignment.batch, checkpointing)]
                for settings in [] if found else tried:
                    with failing({}, why.append):
                        figures = trained(replace(assignment, settings=settings))
                        found.append({**figures, "settings": settings})
            if not found:
                raise RuntimeError(why[-1]["failed"])
            emit({**what, **max(found, key=lambda row: row["tokens_per_s"])})


def assignment_of(who: str, shape: str, method: str, folder: Path) -> Assignment:
    """What a peer has to do. Raises `MemoryError` where it does not fit this GPU."""
    facts = facts_of(folder, method)
    return Assignment(
        contestant=who,
        folder=str(folder),
        out=str(folder / f"{who}-{method}"),
        task=SHAPES[shape]["task"],
        method=method,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        order=facts["order"],
        seed=SEED,
        max_length=facts["longest"],
        max_target_length=facts["longest"],
        learning_rate=1e-5,
        targets=TARGETS,
        lora_r=LORA_R,
    )


def trained(assignment: Assignment) -> Row:
    """Train by the contestant's trainer, all steps, and look at the clock."""
    clean()
    hugging.quieten()
    weights = RandomWeights(models.auto_class(assignment.task), assignment.contestant)
    clock = Clock(torch.cuda.is_available())
    with mock.patch.object(models, "auto_class", return_value=weights):
        if assignment.contestant.startswith("trl"):
            import trl

            with mock.patch.object(trl, "SFTTrainer", with_random_weights(trl.SFTTrainer, weights)):
                trainer = hugging.sft_trainer(assignment, clock)
        else:
            trainer = hugging.trainer(assignment, clock)
        trainer.train()
    return row_of(clock.facts(), WARM_UP)


class RandomWeights:
    """In place of the class that would read weights: they are drawn where they will be used."""

    def __init__(self, auto: Any, who: str) -> None:
        self._auto, self._who = auto, who

    def from_pretrained(self, folder: str, *, dtype: Any, attn_implementation: str) -> Any:
        """A model by the configuration in `folder`; for who is tuned with flash attention where it
        has any.
        """
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
        if has_flash and self._who.endswith("-tuned") and config.model_type != "t5":
            attn_implementation = "flash_attention_2"
        torch.manual_seed(0)
        with torch.device(models.device()):
            return self._auto.from_config(
                config,
                dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
                attn_implementation=attn_implementation,
            )


def with_random_weights(base: Any, weights: RandomWeights) -> Any:
    """The SFT trainer, given a model instead of the name of a folder."""
    import transformers

    class Given(base):  # type: ignore[misc]
        def __init__(self, model: str, args: Any, **others: Any) -> None:
            how, args.model_init_kwargs = args.model_init_kwargs, None
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            drawn = weights.from_pretrained(model, **how)
            drawn.config.use_cache = False
            super().__init__(model=drawn, args=args, processing_class=tokenizer, **others)

    return Given
