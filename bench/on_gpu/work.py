"""What bench/gpu.py trains: real shapes with random weights, random tokens in lengths of real laws,
and farthing's loop.

No weights and no data are needed: a folder has a configuration and a tokenizer, and one file of
tokens that everyone reads. Refuses to measure.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from farthing.events import Event, Note, Warned
from farthing.models.model_config import known_config
from peers.assignment import Examples as Drawn

SHAPES = {
    "0.5B": "Qwen/Qwen2.5-0.5B",
    "1B": "meta-llama/Llama-3.2-1B",
    "3B": "meta-llama/Llama-3.2-3B",
    "8B": "meta-llama/Llama-3.1-8B",
    "T5": "google-t5/t5-base",
    "BERT": "google-bert/bert-base-uncased",
}
"""By name the model whose sizes are taken."""
TASKS = {"T5": "seq2seq", "BERT": "classification"}
"""Of a shape; of all others it is causal-lm."""
N_CLASSES = 8
TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1200,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SMALL_OF = {
    "T5": {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 32,
        "num_heads": 2,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "vocab_size": 1200,
    },
    "BERT": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 1200,
    },
}
"""What makes toys of them."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = ("lora", "full")
LENGTHS = ("chat", "full")
LENGTHS_OF = {"T5": ("seq2seq",), "BERT": ("classes",)}
"""Laws of lengths of the shapes that are not trained on chats: pairs of about 60 and 24 tokens,
texts of about 110.
"""
LABELLED = 0.4  # of an example's tokens, its last ones
LORA_R = 16
LONGEST = 1536
SEED = 42


@dataclass(frozen=True)
class Scale:
    """How large everything is: as on a GPU, or small enough for a CPU to try the program."""

    n_examples: int = 1024
    shrink: int = 1
    """Of the lengths."""
    batches: tuple[tuple[str, int], ...] = (
        ("chat", 32),
        ("full", 13),
        ("seq2seq", 352),
        ("classes", 192),
    )
    """Examples of a step by lengths: about twenty thousand tokens in each."""
    warm_up: int = 2
    timed: tuple[tuple[str, int], ...] = (("0.5B", 16), ("1B", 10))
    """Steps by shape, nine of the others. Fewer than ten after the first set no pace for later
    plans.
    """
    of_variants: tuple[int, int] = (1, 3)
    """Warm-up and timed steps of a variant."""
    matmul: int = 8192
    copy_bytes: int = 2 << 30

    def n_timed(self, shape: str) -> int:
        """Steps that are timed, after the warm-up."""
        return dict(self.timed).get(shape, 12 if shape in TASKS else 9)

    def batch(self, lengths: str) -> int:
        """Examples of a step."""
        return dict(self.batches)[lengths]


FULL = Scale()
SMALL = Scale(
    n_examples=48,
    shrink=32,
    batches=(("chat", 8), ("full", 4), ("seq2seq", 8), ("classes", 8)),
    matmul=256,
    copy_bytes=1 << 20,
)


def config_of(shape: str, is_small: bool = False) -> dict[str, Any]:
    """The sizes of a shape, in the form of its config.json."""
    config = dict(TOY) if shape == "toy" else known_config(SHAPES[shape])
    assert config is not None, f"{shape} is not in the table of models"
    config = config | (SMALL_OF.get(shape, {}) if is_small else {})
    names = {
        **{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"},
        **{"t5": "T5ForConditionalGeneration", "bert": "BertForSequenceClassification"},
    }
    if config["model_type"] == "t5":
        config = config | {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    if config["model_type"] == "bert":
        config = config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config |= {
            "id2label": dict(enumerate(label_names())),
            "problem_type": "single_label_classification",
        }
    return config | {
        "architectures": [names[config["model_type"]]],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def label_names() -> list[str]:
    """Of the classes."""
    return [f"class {index}" for index in range(N_CLASSES)]


def objective_of(shape: str) -> str:
    """What it is trained for."""
    return TASKS.get(shape, "causal-lm")


def lengths_of(shape: str) -> tuple[str, ...]:
    """The laws of lengths that it is trained on."""
    return LENGTHS_OF.get(shape, LENGTHS)


def methods_of(shape: str) -> tuple[str, ...]:
    """What is trained of it."""
    return METHODS if objective_of(shape) == "causal-lm" else ("full",)


def draw_examples(lengths: str, n_words: int, scale: Scale) -> Drawn:
    """Random tokens: "chat" lengths are lognormal (mean about 590, 1536 at most), "full" ones are
    all 1536: a run whose examples are three times as long sets no pace for this one.

    Those of "seq2seq" count source and target.
    """
    from peers.workloads import WORKLOADS, drawn_lengths

    draw = np.random.Generator(np.random.PCG64(SEED))
    law = replace(WORKLOADS[lengths], max_length=min(LONGEST, WORKLOADS[lengths].max_length))
    sizes = np.maximum(8, np.asarray(drawn_lengths(law, scale.n_examples, draw)) // scale.shrink)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = draw.integers(3, n_words, offsets[-1]).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    n_given = np.repeat(sizes - np.maximum(1, np.round(LABELLED * sizes).astype(int)), sizes)
    is_target = (places >= n_given).astype(np.uint8)
    task = WORKLOADS[lengths].task
    classes = draw.integers(0, N_CLASSES, len(sizes)) if task == "classification" else None
    if classes is not None:
        is_target[:] = 0
    return Drawn(ids, is_target, offsets.astype(np.int64), classes, task == "seq2seq")


def prepare(work: Path, shape: str, scale: Scale) -> None:
    """Write the folders of a shape: model without weights, tokens, and what a token costs in FLOPs."""  # noqa: E501
    from farthing.tiny import demo_rows, make_tokenizer, write_jsonl

    config = config_of(shape, is_small=scale.shrink > 1)
    for lengths in lengths_of(shape):
        folder = work / f"{shape}-{lengths}"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        rows = demo_rows(40)
        make_tokenizer(folder / "model", [row["prompt"] + row["completion"] for row in rows])
        if objective_of(shape) != "causal-lm":
            name = (
                ("text", "label")
                if objective_of(shape) == "classification"
                else ("input", "target")
            )
            rows = [
                dict(zip(name, (row["prompt"], row["completion"]), strict=True)) for row in rows
            ]
        write_jsonl(
            folder / "train.jsonl", rows[:1]
        )  # a job names a file; its tokens are not looked at
        drawn = draw_examples(lengths, config["vocab_size"], scale)
        drawn.save(folder / "train.npz")
        facts = {
            "mean_tokens": float(drawn.lengths.mean()),
            "longest": int(drawn.lengths.max()),
            "state_bytes": state_bytes(config, objective_of(shape)),
            "flops_per_token": {
                method: flops_per_token(config, method, drawn) for method in methods_of(shape)
            },
        }
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def shape_of(config: dict[str, Any], task: str) -> Any:
    """Its sizes, as the planner knows them."""
    from farthing.models.shapes import read_shape

    return read_shape(config, task, N_CLASSES if task == "classification" else 0)


def state_bytes(config: dict[str, Any], task: str = "causal-lm") -> dict[str, int]:
    """What must be there at the least, without activations: weights, gradients and two moments in
    fp32; or frozen bf16.
    """
    n = shape_of(config, task).n_parameters
    return {"full": 16 * n, "lora": 2 * n}


def flops_per_token(config: dict[str, Any], method: str, drawn: Drawn) -> dict[str, float]:
    """FLOPs of forward and backward for a token of the data, without recomputation, attention
    within documents.

    `needed`: the head where something is predicted. `usual`: the head everywhere, as figures of
    others count it.
    """
    task = (
        "seq2seq"
        if drawn.is_seq2seq
        else "causal-lm"
        if drawn.classes is None
        else "classification"
    )
    shape = shape_of(config, task)
    adapters = None if method == "full" else shape.with_lora(LORA_R)
    found = {"needed": 0.0, "usual": 0.0}
    scored = np.add.reduceat(drawn.is_target.astype(np.int64), drawn.offsets[:-1])
    for (n_tokens, n_scored), n in Counter(
        zip(drawn.lengths.tolist(), scored.tolist(), strict=True)
    ).items():
        for name, n_read in (("needed", n_scored), ("usual", None)):
            sizes = {
                "causal-lm": (n_tokens, 0, n_read),
                "seq2seq": (n_tokens - n_scored, n_scored, None),
                "classification": (n_tokens, 0, None),
            }[task]
            found[name] += n * shape.training_flops(*sizes, adapters).total
    return {name: flops / int(drawn.lengths.sum()) for name, flops in found.items()}


def order_of(drawn: Drawn, batch: int, n_steps: int) -> list[list[int]]:
    """The examples of every step, as farthing draws them: what the others are given."""
    from farthing.data.batches import Batches

    batches = Batches(np.arange(len(drawn)), batch, SEED)
    return [batches.examples_of(step).tolist() for step in range(n_steps)]


# ---- farthing's loop ----


def random_model(
    choice: Any,
    config: Any,
    task: str,
    *,
    dtype: Any,
    seed: int,
    pad_id: int | None = None,
    **_: Any,
) -> Any:
    """In place of `load_model`: weights drawn where they will be used, so that none has to be read
    or sent.
    """
    import torch

    from farthing.model.load import auto_class

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto_class(task).from_config(config, dtype=dtype)
    model.config.use_cache = False
    return model


def job_values(
    folder: Path,
    out: Path,
    method: str,
    batch: int,
    n_steps: int,
    usd_per_hour: float,
    **train: Any,
) -> dict[str, Any]:
    """A job as a person would write it, with nothing set but what all have."""
    task = objective_of(folder.name.partition("-")[0])
    lengths = (
        {"max_length": 2048}
        if task == "causal-lm"
        else {"max_length": 256, "max_target_length": 128}
    )
    return {
        "task": task,
        "model": {
            "model_name_or_path": f"{folder}/model",
            **({} if method == "qlora" else {"init": "random"}),
        },
        "data": {"train": f"{folder}/train.jsonl", **lengths},
        "method": "full" if method == "full" else {"name": method, "lora_r": LORA_R},
        "train": {
            "max_steps": n_steps,
            "global_batch_size": batch,
            "seed": SEED,
            "learning_rate": 1e-5,
            "probe": False,
            "lr_scheduler_type": "constant",
            "eval_strategy": "no",
            **train,
        },
        "where": {"usd_per_hour": usd_per_hour},
        "output_dir": f"{out}/run-{time.time_ns()}",
        "cache_dir": f"{out}/cache",
    }


@contextlib.contextmanager
def opened(values: dict[str, Any], drawn: Drawn, said: list[str] | None = None) -> Iterator[Any]:
    """An `Attempt` of farthing at its first step, over these tokens: made by the same code that
    `farthing train` runs.

    What it notes and warns of goes to `said`.

    Three things are replaced: where weights come from, where tokens come from, and the look at the
    disk, as nothing is saved.
    """
    import yaml

    import farthing.train.build
    import farthing.train.resolve
    import farthing.train.run
    import farthing.train.saver
    from farthing.config.load import load_job
    from farthing.data.token_set import TokenSet

    folder = Path(values["output_dir"])
    folder.mkdir(parents=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    job = load_job(path)
    facts: dict[str, Any] = {"sources": [{"name": "random tokens"}], "label_names": []}
    n = len(drawn)
    if drawn.classes is not None:
        facts["label_names"] = label_names()
    tokens = TokenSet(
        folder=folder,
        facts=facts,
        ids=drawn.ids,
        targets=drawn.is_target,
        offsets=drawn.offsets,
        lines=np.zeros(n, np.int64),
        target_lengths=np.diff(
            np.concatenate([[0], np.cumsum(drawn.is_target, dtype=np.int64)])[drawn.offsets]
        ),
        groups=np.arange(n, dtype=np.uint64),
        labels=drawn.classes,
    )
    examples = farthing.train.resolve.Examples(tokens, np.arange(n))
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        *(
            []
            if job.method.name == "qlora"
            else [(farthing.train.build, "load_model", random_model)]
        ),
        (farthing.train.build, "open_examples", lambda *_: (examples, None)),
        (farthing.train.saver.Saver, "refuse_small_disk", lambda _: None),
    ]

    def tell(event: Event) -> None:
        if said is not None and isinstance(event, Note | Warned):
            said.append(event.text)

    with contextlib.ExitStack() as stack:
        for where, name, instead in replaced:
            stack.enter_context(mock.patch.object(where, name, instead))
        yield stack.enter_context(farthing.train.run.opened_run(job, tell))
