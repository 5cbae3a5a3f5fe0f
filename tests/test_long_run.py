"""The log of a long run: read fast, by a digest of what was read before, into a curve that stays
short.
"""

import json
import random
from pathlib import Path

from farthing.report.training_log import Curve, keep_digest, read_log
from farthing.storage.logs import line_of


def write_log(folder: Path, n_steps: int, every: int):
    """The log of a run with an evaluation after `every` steps, digested as the loop does it."""
    chance, kept_bytes = random.Random(0), 0
    folder.mkdir(parents=True)
    with open(folder / "log.jsonl", "w", encoding="utf-8") as log:
        for step in range(1, n_steps + 1):
            row = {"step": step, "loss": 1 + chance.random(), "lr": 1e-4}
            row |= {"grad_norm": chance.random(), "n_targets": chance.randrange(4000)}
            row |= {"n_tokens": chance.randrange(4000, 9000), "examples": [step] * 8}
            log.write(line_of(row) + "\n")
            if step % every == 0:
                metrics = {"loss": 1 + chance.random(), "perplexity": 3 + chance.random()}
                log.write(line_of({"step": step, "metrics": metrics, "is_best": False}) + "\n")
                log.flush()
                kept_bytes = keep_digest(folder / "log.jsonl", kept_bytes)


def test_a_log_is_read_fast_to_what_reading_every_line_as_json_gives(tmp_path):
    write_log(tmp_path / "run", n_steps=300, every=10)
    path = tmp_path / "run" / "log.jsonl"
    known = {"lr": 1e-4, "n_targets": 5, "n_tokens": 7, "examples": [1]}
    odd = [
        {"step": 301, "loss": None, "grad_norm": None, **known},
        {"step": 301, "skipped": "the loss is", "samples": ["a.jsonl:7"]},
        {"step": 303, "loss": 2.0, "grad_norm": 1.0, **known},
    ]
    torn = (
        '{"step": 304, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "n_targets": 3, "n_tokens": 9,'
        ' "examples": [1, 2'
    )
    with open(path, "a") as file:
        file.write("".join(line_of(row) + "\n" for row in odd) + "no json\n[1]\n" + torn)
    rows = []
    for line in path.read_text().splitlines()[:-1]:
        if line.startswith("{"):
            rows.append(json.loads(line))
            rows[-1].pop("crc32")
    steps = [row for row in rows if "examples" in row]
    log = read_log(path)
    assert (log.step, log.loss) == (303, 2.0)
    assert log.n_tokens == sum(row["n_tokens"] for row in steps)
    assert log.n_targets == sum(row["n_targets"] for row in steps)
    with_loss = [row for row in steps if row["loss"] is not None]
    assert log.losses.means(1024) == [[row["step"], row["loss"]] for row in with_loss]
    assert log.evaluations == [row for row in rows if "metrics" in row]
    assert log.n_skipped == 1


def test_a_digest_changes_nothing_of_what_a_log_says(tmp_path):
    write_log(tmp_path / "run", n_steps=5_000, every=1000)
    path, digest = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "log.digest.json"
    digest.unlink(missing_ok=True)
    whole, lines = read_log(path), path.read_bytes().splitlines(keepends=True)
    assert not digest.exists(), "reading writes nothing"
    for n_lines in (1, 1023, 2500, len(lines) - 1):
        path.write_bytes(b"".join(lines[:n_lines]) + lines[n_lines][:40])
        end = keep_digest(path, worth_bytes=0)
        assert end == sum(map(len, lines[:n_lines])), "a torn line is not in it"
        path.write_bytes(b"".join(lines))
        assert read_log(path) == whole
    assert keep_digest(path, end, worth_bytes=1 << 30) == end, "not worth writing"
    path.write_bytes(b"".join(lines[1:]))  # another log
    assert read_log(path) != whole
    path.write_bytes(b"".join(lines))
    good = digest.read_bytes()
    for damaged in (
        b"",
        good[:-9],
        good.replace(b'"n_tokens": ', b'"n_tokens": 1', 1),
        b'{"version": 1}',
    ):
        digest.write_bytes(damaged)
        assert read_log(path) == whole
    digest.write_bytes(good)
    path.write_bytes(b"".join(lines[:-2]))  # a resume has taken steps back
    assert read_log(path).step < whole.step


def test_a_curve_keeps_its_sums_and_both_ends():
    curve, values = Curve(), [float(i % 7) for i in range(100_003)]
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    assert len(curve.stretches) <= 1024
    assert sum(n for _, n, *_ in curve.stretches) == len(values)
    assert sum(total for _, _, total, *_ in curve.stretches) == sum(values)
    assert curve.first == [1, 0.0]
    assert curve.stretches[-1][0] == len(values)
    assert len(curve.means(60)) <= 60
