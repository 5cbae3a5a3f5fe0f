"""What a run is: the settings that can change its result, and the content of its data, tokenizer
and model.

Content identifies; where it lies, on which machine, under which user and by which version of a
library it is read does not. Refuses to decide whether a run may go on:
`run.folder.claim` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.data.read import Source
from farthing.data.token_set import Recipe, tokenizer_sha256
from farthing.model.load import ModelChoice, model_sha256

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
    weights = [source.weight for source in train_sources]
    return {
        **job.identity(),
        "data.train (content)": [source.identity for source in train_sources],
        "data.eval (content)": [source.identity for source in eval_sources],
        "tokenizer (content)": tokenizer_sha256(tokenizer),
        **({"data.train (weights)": weights} if any(weight != 1 for weight in weights) else {}),
        MODEL_CONTENT: model_sha256(choice, config, Path(job.cache_dir) if job.cache_dir else None),
        **{
            f"tokenization.{key}": value
            for key, value in recipe.settings().items()
            if key != "label_names"
        },
    }
