"""Odds ratio preference optimisation (Hong et al. 2024): the chosen answers are learned, and the
odds of the rejected ones lowered. No reference.

z = ell(y) / |y|. TRL takes the chosen answers' loss over the prompt too; here it is of the answer,
as the paper's.
"""

from __future__ import annotations

from typing import Any, Literal

from farthing.objectives.objective import Answers, Figures, ObjectiveSettings, Positive
from farthing.objectives.preference import PAIRS, figures_of, nll_of_chosen, per_token, softplus


class ORPO(ObjectiveSettings):
    """Learn the chosen answers, away from the rejected ones, without a reference."""

    name: Literal["orpo"] = "orpo"
    beta: Positive = 0.1
    """Weight of the odds ratio: the paper's lambda."""


def _log1mexp(x: Any) -> Any:
    """log(1 - e^x) for x < 0, near 0 and far from it (Maechler 2012)."""
    import torch

    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near = x > -0.6931
    near = torch.where(is_near, x, -1.0)
    far = torch.where(is_near, -1.0, x)
    return torch.where(is_near, (-torch.expm1(near)).log(), torch.log1p(-far.exp()))


def _loss(answers: Answers, settings: ORPO) -> tuple[Any, Figures]:
    z = per_token(answers)
    odds = z - _log1mexp(z)
    ratio = odds[:, 0] - odds[:, 1]
    loss = nll_of_chosen(answers) + settings.beta * softplus(-ratio).sum()
    return loss, figures_of(answers, settings.beta * z)


OBJECTIVE = PAIRS._replace(name="orpo", settings=ORPO, loss=_loss, learning_rates=(8e-6, 8e-5))
