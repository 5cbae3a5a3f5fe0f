"""Direct preference optimisation (Rafailov et al. 2023) and losses of the same two log-ratios.

a = ell(c) - ell_ref(c), b = ell(r) - ell_ref(r), D = a - b. Names, formulas and defaults are those
of TRL's `DPOTrainer`, but for `label_smoothing` of `sigmoid`, which TRL takes and ignores since
0.29: here it is cDPO (Mitchell 2023).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from farthing.objectives.objective import Answers, Figures, Settings
from farthing.objectives.preference import (
    FIGURES,
    figures_of,
    nll_of_chosen,
    objective,
    per_token,
    softplus,
)

_OfSums = Literal["sigmoid", "hinge", "robust", "exo_pair", "bco_pair", "nca_pair", "sppo_hard"]
_Others = Literal["apo_zero", "apo_down", "discopop", "ipo", "sigmoid_norm", "sft"]
Loss = Literal[_OfSums, _Others]


class DPO(Settings):
    """Learn to prefer an answer to another, held near the model as it began."""

    name: Literal["dpo"] = "dpo"
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held near its reference; for ipo its target is 1 / (2 beta)."""
    loss_type: Loss | tuple[Loss, ...] = "sigmoid"
    """One loss, or several that are added up by `loss_weights`: [sigmoid, sft] is RPO."""
    loss_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Weight of each loss; default 1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose answers are taken to be swapped: cDPO for sigmoid; robust and exo_pair
    need it above 0.
    """
    discopop_tau: Annotated[float, Field(gt=0)] = 0.05
    """Temperature of discopop's mixture."""

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """(loss, weight)"""
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        return tuple(zip(names, self.loss_weights or (1.0,) * len(names), strict=True))

    @model_validator(mode="after")
    def _fits_together(self) -> DPO:
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        if not names or len(set(names)) < len(names):
            raise ValueError("loss_type names each loss once, and at least one")
        if self.loss_weights and len(self.loss_weights) != len(names):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} of {len(names)} weights")
        smoothed = {"sigmoid", "robust", "exo_pair"}
        if self.label_smoothing and not smoothed & {*names}:
            raise ValueError(f"label_smoothing changes nothing in {', '.join(names)}")
        if not self.label_smoothing and {"robust", "exo_pair"} & {*names}:
            raise ValueError("robust and exo_pair need a label_smoothing above 0")
        return self


def _of_pairs(name: str, answers: Answers, a: Any, b: Any, settings: DPO) -> Any:
    """The sum of one loss over the pairs; a and b [n]."""
    beta, eps = settings.beta, settings.label_smoothing
    delta = a - b
    if name == "sigmoid":
        return ((1 - eps) * softplus(-beta * delta) + eps * softplus(beta * delta)).sum()
    if name == "robust":
        kept = (1 - eps) * softplus(-beta * delta) - eps * softplus(beta * delta)
        return (kept / (1 - 2 * eps)).sum()
    if name == "exo_pair":
        better, worse = -softplus(-beta * delta), -softplus(beta * delta)
        return (
            better.exp() * (better - math.log1p(-eps)) + worse.exp() * (worse - math.log(eps))
        ).sum()
    if name == "hinge":
        return (1 - beta * delta).clamp(min=0).sum()
    if name == "sft":
        return nll_of_chosen(answers)
    if name in ("ipo", "sigmoid_norm"):
        ratio = per_token(answers) - answers.reference / answers.n_targets
        mean = ratio[:, 0] - ratio[:, 1]
        if name == "ipo":
            return (mean - 1 / (2 * beta)).square().sum()
        return softplus(-beta * mean).sum()
    if name == "bco_pair":
        return (softplus(-beta * a) + softplus(beta * b)).sum()
    if name == "nca_pair":
        return (softplus(-beta * a) + 0.5 * softplus(beta * a) + 0.5 * softplus(beta * b)).sum()
    if name == "sppo_hard":
        return ((a - 0.5 / beta).square() + (b + 0.5 / beta).square()).sum()
    if name == "discopop":
        x = beta * delta
        mixed = (x / settings.discopop_tau).sigmoid()
        return ((1 - mixed) * softplus(-x) + mixed * (-x).exp()).sum()
    if name == "apo_zero":
        return (1 - (beta * a).sigmoid() + (beta * b).sigmoid()).sum()
    return ((beta * a).sigmoid() + 1 - (beta * delta).sigmoid()).sum()  # apo_down


def _loss(answers: Answers, settings: DPO) -> tuple[Any, Figures]:
    ratios = answers.log_probs - answers.reference
    a, b = ratios[:, 0], ratios[:, 1]
    loss = sum(
        weight * _of_pairs(name, answers, a, b, settings) for name, weight in settings.losses
    )
    return loss, figures_of(answers, settings.beta * ratios)


OBJECTIVE = objective(
    name="dpo", settings=DPO, loss=_loss, needs_reference=True, figures=(*FIGURES, "kl")
)
