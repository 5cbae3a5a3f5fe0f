"""Simple preference optimisation (Meng et al. 2024): the reward is the mean log-probability a
token, with a margin between the answers. No reference.

The defaults are those of its authors for instruct models (beta 2.5, gamma / beta 0.55); TRL's (0.1
and 0.5, with a loss of the chosen answers) are CPO's.
"""

from __future__ import annotations

from typing import Any, Literal

from farthing.objectives.objective import Answers, Figures, NotNegative, ObjectiveSettings, Positive
from farthing.objectives.preference import PAIRS, figures_of, per_token, softplus


class SimPO(ObjectiveSettings):
    """Learn to prefer an answer by its log-probability a token, without a reference."""

    name: Literal["simpo"] = "simpo"
    beta: Positive = 2.5
    """Scale of the reward; its authors used 2 to 10."""
    simpo_gamma: NotNegative = 1.375
    """Margin between the rewards; its authors used 0.1 to 0.8 of beta."""


def _loss(answers: Answers, settings: SimPO) -> tuple[Any, Figures]:
    rewards = settings.beta * per_token(answers)
    loss = softplus(settings.simpo_gamma - rewards[:, 0] + rewards[:, 1]).sum()
    return loss, figures_of(answers, rewards)


OBJECTIVE = PAIRS._replace(name="simpo", settings=SimPO, loss=_loss)
