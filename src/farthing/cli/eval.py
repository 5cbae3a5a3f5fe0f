"""`farthing eval`: the model of a run on held-out examples, beside what it began with. Keeps the
figures with the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import RUN, existing_file, in_range, run_folder
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError
from farthing.storage.files import Json

ARGUMENTS = {
    **RUN,
    "--data FILE": "use these examples instead of the run's held-out ones",
    "--base": "also measure the base model, and the gain",
    "--tasks A,B": "lm-eval tasks, or a folder with your own (pip install 'farthing[eval]')",
    "--limit N": "measure at most N examples",
    "--score FILE": (
        "score a file's answers with a reward model: a JSON line with `score` for each row"
    ),
    "--json": "print the figures as JSON",
}


def run(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments)
    in_range("--limit", arguments.limit, 1)
    from farthing.model.load import quiet_libraries

    quiet_libraries()
    if arguments.score:
        return _score(folder, existing_file(arguments.score, "--score"), arguments)
    found = _measured(folder, arguments)
    if arguments.json:
        print_json(found)
    else:
        from farthing.report.draw import draw_block
        from farthing.report.receipt_report import evaluation_table

        draw_block(rich_console(), evaluation_table(found))
    return EXIT_FINISHED


def _score(folder: Path, path: Path, arguments: argparse.Namespace) -> int:
    from farthing.after.predict import Predictor

    predictor = Predictor(folder, trust_remote_code=arguments.trust_remote_code)
    if not predictor.scores_answers:
        raise InputError(
            f"a run of {predictor.job.task} scores no answers",
            where=str(folder),
            to_do="name a run of a reward model",
        )
    for row in predictor.file(path):
        scored = {("score" if key == "prediction" else key): row[key] for key in row}
        print(json.dumps(scored, ensure_ascii=False, default=str))
    found = predictor.summary
    if found.n_failed:
        text = f"{found.n_failed:,} of {found.n_rows:,} rows have no score"
        rich_console(stderr=True).print(text)
    return EXIT_MISTAKE if found.n_failed == found.n_rows else EXIT_FINISHED


def _measured(folder: Path, arguments: argparse.Namespace) -> Json:
    from rich.progress import Progress

    from farthing.after.evaluation import evaluate_run, on_examples
    from farthing.after.held_out import held_out_of
    from farthing.after.standard_tasks import standard_tasks

    trust = arguments.trust_remote_code
    if arguments.tasks:
        names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
        by = standard_tasks(folder, names, arguments.limit, trust_remote_code=trust)
    else:
        data = None if arguments.data is None else Path(arguments.data)
        by = on_examples(held_out_of(folder, data, arguments.limit, trust_remote_code=trust))
    with Progress(
        console=rich_console(stderr=True), transient=True, disable=arguments.json
    ) as bars:
        shown = {side: bars.add_task(side, total=None) for side in ("base", "tuned")}

        def progress(side: str, done: int, total: int) -> None:
            bars.update(shown[side], completed=done, total=total)

        return evaluate_run(folder, by, with_base=arguments.base, progress=progress)
