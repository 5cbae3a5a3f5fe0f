"""What objectives of pairs share: sequence 0 of a unit is the chosen answer, 1 the rejected one.

Losses and their names follow TRL, whose formulas are cited where they stand; each is the sum over
the pairs of a micro-batch. c and r are the chosen and the rejected answer, ell(y) the
log-probability of the target tokens of y, |y| their count.
"""

from __future__ import annotations

from typing import Any

from farthing.objectives import columns
from farthing.objectives.causal_lm import CAUSAL_LM
from farthing.objectives.objective import Answers, Figures, Starter

OF_REWARDS = (
    "accuracy",
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
)
FIGURES = (*OF_REWARDS, "logps/chosen", "logps/rejected", "length/chosen", "length/rejected")
"""Of objectives with log-probabilities; those with a reference have `kl` besides."""
METRICS = {"loss": False, **dict.fromkeys(OF_REWARDS, True), "rewards/rejected": False}
STARTER = Starter(
    "Qwen/Qwen2.5-0.5B-Instruct",
    "5.0e-6",
    "rewards/accuracies",
    "prompt, chosen, rejected | chosen, rejected | messages, rejected_response",
)


def softplus(x: Any) -> Any:
    """log(1 + e^x)"""
    from torch.nn.functional import softplus

    return softplus(x)


def per_token(answers: Answers) -> Any:
    """[n, k]: the mean log-probability of a target token."""
    return answers.log_probs / answers.n_targets


def nll_of_chosen(answers: Answers) -> Any:
    """The mean negative log-probability of the chosen answers' tokens in the step, as a sum over
    its pairs: what it adds to the loss of the step does not depend on how that is split.
    """
    share = answers.step.n_units / max(1, answers.step.n_targets[0])
    return -answers.log_probs[:, 0].sum() * share


def figures_of(answers: Answers, rewards: Any) -> Figures:
    """What is shown of pairs with `rewards` [n, 2]. Accuracy counts pairs whose chosen answer has
    the larger log-probability a token; `rewards/accuracies` those with the larger reward.
    """
    import torch

    with torch.no_grad():
        rewards, n = rewards.detach(), rewards.new_tensor(float(len(rewards)))
        margins = rewards[:, 0] - rewards[:, 1]
        if answers.log_probs is None:
            ranked = margins
        else:
            mean = per_token(answers).detach()
            ranked = mean[:, 0] - mean[:, 1]
        right, above = (ranked > 0).float(), (margins > 0).float()
        found = (right, above, margins, rewards[:, 0], rewards[:, 1])
        figures = {name: (value.sum(), n) for name, value in zip(OF_REWARDS, found, strict=True)}
        if answers.log_probs is not None:
            for place, which in enumerate(("chosen", "rejected")):
                figures[f"logps/{which}"] = answers.log_probs[:, place].detach().sum(), n
                figures[f"length/{which}"] = answers.n_targets[:, place].sum(), n
        if answers.reference is not None:
            figures["kl"] = divergence(answers), n * answers.log_probs.shape[1]
        return figures


def divergence(answers: Answers) -> Any:
    """Sum over the sequences of e^d - 1 - d, where d is the mean of log(reference / model) a token:
    an estimate of how far the model is from its reference on these answers, 0 or more (k3 of
    Schulman 2020, of means).
    """
    d = ((answers.reference - answers.log_probs) / answers.n_targets).detach()
    return (d.exp() - 1 - d).sum()


PAIRS = CAUSAL_LM._replace(
    formats=columns.PAIRS,
    example_columns="prompt: question, chosen: better, rejected: worse",
    metrics=METRICS,
    judge=lambda seen: {},
    same_head_as=CAUSAL_LM.name,
    asked_as=CAUSAL_LM.name,
    starter=STARTER,
    n_sequences=2,
    learning_rates=(1e-6, 1e-5),
    figures=FIGURES,
)
"""What an objective of pairs has in common with the others; a name, settings and a loss are its
own.
"""
