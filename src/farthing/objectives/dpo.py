"""Direct preference optimisation (Rafailov et al. 2023) and losses of the same two log-ratios.

a = ell(c) - ell_ref(c), b = ell(r) - ell_ref(r), D = a - b. Names, formulas and defaults are those
of TRL's `DPOTrainer`, but for `label_smoothing` of `sigmoid`, which TRL takes and ignores since
0.29: here it is cDPO (Mitchell 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from farthing.objectives.preference import FIGURES, PAIRS, figures_of, nll_of_chosen, softplus

_OfSums = Literal["sigmoid", "hinge", "robust", "exo_pair", "bco_pair", "nca_pair", "sppo_hard"]
_Others = Literal["apo_zero", "apo_down", "discopop", "ipo", "sigmoid_norm", "sft"]
Loss = Literal[_OfSums, _Others]


class DPO(ObjectiveSettings):
    """Learn to prefer an answer to another, held near the model as it began."""

    name: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """How strongly the model is held near its reference; for ipo its target is 1 / (2 beta)."""
    loss_type: Loss | tuple[Loss, ...] = "sigmoid"
    """One loss, or several that are added up by `loss_weights`: [sigmoid, sft] is RPO."""
    loss_weights: tuple[NotNegative, ...] = ()
    """Weight of each loss; default 1."""
    label_smoothing: Swapped = 0.0
    """Share of pairs whose answers are taken to be swapped: cDPO for sigmoid; robust and exo_pair
    need it above 0.
    """
    discopop_tau: Positive = 0.05
    """Temperature of discopop's mixture."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """(loss, weight)"""
        weights = self.loss_weights or (1.0,) * len(self.names)
        return tuple(zip(self.names, weights, strict=True))

    @model_validator(mode="after")
    def _fits_together(self) -> DPO:
        names = self.names
        if not names or len(set(names)) < len(names):
            raise ValueError("loss_type names each loss once, and at least one")
        if self.loss_weights and len(self.loss_weights) != len(names):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} of {len(names)} weights")
        if self.label_smoothing and not {"sigmoid", "robust", "exo_pair"} & {*names}:
            raise ValueError(f"label_smoothing changes nothing in {', '.join(names)}")
        if (
            self.discopop_tau != DPO.model_fields["discopop_tau"].default
            and "discopop" not in names
        ):
            raise ValueError(f"discopop_tau changes nothing in {', '.join(names)}")
        if not self.label_smoothing and {"robust", "exo_pair"} & {*names}:
            raise ValueError("robust and exo_pair need a label_smoothing above 0")
        return self


def _loss(answers: Answers, settings: DPO) -> tuple[Any, Figures]:
    beta, eps = settings.beta, settings.label_smoothing
    ratios = answers.log_probs - answers.reference
    rewards = beta * ratios
    c, r = rewards[:, 0], rewards[:, 1]
    x = c - r
    means = beta * ratios / answers.n_targets
    mean = means[:, 0] - means[:, 1]
    won, lost = softplus(-x), softplus(x)  # -log of the share of either answer

    def discopop() -> Any:
        mixed = (x / settings.discopop_tau).sigmoid()
        return (1 - mixed) * won + mixed * (-x).exp()

    def exo_pair() -> Any:
        better, worse = (-won).exp(), (-lost).exp()
        return better * (-won - math.log1p(-eps)) + worse * (-lost - math.log(eps))

    losses: dict[str, Callable[[], Any]] = {
        "sigmoid": lambda: (1 - eps) * won + eps * lost,
        "robust": lambda: ((1 - eps) * won - eps * lost) / (1 - 2 * eps),
        "exo_pair": exo_pair,
        "hinge": lambda: (1 - x).clamp(min=0),
        "sft": lambda: nll_of_chosen(answers),
        "ipo": lambda: (mean / beta - 1 / (2 * beta)).square(),
        "sigmoid_norm": lambda: softplus(-mean),
        "bco_pair": lambda: softplus(-c) + softplus(r),
        "nca_pair": lambda: softplus(-c) + 0.5 * softplus(c) + 0.5 * softplus(r),
        "sppo_hard": lambda: ((c - 0.5) / beta).square() + ((r + 0.5) / beta).square(),
        "discopop": discopop,
        "apo_zero": lambda: 1 - c.sigmoid() + r.sigmoid(),
        "apo_down": lambda: c.sigmoid() + 1 - x.sigmoid(),
    }
    loss = sum(weight * losses[name]().sum() for name, weight in settings.losses)
    return loss, figures_of(answers, rewards)


OBJECTIVE = PAIRS._replace(
    name="dpo", settings=DPO, loss=_loss, needs_reference=True, figures=(*FIGURES, "kl")
)
