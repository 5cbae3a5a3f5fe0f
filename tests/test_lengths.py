"""Lengths against the real thing: padding against batches that are cut, samples against whole token
sets.
"""

import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest

from data_files import KINDS, opened, write_as
from farthing.config.data_lengths import files_of_split, read_lengths
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.data import packing, sample
from farthing.data.batches import Batches
from farthing.data.lengths import Lengths, from_arrays, from_mean
from farthing.data.light_tokenizer import light_tokenizer
from farthing.data.memory import write_rows
from farthing.data.packing import split_by_tokens, split_padded
from farthing.data.token_set import TokenRecipe
from farthing.data.tokens import tokenize
from farthing.errors import DataError, InputError, ModelError
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.tiny import demo_rows, write_jsonl
from thinned import thinned
from web import Pages
from workshop import job_file, make_job, read_json, read_rows, rows_of, train

# ---- padding ----


def drawn(n: int, mean: float = 5.0, spread: float = 0.8, seed: int = 0):
    """Lengths with a long tail."""
    draws = np.random.default_rng(seed).normal(mean, spread, n)
    return np.minimum(np.exp(draws).astype(np.int64) + 1, 1024)


# ---- cut by tokens ----


def steps_of(n: int):
    """The full steps of a few epochs, of 16 examples in the trainer's order."""
    batches = Batches(np.arange(n), 16, seed=7)
    n_steps = min(300, max(3, 8_000 // n) * batches.steps_per_epoch)
    steps = map(batches.examples_of, range(n_steps))
    return [examples for examples in steps if len(examples) == 16]


@pytest.mark.parametrize("n", [1000, 50])
@pytest.mark.parametrize("most", [512, 8192])
def test_flat_pieces_are_as_many_and_as_large_as_the_trainer_makes(n, most):
    tokens = drawn(n)
    found = from_arrays(tokens, source="drawn").cut(most, 16, is_packed=True)
    pieces = [split_by_tokens(step, tokens, most) for step in steps_of(n)]
    assert found.n_micro_batches == pytest.approx(np.mean([len(step) for step in pieces]), rel=0.02)
    largest = max(
        (piece for step in pieces for piece in step), key=lambda piece: tokens[piece].sum()
    )
    assert tokens[largest].sum() <= found.largest.tokens * 1.02
    assert found.largest.tokens <= max(most, tokens.max())
    assert (found.largest.n_rows, found.largest.targets) == (1, 0)
    assert (tokens[largest] ** 2).sum() <= found.largest.pairs * 1.2, "what attention is made of"
    assert found.example.tokens == pytest.approx(tokens.mean()), "no padding"
    assert found.example.token_pairs == pytest.approx((tokens**2).mean())


@pytest.mark.parametrize("n", [1000, 50])
@pytest.mark.parametrize("most", [512, 8192])
@pytest.mark.parametrize("has_targets", [False, True])
def test_padded_pieces_are_those_of_the_trainer(n, most, has_targets):
    tokens = drawn(n)
    targets = drawn(n, mean=3.0, spread=0.5, seed=1) if has_targets else np.zeros(n, np.int64)
    given = targets if has_targets else None
    found = from_arrays(tokens, given, source="drawn").cut(most, 16, is_packed=False)
    steps = steps_of(n)[:80]
    pieces = [split_padded(step, tokens, most, target_lengths=given) for step in steps]
    assert found.n_micro_batches == pytest.approx(np.mean([len(step) for step in pieces]), rel=0.05)
    sides = np.array([(len(p), tokens[p].max(), targets[p].max()) for step in pieces for p in step])
    n_rows, longest, longest_target = sides.T
    sizes, n_examples = n_rows * (longest + longest_target), sum(map(len, steps))
    example, largest = found.example, found.largest
    assert example.tokens + example.targets == pytest.approx(sizes.sum() / n_examples, rel=0.03)
    squares = (n_rows * longest**2).sum() / n_examples
    assert example.token_pairs == pytest.approx(squares, rel=0.05)
    assert sizes.max() <= largest.n_tokens * 1.15
    assert largest.n_tokens < max(most, (tokens + targets).max()) * 1.1


def test_cutting_at_its_ends():
    tokens = drawn(500)
    lengths, same = (
        from_arrays(tokens, source="drawn"),
        from_arrays(np.full(40, 77), source="equal"),
    )
    for is_packed in (True, False):
        one = lengths.cut(10**9, 16, is_packed=is_packed)
        assert (one.n_micro_batches == 1.0) == is_packed, "padding is kept out of large pieces too"
        alone = lengths.cut(1, 16, is_packed=is_packed)
        assert (alone.n_micro_batches, alone.largest.n_tokens) == (16, int(tokens.max()))
        assert alone.example.tokens == pytest.approx(lengths.mean)
        three = same.cut(4 * 77, 12, is_packed=is_packed)
        assert (three.n_micro_batches, three.largest.n_tokens) == (3, 4 * 77)
        assert same.cut(4 * 77 - 1, 12, is_packed=is_packed).n_micro_batches == 4
    assert (
        lengths.cut(10**9, 9999, is_packed=True).largest.tokens
        == tokens.sum()
        == lengths.largest_step(9999)
    )
    assert lengths.largest_step(1) == tokens.max()


def test_inputs_that_are_cut_off():
    tokens, targets = drawn(300), drawn(300, mean=3.0, seed=1)
    cut = np.minimum(tokens, 100)
    for given, both in ((None, cut), (targets, cut + targets)):
        short = from_arrays(tokens, given, source="drawn").truncated(100)
        assert (short.longest, short.longest_example) == (100, both.max())
        assert short.mean == pytest.approx(cut.mean())


def test_cutting_looks_at_a_bounded_number_of_examples_and_at_none_twice(monkeypatch):
    """However many examples there are: a plan asks for dozens of cuts of the same lengths."""
    n_cut = []

    def counted(split):
        return lambda step, *rest, **named: n_cut.append(len(step)) or split(step, *rest, **named)

    for name in ("split_by_tokens", "split_padded"):
        monkeypatch.setattr(f"farthing.data.lengths.{name}", counted(getattr(packing, name)))
    lengths = from_arrays(drawn(50_000), source="drawn")
    pairs = from_arrays(drawn(50_000), drawn(50_000, seed=1), source="drawn")
    for _ in range(2):
        for batch in (8, 16, 64, 256):
            for most in (1024, 4096, 65_536):
                lengths.cut(most, batch, is_packed=True)
            pairs.cut(4096, batch, is_packed=False)
        assert 0 < sum(n_cut) <= 12 * 2048 + 4 * 1024


def test_a_large_set_is_kept_as_a_sample_with_its_ends():
    tokens = drawn(100_000)
    lengths = from_arrays(tokens, source="x")
    assert len(lengths.tokens) == 4096
    assert (lengths.tokens[0], lengths.longest) == (tokens.min(), tokens.max())
    assert lengths.mean == pytest.approx(tokens.mean())
    assert np.mean(lengths.tokens) == pytest.approx(tokens.mean(), rel=0.002)


def test_lengths_from_the_command_line():
    lengths = from_mean(5000, 300, longest=1024)
    found = (lengths.n_examples, lengths.mean, lengths.longest, lengths.is_exact)
    assert found == (5000, 300, 1024, False)
    assert np.mean(lengths.tokens) == pytest.approx(300, rel=0.002)
    assert "assumption" in lengths.source
    assert from_mean(100, 50, mean_target=10).n_target_tokens == 1000
    assert from_mean(1, 300).longest == 300
    assert from_mean(10, 300, longest=300).tokens.tolist() == [300] * 10
    for wrong in ((0, 300, None), (10, float("nan"), None), (10, 300, 200)):
        with pytest.raises(InputError):
            from_mean(*wrong)
    with pytest.raises(InputError, match="no examples"):
        from_arrays(np.array([], np.int64), source="nothing")


# ---- from a job ----


def same(a: Lengths, b: Lengths):
    """Everything but the words."""
    names = "n_examples n_tokens n_target_tokens longest longest_target tokens targets"
    for name in names.split():
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def known_of(job: Job):
    """What a plan knows of the lengths of its examples."""
    return read_lengths(job, cache_dir=Path(job.cache_dir))


@pytest.mark.parametrize(
    ("keys", "n_examples"),
    [
        (
            {
                "train": [{"path": "data.jsonl", "weight": 3}],
                "eval_fraction": 0.25,
                "max_train_samples": 10,
                "max_eval_samples": 3,
            },
            (30, 3),
        ),
        ({"eval": "held.jsonl"}, (40, 7)),
    ],
)
def test_a_guess_is_of_the_examples_that_a_run_takes(keys, n_examples, tmp_path):
    write_jsonl(tmp_path / "held.jsonl", rows_of("llama", 7, seed=3))
    job = make_job(tmp_path, n_rows=40, data=keys, max_steps=1)
    guesses = known_of(job)
    train(job)
    found = known_of(job)
    for guess, exact, n in zip(guesses, found, n_examples, strict=True):
        assert exact.is_exact == (n != 30)
        assert guess.n_examples == exact.n_examples == n
        if n_examples == (40, 7):
            same(guess, exact)


def test_a_plan_reads_the_files_of_a_split_alone(tmp_path):
    for name in ("train.jsonl.gz", "constraints.test.jsonl", "LICENSE.txt"):
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).touch()
    assert [path.name for path in files_of_split(tmp_path / "set", "train")] == ["train.jsonl.gz"]
    job = make_job(tmp_path, data={"train": "./set", "dataset_config_name": "en"})
    with pytest.raises(InputError, match="configuration `en`"):
        known_of(job)


def test_a_saved_data_set_is_planned_by_its_splits_and_its_classes_have_names(tmp_path):
    of_label = datasets.ClassLabel(names=["World", "Sports"])
    features = datasets.Features({"text": datasets.Value("string"), "label": of_label})
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "set")
    keys = {"train": "./set", "train_split": "train+test", "label_map": {"1": "Chess"}}
    job = make_job(tmp_path, "bert", data=keys, max_steps=1)
    assert known_of(job)[0].n_examples == 4
    train(job)
    assert known_of(job)[0].n_examples == 4
    config = read_json(tmp_path / "run/model/config.json")
    assert config["id2label"] == {"0": "Chess", "1": "World"}
    assert read_rows(write_rows(made, tmp_path))[1]["label"] == "Sports"
    (tmp_path / "two").mkdir()
    for name in ("text", "body"):
        (tmp_path / f"two/{name}.csv").write_text(f"{name},label\na,b\n")
    with pytest.raises(DataError, match="different columns"):
        train(make_job(tmp_path, "bert", data={"train": "./two"}, output_dir="./other"))


@pytest.mark.parametrize("change", thinned(["data", "tokenizer", "max_length", "kind", "set"], 3))
def test_a_stale_note_is_never_used(change, tmp_path):
    file = job_file(tmp_path, n_rows=20, max_steps=1, data={"eval_fraction": 0.1})
    job = load_job(file)
    train(job)
    assert known_of(job)[0].is_exact
    data, tokens = tmp_path / "data.jsonl", Path(job.cache_dir) / "tokens"
    if change == "data":
        times = data.stat()
        data.write_text(data.read_text().replace("a", "e", 1))  # as long as before, and as old
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "tokenizer":
        path = tmp_path / "base/tokenizer_config.json"
        path.write_text(json.dumps(read_json(path) | {"model_max_length": 99}))
    elif change == "max_length":
        job = load_job(file, ["data.max_length=500"])
    elif change == "kind":
        job = load_job(file, [f"data.train={data.rename(data.with_suffix('.txt'))}"])
    else:
        shutil.rmtree(tokens)
    assert not known_of(job)[0].is_exact


def test_a_changed_index_entry_cannot_lead_outside_the_cache(tmp_path):
    job = make_job(tmp_path, n_rows=20, max_steps=1)
    train(job)
    (note,) = Path(job.cache_dir, "token_index").glob("*.json")
    for content in ('{"set": "../../etc"}', '{"set": 5}', "[]", "{", ""):
        note.write_text(content)
        assert not known_of(job)[0].is_exact
    train(job)  # a finished run tokenizes nothing, and nothing is noted again
    assert not known_of(job)[0].is_exact


def test_remote_data_is_remembered_but_not_looked_at(tmp_path, monkeypatch):
    rows = write_jsonl(tmp_path / "rows.jsonl", demo_rows(20)).read_bytes()
    with Pages({"/rows.jsonl": rows}).served() as address:
        job = make_job(tmp_path, n_rows=20, max_steps=1, data={"train": f"{address}/rows.jsonl"})
        with pytest.raises(InputError, match="network") as caught:
            known_of(job)
        assert "--mean-tokens" in caught.value.to_do
        train(job)
    monkeypatch.setattr("farthing.data.read.fetch", lambda *_: pytest.fail("the network was asked"))
    lengths, _ = known_of(job)
    assert (lengths.n_examples, lengths.is_exact) == (20, False)
    assert "not looked at again" in lengths.source


# ---- kinds of files, and mistakes ----


def plain_job(data, model: Path | str = "nobody/nothing", task: str = "causal-lm", **more) -> Job:
    return Job.model_validate(
        {
            "task": task,
            "model": str(model),
            "data": {"train": data, **more},
            "output_dir": "nothing",
            "cache_dir": "nothing",
        }
    )


def by_both(path: Path, model: Path):
    """The tokens that training has of a file, and the lengths that a plan finds in it."""
    sources = [opened(path, path.parent)]
    how = TokenRecipe("causal-lm", 512, max_bad_rows=0.5)
    tokenizer = load_tokenizer(ModelChoice(str(model)), None)
    planned = sample.sample_lengths(sources, light_tokenizer(model, None), how)
    return tokenize(sources, tokenizer, how, path.parent), planned


def test_a_plan_reads_a_csv_file_as_training_does(tiny_folders, tmp_path):
    """Spaces around the names of columns, a line separator in a text, bytes that are no UTF-8."""
    lines = [
        f"{i} \u2028 say,{row['completion']}".replace("\n", " ")
        for i, row in enumerate(demo_rows(60))
    ]
    path = tmp_path / "a.csv"
    path.write_bytes("\n".join(["prompt, completion", *lines]).encode() + b"\nbad,\xff\n")
    tokens, found = by_both(path, tiny_folders["llama"])
    assert (len(tokens), found.n_examples) == (60, 60)
    assert sorted(found.tokens.tolist()) == sorted(tokens.lengths.tolist())


def test_every_kind_of_file_has_the_same_lengths(tiny_folders, tmp_path):
    rows = [{**row, "prompt": f'{row["prompt"]}\n"so, {i}"'} for i, row in enumerate(demo_rows(60))]
    paths = [str(write_as(kind, tmp_path / f"a.{kind}", rows)) for kind in KINDS]
    paths.append(str(write_jsonl(tmp_path / "set/train.jsonl", rows).parent))

    def lengths_of(*names):
        return known_of(plain_job([*names], tiny_folders["llama"]))[0]

    first = lengths_of(paths[0])
    for path in paths[1:]:
        same(lengths_of(path), first)
    assert lengths_of(*paths[:2]).n_examples == 2 * first.n_examples == 120


def test_without_a_tokenizer_characters_are_counted(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "four" * i} for i in range(1, 30)])
    lengths, _ = known_of(plain_job(str(data)))
    assert "guessed from characters" in lengths.source
    assert not lengths.is_exact
    assert lengths.mean == pytest.approx(
        15 + 1
    )  # one for every four characters, and one for the end


def test_data_that_cant_be_used(tiny_folders, tmp_path):
    def refusal(kind, words, name, **keys):
        with pytest.raises(kind, match=words) as caught:
            known_of(plain_job(name, tiny_folders["llama"], **keys))
        return caught.value

    for number, (text, words) in enumerate(
        [
            ("\n\n\n", "no rows"),
            ("no json\n" * 20, "no usable row .invalid JSON"),
            ('{"text": ""}\n' * 20, "no usable row .*`text` is empty"),
            ('{"a": "b"}\n' * 20, "no format"),
        ]
    ):
        (tmp_path / f"{number}.jsonl").write_text(text)
        refusal(DataError, words, str(tmp_path / f"{number}.jsonl"))
    (tmp_path / "folder").mkdir()
    for name in (
        "s3://bucket/a.jsonl",
        "https://example.org/a.jsonl?sig=secret",
        "nobody/set",
        str(tmp_path / "folder"),
    ):
        error = refusal(InputError, "network|split", name)
        assert "--mean-tokens" in error.to_do
        assert "secret" not in str(error)
    data = str(write_jsonl(tmp_path / "good.jsonl", demo_rows(3)))
    refusal(ModelError, "chat template", data, chat_template="/no/where")


def test_a_large_file_is_read_in_blocks(tiny_folders, tmp_path, monkeypatch):
    rows = [
        {"text": "word " * (1 + i * 60 // 6000 + i % 7)} for i in range(6000)
    ]  # longer towards its end
    job = plain_job(str(write_jsonl(tmp_path / "a.jsonl", rows)), tiny_folders["llama"])
    whole, _ = known_of(job)
    monkeypatch.setattr("farthing.data.sample._MOST_READ_BYTES", 400_000)
    part, _ = known_of(job)
    assert "of about" in part.source
    assert part.n_examples == pytest.approx(6000, rel=0.05)
    assert part.mean == pytest.approx(whole.mean, rel=0.05)
    document = write_as("json", tmp_path / "a.json", rows)
    assert known_of(plain_job(str(document), tiny_folders["llama"]))[0].n_examples == 6000
