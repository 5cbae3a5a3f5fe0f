"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): answers with a verdict, desirable or not,
against how far the model is from its reference on answers to other prompts.

a = ell(y) - ell_ref(y); the baseline is the mean of a over the step's prompts with the answer of
the row before in the data, at least 0, without a gradient. TRL takes it over each micro-batch; here
it is of the whole step, however that is split.
"""

from __future__ import annotations

from typing import Any, Literal

from farthing.errors import UnusableRowError
from farthing.objectives import columns
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.columns import Row
from farthing.objectives.objective import (
    Answers,
    Figures,
    NotNegative,
    ObjectiveSettings,
    Positive,
    Starter,
)
from farthing.objectives.preference import divergence


class KTO(ObjectiveSettings):
    """Learn from answers that were accepted or not, held near the model as it began."""

    name: Literal["kto"] = "kto"
    beta: Positive = 0.1
    """How strongly the model is held near its reference."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """apo_zero_unpaired needs no baseline, and spares a pass over each step's answers."""
    desirable_weight: NotNegative = 1.0
    """The paper asks for weights whose products with the counts of rows are in 1 to 4/3."""
    undesirable_weight: NotNegative = 1.0
    """The same of answers that were not accepted."""


VERDICTS = ("chosen", "rejected")
_YES = {"true", "1", "desirable", "good", "chosen", "yes"}
_NO = {"false", "0", "undesirable", "bad", "rejected", "no"}


def _verdict(row: Row) -> float:
    """1 for a desirable answer, 0 for another."""
    value = str(row.get("label")).strip().lower().removesuffix(".0")
    if value not in _YES | _NO:
        raise UnusableRowError(f"`label` is {row.get('label')!r}; a verdict is true or false")
    return float(value in _YES)


def _loss(answers: Answers, settings: KTO) -> tuple[Any, Figures]:
    import torch

    rewards = settings.beta * (answers.log_probs - answers.reference)[:, 0]
    is_good, baseline = answers.values, answers.step.baseline
    x = rewards - settings.beta * baseline if settings.loss_type == "kto" else rewards
    weights = settings.desirable_weight * is_good + settings.undesirable_weight * (1 - is_good)
    loss = (weights * ((1 - 2 * is_good) * x).sigmoid()).sum()
    with torch.no_grad():
        n = is_good.new_tensor(float(len(is_good)))
        found = {
            "rewards": rewards.detach(),
            "logps": answers.log_probs[:, 0].detach(),
            "length": answers.n_targets[:, 0],
        }
        verdicts = dict(zip(VERDICTS, (is_good, 1 - is_good), strict=True))
        baseline = torch.as_tensor(baseline, device=n.device).float()
        figures = {
            **{
                f"{name}/{verdict}": ((each * mask).sum(), mask.sum())
                for name, each in found.items()
                for verdict, mask in verdicts.items()
            },
            "baseline": (baseline * n, n),
            "kl": (divergence(answers), n),
        }
    return loss, figures


OBJECTIVE = CAUSAL_LM._replace(
    name="kto",
    formats=columns.VERDICTS,
    example_columns="prompt: question, completion: answer, label: accepted",
    metrics={"loss": False, "rewards/chosen": True, "rewards/rejected": False},
    judge=lambda seen: {},
    same_head_as=CAUSAL_LM.name,
    asked_as=CAUSAL_LM.name,
    starter=Starter(
        "Qwen/Qwen2.5-0.5B-Instruct", "5.0e-6", "loss", "prompt, completion, label (true | false)"
    ),
    learning_rates=(1e-6, 1e-5),
    settings=KTO,
    loss=_loss,
    needs_reference=True,
    is_mismatched=True,
    value=_verdict,
    figures=(
        *(f"{name}/{verdict}" for name in ("rewards", "logps", "length") for verdict in VERDICTS),
        "baseline",
        "kl",
    ),
)
