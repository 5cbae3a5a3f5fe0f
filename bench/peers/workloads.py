"""What is trained on: a workload folder with a model, its first weights, examples as text and the
same ones as tokens.

    model/       config.json, tokenizer, model.safetensors: the initial weights of every contestant
    train.jsonl  eval.jsonl    texts, for farthing
    train.npz    eval.npz      the same examples as farthing has tokenized them, for all others
    cache/       farthing's token cache: nobody tokenizes while the clock runs
    facts.json   what is in it

Without `--data` the texts are words drawn at random from a vocabulary in which a word is a token,
each likely to be followed by a few others, so that there is something to learn; their lengths are
those of the workload.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from farthing.config.load import load_job
from farthing.tiny import write_jsonl
from farthing.train.resolve import open_examples, resolve
from peers import models
from peers.assignment import Assignment, Examples
from peers.ours import job_values, write_job
from small_models import make_tokenizer

N_CLASSES = 8
TARGET_SHARE = 0.4


@dataclass(frozen=True)
class Workload:
    """The shape of the data: lengths are drawn from a lognormal law, or are all `max_length`."""

    name: str
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
        return replace(
            self,
            mean=self.mean * scale,
            max_length=max(16, round(self.max_length * scale)),
            prefix=round(self.prefix * scale),
            max_target_length=max(8, round(self.max_target_length * scale)),
        )


WORKLOADS = {
    "short": Workload("short", "causal-lm", mean=110, spread=0.7, max_length=512),
    "chat": Workload("chat", "causal-lm", mean=660, spread=0.8, max_length=2048),
    "full": Workload("full", "causal-lm", mean=2048, spread=0.0, max_length=2048),
    "shared": Workload("shared", "causal-lm", mean=145, spread=0.4, max_length=1536, prefix=1000),
    "classes": Workload("classes", "classification", mean=110, spread=0.7, max_length=256),
    "seq2seq": Workload("seq2seq", "seq2seq", mean=60, spread=0.5, max_length=128),
}
SCALES = {"chat": 1 / 3, "full": 0.25, "shared": 0.4}
"""What the lengths are multiplied with on a CPU, so that a run takes less than a minute."""
FAMILY = {"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"}


@dataclass(frozen=True)
class Size:
    """Of the model that is made where none is given."""

    hidden: int = 256
    layers: int = 6
    words: int = 16000
    spread: float = 0.02
    """Standard deviation of the first weights."""


@dataclass(frozen=True)
class Given:
    """What replaces drawn data and the made model."""

    data: str = ""
    model: str = ""
    columns: tuple[tuple[str, str], ...] = ()


Rows = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""To train on, and held out."""


def prepare(
    root: Path,
    workload: Workload,
    size: Size,
    n_train: int,
    n_eval: int,
    given: Given | None = None,
    rows: Rows | None = None,
) -> tuple[Path, dict[str, Any]]:
    """(folder, facts) of the workload, of `rows` where there are some; made once for the same
    arguments.
    """
    given = given or Given()
    stamps = [_stamp(given.data), _stamp(given.model)]
    identity = [asdict(workload), asdict(size), n_train, n_eval, asdict(given), stamps, rows]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    folder = root / f"{workload.name}-{key}"
    if (folder / "facts.json").exists():
        return folder, json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    if rows is None and given.data:
        rows = _read_rows(Path(given.data), n_train, n_eval)
    elif rows is None:
        rows = (
            drawn_rows(workload, size.words, n_train, 1),
            drawn_rows(workload, size.words, n_eval, 2),
        )
    write_jsonl(folder / "train.jsonl", rows[0])
    write_jsonl(folder / "eval.jsonl", rows[1])
    if given.model:
        shutil.copytree(given.model, folder / "model", dirs_exist_ok=True)
    else:
        _make_model_folder(
            folder / "model", workload, size, [*rows[0], *rows[1]] if given.data else None
        )
    facts = _tokenize(folder, workload, n_train, n_eval, given)
    facts |= _initial_weights(folder / "model", workload.task, facts.pop("label_names"))
    facts |= {"workload": asdict(workload), "size": asdict(size), "given": asdict(given)}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return folder, facts


def _stamp(path: str) -> list[int]:
    if not path:
        return []
    status = Path(path).stat()
    return [status.st_size, status.st_mtime_ns]


# ---- texts ----


def drawn_rows(workload: Workload, n_words: int, n: int, seed: int) -> list[dict[str, str]]:
    """`n` rows of random words: the task's columns, a token a word."""
    draw = np.random.Generator(np.random.PCG64(seed))
    lengths = drawn_lengths(workload, n, draw)
    prefix = sentence(np.random.Generator(np.random.PCG64(0)), workload.prefix, n_words)
    rows = []
    for length in lengths:
        words = sentence(
            draw, max(2, int(length) - workload.prefix - 1), n_words
        )  # one token closes it
        n_target = max(1, round(len(words) * TARGET_SHARE))
        given, wanted = words[:-n_target], words[-n_target:]
        if workload.task == "classification":
            rows.append(
                {"text": " ".join(words), "label": f"class {int(words[0][1:]) % N_CLASSES}"}
            )
        elif workload.task == "seq2seq":
            wanted = wanted[: workload.max_target_length - 1]
            rows.append({"input": " ".join(given or words), "target": " ".join(wanted)})
        else:
            rows.append(
                {
                    "prompt": " ".join([*prefix, *given]) or "w0",
                    "completion": " " + " ".join(wanted),
                }
            )
    return rows


def drawn_lengths(workload: Workload, n: int, draw: np.random.Generator) -> Any:
    """Tokens of each example [n], prefix and closing token included."""
    if workload.spread == 0:
        return np.full(n, workload.max_length)
    law = np.log(workload.mean) - workload.spread**2 / 2
    own = np.exp(law + workload.spread * draw.standard_normal(n))
    return (
        np.clip(np.round(own), 4, workload.max_length - workload.prefix).astype(int)
        + workload.prefix
    )


def sentence(draw: np.random.Generator, n: int, n_words: int) -> list[str]:
    """Words of a Zipf law, each followed by one of four others seven times in ten."""
    most = n_words - 16  # room for special tokens
    rare = np.minimum((most ** draw.random(n)).astype(int), most - 1)
    follows, which = draw.random(n) < 0.7, draw.integers(4, size=n)
    words, last = [], 0
    for i in range(n):
        last = (
            (last * 7 + 11 * int(which[i]) + 3) % min(most, 512)
            if follows[i] and i
            else int(rare[i])
        )
        words.append(f"w{last}")
    return words


def _read_rows(path: Path, n_train: int, n_eval: int) -> Rows:
    """Lines of a JSONL file, shuffled, no line on both sides; more than needed, as prompts may fill
    what is allowed.
    """
    lines = sorted({line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()})
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(lines))
    if len(lines) < n_eval + n_train:
        raise SystemExit(
            f"{path}: {len(lines)} different rows, {n_eval + n_train} are needed: give fewer"
            " --steps"
        )
    spare = min(4.0, len(lines) / (n_eval + n_train))
    rows, n_held_out = [json.loads(lines[i]) for i in order], int(n_eval * spare)
    return rows[n_held_out : n_held_out + int(n_train * spare)], rows[:n_held_out]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _strings(part)


# ---- model ----


def _make_model_folder(
    folder: Path, workload: Workload, size: Size, rows: list[dict[str, Any]] | None
) -> None:
    """Tokenizer (of the rows' text, or a word a token) and configuration of a small model."""
    family = FAMILY[workload.task]
    if rows is None:
        tokenizer = word_tokenizer(folder, size.words, family)
    else:
        tokenizer = make_tokenizer(
            folder, (text for row in rows for text in _strings(row)), size.words, family
        )
    heads = max(1, size.hidden // 32)
    wide = size.hidden * 11 // 4
    common = {
        "vocab_size": max(size.words, len(tokenizer)),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    positions = workload.max_length + 8
    if family == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=wide,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            initializer_range=size.spread,
            **common,
        )
    elif family == "t5":
        config = transformers.T5Config(
            d_model=size.hidden,
            d_ff=wide,
            d_kv=32,
            num_layers=size.layers,
            num_heads=heads,
            dropout_rate=0.0,
            initializer_factor=size.spread / 0.02,
            decoder_start_token_id=0,
            **common,
        )
    else:
        config = transformers.BertConfig(
            hidden_size=size.hidden,
            intermediate_size=wide,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            max_position_embeddings=positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=size.spread,
            **common,
        )
    config.save_pretrained(folder)


def word_tokenizer(folder: Path, n_words: int, family: str) -> Any:
    """Words w0, w1, ... between spaces, each one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {
        word: i
        for i, word in enumerate([*special, *(f"w{i}" for i in range(n_words - len(special)))])
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if family != "llama":
        single = "$A </s>" if family == "t5" else "<s> $A </s>"
        tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=1 << 20, **names
    )
    fast.save_pretrained(folder)
    return fast


def _initial_weights(folder: Path, task: str, label_names: list[str]) -> dict[str, Any]:
    """Write the first weights of everyone, in fp32: those in the folder, or drawn. Returns what the
    model is made of.
    """
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    if task == "classification":
        config.num_labels = len(label_names)
        config.id2label = dict(enumerate(label_names))
        config.label2id = {name: index for index, name in enumerate(label_names)}
        config.problem_type = "single_label_classification"
    torch.manual_seed(0)
    if any(folder.glob("*.safetensors")):
        loaded = {
            "config": config,
            "dtype": torch.float32,
            "ignore_mismatched_sizes": task == "classification",
        }
        model = models.auto_class(task).from_pretrained(folder, **loaded)
    else:
        model = models.auto_class(task).from_config(config, dtype=torch.float32)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = model.config.eos_token_id
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    model.save_pretrained(folder)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "targets": {"full": [], "lora": all_linear(model)},
    }


def all_linear(model: Any) -> list[str]:
    """The last parts of the names of the linear layers of the body: peft finds all by them."""
    body = model.base_model_prefix
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and ".pooler." not in name
        and (
            name.startswith(f"{body}.")
            or not hasattr(model, body)
            or model.get_submodule(body) is model
        )
    }
    return sorted(names)


# ---- tokens ----


def _tokenize(
    folder: Path, workload: Workload, n_train: int, n_eval: int, given: Given
) -> dict[str, Any]:
    """The examples as farthing tokenizes them, into the one file for all; returns what is known of
    them.
    """
    one_step = Assignment(
        contestant="farthing",
        folder=str(folder),
        out=str(folder / "tokenizing"),
        task=workload.task,
        method="full",
        precision="fp32",
        order=[[0] * n_train],
        epochs=1,
        seed=0,
        max_length=workload.max_length,
        max_target_length=workload.max_target_length,
        learning_rate=1e-3,
        targets=[],
        columns=dict(given.columns),
    )
    values = job_values(one_step, cache_dir=str(folder / "cache"))
    values["data"] |= {"eval": str(folder / "eval.jsonl"), "max_eval_samples": n_eval}
    values["model"] = {"model_name_or_path": str(folder / "model"), "init": "random"}
    job = load_job(write_job(Path(one_step.out), values))
    started, cpu = time.perf_counter(), time.process_time()
    train, held_out = open_examples(resolve(job), lambda event: None)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert held_out is not None
    if len(train) < n_train:
        raise SystemExit(
            f"{folder}: {len(train)} of the rows can be used, {n_train} are needed: give fewer"
            " --steps"
        )
    n_all = int(train.tokens.lengths.sum() + held_out.tokens.lengths.sum())
    found = {"tokenizing": {"tokens": n_all, "wall_s": seconds, "cpu_s": cpu}}
    for split, examples in (("train", train), ("eval", held_out)):
        tokens, n = examples.tokens, len(examples)
        end = int(tokens.offsets[n])
        Examples(
            np.array(tokens.ids[:end]),
            np.array(tokens.targets[:end]),
            np.array(tokens.offsets[: n + 1]),
            None if tokens.labels is None else np.array(tokens.labels[:n]).astype(np.int64),
            is_seq2seq=workload.task == "seq2seq",
        ).save(folder / f"{split}.npz")
        lengths = np.diff(tokens.offsets[: n + 1])
        n_targets = tokens.n_targets(range(n))
        found[split] = {
            "examples": n,
            "tokens": end,
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
            "targets": n_targets,
        }
    return found | {"label_names": list(train.tokens.label_names)}
