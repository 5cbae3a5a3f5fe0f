"""Log-probabilities of the answers under the reference: the model as it began.

They are found once, before the first step, a block of neighbouring examples at a time, and kept in
the cache by what they follow from: tokens, the model's weights, how it begins, precision. Neither
the learning rate nor the loss nor the rank of an adapter is part of that, so every epoch, every
trial of a search and every later run uses them, and no second model is in memory. A block is a file
that is whole or not there: a pass that is killed goes on behind its last block.

At every start a sample is computed again and compared. Refuses to know which objective asks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from farthing.data.token_set import TokenSet
from farthing.data.units import N_TARGETS
from farthing.errors import DataError, RunInterruptedError
from farthing.events import Note, Working
from farthing.model.forward import Forward, Host
from farthing.storage.files import draft_of, fsync_path, own_folder
from farthing.train.ancestor import KEY as ANCESTOR
from farthing.train.ancestor import begin_from, find_ancestor
from farthing.train.attempt import Attempt
from farthing.train.evaluate import with_room
from farthing.train.identity import MODEL_CONTENT

VERSION = 1
BLOCK = 256  # examples
N_SAMPLED = 8
MOST_APART = {"fp32": 1e-3}
"""Nats a token between a cached log-probability and the live model's, by precision."""
MOST_APART_HALF = 0.25
_BEGINS_AS_THE_MODEL = ("true", "gaussian")
"""Adapters that add nothing before the first step."""


def refer(attempt: Attempt) -> None:
    """Have the references of all examples of a run, before its checkpoint is restored. Raises
    `RunInterruptedError`, `DataError` where the cache holds others than the model finds.
    """
    forward = attempt.forward
    if not forward.of.needs_reference:
        return
    begin_as_the_run(attempt)
    sets: dict[Path, list[NDArray[np.int64]]] = {}
    of_folder: dict[Path, TokenSet] = {}
    for examples in (attempt.train_examples, attempt.eval_examples):
        if examples is not None:
            sets.setdefault(examples.tokens.folder, []).append(examples.indices)
            of_folder[examples.tokens.folder] = examples.tokens
    was_training = attempt.model.training
    attempt.model.eval()
    try:
        with attempt.context.meter.span("reference"), torch.no_grad():
            for folder, indices in sets.items():
                wanted = np.unique(np.concatenate(indices))
                _refer_to(attempt, of_folder[folder], wanted)
    finally:
        attempt.model.train(was_training)


def without_references(forward: Forward, tokens: TokenSet) -> None:
    """References of zero, for who measures speed and memory alone."""
    n = tokens.n_sequences + int(forward.of.is_mismatched)
    forward.references[tokens.folder] = np.zeros((len(tokens), n))


@torch.no_grad()
def references_of(
    forward: Forward, tokens: TokenSet, units: NDArray[np.int64], *, micro_batch_tokens: int
) -> NDArray[np.float64]:
    """[n, k] of all units of a set by this very model; not a number but for `units`."""
    n = tokens.n_sequences + int(forward.of.is_mismatched)
    sums = np.full((len(tokens), n), np.nan)
    for micro_batch in forward.split(tokens, units, micro_batch_tokens):
        found = [forward.log_probs(forward.to_device(forward.collate(tokens, micro_batch)))]
        if forward.of.is_mismatched:
            arrays = forward.collate_mismatched(tokens, micro_batch)
            found.append(forward.log_probs(forward.to_device(arrays)))
        parts = [each.reshape(len(micro_batch), -1) for each in found]
        sums[micro_batch] = torch.cat(parts, 1).cpu().numpy()
    return sums


def begin_as_the_run(attempt: Attempt) -> None:
    """The weights of the run's ancestor, where a checkpoint has spared the start from them."""
    found, ranks = find_ancestor(attempt.job), attempt.context.ranks
    if found is not None:
        names = attempt.train_examples.tokens.label_names
        begin_from(found, attempt.state["model"], ranks.rows_of, names)


def _refer_to(attempt: Attempt, tokens: TokenSet, wanted: NDArray[np.int64]) -> None:
    context, forward = attempt.context, attempt.forward
    cache = own_folder(Path(attempt.job.cache_dir or ".") / "references", attempt.warn)
    folder = cache / _key(attempt, tokens)
    folder.mkdir(exist_ok=True)
    blocks = np.unique(wanted // BLOCK).tolist()
    found: dict[int, NDArray[np.float32]] = {}
    for block in blocks:
        words = _read(folder, block, _n_words(forward, tokens, block))
        if words is not None:
            found[block] = words
    lacking = context.ranks.gather([block for block in blocks if block not in found])
    missing = sorted({block for of_rank in lacking for block in of_rank})
    if missing:
        context.emit(Working("scoring the answers by the model as it begins"))
    n_kept = len(blocks) - len(missing)
    for block in missing:
        words = _measured(attempt, tokens, _units_of(tokens, block))
        found[block] = words
        if not (folder / _name(block)).exists():
            write_block(folder, block, words)
    if n_kept:
        _compare(attempt, tokens, wanted, found, n_kept)
    n = tokens.n_sequences + int(forward.of.is_mismatched)
    sums = np.full((len(tokens), n), np.nan)
    for block, words in found.items():
        sums[block * BLOCK : (block + 1) * BLOCK] = _sums(forward, tokens, block, words)
    forward.references[tokens.folder] = sums


def _units_of(tokens: TokenSet, block: int) -> NDArray[np.int64]:
    return np.arange(block * BLOCK, min(len(tokens), (block + 1) * BLOCK))


def _counts(forward: Forward, tokens: TokenSet, units: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, k]: target tokens of each sequence of these units, mismatched ones last."""
    collates = [forward.collate] + [forward.collate_mismatched] * forward.of.is_mismatched
    counts = [collate(tokens, units)[N_TARGETS].reshape(len(units), -1) for collate in collates]
    return np.concatenate(counts, axis=1).astype(np.int64)


def _n_words(forward: Forward, tokens: TokenSet, block: int) -> int:
    return int(_counts(forward, tokens, _units_of(tokens, block)).sum())


def _sums(
    forward: Forward, tokens: TokenSet, block: int, words: NDArray[np.float32]
) -> NDArray[np.float64]:
    """[n, k] of a block's words, which stand sequence by sequence, unit by unit."""
    counts = _counts(forward, tokens, _units_of(tokens, block))
    owners = np.repeat(np.arange(counts.size), counts.ravel())
    sums = np.zeros(counts.size)
    np.add.at(sums, owners, words.astype(np.float64))
    return sums.reshape(counts.shape)


def _measured(attempt: Attempt, tokens: TokenSet, units: NDArray[np.int64]) -> NDArray[np.float32]:
    """The log-probability of each target of these units, unit by unit, by all ranks together."""
    forward = attempt.forward
    longest = int(forward.lengths_of(tokens)[units].max())
    measure = partial(_passes, attempt, tokens, units)
    of_units: dict[int, list[float]] = with_room(
        measure,
        attempt.settings.micro_batch_tokens,
        longest,
        attempt.numerics.device,
        attempt.warn,
        "the reference pass",
    )
    return np.concatenate([np.array(of_units[unit], np.float32) for unit in units.tolist()])


def _passes(
    attempt: Attempt, tokens: TokenSet, units: NDArray[np.int64], *, micro_batch_tokens: int
) -> dict[int, list[float]]:
    """Of each unit its words."""
    forward, ranks, notice = attempt.forward, attempt.context.ranks, attempt.context.notice
    micro_batches = forward.split(tokens, units, micro_batch_tokens)
    own: dict[int, list[float]] = {}
    with ranks.all_or_none():
        mine = micro_batches[ranks.index :: ranks.n]
        if ranks.is_fsdp:  # all go through the model as often
            mine = mine + micro_batches[-1:] * (-(-len(micro_batches) // ranks.n) - len(mine))
        for micro_batch in mine:
            if (notice or ranks.others_ask_to_leave) and not ranks.is_fsdp:
                raise RunInterruptedError("stopped while scoring by the reference")
            parts = _words(forward, forward.collate(tokens, micro_batch), len(micro_batch))
            if forward.of.is_mismatched:
                arrays = forward.collate_mismatched(tokens, micro_batch)
                more = _words(forward, arrays, len(micro_batch))
                parts = [[*one, *other] for one, other in zip(parts, more, strict=True)]
            own |= dict(zip(micro_batch.tolist(), parts, strict=True))
    if ranks.n == 1:
        return own
    told = ranks.gather([[unit, words] for unit, words in own.items()])
    return {unit: words for of_rank in told for unit, words in of_rank}


def _words(forward: Forward, arrays: Host, n_units: int) -> list[list[float]]:
    """Of each unit of a micro-batch the log-probabilities of its targets."""
    words = forward.target_log_probs(forward.to_device(arrays)).float().cpu().numpy()
    n_each = arrays[N_TARGETS].reshape(n_units, -1).sum(1).astype(np.int64)
    return [part.tolist() for part in np.split(words, np.cumsum(n_each)[:-1])]


def _compare(
    attempt: Attempt,
    tokens: TokenSet,
    wanted: NDArray[np.int64],
    found: dict[int, NDArray[np.float32]],
    n_kept: int,
) -> None:
    """Score a few examples again. Raises `DataError` where the cache says something else."""
    forward = attempt.forward
    sample = np.unique(wanted[np.linspace(0, len(wanted) - 1, N_SAMPLED).astype(np.int64)])
    live = _measured(attempt, tokens, sample)
    kept = []
    for unit in sample.tolist():
        block, place = divmod(unit, BLOCK)
        n_each = _counts(forward, tokens, _units_of(tokens, block)).sum(1)
        start = int(n_each[:place].sum())
        kept.append(found[block][start : start + int(n_each[place])])
    apart = np.abs(live - np.concatenate(kept))
    most = float(apart.max())
    text = (
        f"references of {n_kept * BLOCK:,} examples or fewer come from the cache; of"
        f" {len(sample)} scored again, a token differs by {most:.1g} at most"
    )
    attempt.context.emit(Note(text))
    allowed = MOST_APART.get(attempt.numerics.name, MOST_APART_HALF)
    if not (math.isfinite(most) and float(apart.mean()) <= allowed):
        folder = Path(attempt.job.cache_dir or ".") / "references" / _key(attempt, tokens)
        raise DataError(
            f"the cached references are not this model's: a token differs by {most:.3g}, on"
            f" average by {float(apart.mean()):.3g}",
            where=str(folder),
            to_do="delete that folder and run the same command again: they are made anew",
        )


# ---- the cache ----


def _key(attempt: Attempt, tokens: TokenSet) -> str:
    """The name of a folder: a hash of all that the references follow from."""
    job, identity, forward = attempt.job, attempt.inputs.identity, attempt.forward
    names = [MODEL_CONTENT, "model.init", "model.rope_scaling", "model.new_tokens", ANCESTOR]
    method = job.method
    adapter = method.init_lora_weights if method.name != "full" else "true"
    if adapter not in _BEGINS_AS_THE_MODEL:
        names += [name for name in identity if name.startswith("method.")]
    draws = job.model.init == "random" or job.model.new_tokens or adapter == "false"
    content = {name: identity.get(name) for name in names}
    content |= {
        "version": VERSION,
        "tokens": tokens.content_sha256,
        "seed": job.train.seed if draws else None,
        "mismatched": forward.of.is_mismatched,
        "in_four_bits": method.name == "qlora",
        "precision": [attempt.numerics.name, attempt.numerics.device.type],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _name(block: int) -> str:
    return f"{block:08d}.f32"


def _read(folder: Path, block: int, n_words: int) -> NDArray[np.float32] | None:
    """The words of a block; None where it is not there, or damaged: then it is made again."""
    path = folder / _name(block)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    words, digest = content[:-32], content[-32:]
    if len(words) != 4 * n_words or hashlib.sha256(words).digest() != digest:
        path.unlink()
        return None
    return np.frombuffer(words, np.float32)


def write_block(folder: Path, block: int, words: NDArray[np.float32]) -> None:
    content = words.astype(np.float32).tobytes()
    path = folder / _name(block)
    draft = draft_of(path)
    with open(draft, "wb") as file:
        file.write(content + hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    fsync_path(folder)
