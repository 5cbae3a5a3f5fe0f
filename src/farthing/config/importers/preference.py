"""Objectives of preferences and rewards: which one a tool's settings ask for, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from farthing.config.importers.record import Imported, Line, Odd, say
from farthing.config.importers.tables import fact, number, table
from farthing.objectives.registry import find_objective, objective_of

_WORDS = re.compile(r"(?i)(?<![a-z])(dpo|kto|orpo|cpo|simpo|reward|rm)(?![a-z])")
_OF_KEYS = {
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "center_rewards_coefficient": "reward",
    "cpo_alpha": "cpo",
    "simpo_gamma": "cpo",
    "gamma_beta_ratio": "simpo",
    "rpo_alpha": "dpo",
    "ld_alpha": "dpo",
    "loss_weights": "dpo",
    "discopop_tau": "dpo",
    "f_divergence_type": "dpo",
    "reference_free": "dpo",
    "use_weighting": "dpo",
}
"""Settings of TRL that one objective has -> which."""


def of_keys(values: Mapping[str, Any]) -> str:
    """The objective of TRL that these keys say, by name or because no other has them."""
    asked = str(values.get("objective") or "").lower()
    if asked:
        return asked
    found = {_OF_KEYS[key] for key, value in values.items() if key in _OF_KEYS and value}
    return found.pop() if len(found) == 1 else ""


def of_words(text: str) -> str:
    """The objective that a name of a program, a file or a folder says; empty for none or two."""
    found = {word.lower() for word in _WORDS.findall(text)}
    found = {{"rm": "reward"}.get(word, word) for word in found}
    return found.pop() if len(found) == 1 else ""


def has_keys(values: Mapping[str, Any]) -> bool:
    """Whether settings of a preference are there."""
    others = table("other-objectives")
    return any((why := others.why(key)) and "preference" in why.reason for key in values)


def is_asked(out: Imported) -> bool:
    """Whether the job has an objective of preferences or rewards."""
    return "objective.name" in out.job


def read(out: Imported, name: str, values: Mapping[str, Any], loss: str = "loss_type") -> None:
    """The objective `name` with its loss. `values` are by their keys in the source, `loss` is that
    of the loss; other settings are left to the tool's table.
    """
    given = values.get(loss)
    losses = [str(each) for each in (given if isinstance(given, list) else [given]) if each]
    name, taken = ("simpo", True) if name == "cpo" and losses == ["simpo"] else (name, False)
    if name == "ipo":
        name, losses = "dpo", ["ipo"]
    found = find_objective(name)
    if found is None or found.settings is None:
        return out.name(loss, name, f"{name}, which farthing does not do", "blocks")
    out.job["task"] = out.job["objective.name"] = name
    if "objective" in values:
        out.put("objective", values["objective"], "task", name)
    if taken or (name == losses[0] if len(losses) == 1 else False):
        out.keep([(loss, given)], "objective.name")
        losses = []
    smooth = _smoothing(values)
    if losses == ["robust"] and not smooth:
        losses = ["sigmoid"]  # which it is without smoothing
    weights = values.get("loss_weights")
    alpha = next((k for k in ("rpo_alpha", "pref_ftx") if values.get(k)), "")
    if alpha and name == "dpo":
        losses, weights = [*(losses or ["sigmoid"]), "sft"], [1.0, float(values[alpha])]
        out.keep([(alpha, values[alpha])], "objective.loss_weights")
    if losses:
        _put_losses(out, loss, given, losses, weights)
    if weights:
        out.job["objective.loss_weights"] = weights
        if "loss_weights" in values:
            out.keep([("loss_weights", weights)], "objective.loss_weights")
    ratio = values.get("gamma_beta_ratio")
    if name == "simpo" and ratio:
        beta = float(values.get("beta") or 2.0)
        out.put("gamma_beta_ratio", ratio, "objective.simpo_gamma", float(ratio) * beta, "x beta")
    if name == "simpo" and "cpo_alpha" in values and number(values["cpo_alpha"]):
        why = "adds a loss of the chosen answers, which SimPO has not"
        out.name("cpo_alpha", values["cpo_alpha"], why, "differs")


def _smoothing(values: Mapping[str, Any]) -> float:
    for key in ("label_smoothing", "dpo_label_smoothing"):
        try:
            return float(number(values.get(key) or 0))
        except Odd:
            continue
    return 0.0


def _put_losses(out: Imported, key: str, given: Any, losses: list[str], weights: Any) -> None:
    """The losses, each of which the objective has to know."""
    name = out.job["task"]
    settings = objective_of(name).settings
    assert settings is not None
    for each in losses:
        try:
            settings.model_validate({"name": name, "loss_type": each})
        except ValidationError as error:
            if error.errors()[0]["type"] in ("literal_error", "extra_forbidden", "value_error"):
                if each in ("robust", "exo_pair"):
                    continue  # they need a label_smoothing
                why = f"{name} with the loss {say(each)}, which farthing does not have"
                return out.name(key, given, why, "blocks")
    to = losses[0] if len(losses) == 1 else losses
    if key in out.lines or given is None:
        out.job["objective.loss_type"] = to
    else:
        out.put(key, given, "objective.loss_type", to)


def settle(out: Imported, tool: str) -> None:
    """What goes without saying in a job of preferences, and what `tool` does otherwise."""
    if not is_asked(out):
        return
    name, notes = out.job["task"], fact("objective-notes").get(tool, {})
    out.notes += [notes[each] for each in ("all", name) if each in notes]
    losses = str(out.job.get("objective.loss_type", "sigmoid"))
    if "smoothing" in notes and out.job.get("objective.label_smoothing") and "sigmoid" in losses:
        out.notes.append(notes["smoothing"])
    if out.job.get("method.lora_dropout"):
        out.drop(
            "method.lora_dropout", "dropout is switched off there where preferences are learned"
        )
    out.job.pop("method.lora_dropout", None)
    out.drop(
        "train.label_smoothing_factor", "of answers no token's target is smoothed, there or here"
    )
    out.drop("data.train_on_prompt", "answers alone are learned or scored")
    if out.job.get("data.too_long") == "truncate":
        out.drop(
            "data.too_long",
            "answers are never cut here: rows over the limit are skipped",
            "differs",
        )


def refuse_single(out: Imported) -> None:
    """Block a step of one row where rows are compared with one another, as TRL does."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    found = [out.job.get(f"train.{key}", 1) for key in keys]
    is_one = out.job.get("train.global_batch_size", found[0] * found[1]) == 1
    if is_asked(out) and objective_of(out.job["task"]).is_mismatched and is_one:
        line = next((li for li in out.mapped if li.became == f"train.{keys[0]}"), None)
        key, value = (line.key, line.value) if line else (f"({keys[0]})", 1)
        why = f"{out.job['task']} compares the rows of a step: raise it to 4 or more"
        out.lines[key] = Line(key, value, "", why, "blocks")


def defaults(out: Imported) -> None:
    """What TRL's trainers of preferences do where nothing is said."""
    if not is_asked(out):
        return
    name = out.job["task"]
    out.default({"train.learning_rate": 1e-4 if name == "reward" else 1e-6})
    if name == "simpo":
        out.default({"objective.beta": 0.1, "objective.simpo_gamma": 0.5})
    out.default({"data.max_length": 1024})
