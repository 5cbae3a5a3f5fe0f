"""A small model and a small data set made on the spot: for the demo, and for trying farthing
offline.

The tokenizer is trained on the given texts; the model is a `config.json` that trains from random
weights.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_NAMES = (
    *(
        "The Mill",
        "The Eagle",
        "Blue Spice",
        "Green Man",
        "The Punter",
        "Zizzi",
        "Cotto",
        "Strada",
        "Aromi",
        "Giraffe",
    ),
)
_FOODS = ["Italian", "French", "Indian", "Chinese", "Japanese", "English"]
_AREAS = ["riverside", "city centre", "old town"]
_PRICES = {"cheap": "low prices", "moderate": "fair prices", "high": "high prices"}


def demo_rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """`n` prompt/completion rows: facts about a restaurant, and a sentence that says them."""
    everything = list(itertools.product(_NAMES, _FOODS, _AREAS, _PRICES))
    chosen = random.Random(seed).choices(everything, k=n)
    return [
        {
            "prompt": f"name: {name}; food: {food}; area: {area}; price: {price} =>",
            "completion": f" {name} serves {food} food at {_PRICES[price]} in the {area}.",
        }
        for name, food, area, price in chosen
    ]


def make_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int = 1000) -> Any:
    """Train a byte-level BPE tokenizer on `texts` and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=4096,
    )
    fast.save_pretrained(folder)
    return fast


def make_model_folder(
    folder: Path, texts: Iterable[str], *, hidden: int = 64, layers: int = 2, dropout: float = 0.0
) -> Path:
    """A folder with a tokenizer and the `config.json` of a small Llama, for `model.init:
    random`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, texts)
    heads = max(1, hidden // 32)
    config = {
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": 2048,
        "attention_dropout": dropout,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    """Rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


DEMO_JOB = """\
# A job that runs anywhere in a minute: a small Llama learns to say facts about restaurants.
task: causal-lm
model:
  model_name_or_path: ./model
  init: random            # the folder holds a config.json and a tokenizer, no weights
data:
  train: ./data.jsonl
  eval_fraction: 0.1
method: full
train:
  num_train_epochs: 6
  global_batch_size: 32
  learning_rate: 3.0e-3
  lr_scheduler_type: cosine
  save_steps: 20
where:
  usd_per_hour: 0.36      # what this machine costs; try your own
output_dir: ./run
cache_dir: ./cache
"""


def write_demo(folder: Path) -> Path:
    """The demo's model, data and job file; returns the job file."""
    rows = demo_rows(1200)
    make_model_folder(
        folder / "model",
        (row["prompt"] + row["completion"] for row in rows),
        hidden=96,
        layers=3,
        dropout=0.1,
    )
    write_jsonl(folder / "data.jsonl", rows)
    job = folder / "job.yaml"
    job.write_text(DEMO_JOB, encoding="utf-8")
    return job
