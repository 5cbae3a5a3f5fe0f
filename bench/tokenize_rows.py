"""Rows to tokens on the same cores: farthing and `datasets.map`, wall and CPU seconds.

    python bench/tokenize_rows.py --data FILE.jsonl --tokenizer FOLDER [--cores 2] [--repeats 3]

FILE has `prompt` and `completion`. Both are tokenized, masked and cut to --max-length. `datasets`
maps batches of 1,000 in a process for each core, as trainers of the field do. The two take turns;
each begins with empty caches in a process of its own. Prints the least of the repeats, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def with_farthing(data: str, tokenizer: Any, max_length: int, folder: Path, cores: int) -> int:
    """Tokens of the set."""
    from farthing.data.read import open_sources
    from farthing.data.token_set import TokenRecipe
    from farthing.data.tokens import tokenize

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    sources = open_sources((data,), cache_dir=folder, split="train")
    return len(tokenize(sources, tokenizer, TokenRecipe("causal-lm", max_length), folder).ids)


def with_datasets(data: str, tokenizer: Any, max_length: int, folder: Path, cores: int) -> int:
    """Rows of the set."""
    import datasets

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=data, split="train", cache_dir=str(folder))

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        prompts = tokenizer(batch["prompt"], verbose=False)["input_ids"]
        joined = map(str.__add__, batch["prompt"], batch["completion"])
        wholes = tokenizer(list(joined), verbose=False)["input_ids"]
        ids = [[*whole, tokenizer.eos_token_id][:max_length] for whole in wholes]
        labels = [
            [-100] * min(len(prompt), len(whole)) + whole[len(prompt) :]
            for prompt, whole in zip(prompts, ids, strict=True)
        ]
        return {"input_ids": ids, "labels": labels}

    made = rows.map(encode, batched=True, num_proc=cores, remove_columns=rows.column_names)
    return len(made)


def measured(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of one of the two, in this process and its children."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    of = {"farthing": with_farthing, "datasets": with_datasets}[arguments.only]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        before, started = os.times(), time.perf_counter()
        n = of(arguments.data, tokenizer, arguments.max_length, Path(folder), arguments.cores)
        wall_s, after = time.perf_counter() - started, os.times()
    return {"wall_s": wall_s, "cpu_s": sum(after[:4]) - sum(before[:4]), "n": n}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder of a fast tokenizer")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the caches are made")
    parser.add_argument("--only", choices=["farthing", "datasets"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measured(arguments)))
        return 0
    best: dict[str, dict[str, float]] = {"farthing": {}, "datasets": {}}
    for _ in range(arguments.repeats):
        for name, least in best.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
            threads = {"TOKENIZERS_PARALLELISM": "false"} if name == "datasets" else {}
            done = subprocess.run(
                command, stdout=subprocess.PIPE, env=os.environ | threads, check=True
            )
            for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                least[key] = min(value, least.get(key, value))
    ours, theirs = best["farthing"], best["datasets"]
    ratios = {key: round(theirs[key] / ours[key], 2) for key in ("wall_s", "cpu_s")}
    print(json.dumps({**best, "datasets_over_farthing": ratios}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
