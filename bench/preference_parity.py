"""Losses, rewards and gradients of preference objectives beside TRL's own trainers, on one CPU.

    python bench/preference_parity.py [--seeds 1] [--first-seed 0] [--json]

TRL has to be installed beside farthing. A small Llama with random weights, moved away from its
reference, sees the same rows in both: TRL's trainer tokenizes, collates and computes its loss of
one batch; farthing makes its token set of the same file and computes the batch packed, with shared
beginnings, in micro-batches of 300 tokens. Ends with 1 where a loss, a reward or a gradient differs
by more than 1e-5 relative. The cases are in preference_parity.yaml.

What TRL has otherwise is not compared: `label_smoothing` of sigmoid, which it ignores; SimPO's
defaults; ORPO's loss of the prompt, for which the rows have a prompt of one token. Its trainers of
CPO and ORPO put a BOS token before each prompt, also where the tokenizer does not: they are given a
tokenizer without one.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from torch import Tensor

from common import command, play, seeds_of, write_job
from farthing.config.load import load_job
from farthing.tiny import write_jsonl
from farthing.train.opened_run import opened_run
from small_models import make_model_folder

WORDS = "bread cheese soup apple rice goal match race team ball rain storm sun snow wind".split()  # noqa: SIM905
N, CLOSE = 6, 1e-5
JOB = """
model: ./base
data: {train: data.jsonl, max_length: 1024}
method: full
where: {device: cpu}
train: {global_batch_size: 6}
output_dir: ./run
cache_dir: ./cache
"""
TRAINERS = {
    **dict.fromkeys(("dpo", "kto", "reward"), "trl"),
    "orpo": "trl.experimental.orpo",
    **dict.fromkeys(("cpo", "simpo"), "trl.experimental.cpo"),
}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
Found = tuple[float, dict[str, float], dict[str, Tensor]]
"""Loss, rewards, gradients."""


def rows_of(kind: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of pairs, or of what else the objective learns from."""
    draw = np.random.default_rng(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS, int(draw.integers(least, most))))

    for place in range(N):
        begin, prompt = " " + words(1, 9), "b" if kind == "short" else words(3, 60)
        chosen, rejected = f"{begin} {words(1, 9)}", f"{begin} {words(1, 12)}"
        if kind == "verdicts":
            yield {"prompt": prompt, "completion": chosen, "label": place % 3 != 0}
        else:
            more = {"margin": 0.5 * place} if kind == "margins" else {}
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def cases(seeds: range) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(seed, kind of rows, objective)."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for seed in seeds:
        yield from ((seed, kind, each) for kind, found in table.items() for each in found)


def move(model: Any, seed: int) -> None:
    """Away from the reference: theta is not ref."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.add_(0.02 * torch.randn(weight.shape, generator=draw))


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ours(job: Path, seed: int) -> Found:
    """farthing's loss of the batch."""
    with opened_run(load_job(job), lambda event: None) as run:
        forward, tokens = run.forward, run.train_examples.tokens
        units = np.arange(len(tokens))
        assert len(units) == N, tokens.facts
        if forward.of.needs_reference:
            with torch.no_grad():
                batch = forward.to_device(forward.collate(tokens, units))
                columns = [forward.log_probs(batch).reshape(-1, tokens.n_sequences)]
                if forward.of.is_mismatched:
                    arrays = forward.to_device(forward.collate_mismatched(tokens, units))
                    columns.append(forward.log_probs(arrays).reshape(-1, 1))
            forward.references[tokens.folder] = torch.cat(columns, 1).numpy()
        move(run.model, seed)
        step = forward.of_step(tokens, units)
        if forward.of.is_mismatched:
            with torch.no_grad():
                ratio = forward.mismatched_ratio(tokens, units) / N
            step = step._replace(baseline=ratio.clamp(min=0).float())
        total, figures = 0.0, torch.zeros(2, len(forward.of.figures), dtype=torch.float64)
        for micro_batch in forward.split(tokens, units, 300):
            batch = forward.to_device(forward.collate(tokens, micro_batch))
            loss, found = forward.loss(batch, step)
            (loss / N).backward()
            total += float(loss.detach()) / N
            figures += found
        means = (figures[0] / figures[1]).tolist()
        return total, dict(zip(forward.of.figures, means, strict=True)), gradients(run.model)


def theirs(folder: Path, objective: dict[str, Any], rows: list[Any], seed: int, kind: Any) -> Found:
    """The same of TRL."""
    from datasets import Dataset

    model, reference = (
        kind.from_pretrained(folder / "base", dtype=torch.float32) for _ in range(2)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    move(model, seed)
    model.config.pad_token_id = tokenizer.pad_token_id
    keys = {key: value for key, value in objective.items() if key != "name"}
    name = objective["name"]
    if name == "simpo":
        authors = {"beta": 2.5, "simpo_gamma": 1.375}
        keys, name = {"loss_type": "simpo", "cpo_alpha": 0.0, **authors, **keys}, "cpo"
    if name == "dpo" and isinstance(keys["loss_type"], str):
        keys["loss_type"] = [keys["loss_type"]]
    if name == "kto" and "loss_type" not in keys:
        keys["train_sampling_strategy"] = "sequential"
    if name in ("cpo", "orpo"):
        tokenizer.bos_token = None
    module, title = importlib.import_module(TRAINERS[name]), name.upper()
    title = "Reward" if name == "reward" else title
    config = getattr(module, f"{title}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=N,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
        max_length=1024,
        **keys,
    )
    trainer = getattr(module, f"{title}Trainer")(
        model,
        *([reference] if name in ("dpo", "kto") else []),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    kept = (getattr(trainer, "_metrics", None) or trainer._stored_metrics)["train"]
    rewards = {name: float(np.mean(kept[name])) for name in REWARDS if name in kept}
    return float(loss.detach()), rewards, gradients(trainer.model)


def apart(one: float, other: float) -> float:
    """Relative, or absolute where it is small."""
    return abs(one - other) / max(1.0, abs(other))


def compare(case: tuple[int, str, dict[str, Any]]) -> dict[str, Any]:
    """How far ours is from theirs."""
    seed, of_rows, objective = case
    rows = [*rows_of(of_rows, seed)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [" ".join(map(str, row.values())) for row in rows]
        make_model_folder(folder / "base", texts, "llama")
        config = transformers.AutoConfig.from_pretrained(folder / "base")
        kind = transformers.AutoModelForCausalLM
        if objective["name"] == "reward":
            config.num_labels, kind = 1, transformers.AutoModelForSequenceClassification
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder / "base")
        write_jsonl(folder / "data.jsonl", rows)
        (folder / "run").mkdir()
        mine = ours(write_job(folder, JOB, objective=objective), seed)
        its = theirs(folder, objective, rows, seed, kind)
    shared = mine[1].keys() & its[1].keys()
    off = {
        "loss": apart(mine[0], its[0]),
        "rewards": max((apart(mine[1][name], its[1][name]) for name in shared), default=0),
        "gradients": max(
            float((mine[2][name] - gradient).norm() / gradient.norm())
            for name, gradient in its[2].items()
            if float(gradient.norm()) > 1e-8
        ),
    }
    words = ", ".join(f"{name} {value:.1e}" for name, value in off.items())
    said = f"{json.dumps(objective):80.80} loss {mine[0]:8.5f}  apart: {words}"
    return {"seed": seed, "objective": objective, "said": said, "ok": max(off.values()) <= CLOSE}


if __name__ == "__main__":
    asked = command(__doc__, n=1).parse_args()
    sys.exit(play(cases(seeds_of(asked)), compare, asked.json))
