"""Change the code a little, and see which changes no test notices: `make mutants WING=storage`.

A mutant is one change in a file of the wing: another comparison, a number that is one more, a call
that is not made. A run under coverage tells which tests run its line; it is killed when one of them
fails. Tests run in forks of a process that has the libraries imported. Survivors are printed as
they come; the exit code is 1 where fewer than 85 % were killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic  # tests set the module's own
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FORK = multiprocessing.get_context("fork")
HEAVY = "torch transformers peft pydantic numpy yaml rich fsspec pyarrow httpx pytest coverage"
DURABLE = (
    "store mirror commits lease log_parts checkpoint faults survive snapshot disk_trouble identity"
    " security shared_cache"
)
AFTER = (
    "after api deployment door export labels languages metrics new_tokens predict preference.py"
    " publish quantized"
)
ENGINE = (
    f"{AFTER} alone ancestor attention bf16 casts classes compiled cpu cross decay every_family"
    " faults gpu hardware head identity liger limits low_rank machine.py measurements memory"
    " methods mishaps more_steps noise notices objectives offload out_of packing pairs parity probe"
    " profile progress ranks refused retry shared.py snapshot spread step survive trackers trl"
    " watchdog"
)
WINGS = {  # files to change, and the tests that have to notice
    "launch": ("launch/*.py", "launch machine_bill search_launch"),
    "storage": ("storage/*.py run/commits.py run/checkpoint.py", DURABLE),
    "run": (
        "run/[!c]*.py",
        f"{DURABLE} ledger meter limits.py watchdog retry notices rendezvous ranks spread"
        " receipts.py",
    ),
    "engine": ("train/*.py model/*.py dist/*.py objectives/*.py", ENGINE),
    "after": ("after/*.py export/*.py", AFTER),
    "data": (
        "data/encode.py data/batches.py",
        "encode data.py packing lengths chat step columns preference alone.py",
    ),
    "planner": (
        "planner/price.py planner/ranges.py planner/ranking.py planner/calibration.py",
        "plan.py plan_figures plan_view plan_verb limits calibrate money speed spot.py",
    ),
    "report": (
        "report/receipt*.py report/timeline.py report/diagnosis.py",
        "receipts diagnosis run_page savings calibrate meter card survive cli.py ledger",
    ),
}
BEGIN_PROCESSES = re.compile("test_(watchdog|retry|ranks|spread)")
PAIRS: tuple[tuple[type[Any], type[Any]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
)
SWAPS = {**dict(PAIRS), **{other: one for one, other in PAIRS}}


class Mutant(NamedTuple):
    file: str
    line: int
    end_line: int
    before: str
    after: str
    span: tuple[int, int]


def changed(node: ast.AST) -> ast.AST | None:
    """Another node in its place, where this kind is changed."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others) if type(op) in SWAPS:
            return ast.Compare(left, [SWAPS[type(op)]()], others)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(SWAPS[type(op)](), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            return ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=words):
            return ast.Call(ast.Name({"min": "max", "max": "min"}[name]), args, words)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            return ast.Pass()
    return None


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs, without annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from code_of(each)


def mutants_of(file: Path) -> Iterator[Mutant]:
    text, starts = file.read_bytes(), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in code_of(ast.parse(text)):
        if isinstance(node, ast.expr | ast.stmt) and (other := changed(node)) is not None:
            end_line = node.end_lineno or node.lineno
            span = (
                starts[node.lineno - 1] + node.col_offset,
                starts[end_line - 1] + (node.end_col_offset or 0),
            )
            after = ast.unparse(ast.fix_missing_locations(other))
            after = f"({after})" if isinstance(node, ast.expr) else after
            name = str(file.relative_to(ROOT / "src"))
            yield Mutant(name, node.lineno, end_line, ast.unparse(node), after, span)


def run_tests(source: Path, tests: list[str], notes: Path | None = None) -> None:
    """In a fork: these tests on this source; with `notes`, which test runs which line."""
    import coverage
    import pytest

    os.setpgid(0, 0)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    os.dup2(os.open(source / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    loaded = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", loaded, "-m", "not slow"]
    words += tests
    if notes is None:
        os._exit(int(pytest.main(["-x", "--tb=line", *words])))
    measured = coverage.Coverage(data_file=None, include=[f"{source}/*"])
    seconds: dict[str, float] = {}

    class Notes:
        def pytest_runtest_setup(self, item: Any) -> None:
            measured.switch_context(item.nodeid)
            seconds[item.nodeid] = monotonic()

        def pytest_runtest_teardown(self, item: Any) -> None:
            seconds[item.nodeid] = monotonic() - seconds[item.nodeid]
            measured.switch_context("")

    measured.start()
    code = int(pytest.main(words, plugins=[Notes()]))
    measured.stop()
    data = measured.get_data()
    lines = {
        os.path.relpath(file, source): data.contexts_by_lineno(file)
        for file in data.measured_files()
    }
    notes.write_text(json.dumps({"lines": lines, "seconds": seconds}))
    os._exit(code)


def work(share: list[Mutant], source: Path, found: dict[str, Any]) -> None:
    """One worker's share, on its own copy of the source: whether each mutant was killed."""
    killed = []
    for number, mutant in enumerate(share, 1):
        lines, seconds = found["lines"].get(mutant.file, {}), found["seconds"]
        near = range(mutant.line, mutant.end_line + 1)
        tests = {test for line in near for test in lines.get(str(line), [])}
        if not tests or "/dist/" in mutant.file:  # other processes run it, or run it otherwise
            tests |= {test for test in seconds if BEGIN_PROCESSES.search(test)}
        if "" in tests:  # runs at import: every test that runs the file
            tests = {test for each in lines.values() for test in each}
        ordered = sorted(tests - {""}, key=lambda test: seconds[test])
        file, (begin, end) = source / mutant.file, mutant.span
        kept = file.read_bytes()
        file.write_bytes(kept[:begin] + mutant.after.encode() + kept[end:])
        process = FORK.Process(target=run_tests, args=(source, ordered))
        if ordered:
            process.start()
            process.join(60 + 3 * sum(seconds[test] for test in ordered))
            if process.is_alive():
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
        killed.append(bool(ordered) and process.exitcode != 0)
        if not killed[-1]:
            words = f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}"
            print(f"{number} of {len(share)}: {words}", flush=True)
        file.write_bytes(kept)
    (source / "killed.json").write_text(json.dumps(killed))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wing", choices=WINGS)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(ROOT)
    for name in HEAVY.split():
        __import__(name)
    sources, tests = WINGS[asked.wing]
    files = sorted({f for each in sources.split() for f in (ROOT / "src/farthing").glob(each)})
    given = sorted({str(t) for e in tests.split() for t in ROOT.glob(f"tests/test_{e}*")})
    all_of = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(asked.seed).sample(all_of, min(asked.sample, len(all_of)))
    with tempfile.TemporaryDirectory(prefix="farthing-mutants-") as top:
        places = [Path(top) / str(number) / "src" for number in range(asked.workers)]
        for place in places:
            place.parent.mkdir()
            shutil.copy(ROOT / "pyproject.toml", place.parent)  # a launch packs a checkout by it
            shutil.copytree(ROOT / "src", place, ignore=shutil.ignore_patterns("__pycache__"))
        process = FORK.Process(target=run_tests, args=(places[0], given, Path(top) / "notes"))
        process.start()
        process.join()
        if process.exitcode:
            print((places[0] / "out.txt").read_text()[-3000:], "the tests fail as they are")
            return 2
        found = json.loads((Path(top) / "notes").read_text())
        shares = [drawn[number :: asked.workers] for number in range(asked.workers)]
        workers = [
            FORK.Process(target=work, args=(share, place, found))
            for share, place in zip(shares, places, strict=True)
        ]
        for worker in workers:
            worker.start()
        n_killed = 0
        for worker, place in zip(workers, places, strict=True):
            worker.join()
            n_killed += sum(json.loads((place / "killed.json").read_text()))
    share = n_killed / len(drawn)
    print(f"{asked.wing}: {share:.0%} of {len(drawn)} mutants killed, drawn of {len(all_of)}")
    return 0 if share >= 0.85 else 1


if __name__ == "__main__":
    sys.exit(main())
