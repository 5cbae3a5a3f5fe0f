"""What the tests of methods, metrics and verbs work with: small jobs that train in a second, and
eyes on the model.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import yaml
from safetensors.torch import load_file

import farthing.train.build
import farthing.train.run
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.events import Event, StepTaken, Warned
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.planner.estimate import Estimate
from farthing.run.folder import keep, kept
from farthing.tiny import demo_rows, write_jsonl
from farthing.train.opened_run import opened_run
from farthing.train.resolve import RunSpec, resolve
from farthing.train.run import Outcome
from small_models import make_model_folder

ESTIMATE = Estimate(
    wall_s=10.0,
    wall_range_s=[5.0, 10.0, 20.0],
    usd=0.0,
    peak_bytes=1,
    seconds={},
    memory={},
    step_s=1.0,
    interval_s=60.0,
    calibration="formulas only",
)
"""Says nothing that could be true of a job."""
TASK = {"llama": "causal-lm", "t5": "seq2seq", "bert": "classification"}
TOPICS = {
    "food": ["bread", "cheese", "soup", "apple", "rice"],
    "sport": ["goal", "match", "race", "team", "ball"],
    "weather": ["rain", "storm", "sun", "snow", "wind"],
}


def rows_of(family: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """`n` rows that a small model learns quickly, in the form that suits the family."""
    if family == "bert":
        names = list(TOPICS)
        rows = []
        for i in range(n):
            label = names[(i + seed) % len(names)]
            words = TOPICS[label]
            k = i // len(names)
            rows.append(
                {
                    "text": f"the {words[k % 5]} and the {words[k // 5 % 5]} number {k}",
                    "label": label,
                }
            )
        return rows
    rows = demo_rows(n, seed)
    if family == "t5":
        return [{"input": row["prompt"], "target": row["completion"].strip()} for row in rows]
    return rows


def make_folder(folder: Path, family: str, *, pretrained: bool = False, **size) -> Path:
    """A small model folder; with weights when `pretrained`."""
    texts = [" ".join(row.values()) for row in rows_of(family, 60)]
    make_model_folder(folder, texts, family, **size)
    if pretrained:
        from farthing.model.load import ModelChoice, auto_class, load_config

        torch.manual_seed(0)
        auto_class(TASK[family]).from_config(
            load_config(ModelChoice(str(folder), init="random"))
        ).save_pretrained(folder)
    return folder


def job_file(folder: Path, family: str = "llama", **keys) -> Path:
    """Write model, data and job file into `folder`.

    Keys: `rows` or `n_rows`, `eval_rows`, `pretrained`, `size` (of the model), any key of `train`,
    `method` (a name or a mapping), `task`, `model`, `data`, `limits`, `where`, `output_dir`,
    `output_store`, `search`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = keys.pop("rows", None) or rows_of(family, keys.pop("n_rows", 32))
    pretrained, size = keys.pop("pretrained", False), keys.pop("size", {})
    if not (folder / "base").exists():
        make_folder(folder / "base", family, pretrained=pretrained, **size)
    write_jsonl(folder / "data.jsonl", rows)
    data = {"train": "data.jsonl", **keys.pop("data", {})}
    if "eval_rows" in keys:
        write_jsonl(folder / "eval.jsonl", keys.pop("eval_rows"))
        data["eval"] = "eval.jsonl"
    values = {name: keys.pop(name) for name in ("output_store", "search") if name in keys} | {
        "task": keys.pop("task", TASK[family]),
        "model": {"model_name_or_path": "./base", "init": "pretrained" if pretrained else "random"}
        | keys.pop("model", {}),
        "data": data,
        "method": keys.pop("method", "full"),
        "limits": keys.pop("limits", {}),
        "where": {"device": "cpu", "usd_per_hour": 3.6, **keys.pop("where", {})},
        "output_dir": keys.pop("output_dir", "./run"),
        "cache_dir": "./cache",
        "train": {
            "max_steps": 6,
            "global_batch_size": 8,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
        }
        | keys,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def make_job(folder: Path, family: str = "llama", **keys) -> Job:
    """The job of `job_file`, read."""
    return load_job(job_file(folder, family, **keys))


Kind = TypeVar("Kind", bound=Event)


class Heard(list[Event]):
    """Every event of a run, in order."""

    def __call__(self, event: Event):
        """Hear one."""
        self.append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of one kind."""
        return [event for event in self if isinstance(event, kind)]

    @property
    def warnings(self) -> str:
        """All warnings as text."""
        return "\n".join(event.text for event in self.of(Warned))


def step_taken(**figures) -> StepTaken:
    """An event of a step, with figures that no test looks at where none are given."""
    of_any = {each.name: 1.0 for each in fields(StepTaken)} | {
        "step": 1,
        "n_steps": 2,
        "examples": (0,),
        "metrics": {},
    }
    return StepTaken(**(of_any | figures))


def train(job: Job, heard: Heard | None = None) -> Outcome:
    """Train `job`, hearing what it tells."""
    return farthing.train.run.train(job, heard if heard is not None else Heard())


def trained(folder: Path, family: str = "llama", **keys) -> Path:
    """The folder of a run that has ended, of the job of `job_file`."""
    job = make_job(folder, family, **keys)
    train(job)
    return Path(job.output_dir)


def with_where(job: Job, **keys) -> Job:
    return job.model_copy(update={"where": job.where.model_copy(update=keys)})


def as_tokens(tokenizer, row: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels [1, n] of a prompt and its completion, by the tokenizer's own call."""
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    n_prompt = len(tokenizer(row["prompt"])["input_ids"])
    return torch.tensor([ids]), torch.tensor([[-100] * n_prompt + ids[n_prompt:]])


def opened(job: Job, heard: Heard | None = None):
    """A run at step 0, not in its loop; a context."""
    Path(job.output_dir).mkdir(parents=True, exist_ok=True)
    return opened_run(job, heard if heard is not None else Heard())


def change_facts(run: Path, **facts):
    """Write other facts into a run's `run.json`, with a right checksum; None takes one out."""
    changed = {**kept(run / "run.json"), **facts}
    keep(run / "run.json", {key: value for key, value in changed.items() if value is not None})


@contextlib.contextmanager
def file_system(folder: Path, options: str) -> Iterator[Path]:
    """`folder` as a file system of its own in memory, as `mount` makes it; the test is skipped
    where it can make none.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a file system, and not everywhere")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)])


def read_json(path: Path):
    return json.loads(path.read_text())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A JSON document a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of(job: Job) -> list[dict[str, Any]]:
    """The rows of `log.jsonl`."""
    return read_rows(Path(job.output_dir) / "log.jsonl")


def metrics_of(job: Job) -> list[dict[str, Any]]:
    """What each evaluation has measured."""
    return [row["metrics"] for row in log_of(job) if "metrics" in row]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What the run of a folder has exported."""
    return load_file(folder / "run/model/model.safetensors")


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights_in(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what it has now."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def steps_of(job: Job) -> list[dict[str, Any]]:
    """The rows of the log that are steps."""
    return [row for row in log_of(job) if "examples" in row]


def losses_of(job: Job) -> list[Any]:
    """The loss of every step."""
    return [row["loss"] for row in steps_of(job)]


def resolved(job: Job, numerics: Numerics) -> RunSpec:
    """What a run of the job starts from, as on a machine that computes so."""
    spec = resolve(job)
    vars(spec)["numerics"] = numerics
    return spec


def room_for(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with room for so many tokens at once; returns what it was asked to compute."""
    honest, asked = Forward.loss, []

    def loss(forward, batch, *scale):
        if torch.is_grad_enabled():
            asked.append(batch["input_ids"].numel())
            if asked[-1] > n_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return honest(forward, batch, *scale)

    monkeypatch.setattr(Forward, "loss", loss)
    return asked


def with_gpu(patch: pytest.MonkeyPatch, **answers):
    """torch answers so of its GPU."""
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class Watched:
    """The model of the last run: its state before training, and itself."""

    def __init__(self, monkeypatch):
        self.model = None
        self.before = {}
        build = farthing.train.build.build_model

        def watched(*args, **kwargs):
            self.model = build(*args, **kwargs)
            self.before = weights_in(self.model)
            return self.model

        monkeypatch.setattr(farthing.train.build, "build_model", watched)

    def changed(self) -> set[str]:
        """Names of the parameters that are not, bit for bit, what they were."""
        now = dict(self.model.named_parameters())
        return {name for name, value in self.before.items() if not torch.equal(value, now[name])}

    def trainable(self) -> set[str]:
        """Names of the parameters that require a gradient."""
        return {name for name, p in self.model.named_parameters() if p.requires_grad}


def with_system_prompt(n: int, n_rules: int = 30) -> list[dict[str, Any]]:
    """Chats that begin alike, long enough to be worth it."""
    system = " ".join(f"rule {i} says bread and soup" for i in range(n_rules))
    return [
        {
            "prompt": f"{system} question {i}: {'rain ' * (i % 7)}",
            "completion": f" answer {i % 5} goal",
        }
        for i in range(n)
    ]
