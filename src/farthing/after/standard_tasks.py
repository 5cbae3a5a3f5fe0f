"""Standard tasks of lm-eval on the model of a run and on its base: lm-eval asks, answers and counts; its figures are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from farthing.durability.run_folder import MODEL
from farthing.errors import UserMistake
from farthing.export.folders import trained_model, trusted_job, untrained_model
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.tasks.registry import task_of


def standard_tasks(
    run: Path, names: list[str], sides: Sequence[str], limit: int | None, *, trust_remote_code: bool = False
) -> dict[str, object]:
    """lm-eval's results of each side (`base`, `tuned`), by task. Raises `UserMistake` without it, or for unknown tasks."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserMistake(
            f"standard tasks are measured with lm-eval, which is not installed ({error.name})",
            where="--tasks",
            to_do="pip install 'farthing[eval]'",
        ) from error
    task = trusted_job(run, trust_remote_code)["task"]
    if not task_of(task).predicts_next:
        raise UserMistake(
            f"standard tasks are for models that continue a text, not for {task}", where="--tasks", to_do="leave it out"
        )
    folders = [name for name in names if Path(name).is_dir()]
    own = TaskManager(include_path=folders, include_defaults=False).all_tasks if folders else []
    names = [name for name in names if name not in folders]
    manager = TaskManager(include_path=folders or None, include_defaults=bool(names))
    names += [name for name in own if name not in names]
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserMistake(f"lm-eval has no task {unknown[0]!r}", where="--tasks", to_do="see `lm-eval ls tasks`")
    if not names:
        raise UserMistake("there is no task in it", where=", ".join(folders), to_do="put YAML files of lm-eval there")
    tokenizer = load_tokenizer(ModelChoice(str(run / MODEL)), None)
    found: dict[str, object] = {"run": str(run), "examples": f"standard tasks: {', '.join(names)}"}
    for side in sides:
        make = trained_model if side == "tuned" else untrained_model
        model = make(run, torch.float32, trust_remote_code=trust_remote_code)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        asked = HFLM(pretrained=model, tokenizer=tokenizer)
        results = lm_eval.simple_evaluate(model=asked, tasks=names, limit=limit, task_manager=manager)["results"]
        found[side] = {
            f"{name} {metric.removesuffix(',none')}": float(value)
            for name, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, float)
        }
    return found
