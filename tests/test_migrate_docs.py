"""The pages of docs/migrate: what they show before is imported to what they show after, and that is
a job.
"""

import re
from pathlib import Path

import pytest

from farthing.cli import main
from farthing.config.load import load_job

DOCS = Path(__file__).parents[1] / "docs" / "guides" / "migrate"
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "README")


def test_there_is_a_page_for_each_source():
    from farthing.cli.import_ import SOURCES
    from farthing.config.importers import recognise

    assert set(PAGES) == set(SOURCES.split(",")) == set(recognise.SOURCES)
    index = (DOCS / "README.md").read_text()
    assert all(f"({name}.md)" in index for name in PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_the_importer_writes(name, tmp_path, capsys):
    page = (DOCS / f"{name}.md").read_text()
    before = re.search(r"## Before: (\S+)\n\n```\w+\n(.*?)```\n", page, re.DOTALL)
    after = re.search(r"## After: job.yaml\n\n```yaml\n(.*?)```\n", page, re.DOTALL)
    (tmp_path / before[1]).write_text(before[2])
    command = re.search(r"^farthing (import .*)$", page, re.MULTILINE)
    words = [str(tmp_path / word) if "." in word else word for word in command[1].split()]
    assert main(words) == 0
    assert (tmp_path / "job.yaml").read_text() == after[1]
    load_job(tmp_path / "job.yaml")
    capsys.readouterr()
