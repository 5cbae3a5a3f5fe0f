"""Unsloth's scripts and notebooks: `FastLanguageModel`, `get_peft_model` and TRL's `SFTTrainer`, read as a syntax tree."""

from __future__ import annotations

from collections.abc import Sequence

from farthing.config.importers import trl
from farthing.config.importers.record import Imported
from farthing.config.importers.script_job import Script
from farthing.config.importers.scripts import Call
from farthing.tasks.causal_lm import CAUSAL_LM

NAME = "unsloth"


def read(calls: Sequence[Call], out: Imported) -> None:
    """The calls of an Unsloth script."""
    script = Script(out, calls)
    script.read()
    if (
        not script.masks_prompts
        and "data.train_on_prompt" not in out.job
        and out.job.get("task", CAUSAL_LM.name) == CAUSAL_LM.name
    ):
        out.default("data.train_on_prompt", True, "SFTTrainer without train_on_responses_only: every token is learned")
    model = out.job.get("model.model_name_or_path", "")
    if str(model).endswith("-bnb-4bit"):
        out.notes.append(
            f"{model} is quantized already; farthing quantizes itself: take the name without -bnb-4bit (and -unsloth)"
        )
        out.job["model.model_name_or_path"] = model.removesuffix("-bnb-4bit").removesuffix("-unsloth")
    out.default("data.max_length", 2048)
    trl.defaults(out)
