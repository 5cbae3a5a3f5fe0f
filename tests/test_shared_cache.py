"""A cache that others share: what another user has made or could change is made again or left
alone, with words.
"""

import os
from pathlib import Path

import pytest

from data_files import opened
from farthing.config.data_lengths import read_lengths
from farthing.data.fetch import fetch
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize
from farthing.errors import DataError
from farthing.tiny import demo_rows, write_jsonl
from web import Pages
from workshop import Heard, make_job, train

SOMEBODY = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def made(tmp_path, tokenizers):
    data = write_jsonl(tmp_path / "a.jsonl", demo_rows(8))

    def making():
        said = []
        sources = [opened(data, tmp_path / "cache")]
        recipe = TokenRecipe("causal-lm", 64)
        return tokenize(
            sources, tokenizers["llama"], recipe, tmp_path / "cache", warn=said.append
        ), said

    return making


def all_of(folder: Path) -> list[Path]:
    return [folder, *folder.iterdir()]


def another_owns_it(folder: Path):
    for path in all_of(folder):
        os.chown(path, SOMEBODY, SOMEBODY)


def another_owns_a_file(folder: Path):
    os.chown(folder / "ids.bin", SOMEBODY, SOMEBODY)


def others_may_write_in_it(folder: Path):
    folder.chmod(0o777)


def others_may_write_a_file(folder: Path):
    (folder / "targets.bin").chmod(0o666)


def a_link(folder: Path):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(another_owns_it, marks=needs_root),
        pytest.param(another_owns_a_file, marks=needs_root),
        others_may_write_in_it,
        others_may_write_a_file,
        a_link,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_set_that_another_could_have_changed_is_made_again(spoil, made):
    first, said = made()
    assert said == []
    before = first.folder.lstat().st_ino
    first_open = os.open(
        first.folder, os.O_RDONLY
    )  # its number is given to no other as long as somebody has it open
    assert (made()[0].folder.lstat().st_ino, made()[1]) == (before, []), (
        "a set of one's own is taken as it is"
    )
    spoil(first.folder)
    again, said = made()
    assert again.folder.lstat().st_ino != before
    os.close(first_open)
    assert not again.folder.is_symlink()
    assert "another user made or could change" in said[0]
    assert made()[1] == []


@needs_root
def test_a_folder_of_another_user_is_left_alone(made, tmp_path):
    tokens = tmp_path / "cache/tokens"
    first, _ = made()
    for path in [tokens, *(tokens / first.folder.name).parent.rglob("*")]:
        os.chown(path, SOMEBODY, SOMEBODY)
    before = {path: path.stat().st_mtime_ns for path in [tokens, *tokens.rglob("*")]}
    again, said = made()
    assert again.folder.parent == tokens.with_name(f"tokens-of-{os.geteuid()}")
    assert again.folder.parent.stat().st_mode & 0o777 == 0o700
    assert f"belongs to another user (uid {SOMEBODY})" in said[0]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    os.chown(again.folder.parent, SOMEBODY, SOMEBODY)
    with pytest.raises(
        DataError, match=r"can't be written.*belongs to another user|can't be written"
    ):
        made()


def test_sets_are_safe_from_others_whatever_the_umask(made):
    before = os.umask(0)
    try:
        tokens, _ = made()
    finally:
        os.umask(before)
    assert [path for path in all_of(tokens.folder) if path.stat().st_mode & 0o022] == []
    assert made()[1] == []


@pytest.mark.slow
@needs_root
def test_a_run_says_it_and_a_plan_does_not_go_by_it(tmp_path):
    job = make_job(tmp_path, n_rows=20, max_steps=1)
    cache = Path(str(job.cache_dir))
    train(job)
    assert read_lengths(job, cache_dir=cache)[0].is_exact
    (folder,) = (cache / "tokens").iterdir()
    os.chown(cache / "token_index", SOMEBODY, SOMEBODY)
    assert not read_lengths(job, cache_dir=cache)[0].is_exact
    os.chown(cache / "token_index", os.geteuid(), os.getegid())
    another_owns_it(folder)
    assert not read_lengths(job, cache_dir=cache)[0].is_exact
    heard = Heard()
    train(job.model_copy(update={"output_dir": str(tmp_path / "other")}), heard)
    assert "another user made or could change" in heard.warnings
    assert read_lengths(job, cache_dir=cache)[0].is_exact


@needs_root
def test_a_download_and_a_data_set_of_another_are_fetched_again(tmp_path):
    with Pages({"/a.jsonl": b'{"text": "right"}\n'}).served() as address:
        path = fetch(f"{address}/a.jsonl", tmp_path)
        path.write_bytes(b'{"text": "wrong"}\n')
        os.chown(path, SOMEBODY, SOMEBODY)
        assert fetch(f"{address}/a.jsonl", tmp_path).read_bytes() == b'{"text": "right"}\n'

    folder = write_jsonl(tmp_path / "set/train.jsonl", [{"text": "right"}]).parent
    first = opened(folder, tmp_path)
    arrow_files = list((tmp_path / "datasets").rglob("*.arrow"))
    before = arrow_files[0].stat().st_ino
    os.chown(arrow_files[0], SOMEBODY, SOMEBODY)
    with open(
        arrow_files[0], "rb"
    ):  # its number is given to no other as long as somebody has it open
        again = opened(folder, tmp_path)
        assert next((tmp_path / "datasets").rglob("*.arrow")).stat().st_ino != before
    assert first.sha256 == again.sha256
