"""Log-probabilities of the answers under the reference: the model as it began.

They are found once, before the first step, a block of neighbouring examples at a time, and kept in
the cache by what they follow from: tokens, the model's weights, how it begins, precision. Neither
the learning rate nor the loss nor the rank of an adapter is part of that, so every epoch, every
trial of a search and every later run uses them, and no second model is in memory. A block is a file
that is whole or not there: a pass that is killed continues behind its last block.

At every start a sample is computed again and compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from farthing.data.token_set import TokenSet
from farthing.data.units import N_TARGETS
from farthing.dist.ranks import Ranks
from farthing.errors import DataError, RunInterruptedError
from farthing.events import Note, Working
from farthing.model.forward import Forward
from farthing.storage.files import draft_of, fsync_path, own_folder
from farthing.train.ancestor import KEY as ANCESTOR
from farthing.train.built import Run
from farthing.train.evaluate import with_room
from farthing.train.resolve import MODEL_CONTENT

BLOCK = 256  # examples
N_SAMPLED = 8
MOST_APART = {"fp32": 1e-3}
"""Nats a token between a cached log-probability and the live model's, by precision."""
MOST_APART_HALF = 0.25
_BEGINS_AS_THE_MODEL = ("true", "gaussian")
"""Adapters that add nothing before the first step."""


def refer(run: Run) -> None:
    """Have the references of all examples of a run, before its checkpoint is restored. Raises
    `RunInterruptedError`, `DataError` where the cache holds others than the model finds.
    """
    if not run.forward.of.needs_reference:
        return
    run.begin_as_ancestor()  # a checkpoint may have spared the start from that
    wanted: dict[Path, tuple[TokenSet, list[NDArray[np.int64]]]] = {}
    for examples in (run.train_examples, run.eval_examples):
        if examples is not None:
            _, indices = wanted.setdefault(examples.tokens.folder, (examples.tokens, []))
            indices.append(examples.indices)
    was_training = run.model.training
    run.model.eval()
    try:
        with run.context.meter.span("reference"), torch.no_grad():
            for tokens, indices in wanted.values():
                _refer_to(run, tokens, np.unique(np.concatenate(indices)))
    finally:
        run.model.train(was_training)


def without_references(forward: Forward, tokens: TokenSet) -> None:
    """References of zero, for who measures speed and memory alone."""
    forward.references[tokens.folder] = np.zeros((len(tokens), _width(forward, tokens)))


@torch.no_grad()
def references_of(
    forward: Forward,
    tokens: TokenSet,
    units: NDArray[np.int64],
    *,
    micro_batch_tokens: int,
    ranks: Ranks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> NDArray[np.float64]:
    """[len(units), k] by this very model, mismatched ones last; all ranks share the work. Raises
    `RunInterruptedError`.
    """
    ranks = ranks or Ranks()
    micro_batches = forward.split(tokens, units, micro_batch_tokens)
    own: dict[int, list[float]] = {}
    with ranks.all_or_none():
        mine = micro_batches[ranks.index :: ranks.n]
        if ranks.is_fsdp:  # all go through the model as often
            mine = mine + micro_batches[-1:] * (-(-len(micro_batches) // ranks.n) - len(mine))
        for micro_batch in mine:
            if should_stop() and not ranks.is_fsdp:
                raise RunInterruptedError("stopped while scoring by the reference")
            arrays = forward.collate_scored(tokens, micro_batch)
            found = [forward.log_probs(forward.to_device(each)) for each in arrays]
            rows = torch.cat([each.reshape(len(micro_batch), -1) for each in found], 1)
            own |= dict(zip(micro_batch.tolist(), rows.tolist(), strict=True))
    of_all = {unit: row for told in ranks.gather(list(own.items())) for unit, row in told}
    return np.array([of_all[unit] for unit in units.tolist()])


def _refer_to(run: Run, tokens: TokenSet, wanted: NDArray[np.int64]) -> None:
    forward, width = run.forward, _width(run.forward, tokens)
    cache = own_folder(run.spec.cache_dir / "references", run.context.warn)
    folder = cache / _key(run, tokens)
    folder.mkdir(exist_ok=True)
    found = np.full((len(tokens), width), np.nan)
    blocks, lacking = np.unique(wanted // BLOCK).tolist(), []
    for block in blocks:
        rows = found[block * BLOCK : (block + 1) * BLOCK]
        kept = _read(folder, block, rows.shape)
        if kept is None:
            lacking.append(block)
        else:
            rows[:] = kept
    missing = sorted({block for of_rank in run.context.ranks.gather(lacking) for block in of_rank})
    if missing:
        run.context.emit(Working("scoring the answers by the model as it begins"))
    for block in missing:
        units = np.arange(block * BLOCK, min(len(tokens), (block + 1) * BLOCK))
        found[units] = _measured(run, tokens, units)
        if not (folder / _name(block)).exists():
            write_block(folder, block, found[units])
    if n_kept := len(blocks) - len(missing):
        sample = np.unique(wanted[np.linspace(0, len(wanted) - 1, N_SAMPLED).astype(np.int64)])
        _compare(run, tokens, sample, found[sample], n_kept, folder)
    forward.references[tokens.folder] = found


def _width(forward: Forward, tokens: TokenSet) -> int:
    return tokens.n_sequences + int(forward.of.is_mismatched)


def _measured(run: Run, tokens: TokenSet, units: NDArray[np.int64]) -> NDArray[np.float64]:
    forward = run.forward
    return with_room(
        partial(
            references_of,
            forward,
            tokens,
            units,
            ranks=run.context.ranks,
            should_stop=run.context.is_asked_to_leave,
        ),
        run.steps.settings.micro_batch_tokens,
        int(forward.lengths_of(tokens)[units].max()),
        run.forward.numerics.device,
        run.context.warn,
        "the reference pass",
    )


def _compare(
    run: Run,
    tokens: TokenSet,
    sample: NDArray[np.int64],
    kept: NDArray[np.float64],
    n_kept: int,
    folder: Path,
) -> None:
    """Score a few examples again. Raises `DataError` where the cache says something else."""
    arrays = run.forward.collate_scored(tokens, sample)
    counts = [each[N_TARGETS].reshape(len(sample), -1) for each in arrays]
    n_targets = np.maximum(1, np.concatenate(counts, axis=1))
    apart = np.abs(_measured(run, tokens, sample) - kept) / n_targets
    most, mean = float(apart.max()), float(apart.mean())
    text = (
        f"references of {n_kept * BLOCK:,} examples or fewer come from the cache; of"
        f" {len(sample)} scored again, an answer differs by {most:.1g} a token at most"
    )
    run.context.emit(Note(text))
    if not mean <= MOST_APART.get(run.forward.numerics.name, MOST_APART_HALF):
        raise DataError(
            f"the cached references are not this model's: an answer differs by {most:.3g} a"
            f" token, on average by {mean:.3g}",
            where=str(folder),
            to_do="delete that folder and run the same command again: they are made anew",
        )


# ---- the cache ----


def _key(run: Run, tokens: TokenSet) -> str:
    """The name of a folder: a hash of all that the references follow from."""
    job, identity = run.spec.job, run.spec.identity
    names = [MODEL_CONTENT, "model.init", "model.rope_scaling", "model.new_tokens", ANCESTOR]
    method = job.method
    adapter = method.init_lora_weights if method.name != "full" else "true"
    if adapter not in _BEGINS_AS_THE_MODEL:
        names += [name for name in identity if name.startswith("method.")]
    draws = job.model.init == "random" or job.model.new_tokens or adapter == "false"
    content = {name: identity.get(name) for name in names}
    content |= {
        "tokens": tokens.content_sha256,
        "seed": job.train.seed if draws else None,
        "scored": _width(run.forward, tokens),
        "in_four_bits": method.name == "qlora",
        "precision": [run.forward.numerics.name, run.forward.numerics.device.type],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _name(block: int) -> str:
    return f"{block:08d}.f64"


def _read(folder: Path, block: int, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    """The rows of a block; None where it is not there, or damaged: then it is made again."""
    path = folder / _name(block)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    rows, digest = content[:-32], content[-32:]
    if len(rows) != 8 * math.prod(shape) or hashlib.sha256(rows).digest() != digest:
        path.unlink()
        return None
    return np.frombuffer(rows).reshape(shape)


def write_block(folder: Path, block: int, rows: NDArray[np.float64]) -> None:
    content = rows.tobytes()
    path = folder / _name(block)
    draft = draft_of(path)
    with open(draft, "wb") as file:
        file.write(content + hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    fsync_path(folder)
