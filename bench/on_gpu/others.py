"""The rows of Hugging Face's Trainer and of TRL on the same random weights, tokens and steps.

"hf" is the Trainer as people run it: 8 examples at once, as they come, padded to the longest.
"trl-tuned" has Liger, fused AdamW and flash attention, and packs; two settings are tried and the
quicker is kept. Where nothing fits, the same with checkpointing. The
trainers are those of bench/compare.py (`peers.hugging`); only where the weights come from is
replaced. torch.compile is not tried: it would take a minute a row. Needs nothing that farthing
needs. Never run on a GPU so far.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from on_gpu.clocks import Busy, clean
from on_gpu.ours import Emit, HasTime, row_of
from peers import hugging, models
from peers.assignment import Assignment
from peers.clock import Clock

NEEDS = {
    "hf": ("transformers", "accelerate", "datasets", "peft"),
    "trl-tuned": ("transformers", "accelerate", "datasets", "peft", "trl"),
}


class Watching(Clock):
    """A clock that also says from when on the device is watched."""

    def __init__(self, busy: Busy, n_warm: int) -> None:
        super().__init__(torch.cuda.is_available())
        self._busy, self._n_warm = busy, n_warm

    def _mark(self) -> None:
        super()._mark()
        self._busy.is_on = self.n_steps >= self._n_warm


def missing(who: str) -> list[str]:
    """Packages that a contestant needs and that are not installed."""
    return [name for name in NEEDS[who] if importlib.util.find_spec(name) is None]


def candidates(who: str, batch: int) -> Iterator[dict[str, Any]]:
    """Settings to try, each pair's quicker one to be kept; the later pairs recompute activations."""  # noqa: E501
    loader = {"workers": 2} if torch.cuda.is_available() else {}
    for checkpointing in (False, True):
        if who == "hf":
            yield {"checkpointing": checkpointing, "micro_batch": hugging.DEFAULT_MICRO_BATCH}
        else:
            for n_rows in (batch, 2):  # all of a step at once, or a few
                yield {**loader, "checkpointing": checkpointing, "packing": True, "rows": n_rows}


def device_bytes() -> int | None:
    """Memory of the GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def rows(
    assignments: list[tuple[dict[str, Any], Assignment, int]],
    room: int | None,
    n_warm: int,
    emit: Emit,
    has_time: HasTime,
) -> None:
    """(what it is, assignment, bytes that it takes at the least) one after the other, on a device
    of `room` bytes.
    """
    for what, assignment, least_bytes in assignments:
        who = assignment.contestant
        name = f"{who} {what['shape']} {what['method']} {what['lengths']}"
        if lacking := missing(who):
            emit({**what, "failed": f"{', '.join(lacking)} not installed"})
            continue
        if room is not None and least_bytes > room:
            emit(
                {
                    **what,
                    "failed": (
                        f"{least_bytes / 2**30:.0f} GiB of weights, gradients and moments do"
                        " not fit"
                    ),
                }
            )
            continue
        best: dict[str, Any] | None = None
        why = ""
        for settings in candidates(who, assignment.batch):
            if best is not None and settings["checkpointing"]:
                break
            if not has_time(name):
                break
            found, error = tried(replace(assignment, settings=settings), n_warm)
            why = error or why
            if found is not None and (best is None or found["tokens_per_s"] > best["tokens_per_s"]):
                best = found | {"settings": settings}
        if best is not None:
            emit({**what, **best})
        elif why:
            emit({**what, "failed": why})


def tried(assignment: Assignment, n_warm: int) -> tuple[dict[str, Any] | None, str]:
    """(figures, "") of a whole training, or (None, why it failed)."""
    clean()
    try:
        return trained(assignment, n_warm), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:200]}"
    finally:
        clean()


def trained(assignment: Assignment, n_warm: int) -> dict[str, Any]:
    """Train by the contestant's trainer, all steps, and look at the clock."""
    import datasets
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    weights = RandomWeights(models.auto_class(assignment.task), assignment.contestant)
    with Busy() as busy, mock.patch.object(models, "auto_class", return_value=weights):
        clock = Watching(busy, n_warm)
        if assignment.contestant.startswith("trl"):
            import trl

            with mock.patch.object(trl, "SFTTrainer", with_random_weights(trl.SFTTrainer, weights)):
                trainer = hugging._sft_trainer(assignment, clock)
        else:
            trainer = hugging._trainer(assignment, clock)
        trainer.train()
        busy.is_on = False
        return row_of(clock.facts(), n_warm, busy.percent)


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
