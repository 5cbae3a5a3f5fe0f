"""What a run is: the settings that can change its result, and the content of its data, tokenizer
and model.

Content identifies; where it lies, on which machine, under which user and by which version of a
library it is read does not. Refuses to decide whether a run may go on:
`run.folder.claim` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.data.read import Source
from farthing.data.token_set import Recipe, tokenizer_sha256
from farthing.model.load import ModelChoice, model_sha256, model_sha256_by_place
from farthing.storage.files import Json

MODEL_CONTENT = "model (content)"


def identity_of(
    job: Job,
    choice: ModelChoice,
    config: Any,
    tokenizer: Any,
    train_sources: list[Source],
    eval_sources: list[Source],
    recipe: Recipe,
) -> dict[str, object]:
    """The identity of a run, flat: what two attempts have to agree on."""
    tokenization = recipe.settings()
    weights = [source.weight for source in train_sources]
    if recipe.version == 1:  # whose runs did not note it
        tokenization.pop("date", None)
    return {
        **job.identity(),
        "data.train (content)": [source.identity for source in train_sources],
        "data.eval (content)": [source.identity for source in eval_sources],
        "tokenizer (content)": tokenizer_sha256(tokenizer),
        **({"data.train (weights)": weights} if any(weight != 1 for weight in weights) else {}),
        MODEL_CONTENT: model_sha256(choice, config, Path(job.cache_dir) if job.cache_dir else None),
        **{
            f"tokenization.{key}": value
            for key, value in tokenization.items()
            if key != "label_names"
        },
    }


def former_names(
    job: Job, choice: ModelChoice, config: Any, identity: dict[str, object]
) -> Callable[[Json, Any], Json]:
    """A function of a run's facts and its kept job: what earlier versions of farthing wrote for
    this same `identity`.

    They hashed the model's configuration together with its path and the library's version, or only
    the ends of its weight files, and did not know every key: one that is missing stands for its
    default.
    """

    def names(facts: Json, kept_job: Any) -> Json:
        found: Json = {}
        before = facts.get("identity")
        for key in identity.keys() - (before.keys() if isinstance(before, dict) else set()):
            if is_default(job, key, identity[key]):
                found[key] = None
        section = kept_job.get("model") if isinstance(kept_job, dict) else None
        name = section.get("model_name_or_path") if isinstance(section, dict) else None
        library = facts.get("machine", {}).get("transformers")
        if isinstance(name, str) and isinstance(library, str):
            found[MODEL_CONTENT] = model_sha256_by_place(config, choice, name, library)
        if isinstance(before, dict) and before.get(MODEL_CONTENT) == (
            by_ends := model_sha256(choice, config, by_ends=True)
        ):
            found[MODEL_CONTENT] = by_ends
        return found

    return names


def is_default(job: Job, key: str, value: Any) -> bool:
    """Whether `value` is what a key of an identity is when nobody says anything."""
    section, _, name = key.partition(".")
    if section == "tokenization":
        defaults = {field.name: field.default for field in fields(Recipe)}
        return name in defaults and defaults[name] == value
    model = getattr(job, section, None)
    known = getattr(type(model), "model_fields", {})
    return name in known and known[name].get_default(call_default_factory=True) == value
