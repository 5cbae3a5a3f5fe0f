"""`farthing predict`: label or answer the rows of a file with the model of a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from farthing.cli.console import print_json
from farthing.cli.parser import MAX_TOKENS, RUN, existing_file, in_range, new_file, run_folder
from farthing.errors import EXIT_FINISHED
from farthing.printable import printable

ARGUMENTS = {
    **RUN,
    "data": "file of rows, in any format that the run's job reads",
    "-o --output FILE!": "new JSON Lines file with prediction and score for each row",
    **MAX_TOKENS,
    "--batch-size N:=16": "rows in a batch",
    "--json": "print the counts as JSON",
}


def run(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments)
    in_range("--max-tokens", arguments.max_tokens, 1)
    in_range("--batch-size", arguments.batch_size, 1)
    data, output = existing_file(arguments.data), new_file(arguments.output)
    from farthing.after.predict import Predictor, predict_file
    from farthing.model.load import quiet_libraries
    from farthing.units import plural

    quiet_libraries()
    predictor = Predictor(
        folder,
        max_new_tokens=arguments.max_tokens,
        batch_size=arguments.batch_size,
        trust_remote_code=arguments.trust_remote_code,
    )
    found = predict_file(predictor, data, output)
    if arguments.json:
        print_json({"output": str(output), **asdict(found)})
        return EXIT_FINISHED
    print(f"wrote {printable(str(output))}: {plural(found.n_rows, 'row')}")
    if found.n_failed:
        print(f"  {plural(found.n_failed, 'row')} without a prediction, see `error` there:")
    for line in found.first_errors:
        print(f"    {printable(line)}")
    if found.n_cut:
        print(f"  {plural(found.n_cut, 'input')} cut to the length of the training")
    return EXIT_FINISHED
