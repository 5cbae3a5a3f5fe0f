"""What is trained on: a workload folder with a model, its first weights, examples as text and the
same ones as tokens.

    model/       config.json, tokenizer, model.safetensors: the initial weights of every contestant
    train.jsonl  eval.jsonl    texts, for farthing
    train.npz    eval.npz      the same examples as farthing has tokenized them, for all others
    cache/       farthing's token cache: nobody tokenizes while the clock runs
    facts.json   what is in it

Without `--data` the texts are words drawn at random, each likely to be followed by a few others, so
that there is something to learn; a word is a token, and lengths are those of the workload.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from farthing.config.load import load_job
from farthing.tiny import write_jsonl
from farthing.train.resolve import open_examples, resolve
from peers import models
from peers.assignment import Assignment, Examples
from peers.ours import write_job
from small_models import make_model_folder, make_tokenizer

N_CLASSES = 8
TARGET_SHARE = 0.4


@dataclass(frozen=True)
class Workload:
    """The shape of the data: lengths are drawn from a lognormal law, or are all `max_length`."""

    task: str
    mean: float
    spread: float
    """Sigma of the law's logarithm; 0: every example is as long as allowed."""
    max_length: int
    prefix: int = 0
    """Tokens that all examples begin with."""
    max_target_length: int = 64

    def scaled(self, scale: float) -> Workload:
        """With all lengths times `scale`."""
        names = ("max_length", "prefix", "max_target_length")
        sizes = {name: round(getattr(self, name) * scale) for name in names}
        return replace(self, mean=self.mean * scale, **sizes)


WORKLOADS = {
    "short": Workload("causal-lm", mean=110, spread=0.7, max_length=512),
    "chat": Workload("causal-lm", mean=660, spread=0.8, max_length=2048),
    "full": Workload("causal-lm", mean=2048, spread=0.0, max_length=2048),
    "shared": Workload("causal-lm", mean=145, spread=0.4, max_length=1536, prefix=1000),
    "classes": Workload("classification", mean=110, spread=0.7, max_length=256),
    "seq2seq": Workload("seq2seq", mean=60, spread=0.5, max_length=128),
}
SCALES = {"chat": 1 / 3, "full": 0.25, "shared": 0.4}
"""What the lengths are multiplied with on a CPU, so that a run takes less than a minute."""
FAMILY = {"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"}
SIZE = {"hidden": 256, "layers": 6, "words": 16000}
"""Of the model."""
Rows = list[dict[str, Any]]


def prepare(
    root: Path,
    workload: Workload,
    n_train: int,
    n_eval: int,
    data: str = "",
    columns: dict[str, str] | None = None,
    size: dict[str, int] = SIZE,
) -> tuple[Path, dict[str, Any]]:
    """(folder, facts) of the workload; made once for the same arguments."""
    stamp = [Path(data).stat().st_size, Path(data).stat().st_mtime_ns] if data else []
    identity = [asdict(workload), size, n_train, n_eval, data, columns, stamp]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    folder = root / f"{workload.task}-{key}"
    if (folder / "facts.json").exists():
        return folder, json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    if data:
        train, held_out = _read_rows(Path(data), n_train, n_eval)
    else:
        train, held_out = (
            drawn_rows(workload, size["words"], n, seed) for n, seed in ((n_train, 1), (n_eval, 2))
        )
    _make_model_folder(folder / "model", workload, size, [*train, *held_out], not data)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "eval.jsonl", held_out)
    facts = _tokenize(folder, workload, n_train, n_eval, columns or {})
    facts |= _initial_weights(folder / "model", workload.task, facts["label_names"])
    facts |= {"workload": asdict(workload), "columns": columns or {}}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return folder, facts


# ---- texts ----


def drawn_rows(workload: Workload, n_words: int, n: int, seed: int) -> Rows:
    """`n` rows of random words with the task's columns."""
    draw, rows = np.random.default_rng(seed), Rows()
    prefix = sentence(np.random.default_rng(0), workload.prefix, n_words)
    for length in drawn_lengths(workload, n, draw):
        # one token closes it
        words = sentence(draw, max(2, int(length) - workload.prefix - 1), n_words)
        n_target = max(1, round(len(words) * TARGET_SHARE))
        given, wanted = words[:-n_target], words[-n_target:]
        if workload.task == "classification":
            label = f"class {int(words[0][1:]) % N_CLASSES}"
            rows.append({"text": " ".join(words), "label": label})
        elif workload.task == "seq2seq":
            wanted = wanted[: workload.max_target_length - 1]
            rows.append({"input": " ".join(given or words), "target": " ".join(wanted)})
        else:
            prompt = " ".join([*prefix, *given]) or "w0"
            rows.append({"prompt": prompt, "completion": " " + " ".join(wanted)})
    return rows


def drawn_lengths(workload: Workload, n: int, draw: np.random.Generator) -> Any:
    """Tokens of each example [n], prefix and closing token included."""
    if workload.spread == 0:
        return np.full(n, workload.max_length)
    law = np.log(workload.mean) - workload.spread**2 / 2
    own = np.round(np.exp(law + workload.spread * draw.standard_normal(n)))
    return np.clip(own, 4, workload.max_length - workload.prefix).astype(int) + workload.prefix


def sentence(draw: np.random.Generator, n: int, n_words: int) -> list[str]:
    """Words of a Zipf law, each followed by one of four others seven times in ten."""
    rare = ((n_words - 16) ** draw.random(n)).astype(int)  # room for special tokens
    follows, which = draw.random(n) < 0.7, draw.integers(4, size=n)
    words, last = [], 0
    for i in range(n):
        last = (last * 7 + 11 * int(which[i]) + 3) % 512 if follows[i] and i else int(rare[i])
        words.append(f"w{last}")
    return words


def _read_rows(path: Path, n_train: int, n_eval: int) -> tuple[Rows, Rows]:
    """Lines of a JSONL file, shuffled, no line on both sides; more than needed, as prompts may fill
    what is allowed.
    """
    lines = sorted({line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()})
    if len(lines) < n_eval + n_train:
        raise SystemExit(
            f"{path}: {len(lines)} different rows, {n_eval + n_train} are needed: give fewer"
            " --steps"
        )
    spare = min(4.0, len(lines) / (n_eval + n_train))
    rows = [json.loads(lines[i]) for i in np.random.default_rng(0).permutation(len(lines))]
    n_held_out = int(n_eval * spare)
    return rows[n_held_out : n_held_out + int(n_train * spare)], rows[:n_held_out]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, dict) else value
    for part in parts if isinstance(value, dict | list) else ():
        yield from _strings(part)


# ---- model ----


def _make_model_folder(
    folder: Path, workload: Workload, size: dict[str, int], rows: Rows, is_drawn: bool
) -> None:
    """Tokenizer (of the rows' text, or a word a token) and configuration of a small model."""
    family, texts = FAMILY[workload.task], [*_strings(rows)]
    make_model_folder(folder, texts, family, hidden=size["hidden"], layers=size["layers"])
    tokenizer = make_tokenizer(folder, texts, size["words"], family)
    if is_drawn:
        back = tokenizer.backend_tokenizer
        names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(size["words"] - 3))]
        back.model = WordLevel({name: i for i, name in enumerate(names)}, "w0")
        back.pre_tokenizer = WhitespaceSplit()
        tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["vocab_size"] = max(size["words"], len(tokenizer))
    path.write_text(json.dumps(config), encoding="utf-8")


def _initial_weights(folder: Path, task: str, label_names: list[str]) -> dict[str, Any]:
    """Write the first weights of everyone, drawn, in fp32. Returns what the model is made of."""
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    if task == "classification":
        config.id2label = dict(enumerate(label_names))
        config.label2id = {name: index for index, name in enumerate(label_names)}
        config.problem_type = "single_label_classification"
    torch.manual_seed(0)
    model = models.auto_class(task).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    # the last parts of the names of the linear layers of the body: peft finds all by them
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".pooler." not in name and "." in name
    }
    return {"parameters": model.num_parameters(), "targets": sorted(linear)}


# ---- tokens ----


def _tokenize(
    folder: Path, workload: Workload, n_train: int, n_eval: int, columns: dict[str, str]
) -> dict[str, Any]:
    """The examples as farthing tokenizes them, into the one file for all; returns what is known of
    them.
    """
    one_step = Assignment(
        contestant="farthing",
        folder=str(folder),
        out=str(folder),
        task=workload.task,
        method="full",
        precision="fp32",
        order=[[0] * n_train],
        seed=0,
        max_length=workload.max_length,
        max_target_length=workload.max_target_length,
        learning_rate=1e-3,
        targets=[],
        columns=columns,
    )
    more = {"eval": str(folder / "eval.jsonl"), "max_eval_samples": n_eval}
    job = load_job(write_job(one_step, **more), ["model.init=random"])
    train, held_out = open_examples(resolve(job), lambda event: None)
    assert held_out is not None
    if len(train) < n_train:
        raise SystemExit(
            f"{folder}: {len(train)} of the rows can be used, {n_train} are needed: give fewer"
            " --steps"
        )
    for split, examples in (("train", train), ("eval", held_out)):
        tokens, n = examples.tokens, len(examples)
        end = int(tokens.offsets[n])
        drawn = Examples(
            np.array(tokens.ids[:end]),
            np.array(tokens.targets[:end]),
            np.array(tokens.offsets[: n + 1]),
            None if tokens.labels is None else np.array(tokens.labels[:n]).astype(np.int64),
            workload.task == "seq2seq",
        )
        drawn.save(folder / f"{split}.npz")
    lengths = Examples.load(folder / "train.npz").lengths
    of_train = {"examples": n_train, "mean": lengths.mean(), "longest": int(lengths.max())}
    return {"train": of_train, "label_names": list(train.tokens.label_names)}
