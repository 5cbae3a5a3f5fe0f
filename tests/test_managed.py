"""What services that fine-tune for you would charge, beside renting and owning."""

from datetime import date
from types import SimpleNamespace

import pytest

from farthing.planner.managed import Service, fee_of, fees_of, services
from offers import offer_of
from workshop import job_file


def spec(max_steps: int | None = None):
    """Three epochs of a thousand examples of a hundred tokens."""
    lengths = SimpleNamespace(n_tokens=100_000, n_examples=1000)
    return SimpleNamespace(
        lengths=lengths,
        n_epochs=3,
        max_steps=max_steps,
        global_batch=10,
        eval_lengths=lengths,
    )


def a_service(counts: str) -> Service:
    return Service(
        "N", "", "lora", 0, 0.5, counts, "the adapter", "", None, "made", date(2026, 1, 1), 16, 1.0
    )


def test_tokens_are_counted_by_the_rules_of_each():
    plain = fee_of(a_service("tokens"), spec(), 512)
    assert (plain.n_tokens, plain.usd, plain.usd_high, plain.usd_unpacked) == (
        300_000,
        0.15,
        0.3,
        None,
    )
    with_validation = fee_of(a_service("with validation"), spec(), 512)
    assert with_validation.n_tokens == 600_000  # the validation data once an epoch
    assert with_validation.usd_unpacked == pytest.approx((3 * 1000 * 512 + 300_000) / 1e6 * 0.5)
    assert fee_of(a_service("tokens"), spec(max_steps=50), 512).n_tokens == 50 * 10 * 100


def test_every_row_has_its_source_its_day_and_its_unit():
    for service in services():
        assert service.source
        assert date(2025, 1, 1) <= service.date <= date(2026, 11, 22)
        assert 0 < service.usd_per_million_tokens <= 100
        assert service.usd_high == 0 or service.usd_per_million_tokens < service.usd_high <= 100
        assert service.counts in ("tokens", "with validation")
        assert service.you_get in ("the adapter", "the weights", "no weights")
        assert (service.method == "closed") == (service.you_get == "no weights")
        assert service.model or service.upto_billion > service.over_billion


def test_a_plan_answers_what_was_paid(tmp_path, cli, monkeypatch):
    monkeypatch.setenv("FARTHING_TODAY", "2026-11-22")
    size = ("--examples", "20000", "--mean-tokens", "500")
    words = ["plan", job_file(tmp_path), *size, "--paid", "$90"]
    view = cli.json(*words)
    assert view["paid"]["usd"] == 90
    assert view["paid"]["here_usd"] == pytest.approx(view["best"]["total_usd"])
    assert {"Fireworks", "Together", "OpenAI"} <= {each["provider"] for each in view["managed"]}
    assert all(each["price_source"] and each["price_date"] for each in view["managed"])
    said = " ".join(cli.out(*words, "--all").split())
    assert "you paid $90.00: here it is" in said
    assert "no new jobs from 2027-01-06" in said
    assert "--paid" in cli.err(*words[:-1], "much")


def test_a_service_is_listed_until_the_day_on_which_it_takes_no_new_jobs():
    asked, found = spec(), []
    asked.method = "lora"
    asked.shape = SimpleNamespace(n_parameters=8_000_000_000, task="causal-lm")
    for today in (date(2027, 1, 5), date(2027, 1, 6)):
        fees = fees_of(asked, "a/b", 512, [], today)  # type: ignore[arg-type]
        found.append("OpenAI" in {fee.provider for fee in fees})
    assert found == [True, False]


def test_a_row_of_a_price_file_is_for_models_of_its_size_and_method():
    asked = SimpleNamespace(
        method="lora",
        shape=SimpleNamespace(n_parameters=8_000_000_000, task="seq2seq"),
        n_tokens=1e6,
    )
    rows = ("LoRA up to 16B", "full up to 16B", "LoRA 16B to 80B", "Llama-3.1-8B", "other")
    offers = [offer_of("", 1.0, 0, instance=name, unit="million_tokens") for name in rows]
    found = fees_of(asked, "meta-llama/Llama-3.1-8B", 512, offers, date(2026, 1, 1))  # type: ignore[arg-type]
    assert {fee.what for fee in found if fee.takes_the_model} == {"LoRA up to 16B", "Llama-3.1-8B"}
