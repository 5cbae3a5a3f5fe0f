"""How far reading and tokenizing have got: told with a total, as a bar on a terminal and as lines
in a log.
"""

import io
import random
import re

import pytest

from data_files import opened, write_as
from farthing.data import arrow, blocks
from farthing.events import ReadingData, Tokenizing
from farthing.report.safe import SafeConsole
from farthing.report.terminal import Terminal
from workshop import Heard, make_job, train


class Log:
    """A terminal, or a log, and the clock beside it."""

    def __init__(self, *, is_terminal=False):
        self.now = 0.0
        self.file = io.StringIO()
        console = SafeConsole(
            file=self.file, force_terminal=is_terminal, width=200, highlight=False
        )
        self.terminal = Terminal(console, 10, clock=lambda: self.now)

    def tokenizing(self, n_seconds, of_seconds):
        for second in range(n_seconds + 1):
            self.now = float(second)
            share = second / of_seconds
            self.terminal(Tokenizing("train", 1000 * second, 10**6, share))

    @property
    def lines(self):
        return self.file.getvalue().splitlines()


def test_a_log_is_told_after_five_seconds_and_then_more_seldom():
    log = Log()
    log.tokenizing(4, 60)
    assert log.lines == []
    log.tokenizing(60, 60)
    shares = [int(re.search(r"tokenizing train: (\d+)%", line)[1]) for line in log.lines]  # type: ignore[index]
    assert 4 <= len(shares) <= 8
    assert shares == sorted(shares)
    assert "8%, 5,000 rows" in log.lines[0]
    assert "55 s to go" in log.lines[0]
    long = Log()
    long.tokenizing(3600, 7200)
    assert 50 <= len(long.lines) <= 75, "once a minute in the end"


def test_rates_are_of_what_was_done_since_the_tokenization_was_resumed():
    log = Log()
    for second in range(11):
        log.now = float(second)
        log.terminal(Tokenizing("train", 50_000 + 500 * second, 10**6, 0.5 + 0.02 * second))
    assert "500 rows/s" in log.lines[0]
    assert "20 s to go" in log.lines[0]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_every_reader_knows_how_far_it_is(kind, tmp_path, monkeypatch):
    dice = random.Random(0)
    rows = [{"text": dice.randbytes(300).hex()} for _ in range(2000)]
    path = write_as(kind, tmp_path / f"a.{kind}", rows)
    source = opened(path, tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 100)
    monkeypatch.setattr(arrow, "BATCH_ROWS", 100)
    shares = [block.share for block in source.blocks()]
    assert 0 <= shares[0] < 0.5
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_run_tells_of_reading_and_of_tokenizing(tmp_path):
    heard = Heard()
    train(make_job(tmp_path, n_rows=20, max_steps=1), heard)
    (reading,) = heard.of(ReadingData)
    assert reading.what.startswith("reading ")
    assert reading.done_bytes == reading.total_bytes == (tmp_path / "data.jsonl").stat().st_size
    assert heard.of(Tokenizing)[-1].role == "train"
