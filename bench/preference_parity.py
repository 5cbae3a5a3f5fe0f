"""Losses, rewards and gradients of preference objectives beside TRL's own trainers, on one CPU.

    python bench/preference_parity.py [--seeds 1] [--first-seed 0] [--json]

TRL has to be installed beside farthing. A small Llama with random weights, moved away from its
reference, sees the same rows in both: TRL's trainer tokenizes, collates and computes its loss of
one batch; farthing makes its token set of the same file and computes the batch packed, with shared
beginnings, in micro-batches of 300 tokens. Ends with 1 where a loss, a reward or a gradient differs
by more than 1e-5 relative.

What TRL has otherwise is not compared: `label_smoothing` of sigmoid, which it ignores; SimPO's
defaults; ORPO's loss of the prompt, for which the rows have a prompt of one token. Its trainers of
CPO and ORPO put a BOS token before each prompt, also where the tokenizer does not: they are given a
tokenizer without one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from small_models import make_model_folder

WORDS = [
    "bread",
    "cheese",
    "soup",
    "apple",
    "rice",
    "goal",
    "match",
    "race",
    "team",
    "ball",
    "rain",
    "storm",
    "sun",
    "snow",
    "wind",
]
N = 6
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "sigmoid_norm", "bco_pair", "nca_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "robust", "exo_pair"),
)


def rows_of(seed: int, *, has_prompt: bool = True) -> list[dict[str, str]]:
    draw = np.random.default_rng(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS, int(draw.integers(least, most))))

    rows = []
    for _ in range(N):
        begin = " " + words(1, 9)
        prompt = words(3, 60) if has_prompt else "b"
        rows.append(
            {
                "prompt": prompt,
                "chosen": f"{begin} {words(1, 9)}",
                "rejected": f"{begin} {words(1, 12)}",
            }
        )
    return rows


def move(model: Any, seed: int) -> None:
    """Away from the reference: theta is not ref."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.add_(0.02 * torch.randn(weight.shape, generator=draw))


class Case:
    """An objective with its rows and its model."""

    def __init__(self, folder: Path, objective: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.folder, self.objective, self.rows = folder, objective, rows
        is_reward = objective["name"] == "reward"
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )

        texts = [" ".join(str(value) for value in row.values()) for row in rows]
        make_model_folder(folder / "base", texts, "llama")
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder / "base")
        if is_reward:
            config.num_labels = 1
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        self.kind = kind
        kind.from_config(config).save_pretrained(folder / "base")
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def model(self) -> Any:
        return self.kind.from_pretrained(self.folder / "base", dtype=torch.float32)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "base")

    def ours(self, seed: int) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """(loss, figures, gradients)"""
        from farthing.config.load import load_job
        from farthing.train.run import opened_run

        (self.folder / "job.yaml").write_text(
            yaml.safe_dump(
                {
                    "objective": self.objective,
                    "model": "./base",
                    "data": {"train": "data.jsonl", "max_length": 1024},
                    "method": "full",
                    "where": {"device": "cpu"},
                    "train": {"global_batch_size": N},
                    "output_dir": "./run",
                    "cache_dir": "./cache",
                }
            )
        )
        (self.folder / "run").mkdir(exist_ok=True)
        with opened_run(load_job(self.folder / "job.yaml"), lambda event: None) as attempt:
            forward, tokens = attempt.forward, attempt.train_examples.tokens
            units = np.arange(len(tokens))
            assert len(units) == N, tokens.facts
            if forward.of.needs_reference:
                self._refer(forward, tokens, units)
            move(attempt.model, seed)
            step = forward.of_step(tokens, units)
            if forward.of.is_mismatched:
                with torch.no_grad():
                    ratio = forward.mismatched_ratio(tokens, units) / N
                step = step._replace(baseline=ratio.clamp(min=0).float())
            total, figures = 0.0, torch.zeros(2, len(forward.of.figures), dtype=torch.float64)
            for micro_batch in forward.split(tokens, units, 300):
                batch = forward.to_device(forward.collate(tokens, micro_batch))
                loss, found = forward.unit_loss(batch, step)
                (loss / N).backward()
                total += float(loss.detach()) / N
                figures += found
            means = (figures[0] / figures[1]).tolist()
            gradients = {
                name: weight.grad.clone()
                for name, weight in attempt.model.named_parameters()
                if weight.grad is not None
            }
            return total, dict(zip(forward.of.figures, means, strict=True)), gradients

    def _refer(self, forward: Any, tokens: Any, units: Any) -> None:
        with torch.no_grad():
            k = tokens.n_sequences
            found = [forward.log_probs(forward.to_device(forward.collate(tokens, units)))]
            columns = [found[0].reshape(-1, k)]
            if forward.of.is_mismatched:
                arrays = forward.collate_mismatched(tokens, units)
                columns.append(forward.log_probs(forward.to_device(arrays)).reshape(-1, 1))
        forward.references[tokens.folder] = torch.cat(columns, 1).numpy()

    def theirs(self, seed: int) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """The same of TRL."""
        trainer = self._trainer(seed)
        model = trainer.model
        model.train()
        batch = next(iter(trainer.get_train_dataloader()))
        loss = trainer.compute_loss(model, batch)
        loss.backward()
        names = {
            "rewards/chosen": "rewards/chosen",
            "rewards/rejected": "rewards/rejected",
            "rewards/margins": "rewards/margins",
        }
        kept = getattr(trainer, "_metrics", None) or trainer._stored_metrics
        metrics = {
            ours: float(np.mean(kept["train"][name]))
            for ours, name in names.items()
            if name in kept["train"]
        }
        named = model.named_parameters()
        gradients = {name: weight.grad for name, weight in named if weight.grad is not None}
        return float(loss.detach()), metrics, gradients

    def _trainer(self, seed: int) -> Any:
        from datasets import Dataset

        model, reference, tokenizer = self.model(), self.model(), self.tokenizer()
        move(model, seed)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        common: dict[str, Any] = {
            "output_dir": str(self.folder / "trl"),
            "per_device_train_batch_size": N,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "use_cpu": True,
            "max_length": 1024,
        }
        data = Dataset.from_list(self.rows)
        keys = {key: value for key, value in self.objective.items() if key != "name"}
        name = self.objective["name"]
        given: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer}
        if name == "dpo":
            from trl import DPOConfig, DPOTrainer

            losses = keys.pop("loss_type", "sigmoid")
            keys["loss_type"] = [losses] if isinstance(losses, str) else losses
            config = DPOConfig(**common, **keys)
            return DPOTrainer(model, reference, args=config, **given)
        if name == "kto":
            from trl import KTOConfig, KTOTrainer

            if keys.get("loss_type", "kto") == "kto":
                common["train_sampling_strategy"] = "sequential"
            return KTOTrainer(model, reference, args=KTOConfig(**common, **keys), **given)
        if name == "reward":
            from trl import RewardConfig, RewardTrainer

            return RewardTrainer(model, args=RewardConfig(**common, **keys), **given)
        tokenizer.bos_token = None
        if name == "orpo":
            from trl.experimental.orpo import ORPOConfig, ORPOTrainer

            return ORPOTrainer(model, args=ORPOConfig(**common, **keys), **given)
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        if name == "simpo":
            authors = {"beta": 2.5, "simpo_gamma": 1.375}
            keys = {"loss_type": "simpo", "cpo_alpha": 0.0, **authors, **keys}
        return CPOTrainer(model, args=CPOConfig(**common, **keys), **given)


def cases(seed: int) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    rows = rows_of(seed)
    verdicts = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": place % 3 != 0}
        for place, row in enumerate(rows)
    ]
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for loss in DPO_LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("robust", "exo_pair") else {}
        found.append(({"name": "dpo", "loss_type": loss, "beta": 0.2, **smoothing}, rows))
    rpo = {"name": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}
    found += [(rpo, rows), ({"name": "kto", "desirable_weight": 1.2}, verdicts)]
    found += [({"name": "kto", "loss_type": "apo_zero_unpaired"}, verdicts)]
    found += [({"name": "cpo"}, rows), ({"name": "cpo", "label_smoothing": 0.1}, rows)]
    found += [({"name": "cpo", "loss_type": "hinge"}, rows), ({"name": "simpo"}, rows)]
    found += [({"name": "orpo", "beta": 0.3}, rows_of(seed, has_prompt=False))]
    with_margin = [{**row, "margin": 0.5 * place} for place, row in enumerate(rows)]
    found += [({"name": "reward"}, rows), ({"name": "reward"}, with_margin)]
    found += [({"name": "reward", "center_rewards_coefficient": 0.01}, rows)]
    return found


def apart(one: float, other: float) -> float:
    return abs(one - other) / max(1.0, abs(other))


def compare(case: Case, seed: int) -> dict[str, Any]:
    """How far ours is from theirs."""
    ours, theirs = case.ours(seed), case.theirs(seed)
    of_gradients = [
        float((ours[2][name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        for name, gradient in theirs[2].items()
        if float(gradient.norm()) > 1e-8
    ]
    shared = ours[1].keys() & theirs[1].keys()
    return {
        "objective": case.objective,
        "loss": ours[0],
        "loss_apart": apart(ours[0], theirs[0]),
        "rewards_apart": max((apart(ours[1][name], theirs[1][name]) for name in shared), default=0),
        "gradients_apart": max(of_gradients),
        "n_gradients": len(of_gradients),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="preference objectives beside TRL's")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    is_bad = False
    say: Callable[[str], None] = lambda text: None if asked.json else print(text, flush=True)  # noqa: E731
    results = []
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for objective, rows in cases(seed):
            with tempfile.TemporaryDirectory() as folder:
                found = compare(Case(Path(folder), objective, rows), seed)
            worst = max(found["loss_apart"], found["rewards_apart"], found["gradients_apart"])
            is_bad |= not worst <= 1e-5
            results.append({"seed": seed, **found})
            say(
                f"{json.dumps(objective):80.80} loss {found['loss']:8.5f}  apart: loss"
                f" {found['loss_apart']:.1e} rewards {found['rewards_apart']:.1e} gradients"
                f" {found['gradients_apart']:.1e}"
            )
    if asked.json:
        print(json.dumps({"cases": results, "is_good": not is_bad}))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
