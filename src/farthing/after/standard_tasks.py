"""Standard tasks of lm-eval on the model of a run and on its base: lm-eval asks, answers and
counts; its figures are shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farthing.after.evaluation import Measure
from farthing.after.predict import numerics_of_run
from farthing.errors import InputError
from farthing.export.folders import trusted_job
from farthing.metrics import Metrics
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.objectives.registry import objective_of
from farthing.run.folder import MODEL, STANDARD_TASKS
from farthing.storage.files import files_below


def standard_tasks(
    run: Path, names: list[str], limit: int | None, *, trust_remote_code: bool = False
) -> Measure:
    """The tasks of these names, and those in folders among them. Raises `InputError` without
    lm-eval, or for unknown ones.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(
            f"standard tasks are measured with lm-eval, which is not installed ({error.name})",
            where="--tasks",
            to_do="pip install 'farthing[eval]'",
        ) from error
    job = trusted_job(run, trust_remote_code)
    if not objective_of(job.task).predicts_next:
        raise InputError(
            f"standard tasks are for models that continue a text, not for {job.task}",
            where="--tasks",
            to_do="leave it out",
        )
    folders = [name for name in names if Path(name).is_dir()]
    own = TaskManager(include_path=folders, include_defaults=False).all_tasks if folders else []
    tasks = list(dict.fromkeys([*(name for name in names if name not in folders), *own]))
    manager = TaskManager(include_path=folders or None, include_defaults=bool({*tasks} - {*own}))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise InputError(
            f"lm-eval has no task {unknown[0]!r}" if unknown else "there is no task in it",
            where="--tasks" if unknown else ", ".join(folders),
            to_do="see `lm-eval ls tasks`, or put YAML files of lm-eval in a folder",
        )
    identity = hashlib.sha256(repr((lm_eval.__version__, tasks, limit)).encode())
    for path in sorted(path for folder in folders for path in files_below(Path(folder))):
        identity.update(path.read_bytes())
    tokenizer = load_tokenizer(ModelChoice(str(run / MODEL)), None)
    better, numerics = dict[str, bool](), numerics_of_run(run)

    def measured(model: Any, part: str, progress: Callable[[int, int], None]) -> Metrics:
        """lm-eval's figures of one task, and in which direction they are better."""
        from lm_eval.models.huggingface import HFLM

        progress(tasks.index(part), len(tasks))
        asked = HFLM(pretrained=model.to(numerics.device), tokenizer=tokenizer)
        found = lm_eval.simple_evaluate(
            model=asked, tasks=[part], limit=limit, task_manager=manager
        )
        for name, directions in found["higher_is_better"].items():
            known = {key: value for key, value in directions.items() if value is not None}
            better.update({f"{name} {metric}": is_so for metric, is_so in known.items()})
        progress(tasks.index(part) + 1, len(tasks))
        return {
            f"{name} {metric.removesuffix(',none')}": float(value)
            for name, metrics in found["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, float)
        }

    most = f", at most {limit:,} examples of each" if limit else ""
    return Measure(
        job,
        f"standard tasks: {', '.join(tasks)}{most}",
        identity.hexdigest(),
        measured,
        better,
        STANDARD_TASKS,
        numerics,
        tasks,
    )
