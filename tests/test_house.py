"""The rules of the house: who may import whom, what may stand where."""

import ast
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import farthing
from command import in_python
from farthing.cli.parser import VERBS
from farthing.objectives.registry import objective_names

SOURCE = Path(farthing.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file of Python says."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path):
    """Every node of a file of Python."""
    return tuple(ast.walk(tree_of(path)))


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Names of the modules a file imports."""
    nodes = tree_of(path).body if top_only else nodes_of(path)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room(name: str) -> list[Path]:
    """A file, or the files of a folder."""
    folder = SOURCE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{name}.py"]


def test_tests_and_benches_import_no_private_names():
    root = SOURCE.parents[1]
    private = re.compile(
        r"^ *from farthing\S* import (?:\([^)]*?|.*?)(?<![\w.])_[a-zA-Z]", re.MULTILINE
    )
    for path in (*root.glob("tests/**/*.py"), *root.glob("bench/**/*.py")):
        assert not private.search(path.read_text()), path


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in names.items() if n > 1] == []


def test_one_place_goes_backward():
    assert [path.name for path in FILES for _ in re.findall(r"\.backward\(", text_of(path))] == [
        "step.py"
    ]


MAY_READ_THE_JOB = {
    *("run", "resolve", "ancestor", "budget", "finished", "rank_setup", "attempt", "metrics_file"),
    *("probe", "profiling", "opened_run"),  # verbs, which begin a run of their own
    "estimate",  # asks the planner, which plans jobs
}


def test_behind_resolve_no_stage_reads_the_job_or_takes_an_attempt():
    for path in sorted((SOURCE / "train").glob("*.py")):
        for node in [] if path.stem in MAY_READ_THE_JOB else nodes_of(path):
            assert not (isinstance(node, ast.Attribute) and node.attr == "job"), path.stem
            assert not (isinstance(node, ast.arg) and node.arg in ("job", "attempt")), path.stem


def test_four_files_talk_to_other_processes_of_a_run():
    talks = re.compile(
        r"(?:import|from) torch\.distributed|torch\.distributed\.\w|import distributed"
    )
    assert [module_of(path) for path in FILES if talks.search(text_of(path))] == [
        "dist.fsdp",
        "dist.ranks",
        "dist.reduce",
        "dist.rendezvous",
    ]


HEAVY = {"torch", "transformers", "peft", "datasets"}


def module_of(path: Path) -> str:
    """`.../farthing/storage/files.py` -> `storage.files`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def test_wings_without_torch():
    wings = "objectives storage run models data prices config local planner report launch"
    loads_tensors = {"run.checkpoint", "run.parts", "run.snapshot"}
    for path in (path for wing in wings.split() for path in room(wing)):
        tops = {name.split(".")[0] for name in imports(path, top_only=True)}
        assert not tops & HEAVY or module_of(path) in loads_tensors, path


@cache
def literals(path: Path) -> list[str]:
    """The strings of a file, but for those that stand by themselves: docstrings, and the docs of
    fields.
    """
    alone = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    nodes = [
        node for node in nodes_of(path) if isinstance(node, ast.Constant) and id(node) not in alone
    ]
    return [node.value for node in nodes if isinstance(node.value, str)]


def test_the_name_of_an_objective_stands_in_its_own_file_alone():
    names = objective_names()
    others_words = "importers", "scored.py"  # of tools and of data sets
    known = [path for path in FILES if not {*path.parts}.intersection(others_words)]
    is_named = {path: any(text in names for text in literals(path)) for path in known}
    assert sorted(path.stem for path, found in is_named.items() if found) == [
        "causal_lm",
        "classification",
        "cpo",
        "dpo",
        "kto",
        "multi_label",
        "orpo",
        "regression",
        "reward",
        "seq2seq",
        "simpo",
        "token_classification",
    ]
    in_a_sentence = {
        "tiny",  # the job of the demo
        "model.loss",  # an error of models with an encoder and a decoder
    }
    is_spelt = [path for path in FILES if re.search(r"causal-lm|seq2seq", " ".join(literals(path)))]
    assert {module_of(path) for path in is_spelt} <= {
        *in_a_sentence,
        "objectives.causal_lm",
        "objectives.seq2seq",
    }


def test_the_model_is_asked_what_it_computes_and_not_the_objective():
    asks = re.compile(r"\.(is_pair|scores_\w+|reads_\w+|learns_units|counts_units|predicts_next)\b")
    found = {module_of(path): len(asks.findall(text_of(path))) for path in FILES}
    own = {name: n for name, n in found.items() if n and name.startswith(("model.", "export."))}
    assert own == {
        "model.load": 2,  # languages of a tokenizer, and what a decoder reads
        "export.gguf_families": 1,  # llama.cpp continues texts
    }


CLOCKS = {"time", "socket", "http", "httpx", "requests", "farthing.prices.feeds"}


def test_what_the_planner_says_hangs_on_no_clock_and_no_network():
    measures_or_reads = {
        "config.data_lengths",
        "local.machine",
        "local.measurements",
        "models.model_config",
        "prices.feeds",
    }
    for path in [*room("planner"), *room("prices"), *sorted((SOURCE / "report").glob("plan_*.py"))]:
        if module_of(path) not in measures_or_reads:
            assert not imports(path) & CLOCKS, path
            assert not re.search(r"\b(today|now)\(\)", text_of(path)), path


def test_nothing_is_unpickled_or_evaluated():
    """Beside what ruff forbids: S102, S301, S307, TID251."""
    loads = re.compile(r"torch\.load\(|yaml\.(unsafe_|full_)?load\(|allow_pickle=True")
    assert [path for path in FILES if loads.search(text_of(path))] == []


def test_help_and_job_files_need_no_torch():
    every_verb = "".join(
        f"import farthing.cli.{path.stem}\n" for path in room("cli") if path.stem != "import_"
    )
    code = (
        every_verb + "import sys, farthing.cli, farthing.report.receipt, farthing.report.plan_view,"
        " farthing.planner.inputs\nfrom farthing.config.starter import starter\nheavy = {'torch',"
        " 'transformers', 'datasets', 'peft', 'rich'} & set(sys.modules)\nassert not heavy,"
        " heavy\nfarthing.cli.main(['--help'])\n"
    )
    done = in_python(code)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert verb in done.stdout


DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "rouge_score": "rouge-score",
    "pynvml": "nvidia-ml-py",
    "liger_kernel": "liger-kernel",
    "google": "protobuf",
    "lm_eval": "lm-eval",
    "compressed_tensors": "compressed-tensors",
    "mlflow": "mlflow-skinny",
    "triton": "torch",
    "accelerate": "peft",
    "pydantic_core": "pydantic",
}
"""Packages whose distribution has another name; triton comes with torch, accelerate with peft,
pydantic_core with pydantic.
"""
BUILT_BY_HAND = {"flash_attn"}
"""Used where somebody has built it, which no installer does by itself."""


def declared():
    """Names of distributions in pyproject.toml: those that are always installed, and those of each
    extra.
    """
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.split(r"[\[<>=~!; ]", text)[0].lower() for text in requirements}

    return {"": names(project["dependencies"])} | {
        extra: names(wanted)
        for extra, wanted in project["optional-dependencies"].items()
        if extra != "dev"
    }


def undeclared(path: Path, known: set[str], *, top_only: bool = False) -> set[str]:
    """Distributions that a file imports and that are not among the known."""
    tops = {name.split(".")[0] for name in imports(path, top_only=top_only)}
    tops -= {*sys.stdlib_module_names, "farthing"}
    return {DISTRIBUTIONS.get(top, top) for top in tops} - known


def test_what_is_imported_is_declared():
    distributions = declared()
    known = BUILT_BY_HAND.union(*distributions.values())
    assert {path.name: names for path in FILES if (names := undeclared(path, known))} == {}
    assert undeclared(SOURCE / "data" / "arrow.py", known - {"pyarrow"}) == {"pyarrow"}
    at_top = (undeclared(path, distributions[""], top_only=True) for path in FILES)
    assert set().union(*at_top) == set(), "an extra is imported where it is needed"


def test_nothing_in_src_is_for_tests_alone():
    """Names in code count, in docstrings and comments they don't; overrides of a library's methods
    are not public.
    """
    in_file = {path: named(nodes_of(path)) for path in FILES}
    used, root = Counter[str](), SOURCE.parent.parent
    for names in (*in_file.values(), *(named(nodes_of(p)) for p in root.glob("bench/**/*.py"))):
        used.update(names)
    used.update(re.findall(r"\w+", text_of(root / "pyproject.toml")))
    for path in SOURCE.rglob("templates/*"):  # in their expressions
        for code in re.findall(r"{[{%](.*?)[%}]}", text_of(path), re.DOTALL):
            used.update(re.findall(r"\w+", code))
    # methods of rich, argparse, importlib, yaml, torch's compiler, jinja2's visitor and sandbox
    overrides = {
        *("on_broken_pipe", "format_help", "parse_known_args", "create_module", "exec_module"),
        "construct_object",
        *("assume_constant_result", "graph_break", "generic_visit", "is_safe_callable"),
        *("call_binop", "getitem"),
    }
    unused = {
        f"{module_of(path)}.{node.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if node.name not in overrides
        and used[node.name] == in_file[path][node.name]
        and used[node.name] <= named(ast.walk(node))[node.name]
    }
    assert unused == set(), "remove it, or move it to the tests"


def named(nodes) -> Counter[str]:
    """How often each name is used as a variable, an attribute, a keyword or a text that is one
    word.
    """
    found = Counter()
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found[name] += 1
            case ast.Constant(value=str(name)) if name.isidentifier():
                found[name] += 1
    return found
