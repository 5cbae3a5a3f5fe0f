"""OpenAI's fine-tuning jobs: the JSON that makes one, or that describes one which was made.

`n_epochs`, `batch_size` and `learning_rate_multiplier` are OpenAI's own words; what the multiplier
multiplies was never published for GPT-4 models. For GPT-3 the pretraining rate times 0.02 to 0.2 by
batch size was documented, with a batch of
0.2 % of the examples, up to 256 (OpenAI's guide to the older fine-tunes). So a rate is only
suggested here, and said to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers.record import Imported, Odd, To, flat, positive, read_keys, whole
from farthing.config.importers.shared import reasons, uploaded

NAME = "openai"
BASE_RATE = 2e-4  # farthing's default for adapters, which a multiplier of 1 is taken to mean


def _unless_auto(value: Any) -> int:
    if value == "auto":
        raise Odd("auto: OpenAI chose it by the size of the data", "none")
    return whole(value)


def _rate(value: Any) -> float:
    if value == "auto":
        raise Odd("auto: OpenAI chose it; farthing's default of 2e-4 for adapters holds", "none")
    return float(positive(value)) * BASE_RATE


TABLE: dict[str, To] = {
    "n_epochs": To("train.num_train_epochs", _unless_auto),
    "batch_size": To("train.global_batch_size", _unless_auto),
    "learning_rate_multiplier": To(
        "train.learning_rate", _rate, "a guess: the multiplier times 2e-4; try half and double"
    ),
    "seed": To("train.seed", lambda value: int(whole(value))),
}


def read(values: Mapping[str, Any], out: Imported) -> None:
    """A fine-tuning job of OpenAI."""
    given = values.get("method")
    method: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = method.get("type") or next(
        (k for k in ("dpo", "reinforcement", "supervised") if k in method), None
    )
    if kind in ("dpo", "reinforcement"):
        what = "preference learning (DPO)" if kind == "dpo" else "reinforcement learning"
        key = next(key for key, _ in flat({"method": method}))
        out.name(key, kind, f"{what}, which farthing does not do", "blocks")
    elif "type" in method:
        out.name("method.type", kind, "supervised: what farthing does")
    model = values.get("model")
    out.name(
        "model",
        model,
        "weights that OpenAI keeps: another model is needed; Qwen/Qwen2.5-7B-Instruct stands in the"
        " job, choose yours",
        "differs",
    )
    out.job["model.model_name_or_path"] = "Qwen/Qwen2.5-7B-Instruct"
    uploaded(values, out, "OpenAI (its files API)")
    read_keys(
        out,
        flat(values),
        TABLE,
        reasons(NAME),
        name_of=lambda key: key.rpartition(".")[2] if "hyperparameters" in key else key,
    )
    out.default("train.num_train_epochs", 3, "OpenAI's usual choice for auto")
    out.default("train.global_batch_size", 8, "a guess for auto")
    out.default("method.name", "lora", "what OpenAI trains is not published; an adapter")
    out.notes.append(
        "OpenAI never published what it trains (all weights or an adapter), its rates and its"
        " batches for auto: the losses will differ; data, epochs and seed are the same"
    )
