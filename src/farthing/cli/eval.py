"""`farthing eval`: the model of a run on held-out examples, beside what it began with. Keeps the
figures with the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from farthing.cli.console import print_json, rich_console
from farthing.cli.parser import add_run_argument, run_folder
from farthing.errors import EXIT_FINISHED, EXIT_MISTAKE, InputError
from farthing.storage.files import Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `farthing eval`."""
    add_run_argument(parser)
    parser.add_argument(
        "--data", metavar="FILE", help="use these examples instead of the run's held-out ones"
    )
    parser.add_argument(
        "--base", action="store_true", help="also measure the base model, and the gain"
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B",
        help="lm-eval tasks, or a folder with your own (pip install 'farthing[eval]')",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="measure at most N examples")
    parser.add_argument(
        "--score",
        metavar="FILE",
        help="score a file's answers with a reward model: a JSON line with `score` for each row",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the figures side by side."""
    folder = run_folder(arguments)
    if arguments.limit is not None and arguments.limit < 1:
        raise InputError(
            "at least one example is needed", where="--limit", to_do="e.g. --limit 100"
        )
    from farthing.model.load import quiet_libraries

    quiet_libraries()
    if arguments.score:
        return _score(folder, Path(arguments.score), arguments)
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

    if not path.is_file():
        raise InputError("no such file", where=str(path), to_do="check --score")
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
        return evaluate_run(
            folder,
            by,
            with_base=arguments.base,
            trust_remote_code=trust,
            progress=lambda side, done, total: bars.update(
                shown[side], completed=done, total=total
            ),
        )
