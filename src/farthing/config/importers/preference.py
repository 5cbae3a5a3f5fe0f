"""Objectives of preferences and rewards: which one a tool's settings ask for, and its settings."""

from __future__ import annotations

import contextlib
import re

from farthing.config.importers.tables import Imported, UnmatchedError, fact, number, say, table
from farthing.objectives.registry import find_objective
from farthing.storage.files import Json

_WORDS = re.compile(r"(?i)(?<![a-z])(dpo|kto|orpo|cpo|simpo|reward|rm)(?![a-z])")


def of_keys(values: Json) -> str:
    """The objective of TRL that these keys say, by name or because no other has them."""
    if asked := str(values.get("objective") or "").lower():
        return asked
    own = fact("keys-of-objectives").items()
    found = {name for name, keys in own if any(values.get(key) for key in keys.split())}
    return found.pop() if len(found) == 1 else ""


def of_words(text: str) -> str:
    """The objective that a name of a program, a file or a folder says; empty for none or two."""
    found = {re.sub("^rm$", "reward", word.lower()) for word in _WORDS.findall(text)}
    return found.pop() if len(found) == 1 else ""


def has_keys(values: Json) -> bool:
    others = table("other-objectives")
    return any((why := others.why(key)) and "preference" in why.reason for key in values)


def read(
    out: Imported, name: str, values: Json, loss: str = "loss_type", said_by: str = "objective"
) -> None:
    """The objective `name` with its loss. `values` are by their keys in the source, of which `loss`
    has the loss and `said_by` the objective; other settings are left to the tool's table.
    """
    given = values.get(loss)
    losses = [str(each) for each in (given if isinstance(given, list) else [given]) if each]
    if name == "cpo" and losses == ["simpo"]:
        name = "simpo"
    if name == "ipo":
        name, losses = "dpo", ["ipo"]
    found = find_objective(name)
    if found is None or found.settings is None:
        return out.refuse(loss, name, f"{name}, which farthing does not do")
    out.job["task"] = out.job["objective.name"] = name
    if said_by in values:
        out.put(said_by, values[said_by], "task", name)
    if losses == [name]:
        out.keep({loss: given}, "objective.name")
        losses = []
    smoothing = ("label_smoothing", "dpo_label_smoothing")
    if losses == ["robust"] and not any(_amount(values, key) for key in smoothing):
        losses = ["sigmoid"]  # which it is without smoothing
    for alpha in ("rpo_alpha", "pref_ftx") if name == "dpo" else ():
        if weight := _amount(values, alpha):
            losses = [*(losses or ["sigmoid"]), "sft"]
            out.put(alpha, values[alpha], "objective.loss_weights", [1.0, weight])
    for each in losses:
        try:
            known = out.has("objective.loss_type") and out.fit("objective.loss_type", each)
        except UnmatchedError:
            known = False
        if not known:
            why = f"{name} with the loss {say(each)}, which farthing does not have"
            return out.refuse(loss, given, why)
    if losses:
        out.job["objective.loss_type"] = losses[0] if len(losses) == 1 else losses
        out.keep({loss: given} if given else {}, "objective.loss_type")
    if name == "simpo" and (ratio := _amount(values, "gamma_beta_ratio")):
        gamma = ratio * (_amount(values, "beta") or 2.0)
        out.put("gamma_beta_ratio", ratio, "objective.simpo_gamma", gamma, "x beta")
    if name == "simpo" and _amount(values, "cpo_alpha"):
        why = "adds a loss of the chosen answers, which SimPO has not"
        out.name("cpo_alpha", values["cpo_alpha"], why, "differs")
    return None


def _amount(values: Json, key: str) -> float:
    with contextlib.suppress(UnmatchedError):
        return number(values.get(key))
    return 0.0


def settle(out: Imported, tool: str) -> None:
    """What goes without saying in a job of preferences, and what `tool` does otherwise."""
    if not out.prefers:
        return
    out.default(fact("objective-defaults").get(out.job["task"], {}))
    notes = fact("objective-notes").get(tool, {})
    out.notes += [notes[each] for each in ("all", out.job["task"]) if each in notes]
    losses = str(out.job.get("objective.loss_type", "sigmoid"))
    if "smoothing" in notes and out.job.get("objective.label_smoothing") and "sigmoid" in losses:
        out.notes.append(notes["smoothing"])
    for key, why in fact("not-of-preferences").items():
        out.drop(key, why)
    if out.job.get("data.too_long") == "truncate":
        why = "answers are never cut here: rows over the limit are skipped"
        out.drop("data.too_long", why, "differs")
