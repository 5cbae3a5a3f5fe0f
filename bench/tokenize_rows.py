"""Tokens a second of one core from rows to a token set, and from there to batches: what is the
tokenizer's, what is ours.

    python bench/tokenize_rows.py --data FILE --tokenizer FOLDER [--task causal-lm] [--columns
    label=product]
                                  [--max-length 100000] [--repeats 3] [--without-maps] [--resume
                                  10000000] [--json]

CPU seconds of this process, all of its threads, one of them the tokenizer's; the best of the
repeats, which take turns. The tokenizer's identity, which a job finds once, is found before. Beside
farthing:
`encode_batch_fast` alone on the very texts that farthing encodes, which is as quick as it could be;
and the usual way of row-wise trainers, three passes of `datasets.map`: one that tokenizes the
prompt and the prompt with its completion, one that masks, one that truncates. Chats are handed to
these rendered. Tokens are those of the set. `--resume N` makes a set of N short examples and times
what a run does to go on at 99 % of its first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np

from farthing.data.batches import Batches, collate, permutation
from farthing.data.chat import DEFAULT_CHAT_TEMPLATE
from farthing.data.encode import Encoder
from farthing.data.formats import Text, converter, recognise
from farthing.data.packing import collate_packed, split_by_tokens, split_padded
from farthing.data.read import Row, Source, open_sources
from farthing.data.token_set import Recipe, TokenSet, open_token_set
from farthing.data.tokens import tokenize
from farthing.objectives.columns import Unusable
from farthing.storage.files import commit_folder

PIECE_TOKENS = 16384


@dataclass
class Watched:
    """What `Encoder` asked of the tokenizer, and how long that took."""

    seconds: float = 0.0
    wall_seconds: float = 0.0
    n_tokens: int = 0
    calls: list[tuple[list[str], bool]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Watched]:
    """Time every call of the tokenizer, by the CPU seconds of the thread that makes it."""
    found, encode = Watched(), Encoder._encode

    def timed(self: Encoder, strings: list[str], special: bool, *others: Any) -> Any:
        started, wall_started = time.thread_time(), time.perf_counter()
        encodings = encode(self, strings, special, *others)
        found.seconds += time.thread_time() - started
        found.wall_seconds += time.perf_counter() - wall_started
        found.n_tokens += sum(map(len, encodings))
        found.calls.append((strings, special))
        return encodings

    Encoder._encode = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Encoder._encode = encode  # type: ignore[method-assign]


def seconds_of(run: Callable[..., Any], *arguments: Any) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    run(*arguments)
    return time.process_time() - started


def with_farthing(data: Path, tokenizer: Any, recipe: Recipe, folder: Path) -> TokenSet:
    """From the file to the token set, opened."""
    return tokenize(
        open_sources((str(data),), cache_dir=folder, split="train"),
        tokenizer,
        recipe,
        folder,
        progress=lambda *_: None,
    )


def only_encode(tokenizer: Any, calls: list[tuple[list[str], bool]]) -> None:
    """The tokenizer alone, on the texts of `calls`."""
    rust = tokenizer.backend_tokenizer
    rust.no_truncation()
    for strings, special in calls:
        rust.encode_batch_fast(strings, add_special_tokens=special)


def with_maps(rows: Path, tokenizer: Any, recipe: Recipe, folder: Path) -> None:
    """Three row-wise maps."""
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder))

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer(row["prompt"], verbose=False)["input_ids"]
        if recipe.task == "seq2seq":
            return {"input_ids": prompt, "labels": tokenizer(row["completion"])["input_ids"]}
        if recipe.task == "classification":
            return {"input_ids": prompt, "n_prompt": len(prompt)}
        whole = tokenizer(row["prompt"] + row["completion"], verbose=False)["input_ids"]
        return {"input_ids": [*whole, tokenizer.eos_token_id], "n_prompt": len(prompt)}

    def mask(row: dict[str, Any]) -> dict[str, Any]:
        return (
            row
            if "labels" in row
            else {"labels": [-100] * row["n_prompt"] + row["input_ids"][row["n_prompt"] :]}
        )

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name][: recipe.max_length] for name in ("input_ids", "labels")}

    data.map(encode, remove_columns=data.column_names).map(mask).map(cut)


def texts_of(source: Source, tokenizer: Any, recipe: Recipe) -> list[Text]:
    """The usable rows of a file, rendered."""
    rows = [row.value for row in source.rows() if isinstance(row, Row)]
    name, columns, _ = recognise(
        set().union(*rows[:1024]), recipe.task, recipe.columns, source.name
    )
    convert, texts = converter(name, columns, recipe.label_map, tokenizer, recipe.task), []
    for row in rows:
        try:
            texts.append(convert(row))
        except Unusable:
            continue
    return texts


def preparation(
    data: Path, tokenizer: Any, recipe: Recipe, repeats: int, is_with_maps: bool, folder: Path
) -> Any:
    """(the token set, what was found out about making it); seconds are the least of the repeats."""
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    with watched() as seen:
        tokens = with_farthing(data, tokenizer, recipe, folder / "first")
    (source,) = open_sources((str(data),), cache_dir=folder, split="train")
    rows = folder / "rows.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for text in texts_of(source, tokenizer, recipe):
            parts = [part for part, _ in text.segments]
            print(json.dumps({"prompt": parts[0], "completion": "".join(parts[1:])}), file=file)
    for number in range(repeats):
        place = folder / str(number)
        with watched() as again:
            started = time.perf_counter()
            with_farthing(data, tokenizer, recipe, place / "watched")
            wall_seconds = time.perf_counter() - started
        note("in the tokenizer", again.seconds)
        best["share of wall"] = max(
            best.get("share of wall", 0.0), again.wall_seconds / wall_seconds
        )
        note("farthing", seconds_of(with_farthing, data, tokenizer, recipe, place / "farthing"))
        note("encode_batch_fast alone", seconds_of(only_encode, tokenizer, seen.calls))
        note("reading and parsing", seconds_of(lambda: sum(1 for _ in source.rows())))
        note("reading, parsing and rendering", seconds_of(texts_of, source, tokenizer, recipe))
        if is_with_maps:
            note("maps", seconds_of(with_maps, rows, tokenizer, recipe, place / "maps"))
    facts = {name: tokens.facts[name] for name in ("n_rows", "n_examples", "n_tokens")}
    return tokens, {**facts, "n_encoded": seen.n_tokens, "seconds": best}


def batching(tokens: TokenSet, task: str, batch: int, repeats: int) -> dict[str, float]:
    """M tokens a second of cutting and collating global batches, and of finding what is labelled in
    them.
    """
    import torch

    from farthing.model.loss import find_labelled

    torch.set_num_threads(1)
    order = permutation(len(tokens), 0, 0)[: 16384 // batch * batch]
    steps = [
        order[start : start + batch] for start in range(0, max(1, len(order) - batch + 1), batch)
    ]
    n_tokens = sum(int(tokens.lengths[step].sum()) for step in steps)
    lengths, found = tokens.lengths, {}

    def rate(name: str, run: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        made: list[Any] = []
        seconds = min(
            seconds_of(lambda: (made.clear(), made.extend(map(run, items))))
            for _ in range(repeats + 2)
        )
        found[name] = n_tokens / seconds / 1e6
        return made

    padded = rate("split_padded", lambda step: split_padded(step, lengths, PIECE_TOKENS), steps)
    rate("collate", lambda pieces: [collate(tokens, piece, task, 0) for piece in pieces], padded)
    if task != "seq2seq":
        flat = rate(
            "split_by_tokens", lambda step: split_by_tokens(step, lengths, PIECE_TOKENS), steps
        )
        made = rate(
            "collate_packed",
            lambda pieces: [collate_packed(tokens, piece, task) for piece in pieces],
            flat,
        )
        if task == "causal-lm":
            labels = [[torch.from_numpy(arrays["labels"]) for arrays in batch] for batch in made]
            rate(
                "find_labelled",
                lambda batch: [find_labelled(each, predicts_next=True) for each in batch],
                labels,
            )
    return found


def resuming(n: int, folder: Path) -> dict[str, float]:
    """CPU seconds until a run of `n` examples of 16 tokens has those of a step at 99 % of its first
    epoch.
    """
    arrays = {
        "ids": np.zeros(16 * n, np.int32),
        "targets": np.ones(16 * n, np.uint8),
        "offsets": np.arange(0, 16 * n + 1, 16),
        "lines": np.arange(n),
        "target_lengths": np.full(n, 16),
        "groups": np.arange(n, dtype=np.uint64),
    }

    def fill(draft: Path) -> None:
        for name, array in arrays.items():
            array.tofile(draft / f"{name}.bin")

    commit_folder(folder / "long", fill, {"label_names": [], "sources": []})
    arrays.clear()
    found: dict[str, Any] = {"examples": n}
    started = time.process_time()
    tokens = open_token_set(folder / "long")
    found["open, every byte checked"] = time.process_time() - started
    batches = Batches(np.arange(len(tokens)), 64, seed=42)
    started = time.process_time()
    batches.examples_of(int(0.99 * batches.steps_per_epoch))
    found["examples of the step"] = time.process_time() - started
    return found


def shown(found: dict[str, Any]) -> str:
    """The findings as tables for people."""
    made, lines = found["preparation"], []
    seconds, n_tokens = made["seconds"], made["n_tokens"]
    lines.append(
        f"{made['n_rows']:,} rows, {n_tokens:,} tokens, {made['n_encoded']:,} of them encoded"
    )
    lines += [f"{'CPU s':>10} {'M tokens/s':>11}"]
    for name in ("farthing", "in the tokenizer", "encode_batch_fast alone", "maps"):
        if name in seconds:
            n = made["n_encoded"] if "encode" in name or "tokenizer" in name else n_tokens
            lines.append(f"{seconds[name]:10.3f} {n / seconds[name] / 1e6:11.2f}  {name}")
    for name in ("reading and parsing", "reading, parsing and rendering"):
        lines.append(f"{seconds[name]:10.3f} {n_tokens / seconds[name] / 1e6:11.2f}  {name}, alone")
    share = seconds["in the tokenizer"] / seconds["farthing"]
    lines.append(
        f"{share:10.1%} of farthing's CPU seconds are in the tokenizer; "
        f"it is busy {seconds['share of wall']:.1%} of the time that passes"
    )
    for batch, rates in found["batching"].items():
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        lines.append(f"global batch {batch}, M tokens/s: {rates}")
    if "resuming" in found:
        lines.append(", ".join(f"{name} {value:,.2f}" for name, value in found["resuming"].items()))
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder of a fast tokenizer")
    parser.add_argument(
        "--task", default="causal-lm", choices=["causal-lm", "seq2seq", "classification"]
    )
    parser.add_argument("--columns", nargs="*", default=[], metavar="STANDARD=OWN")
    parser.add_argument("--max-length", type=int, default=100_000, help="default: nothing is cut")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-maps", action="store_true")
    parser.add_argument("--resume", type=int, metavar="N")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    limit, columns = arguments.max_length, dict(each.split("=", 1) for each in arguments.columns)
    recipe = Recipe(arguments.task, limit, limit, columns=columns, max_bad_rows=0.5)
    with tempfile.TemporaryDirectory() as folder:
        tokens, made = preparation(
            arguments.data,
            tokenizer,
            recipe,
            arguments.repeats,
            not arguments.without_maps,
            Path(folder),
        )
        rates = {
            n: batching(tokens, arguments.task, n, arguments.repeats)
            for n in (16, 64, 512)
            if n <= len(tokens)
        }
        found = {"preparation": made, "batching": rates}
        if arguments.resume:
            found["resuming"] = resuming(arguments.resume, Path(folder))
    print(json.dumps(found, indent=1) if arguments.json else shown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
