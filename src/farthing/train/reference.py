"""Log-probabilities of the answers under the reference: the model as it began.

They are found once, before the first step, a block of neighbouring examples at a time, and kept in
the cache by what they follow from: tokens, the model's weights, how it begins, precision. Neither
the learning rate nor the loss nor the rank of an adapter is part of that, so every epoch, every
trial of a search and every later run uses them, and no second model is in memory. A block is a file
with a checksum that is whole or not there: a pass that is killed continues behind its last block.

At every start a sample is computed again and compared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from farthing.arrays import Ints
from farthing.data.token_set import TokenSet
from farthing.data.units import N_TARGETS
from farthing.errors import DataError
from farthing.events import Note, Working
from farthing.model.forward import Forward
from farthing.run.folder import keep, kept
from farthing.storage.files import DamagedFileError, own_folder
from farthing.train.built import Run
from farthing.train.evaluate import Found, Sweep

BLOCK = 256  # examples
N_SAMPLED = 8
MOST_APART = {"fp32": 1e-3}
"""Nats a token between a cached log-probability and the live model's, by precision."""
MOST_APART_HALF = 0.25


def refer(run: Run) -> None:
    """Have the references of all examples of a run, before its checkpoint is restored. Raises
    `RunInterruptedError`, `DataError` where the cache holds others than the model finds.
    """
    if not run.forward.of.needs_reference:
        return
    run.begin_as_ancestor()  # a checkpoint may have spared the start from that
    wanted: dict[Path, tuple[TokenSet, list[Ints]]] = {}
    for examples in (run.train_examples, run.eval_examples):
        if examples is not None:
            _, indices = wanted.setdefault(examples.tokens.folder, (examples.tokens, []))
            indices.append(examples.indices)
    was_training = run.model.training
    run.model.eval()
    try:
        with run.context.meter.span("reference"):
            for tokens, indices in wanted.values():
                _refer_to(run, tokens, np.unique(np.concatenate(indices)))
    finally:
        run.model.train(was_training)


def without_references(forward: Forward, tokens: TokenSet) -> None:
    """References of zero, for who measures speed and memory alone."""
    forward.references[tokens.folder] = np.zeros((len(tokens), _width(forward, tokens)))


@torch.no_grad()
def references_of(sweep: Sweep) -> NDArray[np.float64]:
    """[n, k] of the units of a sweep by this very model, mismatched ones last; all ranks share the
    work. Raises `RunInterruptedError`.
    """
    forward, tokens = sweep.forward, sweep.tokens

    def look(part: Ints) -> Found:
        arrays = forward.collate_scored(tokens, part)
        found = [forward.log_probs(forward.to_device(each)) for each in arrays]
        return {"rows": torch.cat([each.reshape(len(part), -1) for each in found], 1)}

    parts, found = sweep.look(look)
    of_unit = dict(zip(np.concatenate(parts).tolist(), found["rows"], strict=True))
    return np.array([of_unit[unit] for unit in sweep.examples.tolist()])


def _refer_to(run: Run, tokens: TokenSet, wanted: Ints) -> None:
    context = run.context
    folder = own_folder(run.spec.cache_dir / "references", context.warn) / _key(run, tokens)
    folder.mkdir(exist_ok=True)
    found = np.full((len(tokens), _width(run.forward, tokens)), np.nan)
    blocks, lacking = np.unique(wanted // BLOCK).tolist(), []
    for block in blocks:
        rows = found[block * BLOCK : (block + 1) * BLOCK]
        try:
            content = kept(_path(folder, block))
        except DamagedFileError:
            content = None
        if content is None:
            lacking.append(block)
        else:
            rows[:] = np.frombuffer(bytes.fromhex(content["rows"])).reshape(rows.shape)
    missing = sorted({block for of_rank in context.ranks.gather(lacking) for block in of_rank})
    if missing:
        context.emit(Working("scoring the answers by the model as it begins"))
    for block in missing:
        units = np.arange(block * BLOCK, min(len(tokens), (block + 1) * BLOCK))
        found[units] = _measured(run, tokens, units)
        if block in lacking:
            keep(_path(folder, block), {"rows": found[units].tobytes().hex()})
    if n_kept := len(blocks) - len(missing):
        n_examples = min(n_kept * BLOCK, len(tokens))
        sample = np.unique(wanted[np.linspace(0, len(wanted) - 1, N_SAMPLED).astype(np.int64)])
        most, mean = _apart(run, tokens, sample, found[sample])
        text = (
            f"references of {n_examples:,} examples come from the cache; of {len(sample)} scored"
            f" again, an answer differs by {most:.1g} a token at most"
        )
        context.emit(Note(text))
        if not mean <= MOST_APART.get(run.forward.numerics.name, MOST_APART_HALF):
            raise DataError(
                f"the cached references are not this model's: an answer differs by {most:.3g} a"
                f" token, on average by {mean:.3g}",
                where=str(folder),
                to_do="delete that folder and run the same command again: they are made anew",
            )
    run.forward.references[tokens.folder] = found


def _path(folder: Path, block: int) -> Path:
    return folder / f"{block:08d}.json"


def _width(forward: Forward, tokens: TokenSet) -> int:
    return tokens.n_sequences + int(forward.of.is_mismatched)


def _measured(run: Run, tokens: TokenSet, units: Ints) -> NDArray[np.float64]:
    context = run.context
    sweep = Sweep(
        run.forward,
        tokens,
        units,
        run.feed.settings.micro_batch_tokens,
        context.ranks,
        context.is_asked_to_leave,
        warn=context.warn,
        what="the reference pass",
    )
    return references_of(sweep)


def _apart(
    run: Run, tokens: TokenSet, sample: Ints, cached: NDArray[np.float64]
) -> tuple[float, float]:
    """(most, mean) nats a token between cached log-probabilities and those of the live model."""
    arrays = run.forward.collate_scored(tokens, sample)
    counts = [each[N_TARGETS].reshape(len(sample), -1) for each in arrays]
    n_targets = np.maximum(1, np.concatenate(counts, axis=1))
    apart = np.abs(_measured(run, tokens, sample) - cached) / n_targets
    return float(apart.max()), float(apart.mean())


def _key(run: Run, tokens: TokenSet) -> str:
    """The name of a folder: a hash of all that the references follow from."""
    numerics = run.forward.numerics
    content = run.spec.beginning | {
        "tokens": tokens.content_sha256,
        "scored": _width(run.forward, tokens),
        "precision": [numerics.name, numerics.device.type],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
