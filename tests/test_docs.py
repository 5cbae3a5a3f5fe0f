"""Every command, job and Python line of README and docs is one that farthing takes; written pages
are what the code says.
"""

import ast
import contextlib
import csv
import importlib.util
import io
import re
import shlex
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import farthing.api
import farthing.errors
from farthing.cli.parser import build_parser
from farthing.config.load import parse_job

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LINKED = sorted([*PAGES, *ROOT.glob("*.md"), *(ROOT / "evidence").rglob("*.md")])
BY_HAND = {"errors.md", "glossary.md", "run-folder.md"}
"""Pages of the reference that nobody generates."""
BLOCK = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LEAST = {"task": "causal-lm", "model": "base", "data": "train.jsonl", "output_dir": "run"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of a page of these kinds."""
    return [text for _, kind, text in BLOCK.findall(page.read_text()) if kind in kinds]


def commands(page: Path) -> list[str]:
    """The `farthing ...` lines of a page's blocks, without what is set by the shell."""
    lines = [
        line.strip()
        for block in blocks(page, "", "bash", "sh", "console")
        for line in block.splitlines()
    ]
    lines = [re.sub(r"^(\$ |\.venv/bin/|[A-Z_]+=\S+ )+", "", line) for line in lines]
    return [line for line in lines if line.startswith("farthing ")]


def complaint(words: list[str], verb: str) -> str:
    """What the command line says against these words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            build_parser([verb]).parse_args(words)
    except SystemExit as left:
        return said.getvalue() if left.code else ""
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_are_taken(page):
    for line in commands(page):
        words = shlex.split(
            re.sub(r"(\s&|\s\||\s>|;).*$", "", line.removesuffix("\\")), comments=True
        )[1:]
        words = [word for word in words if word not in ("[--json]",)]
        verb = next((word for word in words if not word.startswith("-")), "")
        if words and not verb:
            continue  # farthing --help
        assert complaint(words, verb) == "", f"{name_of(page)}: {line}"


def job_problems(text: str, page: Path) -> str:
    """What is wrong with a job, or with a part of one."""
    values = yaml.safe_load(text)
    if not isinstance(values, dict) or not values.keys() & farthing.api.Job.model_fields.keys():
        return ""
    try:
        parse_job(yaml.safe_dump({**LEAST, **values}), page)
    except farthing.api.FarthingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_jobs_and_python_of_a_page_are_those_of_farthing(page):
    for text in blocks(page, "yaml", "yml"):
        if "not a farthing job" not in text:
            assert job_problems(text, page) == ""
    for text in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "farthing":
                assert hasattr(farthing.api, node.attr), node.attr


@pytest.fixture(scope="module")
def pages():
    specification = importlib.util.spec_from_file_location("pages", ROOT / "docs/pages.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "keys.md",
        "verbs.md",
        "models.md",
        pytest.param("gpus.md", marks=pytest.mark.slow),
        "providers.md",
        pytest.param("../pictures/plan.svg", marks=pytest.mark.slow),
        "../pictures/receipt.svg",
    ],
)
def test_written_pages_are_current(name, pages):
    assert {name for name in pages.PAGES if name.endswith(".md")} == {
        path.name for path in (ROOT / "docs/reference").glob("*.md")
    } - BY_HAND
    if name.endswith(".svg") and int(metadata.version("rich").partition(".")[0]) < 15:
        pytest.skip("pictures are drawn by rich 15")
    written = (ROOT / "docs/reference" / name).read_text()
    assert written == pages.PAGES[name](), "run `make pages`"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def dead_links(page: Path) -> list[str]:
    text = page.read_text()
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        is_off_the_site = (
            page.is_relative_to(ROOT / "docs") and ROOT / "docs" not in target.resolve().parents
        )
        if not target.exists() or is_off_the_site:
            dead.append(link)
        elif anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            dead += [link] if anchor not in map(slug, headings) else []
    return dead


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
    """Those of the site stay on the site."""
    assert dead_links(page) == []


def table_rows(page: Path):
    lines = page.read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_claim_about_another_tool_has_a_source_and_a_date():
    with open(ROOT / "evidence/comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] and date.fromisoformat(row["date"]) for row in rows)
    backed = {(row["subject"], row["tool"]): row["claim"] for row in rows}
    head, _, *body = table_rows(ROOT / "docs/explanation/compared.md")
    claimed = {
        (row[0], tool): claim
        for row in body[: len({subject for subject, _ in backed})]
        for tool, claim in zip(head[2:], row[2:], strict=True)
    }
    assert claimed == backed


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600


@pytest.mark.parametrize("name", ["keys.md", "verbs.md"])
def test_every_key_and_argument_has_a_meaning(name):
    rows = table_rows(ROOT / "docs/reference" / name)
    assert [row[0] for row in rows if not row[-1] or "SUPPRESS" in row[-1]] == []


def literals() -> set[str]:
    """The texts of the source; NUL stands for what is put into them."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text.replace("`", "") for text in found}


def test_quoted_messages_are_those_of_the_code():
    rows = table_rows(ROOT / "docs/reference/errors.md")
    quoted = [
        row[0]
        for row in rows
        if row[0] and not re.fullmatch(r"\d+|-+|exit code|it says|class|`.*", row[0])
    ]
    assert len(quoted) > 10
    classes = [name for row in rows for name in re.findall(r"`(\w+Error)`", row[0])]
    assert len(classes) > 10
    assert [name for name in classes if not hasattr(farthing.errors, name)] == []
    known = "\n".join(literals())
    for text in quoted:
        for part in re.split(r"\b[A-Z]+\b", text):
            assert part.strip() in known, text
