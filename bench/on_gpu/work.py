"""What bench/gpu.py trains: real shapes with random weights, random tokens in lengths of real laws,
and farthing's loop.

No weights and no data are needed: a folder has a configuration and a tokenizer, and one file of
tokens that everyone reads.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import yaml

from farthing.events import Event, Note, Warned
from farthing.models.model_config import known_config
from peers.assignment import Examples as Drawn

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LENGTHS: dict[str, dict[str, Any]] = TABLE["lengths"]
SHAPES: dict[str, dict[str, Any]] = {
    name: TABLE["usual"] | row for name, row in TABLE["shapes"].items()
}
for _row in SHAPES.values():
    _row["task"] = LENGTHS[_row["lengths"][0]]["task"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
N_CLASSES = 8
LABELLED = 0.4  # of an example's tokens, its last ones
LORA_R = 16
SEED = 42
WARM_UP = 2


class Scale(NamedTuple):
    """How large everything is: as on a GPU, or small enough for a CPU to try the program."""

    n_examples: int = 1024
    shrink: int = 1
    """Of the lengths."""
    batch: str = "batch"
    matmul: int = 8192
    copy_bytes: int = 2 << 30


FULL, SMALL = Scale(), Scale(48, 32, "toy_batch", 256, 1 << 20)


def config_of(shape: str, is_small: bool = False) -> dict[str, Any]:
    """The sizes of a shape, in the form of its config.json."""
    row = SHAPES[shape]
    config = known_config(row["of"]) if "of" in row else {}
    assert config is not None, f"{row['of']} is not in the table of models"
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return config | row["own"] | ends | (row["small"] if is_small else {})


def draw_examples(lengths: str, n_words: int, scale: Scale) -> Drawn:
    """Random tokens; those of "seq2seq" count source and target."""
    law, draw = LENGTHS[lengths], np.random.default_rng(SEED)
    middle = np.log(law["mean"]) - law["spread"] ** 2 / 2
    sizes = np.exp(middle + law["spread"] * draw.standard_normal(scale.n_examples))
    sizes = np.clip(np.round(sizes), 4, law["longest"]).astype(int)
    sizes = np.maximum(8, sizes // scale.shrink)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = draw.integers(3, n_words, offsets[-1]).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    n_given = np.repeat(sizes - np.maximum(1, np.round(LABELLED * sizes).astype(int)), sizes)
    is_target = (places >= n_given).astype(np.uint8)
    classes = None
    if law["task"] == "classification":
        is_target[:], classes = 0, draw.integers(0, N_CLASSES, len(sizes))
    return Drawn(ids, is_target, offsets, classes, law["task"] == "seq2seq")


def prepare(work: Path, shape: str, scale: Scale) -> None:
    """Write the folders of a shape: model without weights, tokens, steps, and what a token costs in
    FLOPs.
    """
    from farthing.data.batches import Batches
    from farthing.tiny import demo_rows, make_tokenizer, write_jsonl

    row, config = SHAPES[shape], config_of(shape, is_small=scale.shrink > 1)
    n = shape_of(config, row["task"]).n_parameters
    for lengths in row["lengths"]:
        folder = work / f"{shape}-{lengths}"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        texts = [tuple(each.values()) for each in demo_rows(40)]
        make_tokenizer(folder / "model", map("".join, texts))
        names = {"classification": ("text", "label"), "seq2seq": ("input", "target")}
        columns = names.get(row["task"], ("prompt", "completion"))
        # a job names a file; its tokens are not looked at
        write_jsonl(folder / "train.jsonl", [dict(zip(columns, texts[0], strict=True))])
        drawn = draw_examples(lengths, config["vocab_size"], scale)
        drawn.save(folder / "train.npz")
        batches = Batches(np.arange(len(drawn)), LENGTHS[lengths][scale.batch], SEED)
        steps = range(WARM_UP + row["timed"])
        facts = {
            "longest": int(drawn.lengths.max()),
            # weights, gradients and two moments in fp32, or frozen weights in bf16
            "state_bytes": {"full": 16 * n, "lora": 2 * n},
            "flops_per_token": {
                method: flops_per_token(config, method, drawn) for method in row["methods"]
            },
            "order": [batches.examples_of(step).tolist() for step in steps],
        }
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def shape_of(config: dict[str, Any], task: str) -> Any:
    """Its sizes, as the planner knows them."""
    from farthing.models.shapes import read_shape

    return read_shape(config, task, N_CLASSES if task == "classification" else 0)


def facts_of(folder: Path, method: str) -> dict[str, Any]:
    """What is known of a folder. Raises `MemoryError` where no way to train it fits this GPU."""
    import torch

    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    least = facts["state_bytes"].get(method, 0)
    if torch.cuda.is_available() and least > torch.cuda.get_device_properties(0).total_memory:
        raise MemoryError(f"{least / 2**30:.0f} GiB of weights, gradients and moments do not fit")
    return facts


def flops_per_token(config: dict[str, Any], method: str, drawn: Drawn) -> dict[str, float]:
    """FLOPs of forward and backward for a token of the data, without recomputation, attention
    within documents.

    `needed`: the head where something is predicted. `usual`: the head everywhere, as figures of
    others count it.
    """
    others = "causal-lm" if drawn.classes is None else "classification"
    task = "seq2seq" if drawn.is_seq2seq else others
    shape = shape_of(config, task)
    adapters = None if method == "full" else shape.with_lora(LORA_R)
    found = {"needed": 0.0, "usual": 0.0}
    scored = np.add.reduceat(drawn.is_target.astype(np.int64), drawn.offsets[:-1])
    pairs = Counter(zip(drawn.lengths.tolist(), scored.tolist(), strict=True))
    for (n_tokens, n_scored), n in pairs.items():
        for name, n_read in (("needed", n_scored), ("usual", None)):
            sizes = {
                "causal-lm": (n_tokens, 0, n_read),
                "seq2seq": (n_tokens - n_scored, n_scored, None),
                "classification": (n_tokens, 0, None),
            }[task]
            found[name] += n * shape.training_flops(*sizes, adapters).total
    return {name: flops / int(drawn.lengths.sum()) for name, flops in found.items()}


# ---- farthing's loop ----


def random_model(choice: Any, config: Any, task: str, *, dtype: Any, seed: int, **_: Any) -> Any:
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
    scale: Scale,
    n_steps: int,
    usd_per_hour: float,
    **train: Any,
) -> dict[str, Any]:
    """A job as a person would write it, with nothing set but what all have."""
    shape, _, lengths = folder.name.partition("-")
    is_causal = SHAPES[shape]["task"] == "causal-lm"
    init = {} if method == "qlora" else {"init": "random"}
    return {
        "task": SHAPES[shape]["task"],
        "model": {"model_name_or_path": f"{folder}/model", **init},
        "data": {"train": f"{folder}/train.jsonl", "max_length": 2048 if is_causal else 256}
        | ({} if is_causal else {"max_target_length": 128}),
        "method": "full" if method == "full" else {"name": method, "lora_r": LORA_R},
        "train": {
            "max_steps": n_steps,
            "global_batch_size": LENGTHS[lengths.removesuffix("-weights")][scale.batch],
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
    `farthing train` runs. What it notes and warns of goes to `said`.

    Three things are replaced: where weights come from, where tokens come from, and the look at the
    disk, as nothing is saved.
    """
    import farthing.train.build
    import farthing.train.opened_run
    import farthing.train.resolve
    import farthing.train.saver
    from farthing.config.load import load_job
    from farthing.data.token_set import TokenSet

    folder, n = Path(values["output_dir"]), len(drawn)
    folder.mkdir(parents=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    names = [] if drawn.classes is None else list("abcdefgh")
    scored = np.concatenate([[0], np.cumsum(drawn.is_target, dtype=np.int64)])
    tokens = TokenSet(
        folder=folder,
        facts={
            "sources": [{"name": "random tokens"}],
            "label_names": names,
            "notes": [],
            "n_rendered": 0,
        },
        ids=drawn.ids,
        targets=drawn.is_target,
        offsets=drawn.offsets,
        lines=np.zeros(n, np.int64),
        target_lengths=np.diff(scored[drawn.offsets]),
        groups=np.arange(n, dtype=np.uint64),
        labels=drawn.classes,
    )
    examples = farthing.train.resolve.Examples(tokens, np.arange(n))
    job = load_job(path)
    build = farthing.train.build
    load = build.load_model if job.method.name == "qlora" else random_model

    def tell(event: Event) -> None:
        if said is not None and isinstance(event, Note | Warned):
            said.append(event.text)

    with (
        mock.patch.object(build, "load_model", load),
        mock.patch.object(build, "open_examples", return_value=(examples, None)),
        mock.patch.object(farthing.train.saver.Saver, "refuse_small_disk"),
        farthing.train.opened_run.opened_run(job, tell) as run,
    ):
        yield run
