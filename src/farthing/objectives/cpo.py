"""Contrastive preference optimisation (Xu et al. 2024): DPO's loss without a reference, and a loss
of the chosen answers that holds the model near them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from farthing.objectives.objective import (
    Answers,
    Figures,
    NotNegative,
    ObjectiveSettings,
    Positive,
    Swapped,
)
from farthing.objectives.preference import PAIRS, figures_of, nll_of_chosen, softplus


class CPO(ObjectiveSettings):
    """Learn to prefer an answer, and to write it, without a reference."""

    name: Literal["cpo"] = "cpo"
    beta: Positive = 0.1
    """Scale of the log-probabilities that are compared."""
    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    """How the difference is judged."""
    label_smoothing: Swapped = 0.0
    """Of sigmoid: share of pairs whose answers are taken to be swapped."""
    cpo_alpha: NotNegative = 1.0
    """Weight of the chosen answers' own loss."""

    @model_validator(mode="after")
    def _fits_together(self) -> CPO:
        if self.label_smoothing and self.loss_type == "hinge":
            raise ValueError("label_smoothing changes nothing in hinge")
        return self


def _loss(answers: Answers, settings: CPO) -> tuple[Any, Figures]:
    rewards, eps = settings.beta * answers.log_probs, settings.label_smoothing
    x = rewards[:, 0] - rewards[:, 1]
    if settings.loss_type == "hinge":
        loss = (1 - x).clamp(min=0).sum()
    else:
        loss = ((1 - eps) * softplus(-x) + eps * softplus(x)).sum()
    return loss + settings.cpo_alpha * nll_of_chosen(answers), figures_of(answers, rewards)


OBJECTIVE = PAIRS._replace(name="cpo", settings=CPO, loss=_loss)
