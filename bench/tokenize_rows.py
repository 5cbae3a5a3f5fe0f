"""Tokens a second from JSONL to ids and target masks: farthing's cache against the usual row-by-row `datasets.map`.

    python bench/tokenize_rows.py --data FILE.jsonl --tokenizer FOLDER [--repeats 3] [--json]

FILE holds prompt/completion rows. Both contestants read the same file with the same tokenizer and end with ids and labels
on disk. The usual way is that of row-wise trainers: one map that tokenizes the prompt and the prompt with its completion,
one that masks, one that truncates. Runs alternate; the median of each is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def with_farthing(data: Path, tokenizer: Any, folder: Path) -> tuple[float, int]:
    """(seconds, tokens) of farthing's cache."""
    from farthing.data.read import open_sources
    from farthing.data.tokens import Recipe, tokenize

    started = time.perf_counter()
    sources = open_sources((str(data),), cache_dir=folder, split="train")
    tokens = tokenize(sources, tokenizer, Recipe("causal-lm", 1024, max_bad_rows=0.5), folder)
    return time.perf_counter() - started, int(tokens.facts["n_tokens"])


def with_maps(data: Path, tokenizer: Any, folder: Path) -> tuple[float, int]:
    """(seconds, tokens) of three row-wise maps."""
    import datasets

    datasets.disable_progress_bars()
    started = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(folder))

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        return {"input_ids": whole, "n_prompt": len(prompt)}

    def mask(row: dict[str, Any]) -> dict[str, Any]:
        return {"labels": [-100] * row["n_prompt"] + row["input_ids"][row["n_prompt"] :]}

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][:1024], "labels": row["labels"][:1024]}

    done = rows.map(encode, remove_columns=rows.column_names).map(mask).map(cut)
    return time.perf_counter() - started, sum(len(ids) for ids in done["input_ids"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="folder of a fast tokenizer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer, logging

    from farthing.data.formats import DEFAULT_CHAT_TEMPLATE

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    rates: dict[str, list[float]] = {"farthing": [], "maps": []}
    for _ in range(arguments.repeats):
        for name, run in (("farthing", with_farthing), ("maps", with_maps)):
            with tempfile.TemporaryDirectory() as folder:
                seconds, n_tokens = run(arguments.data, tokenizer, Path(folder))
            rates[name].append(n_tokens / seconds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {"tokens_per_s": medians, "ratio": medians["farthing"] / medians["maps"], "all": rates}
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"farthing {medians['farthing'] / 1e6:.2f} M tokens/s, maps {medians['maps'] / 1e6:.2f} M: {result['ratio']:.1f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
