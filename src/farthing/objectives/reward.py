"""A reward model (Bradley and Terry 1952, as in Ouyang et al. 2022): a score for each answer, the
chosen one's above the rejected one's.

The head reads the last token, as transformers' sequence classifiers do. Names are those of TRL's
`RewardTrainer`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from farthing.errors import UnusableRowError
from farthing.objectives.classification import CLASSIFICATION, LABELS, head_of
from farthing.objectives.columns import Row
from farthing.objectives.objective import Answers, Figures, NotNegative, ObjectiveSettings, Starter
from farthing.objectives.preference import OF_REWARDS, PAIRS, figures_of, softplus


class Reward(ObjectiveSettings):
    """Learn to score answers as people prefer them."""

    name: Literal["reward"] = "reward"
    center_rewards_coefficient: NotNegative = 0.0
    """Weight of the squared sum of both scores, which holds them around 0 (Eisenstein et al.
    2023).
    """


def _margin(row: Row) -> float:
    """By how much more the chosen answer should score; 0 where the data says nothing."""
    value = row.get("margin")
    if value is None or value == "":
        return 0.0
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise UnusableRowError(f"`margin` is {str(value)[:40]!r}, not a number")
    return margin


def _loss(answers: Answers, settings: Reward) -> tuple[Any, Figures]:
    margin = answers.scores[:, 0] - answers.scores[:, 1]
    loss = softplus(answers.values - margin).sum()
    if settings.center_rewards_coefficient:
        loss = loss + settings.center_rewards_coefficient * answers.scores.sum(1).square().sum()
    return loss, figures_of(answers, answers.scores)


OBJECTIVE = PAIRS._replace(
    name="reward",
    learning_rates=(1e-5, 1e-4),
    settings=Reward,
    loss=_loss,
    value=_margin,
    same_head_as=CLASSIFICATION.name,
    auto_class=CLASSIFICATION.auto_class,
    peft_type=CLASSIFICATION.peft_type,
    pipeline_tag=CLASSIFICATION.pipeline_tag,
    starter=Starter(
        "Qwen/Qwen2.5-0.5B-Instruct", "1.0e-4", "rewards/accuracies", "prompt, chosen, rejected"
    ),
    figures=OF_REWARDS,
    labels=LABELS._replace(
        set_head=head_of("regression", "reward"), answers=lambda scores: scores[:, 0]
    ),
)
