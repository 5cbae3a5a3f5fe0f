"""Whether a model that was written answers as the one that was trained, on a few examples of its
own run.

Shapes: T tokens, V words, C classes.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farthing.data.encode import Encoder
from farthing.data.read import open_sources
from farthing.data.reader import SourceReader
from farthing.data.rows import Layout, Text
from farthing.data.token_set import Recipe
from farthing.errors import FarthingError, ModelError
from farthing.objectives.registry import objective_of
from farthing.storage.files import Json

N_EXAMPLES, N_ROWS, MOST_TOKENS = 4, 32, 128
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Root mean square of the differences over that of the answers around their mean. Weights in bf16
are rounded to 1 in 256 and logits move by a few per cent; what is merged in the wrong place moves
them as far as training did, or farther."""


def check_examples(job: Json, tokenizer: Any, n_words: int) -> list[dict[str, Tensor]]:
    """What a model takes of a few examples, each [1, T]: the run's first rows that are available
    here, else drawn ids.
    """
    is_pair = objective_of(job["task"]).is_pair
    rows = _first_rows(job, tokenizer)
    if not rows:
        dice = torch.Generator().manual_seed(0)
        rows = [
            (torch.randint(n_words, (24,), generator=dice).tolist(), [0] * 16 + [1] * 8)
            for _ in range(N_EXAMPLES)
        ]
    batches = []
    for ids, is_target in rows:
        source = [
            token for token, target in zip(ids, is_target, strict=True) if not is_pair or not target
        ]
        batch = {
            "input_ids": torch.tensor([source]),
            "attention_mask": torch.ones(1, len(source), dtype=torch.long),
        }
        if is_pair:
            target = [token for token, target in zip(ids, is_target, strict=True) if target]
            batch["decoder_input_ids"] = torch.tensor([target])
        batches.append(batch)
    return batches


def _first_rows(job: Json, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(token ids, 1 where a target) of the first usable rows of the training files that are here;
    none if there are none.
    """
    data, task = job["data"], job["task"]
    names = [name for name in data["train"] if Path(name).exists()]
    own = dict(zip(data["train"], data.get("of_train") or (), strict=False)).get(
        names[0] if names else "", [None]
    )
    with contextlib.suppress(FarthingError, OSError, ValueError, KeyError):
        opened = {"split": data["train_split"], "config_name": data["dataset_config_name"]}
        opened["layout"] = Layout.of(data)
        source, *_ = open_sources(names[:1], cache_dir=Path(job["cache_dir"] or "."), **opened)  # type: ignore[arg-type]
        recipe = Recipe(task, 0, columns=data["columns"], label_map=data["label_map"])
        reader = SourceReader(replace(source, columns=own[0]), recipe, tokenizer)
        rows_there = list(itertools.islice(source.rows(), N_ROWS))
        texts = [text for _, text in reader.texts(rows_there) if isinstance(text, Text)]
        encoded = Encoder(tokenizer, task, MOST_TOKENS, MOST_TOKENS)(texts[:N_EXAMPLES])
        rows, start = [], 0
        for length in encoded.lengths.tolist():
            span = slice(start, start + length)
            targets = encoded.is_target[span].tolist()
            if length and (not objective_of(task).is_pair or 0 < sum(targets) < length):
                rows.append((encoded.ids[span].tolist(), targets))
            start += length
        return rows
    return []


@torch.no_grad()
def answers(model: Any, examples: list[dict[str, Tensor]]) -> list[Tensor]:
    """Logits of each example in fp32: [T, V], or [C] of a classifier. Raises `ModelError` where the
    model can't be run.
    """
    try:
        return [model(**example).logits[0].float() for example in examples]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise ModelError(
            f"the model can't be run here to check the export ({type(error).__name__}:"
            f" {str(error)[:200]})",
            where=type(model).__name__,
            to_do="export it on a machine that can run it, or use --format adapter",
        ) from error


def refuse_other_answers(
    found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, name: str
) -> None:
    """Raises `ModelError` where `found` is not `expected` to the rounding of `dtype`."""
    ours, theirs = (torch.cat([one.flatten() for one in of]).double() for of in (found, expected))
    tolerance, precision = (
        TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]),
        str(dtype).removeprefix("torch."),
    )
    if not torch.isfinite(theirs).all():
        raise ModelError(
            "the trained model itself answers with numbers that are not finite",
            where=name,
            to_do="export it with --dtype float32; if that is refused too, train it again",
        )
    if not torch.isfinite(ours).all():
        raise ModelError(
            f"in {precision} the model's outputs are not finite; the export was deleted",
            where=name,
            to_do="export it with --dtype float32 or bfloat16",
        )
    spread = (theirs - theirs.mean()).square().mean().sqrt()
    off = float((ours - theirs).square().mean().sqrt() / spread.clamp_min(1e-12))
    if off > tolerance:
        raise ModelError(
            "the exported model's answers differ from the trained model's: its logits in"
            f" {precision} are off by {off:.1%} (at most {tolerance:.1%} is rounding); it was"
            " deleted",
            where=name,
            to_do="use --format adapter, or --dtype float32 if another was asked for",
        )
