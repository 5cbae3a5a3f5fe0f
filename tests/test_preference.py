"""Preference objectives: their losses against the formulas, whole runs, shared beginnings, the
references' cache, verdicts, reward models, and the rows they are read from.
"""

import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_files import assistant, user
from farthing.config.load import load_job
from farthing.data.formats import Converter, recognise
from farthing.data.scored import expanded
from farthing.data.token_set import TokenSet, open_token_set
from farthing.data.units import mismatched
from farthing.errors import DataError, InputError, JobError, UnusableRowError
from farthing.events import DataRead, Evaluated, Note, StepTaken
from farthing.model.forward import Forward
from farthing.objectives.objective import Answers, OfStep
from farthing.objectives.registry import objective_of, read_settings
from farthing.report import answers_view
from farthing.run.folder import keep, kept, kept_job
from farthing.tiny import write_jsonl
from farthing.train.resolve import open_examples, resolve
from mishaps import crash
from ranks_at_work import finish_on
from thinned import thinned
from token_sets import with_words
from workshop import (
    TOPICS,
    Heard,
    job_file,
    log_of,
    losses_of,
    metrics_of,
    opened,
    read_json,
    read_rows,
    train,
    trained,
)

WORDS = [word for words in TOPICS.values() for word in words]
PAIRS = ["dpo", "orpo", "simpo", "cpo", "reward"]


def pairs(n: int) -> list[dict[str, Any]]:
    """Prompts with two answers, of which the one that ends with bread is better."""
    draw = np.random.default_rng(0)

    def words(least, most):
        return " ".join(draw.choice(WORDS, int(draw.integers(least, most))))

    rows = []
    for _ in range(n):
        begin = " " + words(1, 12)
        rows.append(
            {
                "prompt": words(3, 60),
                "chosen": f"{begin} bread",
                "rejected": f"{begin} storm" + " rain" * int(draw.integers(0, 4)),
            }
        )
    return rows


def verdicts(n: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(n)
        for side in ("chosen", "rejected")
    ]


def read_of(path: Path) -> tuple[TokenSet, DataRead]:
    """What a job would train on."""
    job, heard = load_job(path), Heard()
    spec = resolve(job)
    return open_examples(spec, heard)[0].tokens, heard.of(DataRead)[0]


def preference_job(folder: Path, objective, *, method: str = "lora", **keys) -> Path:
    """A small job of an objective."""
    name = objective["name"] if isinstance(objective, dict) else objective
    rows = keys.pop("rows", None) or (verdicts(16) if name == "kto" else pairs(24))
    path = job_file(
        folder,
        rows=rows,
        eval_rows=keys.pop("eval_rows", rows[:8]),
        pretrained=True,
        method=method,
        **keys,
    )
    text = path.read_text()
    path.write_text(text.replace("task: causal-lm\n", "") + f"objective: {json.dumps(objective)}\n")
    return path


# ---- the formulas ----


def answers_of(c, r) -> Answers:
    """Two answers a row with these log-probabilities, half of a step; the reference has -4 and
    -6.
    """
    n = len(c)
    reference = torch.tensor([[-4.0, -6.0]]).double().expand(n, 2)
    n_targets = torch.tensor([[3.0, 5.0]]).double().expand(n, 2)
    log_probs = torch.stack([torch.as_tensor(c), torch.as_tensor(r)], 1).double()
    return Answers(log_probs, n_targets, reference, None, None, OfStep(2 * n, (3 * n, 5 * n)))


def loss_of(settings, answers: Answers) -> float:
    settings = {"name": "dpo"} | settings
    objective = objective_of(settings["name"])
    return float(objective.loss(answers, read_settings(settings))[0])


def as_numbers(figures) -> dict[str, tuple[float, float]]:
    """Sums with their counts."""
    return {name: (float(total), float(n)) for name, (total, n) in figures.items()}


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return math.exp(-minus_log_sigmoid(x))


@pytest.mark.parametrize(
    ("name", "keys", "rates"),
    [
        (
            "dpo",
            {
                "loss_type": "sigmoid",
                "loss_weights": (),
                "label_smoothing": 0.0,
                "discopop_tau": 0.05,
            },
            (1e-6, 1e-5),
        ),
        (
            "kto",
            {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
            (1e-6, 1e-5),
        ),
        ("orpo", {}, (8e-6, 8e-5)),
        ("simpo", {"beta": 2.5, "simpo_gamma": 1.375}, (1e-6, 1e-5)),
        ("cpo", {"loss_type": "sigmoid", "label_smoothing": 0.0, "cpo_alpha": 1.0}, (1e-6, 1e-5)),
        ("reward", {"beta": None, "center_rewards_coefficient": 0.0}, (1e-5, 1e-4)),
    ],
)
def test_keys_that_a_job_leaves_out_are_those_of_the_papers(name, keys, rates):
    keys = {"name": name, "beta": 0.1, **keys}
    assert read_settings(name).model_dump() == {k: v for k, v in keys.items() if v is not None}
    assert objective_of(name).learning_rates == rates


ODDS = [z - math.log1p(-math.exp(z)) for z in (-1.0, -9 / 5)]


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, minus_log_sigmoid(0.4)),
        (
            {"label_smoothing": 0.2, "beta": 0.5},
            0.8 * minus_log_sigmoid(2.0) + 0.2 * minus_log_sigmoid(-2.0),
        ),
        ({"loss_type": "ipo", "beta": 0.5}, (1 / 3 + 3 / 5 - 1) ** 2),
        ({"loss_type": "hinge"}, 1 - 0.4),
        ({"loss_type": "hinge", "beta": 1.0}, 0.0),
        ({"loss_type": "sigmoid_norm"}, minus_log_sigmoid(0.1 * (1 / 3 + 3 / 5))),
        (
            {"loss_type": "robust", "label_smoothing": 0.1},
            (0.9 * minus_log_sigmoid(0.4) - 0.1 * minus_log_sigmoid(-0.4)) / 0.8,
        ),
        (
            {"loss_type": "exo_pair", "label_smoothing": 0.1},
            sigmoid(0.4) * math.log(sigmoid(0.4) / 0.9)
            + sigmoid(-0.4) * math.log(sigmoid(-0.4) / 0.1),
        ),
        ({"loss_type": "bco_pair"}, minus_log_sigmoid(0.1) + minus_log_sigmoid(0.3)),
        (
            {"loss_type": "nca_pair"},
            minus_log_sigmoid(0.1) + 0.5 * minus_log_sigmoid(-0.1) + 0.5 * minus_log_sigmoid(0.3),
        ),
        (
            {"loss_type": "discopop"},
            sigmoid(-8) * minus_log_sigmoid(0.4) + sigmoid(8) * math.exp(-0.4),
        ),
        ({"loss_type": "sppo_hard"}, (1 - 5) ** 2 + (-3 + 5) ** 2),
        ({"loss_type": "apo_zero"}, 1 - sigmoid(0.1) + sigmoid(-0.3)),
        ({"loss_type": "apo_down"}, sigmoid(0.1) + 1 - sigmoid(0.4)),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
            minus_log_sigmoid(0.4) + 1.0,
        ),
        (
            {"name": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
            minus_log_sigmoid(2 * (-1 + 9 / 5) - 1),
        ),
        (
            {"name": "cpo", "cpo_alpha": 2.0, "label_smoothing": 0.2},
            0.8 * minus_log_sigmoid(0.6) + 0.2 * minus_log_sigmoid(-0.6) + 4,
        ),
        ({"name": "cpo", "loss_type": "hinge"}, 0.4 + 2),
        ({"name": "cpo", "loss_type": "hinge", "beta": 1.0}, 2.0),
        ({"name": "orpo", "beta": 0.3}, 2.0 + 0.3 * minus_log_sigmoid(ODDS[0] - ODDS[1])),
    ],
)
def test_losses_are_those_of_their_papers(settings, loss):
    """Log-ratios to the reference are 1 and -3."""
    assert loss_of(settings, answers_of([-3.0], [-9.0])) == pytest.approx(loss)


def test_the_figures_of_pairs_are_sums_with_their_counts():
    """The second pair is a tie in what a token costs."""
    answers = answers_of([-3.0, -6.0], [-9.0, -10.0])
    found = objective_of("dpo").loss(answers, read_settings("dpo"))[1]
    d = [-1 / 3, 3 / 5, 2 / 3, 4 / 5]
    assert as_numbers(found) == {
        "accuracy": (1.0, 2.0),
        "rewards/accuracies": (2.0, 2.0),
        "rewards/margins": (pytest.approx(0.6), 2.0),
        "rewards/chosen": (pytest.approx(-0.1), 2.0),
        "rewards/rejected": (pytest.approx(-0.7), 2.0),
        "logps/chosen": (-9.0, 2.0),
        "logps/rejected": (-19.0, 2.0),
        "length/chosen": (6.0, 2.0),
        "length/rejected": (10.0, 2.0),
        "kl": (pytest.approx(sum(math.exp(x) - 1 - x for x in d)), 4.0),
    }

    found = objective_of("orpo").loss(answers, read_settings("orpo"))[1]
    assert float(found["rewards/chosen"][0]) == pytest.approx(-0.3)


@pytest.mark.parametrize(("centring", "loss"), [(0.0, 0.0), (0.1, 0.4)])
def test_a_reward_is_pulled_to_zero_as_its_paper_says(centring, loss):
    """Scores of 1 and -3, and a margin of 0.5."""
    scores, one = torch.tensor([[1.0, -3.0]]), torch.ones(1, 2)
    answers = Answers(None, one, None, scores, torch.tensor([0.5]), OfStep(1, (1, 1)))
    settings = {"name": "reward", "center_rewards_coefficient": centring}
    assert loss_of(settings, answers) == pytest.approx(minus_log_sigmoid(3.5) + loss)


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "cpo"])
def test_gradients_of_losses_are_right(name):
    objective, settings = objective_of(name), read_settings(name)
    log_probs = torch.tensor([[-1e-7, -9.0], [-30.0, -2.0]], dtype=torch.float64)

    def of(x):
        return objective.loss(answers_of(*x.unbind(1)), settings)[0]

    assert torch.autograd.gradcheck(of, (log_probs.requires_grad_(),), eps=1e-8, atol=1e-4)


@pytest.mark.parametrize(
    ("kl", "loss"),
    [
        (0.0, 1.5 * sigmoid(-0.1) + 0.5 * sigmoid(-0.2)),
        (2.0, 1.5 * sigmoid(0.1) + 0.5 * sigmoid(-0.4)),
    ],
)
def test_a_verdict_costs_what_its_paper_says(kl, loss):
    """Log-ratios to the reference are 1 of the accepted answer and -2 of the other."""
    log_probs, reference = torch.tensor([[-3.0], [-6.0]]), torch.tensor([[-4.0], [-4.0]])
    of_step, lengths = OfStep(2, (2,), torch.tensor(kl)), torch.tensor([[2.0], [1.0]])
    answers = Answers(log_probs, lengths, reference, None, torch.tensor([1.0, 0.0]), of_step)
    settings = {"name": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}
    assert loss_of(settings, answers) == pytest.approx(loss)
    unpaired = loss_of(settings | {"loss_type": "apo_zero_unpaired"}, answers)
    without = 1.5 * sigmoid(-0.1) + 0.5 * sigmoid(-0.2)
    assert unpaired == pytest.approx(without), "whatever the baseline"
    found = objective_of("kto").loss(answers, read_settings(settings))[1]
    assert as_numbers(found) == {
        "rewards/chosen": (pytest.approx(0.1), 1.0),
        "rewards/rejected": (pytest.approx(-0.2), 1.0),
        "logps/chosen": (-3.0, 1.0),
        "logps/rejected": (-6.0, 1.0),
        "length/chosen": (2.0, 1.0),
        "length/rejected": (1.0, 1.0),
        "baseline": (2 * kl, 2.0),
        "kl": (pytest.approx(math.exp(-0.5) - 0.5 + math.exp(2) - 3), 2.0),
    }


# ---- against whole logits ----


def naive(forward: Forward, tokens: TokenSet, units) -> tuple[Tensor, Tensor]:
    """[m] log-probabilities of the sequences of these units, each by itself with whole logits, and
    their targets."""
    found, counts = [], []
    for unit in units:
        starts, lengths = tokens.sequences_of([unit])
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            ids = torch.tensor(tokens.ids[start : start + length].astype(np.int64))
            wanted = torch.tensor(tokens.targets[start : start + length].astype(bool))[1:]
            logits = forward.model(
                input_ids=ids[None], attention_mask=torch.ones(1, length).long(), use_cache=False
            ).logits[0, :-1]
            words = logits.float().log_softmax(-1)[torch.arange(length - 1), ids[1:]]
            found.append(words[wanted].sum())
            counts.append(int(wanted.sum()))
    return torch.stack(found).double(), torch.tensor(counts)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("shares", thinned([True, False], 2))
def test_log_probabilities_and_gradients_are_those_of_whole_logits(tmp_path, method, shares):
    with opened(load_job(preference_job(tmp_path, "dpo", method=method))) as attempt:
        forward, tokens = attempt.forward, attempt.train_examples.tokens
        for weight in attempt.model.parameters():  # an adapter begins as nothing
            if weight.requires_grad:
                weight.data.add_(0.05 * torch.randn(weight.shape, generator=torch.manual_seed(1)))
        assert forward.shares_units
        forward.shares_units = shares
        units = np.array([3, 0, 7, 7])
        batch = forward.to_device(forward.collate(tokens, units))
        n_tokens = int(tokens.lengths[units].sum())
        assert (batch["input_ids"].shape[1] < n_tokens) is shares
        n_targets = int(batch["n_targets"].sum())
        assert (len(batch["labelled_positions"]) < n_targets) is shares
        expected, counts = naive(forward, tokens, units.tolist())
        found = forward.log_probs(batch)
        assert torch.allclose(found, expected, atol=1e-4)
        assert batch["n_targets"].tolist() == counts.tolist()
        coefficients = torch.linspace(-1, 1, len(expected))
        weights = [weight for weight in attempt.model.parameters() if weight.requires_grad]
        ours = torch.autograd.grad((found * coefficients).sum(), weights)
        theirs = torch.autograd.grad((expected * coefficients).sum(), weights)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, atol=2e-4, rtol=1e-3)


# ---- whole runs ----


@pytest.mark.parametrize("objective", thinned([*PAIRS, "kto"], 6))
def test_every_objective_learns_is_killed_and_goes_on_to_the_same_bits(tmp_path, objective):
    keys = {"max_steps": 8, "learning_rate": 0.01, "eval_strategy": "steps", "eval_steps": 4}
    whole, heard = load_job(preference_job(tmp_path / "a", objective, **keys)), Heard()
    assert train(whole, heard).state == "finished"
    losses = losses_of(whole)
    assert losses[-1] < losses[0]
    metrics = heard.of(Evaluated)[-1].metrics
    if objective == "kto":
        assert metrics["rewards/chosen"] > metrics["rewards/rejected"]
    else:
        assert metrics["rewards/accuracies"] == 1.0
        assert metrics["rewards/margins"] > 0
    if objective == "dpo":
        first, _, third = (row for row in log_of(whole)[:3])
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
        assert 0 < third["rewards/accuracies"] <= 1
        assert heard.of(StepTaken)[0].metrics["kl"] == pytest.approx(0, abs=1e-6)
        assert kept_job(Path(whole.output_dir))["objective"]["beta"] == 0.1
    parts = load_job(preference_job(tmp_path / "b", objective, **keys, save_steps=3))
    crash(parts, 5)
    assert train(parts).state == "finished"
    assert losses_of(parts)[-3:] == losses[-3:]


@pytest.mark.parametrize("reference", [-300.0, 300.0])
def test_a_baseline_is_how_far_mismatched_answers_have_moved_and_not_below_zero(
    tmp_path, reference
):
    with opened(load_job(preference_job(tmp_path, "kto"))) as attempt:
        forward, step, held = attempt.forward, attempt.steps.step, attempt.eval_examples
        for examples in (attempt.train_examples, held):
            tokens = examples.tokens
            forward.references[tokens.folder] = np.full((len(tokens), 2), reference)
        step.begin(0)
        judged = attempt.evaluator.measure({})
        for tokens, of, found in (
            (attempt.train_examples.tokens, step.feed.batches.examples_of(0), step.totals.baseline),
            (held.tokens, held.indices, judged["baseline"]),
        ):
            with torch.no_grad():
                moved = float(forward.mismatched_ratio(tokens, of)) / len(of)
            assert (moved > 0) is (reference < 0)
            (own, is_own), (other, is_other) = tokens.example(1), tokens.example(0)
            joined = [*own[is_own == 0], *other[is_other == 1]]
            assert mismatched(tokens, np.array([1])).ids.tolist() == joined, "of the row before"
            assert float(found) == pytest.approx(max(0.0, moved), rel=1e-5)


@pytest.mark.parametrize("objective", thinned(["kto", "reward"], 2))
def test_how_a_step_is_split_and_laid_out_changes_nothing(tmp_path, objective):
    path, found = preference_job(tmp_path, objective, max_steps=2), []
    for change in (
        "train.micro_batch_tokens=64",
        "train.micro_batch_tokens=4096",
        "model.attn_implementation=eager",
    ):
        job = load_job(path, overrides=(change, f"output_dir={tmp_path / change}"))
        train(job)
        found.append(losses_of(job))
    assert np.allclose(found[0], found[1:], atol=2e-5)


# ---- references ----


def references_in(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "references").rglob("*.json"))


def test_references_hang_on_content_alone_and_bad_blocks_are_made_again_or_refused(tmp_path):
    path = preference_job(tmp_path, "dpo", max_steps=2)

    def run(name, *changes):
        heard = Heard()
        train(load_job(path, overrides=[f"output_dir={tmp_path / name}", *changes]), heard)
        return "\n".join(note.text for note in heard.of(Note))

    assert "references of" not in run("first")
    made = references_in(tmp_path)
    content = [each.read_bytes() for each in made]
    assert made
    other = ("train.learning_rate=0.1", "objective.beta=0.5", "method.lora_r=4")
    assert "come from the cache" in run("settings", *other)
    assert references_in(tmp_path) == made
    rows = pairs(24)
    rows[3]["chosen"] += " wind"
    write_jsonl(tmp_path / "other.jsonl", rows)
    run("rows", f"data.train={tmp_path / 'other.jsonl'}")
    assert len(references_in(tmp_path)) == len(made) + 1
    assert [each.read_bytes() for each in made] == content
    block, good = made[0], content[0]
    block.write_bytes(good[:50] + bytes([good[50] ^ 1]) + good[51:])
    run("damaged")
    assert block.read_bytes() == good
    scores = np.frombuffer(bytes.fromhex(kept(block)["rows"])) + 5.0
    keep(block, {"rows": scores.tobytes().hex()})
    with pytest.raises(DataError, match="not this model's"):
        run("poisoned")


def test_a_pass_that_is_killed_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    from farthing.train import reference

    monkeypatch.setattr(reference, "BLOCK", 4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(load_job(preference_job(whole, "kto", max_steps=1)))
    write, n = reference.keep, 0

    def dies(*given):
        nonlocal n
        n += 1
        if n == 3:
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(reference, "keep", dies)
    job = load_job(preference_job(parts, "kto", max_steps=1))
    with pytest.raises(KeyboardInterrupt):
        train(job)
    assert len(references_in(parts)) == 2
    monkeypatch.setattr(reference, "keep", write)
    train(job)
    assert [each.read_bytes() for each in references_in(parts)] == [
        each.read_bytes() for each in references_in(whole)
    ]


# ---- the job ----


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("objective: {name: dpo, beat: 1}", "did you mean `beta`"),
        ("objective: dpp", "did you mean `dpo`"),
        ("objective: {beta: 0.1}", "`name` is missing"),
        ("objective: {name: dpo, beta: 0}", "greater than 0"),
        ("objective: {name: cpo, label_smoothing: 0.5}", "less than 0.5"),
        ("objective: {name: dpo, loss_type: [sft, sft]}", "each loss once"),
        ("objective: {name: dpo, loss_type: [sigmoid, sft], loss_weights: [1]}", "1 of 2 weights"),
        ("objective: {name: dpo, loss_type: exo_pair}", "above 0"),
        ("objective: {name: dpo, label_smoothing: 0.1, loss_type: hinge}", "changes nothing"),
        ("objective: {name: cpo, label_smoothing: 0.1, loss_type: hinge}", "changes nothing"),
        ("objective: {name: dpo, discopop_tau: 0.1}", "changes nothing"),
        ("objective: dpo\ntask: seq2seq", "leave `task` out"),
        ("objective: dpo\ndata: {train: data.jsonl, too_long: truncate}", "none of them is cut"),
        ("objective: dpo\ndata: {train: data.jsonl, keep: best}", "use data.pairs"),
        ("objective: kto\ndata: {train: data.jsonl, pairs: adjacent}", "data.keep"),
        ("objective: kto\ntrain: {global_batch_size: 1}", "no other"),
        ("objective: dpo\ntrain: {label_smoothing_factor: 0.1}", "no probabilities of targets"),
        ("objective: dpo\nsearch: {vary: {objective.beta: [0.1, 0.5]}}", "can't be compared"),
    ],
)
def test_what_an_objective_can_not_do_is_refused(tmp_path, text, word):
    base = "model: ./base\noutput_dir: ./run\n"
    base += "" if "data:" in text else "data: data.jsonl\n"
    (tmp_path / "job.yaml").write_text(base + text + "\n")
    with pytest.raises((JobError, InputError), match=word):
        load_job(tmp_path / "job.yaml")


# ---- rows ----

USER = user("How much?")
GOOD = assistant("A farthing.")
BAD = assistant("Go away.")


A, B = "A farthing.", "Go away."
CHAT_ROWS = {
    "trl": ("prompt/chosen/rejected", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
    "implicit": ("chosen/rejected", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
    "ultrafeedback": (
        "prompt/chosen/rejected",
        {"prompt": "How much?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ),
    "openai": (
        "input/preferred",
        {
            "input": {"messages": [USER], "tools": []},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
    ),
    "sharegpt": (
        "conversations/chosen/rejected",
        {
            "conversations": [{"from": "human", "value": "How much?"}],
            "chosen": {"from": "gpt", "value": A},
            "rejected": {"from": "gpt", "value": B},
        },
    ),
    "alpaca": (
        "instruction/chosen/rejected",
        {"instruction": "How much?", "input": "", "chosen": A, "rejected": B},
    ),
    "axolotl": (
        "prompt/chosen/rejected",
        {"system": "", "prompt": "How much?", "chosen": A, "rejected": B},
    ),
    "axolotl messages": (
        "messages/chosen/rejected",
        {"messages": [USER], "chosen": GOOD, "rejected": B},
    ),
    "ms-swift": (
        "messages/rejected_response",
        {"messages": [USER, GOOD], "rejected_response": B},
    ),
    "ms-swift messages": (
        "messages/rejected_messages",
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    ),
}


class _Tokenizer:
    """A template without a tokenizer."""

    chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    special_tokens_map = MappingProxyType({"eos_token": "<|end|>"})
    backend_tokenizer = with_words("<|end|>")


def text_of(form: str, row: dict[str, Any], objective: str = "dpo"):
    """What a row of a format becomes."""
    return Converter(form, {}, {}, _Tokenizer(), objective)(row)


@pytest.mark.parametrize(("form", "row"), CHAT_ROWS.values(), ids=CHAT_ROWS)
def test_every_form_of_a_pair_is_the_same_chat(form, row):
    assert recognise({*row}, "dpo", {}, "here").format == form
    table = {key: json.dumps(v, indent=1) if isinstance(v, list) else v for key, v in row.items()}
    for each in (row, table):
        text = text_of(form, each)
        for found, answer in zip((text.segments, *text.beside), (A, B), strict=True):
            assert found == (
                ("<user>How much?<|end|><assistant>", False),
                (f"{answer}<|end|>", True),
            )
    assert text.given == ("How much?",)


def test_texts_of_hh_are_cut_at_the_last_turn_in_common():
    begin = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: How much?\n\nAssistant:"
    row = {"chosen": f"{begin} A farthing.", "rejected": f"{begin} Go away."}
    text = text_of("chosen/rejected", row)
    assert text.segments == ((begin, False), (" A farthing.", True))
    assert text.beside == (((begin, False), (" Go away.", True)),)


@pytest.mark.parametrize(
    ("form", "row", "word"),
    [
        (
            "chosen/rejected",
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "Why?"}, BAD]},
            "different prompts",
        ),
        ("chosen/rejected", {"chosen": [GOOD], "rejected": [BAD]}, "no turn of the user"),
        ("chosen/rejected", {"chosen": "a", "rejected": "b"}, "no prompt"),
        ("prompt/chosen/rejected", {"prompt": "a", "chosen": "", "rejected": "b"}, "`chosen` is"),
        ("prompt/chosen/rejected", {"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        (
            "prompt/chosen/rejected",
            {"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]},
            "does not end",
        ),
        (
            "prompt/chosen/rejected",
            {"prompt": "Why?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "another text",
        ),
        ("input/preferred", {"input": "a", "preferred_output": [GOOD]}, "not an object"),
        (
            "messages/chosen/rejected",
            {"messages": [USER, GOOD], "chosen": GOOD, "rejected": BAD},
            "ends with an answer",
        ),
    ],
)
def test_rows_that_are_no_pair_are_named(form, row, word):
    with pytest.raises(UnusableRowError, match=word):
        text_of(form, row)


@pytest.mark.parametrize("value", [True, 1, "true", "desirable", "1.0"])
def test_verdicts_are_read_as_they_are_written(value):
    row = {"prompt": "a", "completion": " b", "label": value}
    form = "prompt/completion/label"
    assert text_of(form, row, "kto").value == 1.0
    row["label"] = {"True": False, "1": 0, "true": "False", "desirable": "bad"}.get(str(value), 0.0)
    assert text_of(form, row, "kto").value == 0.0
    with pytest.raises(UnusableRowError, match="verdict"):
        text_of(form, row | {"label": "maybe"}, "kto")


def test_a_pair_is_never_cut(tmp_path):
    rows = pairs(24)
    rows[5]["rejected"] = " soup" * 300
    _, read = read_of(preference_job(tmp_path, "dpo", rows=rows, data={"max_length": 900}))
    assert (read.n_skipped_long, read.n_examples) == (1, 23)


def test_a_margin_is_the_value_of_a_row():
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    for margin in (2.0, "2"):
        unit = text_of("prompt/chosen/rejected", row | {"margin": margin}, "reward")
        assert unit.value == 2.0
    for odd in (math.nan, True):
        with pytest.raises(UnusableRowError, match=f"'{odd}', not a number"):
            text_of("prompt/chosen/rejected", row | {"margin": odd}, "reward")


def run_of(folder: Path, objective) -> Path:
    """The folder of a finished run."""
    job = load_job(preference_job(folder, objective, max_steps=8, learning_rate=0.01))
    train(job)
    return Path(job.output_dir)


@pytest.fixture(scope="module")
def dpo_run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("dpo"), "dpo")


def test_eval_compares_the_model_with_what_it_began_with(dpo_run, cli):
    found = cli.json("eval", dpo_run, "--base")
    assert found["base"]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found["base"]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert found["tuned"]["rewards/accuracies"] == 1.0
    last = metrics_of(load_job(dpo_run.parent / "job.yaml"))[-1]
    assert found["tuned"]["rewards/margins"] == pytest.approx(last["rewards/margins"], abs=1e-3)


def test_the_reference_of_a_run_that_goes_on_from_another_is_that_one(tmp_path, cli):
    answers = trained(tmp_path / "answers", pretrained=True, method="lora", max_steps=2)
    path = preference_job(tmp_path, "dpo", max_steps=1, learning_rate=1e-9)
    train(load_job(path, overrides=[f"output_dir={tmp_path / 'plain'}"]))  # of other references
    job = load_job(path, overrides=[f"model.from_run={answers}"])
    train(job)
    job = load_job(path, overrides=[f"model.from_run={answers}", "train.max_steps=2"])
    train(job)
    assert losses_of(job) == pytest.approx([math.log(2)] * 2, abs=1e-6)
    found = cli.json("eval", job.output_dir)
    assert found["tuned"]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_a_reward_model_scores_answers_of_a_file(tmp_path, dpo_run, cli):
    run, row = run_of(tmp_path, "reward"), pairs(24)[0]
    rows = [{"prompt": row["prompt"], "completion": row[side]} for side in ("chosen", "rejected")]
    file = write_jsonl(tmp_path / "answers.jsonl", rows)
    scored = [json.loads(line) for line in cli.out("eval", run, "--score", file).splitlines()]
    assert scored[0]["score"] > scored[1]["score"] + 0.1
    assert scored[0]["prompt"] == row["prompt"]
    both = write_jsonl(tmp_path / "pairs.jsonl", pairs(24))
    said = cli.err("eval", run, "--score", both)
    assert "give one answer a row" in said
    assert "--data FILE` measures pairs" in said
    assert "objective:" not in said
    assert "scores no answers" in cli.err("eval", dpo_run, "--score", file)


def test_a_tuned_model_answers_the_prompts_of_pairs(tmp_path, dpo_run, cli):
    found = []
    for names in (("prompt",), ("prompt", "chosen", "rejected")):
        rows = [{name: row[name] for name in names} for row in pairs(3)]
        file, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / f"{len(names)}.jsonl"
        cli("predict", dpo_run, file, "-o", out)
        found.append([row["score"] for row in read_rows(out)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "strategy"), [("kto", "ddp"), ("dpo", "fsdp")])
def test_two_ranks_take_the_same_steps(tmp_path, objective, strategy):
    keys = {"max_steps": 2, "micro_batch_tokens": 700, "method": "full"}
    alone = load_job(preference_job(tmp_path / "one", objective, **keys))
    train(alone)
    place = {"strategy": strategy, "device": "cpu", "gpus": 2}
    job = load_job(preference_job(tmp_path / "two", objective, where=place, **keys))
    finish_on(2, tmp_path, job)
    assert losses_of(job) == pytest.approx(losses_of(alone), abs=2e-5)


# ---- answers with scores ----

SAMPLES = {
    "prompt": "How much?",
    "responses": ["a", "b", "c"],
    "scores": [0.2, 0.9, 0.5],
}


RANKED = {"instruction": "?", "answers": [{"text": "x", "rank": 2}, {"text": "y", "rank": 1}]}
CHAT = {"messages": [USER], "completions": [{"response": "x", "score": 1}]}


@pytest.mark.parametrize(
    ("row", "way", "expected"),
    [
        (SAMPLES, "best", [{"completion": "b"}]),
        (SAMPLES, "above:0.3", [{"completion": "b"}, {"completion": "c"}]),
        (SAMPLES, "best_worst", [{"chosen": "b", "rejected": "a"}]),
        (
            SAMPLES,
            "adjacent",
            [{"chosen": "b", "rejected": "c"}, {"chosen": "c", "rejected": "a"}],
        ),
        (RANKED, "best", [{"instruction": "?", "output": "y"}]),
        (CHAT, "best", [{"messages": [USER, assistant("x")]}]),
    ],
)
def test_scored_answers_become_what_is_learned(row, way, expected):
    prompt = {"prompt": row["prompt"]} if "prompt" in row else {}
    assert expanded(row, way) == [prompt | each for each in expected]


@pytest.mark.parametrize(
    ("row", "way", "word"),
    [
        ({"prompt": "a"}, "best", "no list of answers"),
        (SAMPLES | {"scores": [1]}, "best", "3 answers, and `scores` 1"),
        (SAMPLES | {"scores": None}, "best", "has no score"),
        (SAMPLES | {"scores": [1, 1, 1]}, "best_worst", "no answer of `responses` scores better"),
        (SAMPLES, "above:1.0", "scores above 1"),
        (SAMPLES | {"scores": [1, "x", 2]}, "best", "no number"),
        (SAMPLES | {"responses": ["a", "", "c"]}, "best", "not text"),
    ],
)
def test_scored_answers_that_can_not_be_used_are_named(row, way, word):
    with pytest.raises(UnusableRowError, match=word):
        expanded(row, way)


def test_scored_answers_train_pairs_and_single_answers(tmp_path):
    rows = [
        {"prompt": row["prompt"], "responses": [row["rejected"], row["chosen"]], "scores": [0, 1]}
        for row in pairs(24)
    ]
    keys = {"rows": rows, "eval_rows": rows[:4]}
    scored = preference_job(tmp_path / "a", "dpo", data={"pairs": "best_worst"}, **keys)
    paired, _ = read_of(scored)
    plain, _ = read_of(preference_job(tmp_path / "b", "dpo"))
    assert np.array_equal(paired.ids, plain.ids)
    assert np.array_equal(paired.targets, plain.targets)
    kept_rows = job_file(tmp_path / "c", data={"keep": {"above": 0.5}}, **keys)
    assert read_of(kept_rows)[1].n_examples == 24


def test_a_plan_counts_a_prompt_once(tmp_path, cli):
    path, found = preference_job(tmp_path, "dpo"), []
    for _ in range(2):
        found.append(cli.json("plan", path, "--gpu", "L4")["job"]["mean_tokens"])
        read_of(path)
    assert found[0] == pytest.approx(found[1], rel=0.02)
    tokens = open_token_set(next((tmp_path / "cache" / "tokens").glob("*[0-9a-f]")))
    assert found[1] < 0.7 * float(tokens.lengths.mean())


def test_the_receipt_has_what_was_saved(dpo_run):
    answers = read_json(dpo_run / "receipt.json")["answers"]
    assert 0.3 < answers["shared_share"] < 0.6
    assert answers["shared_usd"] > 0
    assert answers["figures"]["rewards/margins"][-1][1] > 0
    assert "Rewards" in next(dpo_run.glob("*.html")).read_text()


def test_a_run_that_forgets_is_named():
    points = {
        "rewards/chosen": [[step, -0.1 * step] for step in range(10)],
        "rewards/rejected": [[step, -0.3 * step] for step in range(10)],
    }
    job = {"task": "dpo", "method": {"name": "lora"}}
    spans = {"compute": 100.0, "reference": 10.0}
    found = answers_view.answers_of(job, points, spans, {"compute": 1.0}, 200, 150)
    assert (found.shared_s, found.reference_s) == (pytest.approx(100 / 3), 40.0)
    assert "fell from -0.05 to -0.85" in found.notes[0]
    assert answers_view.answers_of({"task": "orpo"}, {}, spans, {}, 1, 1).reference_s == 0
    assert answers_view.answers_of({"task": "causal-lm"}, {}, spans, {}, 1, 1) is None
