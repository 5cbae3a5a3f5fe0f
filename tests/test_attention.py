"""Documents laid end to end against the same documents one by one and padded: losses, gradients,
and what leaks.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from farthing.model import attention_kernels
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention import (
    Documents,
    attend,
    can_go_packed,
    first_position,
    go_packed,
    packed_logits,
)
from farthing.model.flops import flops_per_token
from farthing.model.last_layer import last_layer
from farthing.models.families import DECODERS, ENCODERS
from farthing.models.shapes import read_shape
from packed_models import (
    CLOSE,
    COMMON,
    MAIN,
    WINDOW,
    Layer,
    Waits,
    assert_same,
    gradients,
    heads,
    model_of,
)
from thinned import thinned


def documents_of(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Random token ids, one row a document."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (length,), generator=draw) for length in lengths]


def some_lengths(seed: int) -> list[int]:
    """Random lengths with ones, repeats and neighbours of equal length."""
    draw = random.Random(seed)
    lengths = [
        draw.choice([1, 2, WINDOW, draw.randint(1, 12), draw.randint(10, 30)])
        for _ in range(draw.randint(2, 6))
    ]
    return lengths + draw.choices(lengths, k=2) + [lengths[-1]] * draw.randint(0, 2)


def flat(model: Any, documents: list[Tensor]) -> dict[str, Any]:
    """A packed batch of documents, made without farthing's collation."""
    begin = first_position(model.config)
    of = Documents.of([len(ids) for ids in documents])
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) + begin for ids in documents])[None],
        "attention_mask": of.no_mask,
        "documents": of,
    }


def flat_losses(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """Losses of every predicted token, by document."""
    logits = packed_logits(model, flat(model, documents))[0].split([len(ids) for ids in documents])
    return [
        F.cross_entropy(rows[:-1].float(), ids[1:], reduction="none")
        for rows, ids in zip(logits, documents, strict=True)
    ]


def padded_losses(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """The same through one padded batch and transformers' attention."""
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=1)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(ids) for ids in documents], batch_first=True
    )
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    return [
        F.cross_entropy(row[: len(ids) - 1].float(), ids[1:], reduction="none")
        for row, ids in zip(logits, documents, strict=True)
    ]


def single_losses(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """The same, one document at a time."""
    return [padded_losses(model, [ids])[0] for ids in documents]


def together(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).sum()


# ---- equality ----


@pytest.mark.parametrize(
    ("family", "seed"),
    thinned(
        [*((family, seed) for family in MAIN for seed in range(3))]
        + [(family, 0) for family in sorted(DECODERS - set(MAIN))],
        2,
    ),
)
def test_flat_losses_and_gradients_are_those_of_documents_alone_and_padded(family, seed):
    model, documents = model_of(family, seed=seed), documents_of(some_lengths(seed), seed)
    assert can_go_packed(model, "causal-lm") is None
    alone, padded = single_losses(model, documents), padded_losses(model, documents)
    theirs = gradients(model, together(alone))
    go_packed(model)
    ours = flat_losses(model, documents)
    for one, other, third in zip(ours, alone, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(one, third, rtol=CLOSE, atol=CLOSE)
    assert_same(gradients(model, together(ours)), theirs, 3 * CLOSE)


@pytest.mark.parametrize("seed", thinned(range(3), 2))
@pytest.mark.parametrize("family", [*sorted(ENCODERS), "llama", "gpt2", "gemma2"])
def test_classification_reads_each_document_where_its_head_does(family, seed):
    model, lengths = model_of(family, "classification", seed), some_lengths(seed)
    documents = documents_of(
        [*lengths, 40, 40], seed
    )  # longer together than the model has positions
    labels = torch.arange(len(documents)) % 3
    assert can_go_packed(model, "classification") is None
    alone = torch.cat([model(input_ids=ids[None]).logits for ids in documents])
    theirs = gradients(model, F.cross_entropy(alone, labels, reduction="sum"))
    go_packed(model)
    ours = packed_logits(model, flat(model, documents))
    torch.testing.assert_close(ours, alone, rtol=CLOSE, atol=CLOSE)
    assert_same(gradients(model, F.cross_entropy(ours, labels, reduction="sum")), theirs)


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_the_last_layer_of_an_encoder_is_computed_for_the_tokens_that_are_read(family):
    model, documents = model_of(family, "classification"), documents_of([7, 1, 12, 12])
    go_packed(model)
    body = getattr(model, model.base_model_prefix)
    seen: list[int] = []
    body.encoder.layer[-1].intermediate.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    found = []
    for is_heard in (False, True):
        if is_heard:
            body.encoder.layer[-1].register_forward_hook(lambda *_: None)
        scores = packed_logits(model, flat(model, documents))
        found.append((scores, gradients(model, scores.sum())))
    assert seen == [4, 32], "who listens to the layer hears of every token"
    torch.testing.assert_close(found[0][0], found[1][0], rtol=CLOSE, atol=CLOSE)
    assert_same(found[0][1], found[1][1])
    assert len(body.encoder.layer) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_plan_and_receipt_count_the_last_layer_of_an_encoder_for_the_tokens_that_are_read(family):
    model, lengths = model_of(family, "classification"), [12] * 4
    go_packed(model)
    batch = flat(model, documents_of(lengths))
    with FlopCounterMode(display=False) as counter:
        packed_logits(model, batch).sum().backward()
    counted = {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}
    products = sum(counted.get(f"aten.{name}", 0) for name in ("mm", "addmm")) / len(lengths)
    shape = read_shape(model.config.to_dict(), "classification", model.config.num_labels)
    planned, whole = (shape.training_flops(12, n_read=n_read) for n_read in (1.0, None))
    assert planned.body + planned.head == pytest.approx(products, rel=0.02)
    assert whole.body - planned.body > 0.6 * whole.body / shape.n_layers
    assert planned.attention == pytest.approx(whole.attention * (1 - (1 - 1 / 12) / shape.n_layers))
    assert (
        flops_per_token(model, last_layer(model), 1 / 12)
        < flops_per_token(model)
        == pytest.approx(6 * (shape.n_matmul + shape.n_head_matmul))
    )
    saved = (flops_per_token(model) - flops_per_token(model, last_layer(model), 1 / 12)) * 12
    assert saved == pytest.approx(whole.body - planned.body)


def test_positions_begin_after_the_padding_index_where_the_family_does_so():
    assert [
        first_position(model_of(family, "classification").config)
        for family in ("bert", "roberta", "llama")
    ] == [
        0,
        2,
        0,
    ]


# ---- with what else a run switches on ----


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_recomputed_layers_see_the_documents_of_their_own_batch(family, every):
    model = model_of(family)
    first, second = documents_of([7, 1, 12, 12]), documents_of([3, 20, 9], seed=1)
    theirs = gradients(model, together(single_losses(model, [*first, *second])))
    go_packed(model)
    checkpoint_layers(model, every)
    loss = together(flat_losses(model, first)) + together(
        flat_losses(model, second)
    )  # both forward, then both backward
    assert_same(gradients(model, loss), theirs)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_adapters_train_alike(family, every):
    model = add_adapter(model_of(family), Adapter(r=4), "causal-lm", seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    documents = documents_of([7, 1, 12, 12])
    theirs = gradients(model, together(single_losses(model, documents)))
    assert can_go_packed(model, "causal-lm") is None
    go_packed(model)
    checkpoint_layers(model, every)
    ours = gradients(model, together(flat_losses(model, documents)))
    assert all("lora_" in name for name in ours)
    assert_same(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_bf16_autocast_is_as_close_as_bf16_is(family):
    model, documents = model_of(family), documents_of([7, 1, 12, 12, 25])
    exact = gradients(model, together(single_losses(model, documents)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        padded = together(padded_losses(model, documents))
        theirs = gradients(model, padded)
        go_packed(model)
        ours = together(flat_losses(model, documents))
        found = gradients(model, ours)
    assert float(ours.detach()) == pytest.approx(float(padded.detach()), rel=1e-2)

    def error(these: dict[str, Tensor]) -> float:
        return float(torch.stack([(these[name] - g).norm() for name, g in exact.items()]).norm())

    assert error(found) < 1.5 * error(theirs)


def test_boundaries_and_masks_are_made_once_a_batch(monkeypatch):
    model, documents = model_of("mistral", num_hidden_layers=4), documents_of([7, 12, 12, 7])
    go_packed(model)
    batch = flat(model, documents)
    seen: list[Any] = []
    made: list[Any] = []
    real, once = attention_kernels.padded, Documents.once

    def watched(*args: Any) -> Tensor:
        seen.append(args[3])
        return real(*args)

    def counted(documents: Documents, key: Any, make: Any) -> Any:
        return once(documents, key, lambda: made.append(key) or make())

    monkeypatch.setitem(attention_kernels.KERNELS, "cpu", watched)
    monkeypatch.setattr(Documents, "once", counted)
    monkeypatch.setattr(Documents, "of", lambda *args: pytest.fail("boundaries are computed again"))
    packed_logits(model, batch)
    assert len(seen) == 4
    assert all(one is batch["documents"] for one in seen)
    assert len(made) == len(set(made)) == 2, "places, and one mask for documents of 7 and 12"


@pytest.mark.parametrize(
    ("family", "task"),
    [
        *((family, "causal-lm") for family in MAIN),
        ("bert", "classification"),
        ("llama", "classification"),
    ],
)
def test_a_flat_forward_pass_never_waits_for_the_device(family, task):
    model = model_of(family, task)
    go_packed(model)
    batch = flat(model, documents_of([7, 12, 12, 1]))
    with Waits() as waits:
        packed_logits(model, batch)
    assert waits.n == 0
    with Waits() as waits:
        assert torch.ones(1).all()
    assert waits.n == 1


# ---- windows, caps and dropout, against the formula ----


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """Attention with one dense mask over the whole batch: [1, T, H, D]."""
    owner = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    at = torch.arange(len(owner))
    seen = owner[:, None] == owner[None]
    if causal:
        seen &= at[:, None] >= at[None]
    if window is not None:
        seen &= at[:, None] - at[None] < window
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


WAYS = [
    (True, None, None),
    (False, None, None),
    (True, 3, None),
    (True, 1, None),
    (True, 100, None),
    (True, None, 1.5),
]
WAYS += [(True, 3, 1.5), (False, None, 1.5)]


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "window", "cap"), WAYS)
@pytest.mark.parametrize("kernel", ["padded", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_kernels_follow_the_formula(kernel, causal, window, cap, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *args: kernel)
    monkeypatch.setattr(
        attention_kernels, "_flex", lambda: flex_attention
    )  # not compiled, as it runs on a CPU
    for lengths in ([1, 4, 4, 2, 1, 9], [6], [1, 1, 1]):
        q, k, v = heads(sum(lengths))
        documents = Documents.of(lengths)
        theirs = formula(q, k, v, lengths, causal=causal, window=window, cap=cap)
        inputs = (
            (q.detach(), k.detach(), v.detach()) if kernel == "flex" else (q, k, v)
        )  # flex: forward only on a CPU
        ours, weights = attend(
            Layer(),
            *inputs,
            None,
            sliding_window=window,
            softcap=cap,
            is_causal=causal,
            documents=documents,
        )
        assert weights is None
        torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE)
        if ours.requires_grad:
            weight = torch.randn_like(theirs)
            found = torch.autograd.grad((ours * weight).sum(), (q, k, v))
            for one, other in zip(
                found, torch.autograd.grad((theirs * weight).sum(), (q, k, v)), strict=True
            ):
                torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["cpu", "padded"])
def test_no_kernel_drops_a_bias(kernel, causal, monkeypatch):
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *args: kernel)
    lengths = [1, 4, 4, 2, 9]
    q, k, v = heads(sum(lengths))
    bias = torch.randn(1, 4, 9, 9)
    hides = torch.full((9, 9), -torch.inf).triu(1) if causal else torch.zeros(9, 9)
    ours, _ = attend(
        Layer(),
        q,
        k,
        v,
        None,
        is_causal=causal,
        position_bias=bias + hides,
        documents=Documents.of(lengths),
    )
    parts = zip(*(each.split(lengths, 2) for each in (q, k, v)), lengths, strict=True)
    theirs = torch.cat(
        [
            (q @ k.repeat_interleave(2, 1).mT * 16**-0.5 + (bias + hides)[..., :n, :n]).softmax(-1)
            @ v.repeat_interleave(2, 1)
            for q, k, v, n in parts
        ],
        2,
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_dropped_weights_are_the_same_in_expectation(cap):
    q, k, v = (tensor.detach() for tensor in heads(7))
    documents = Documents.of([4, 3])
    exact = attend(Layer(), q, k, v, None, softcap=cap, documents=documents)[0]
    torch.manual_seed(0)
    draws = [
        attend(Layer(), q, k, v, None, dropout=0.5, softcap=cap, documents=documents)[0]
        for _ in range(1000)
    ]
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(torch.stack(draws).mean(0), exact, rtol=0, atol=0.25)


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal-lm"), ("bert", "classification")])
def test_a_model_that_drops_is_repeatable_in_training_and_exact_in_evaluation(family, task):
    drops = {"attn_pdrop": 0.2, "attention_probs_dropout_prob": 0.2}
    model, documents = model_of(family, task, **drops), documents_of([7, 1, 12, 12])
    model.eval()
    alone = [model(input_ids=ids[None]).logits.flatten(0, -2) for ids in documents]
    go_packed(model)
    batch = flat(model, documents)
    ours = packed_logits(model, batch).flatten(0, -2)
    torch.testing.assert_close(ours, torch.cat(alone), rtol=CLOSE, atol=CLOSE)
    model.train()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(packed_logits(model, batch))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ---- kernels this machine lacks ----


@pytest.mark.parametrize(("window", "causal"), [(None, True), (None, False), (3, True)])
def test_flash_is_told_of_documents_windows_and_dropout(window, causal, monkeypatch):
    said: list[Any] = []

    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        *others: Any,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor]:
        assert bounds.dtype == torch.int32
        said.extend([*others, window_size_left, window_size_right, key_bounds is bounds])
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q * scale * 4, k, v))
        return (formula(q, k, v, bounds.diff().tolist(), causal=causal, window=window, cap=None),)

    def answer(*args: Any, **options: Any) -> tuple[Tensor]:
        return (fake(*args, **options)[0][0],)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", answer)
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *args: "flash")
    lengths = [1, 4, 4, 9]
    q, k, v = heads(sum(lengths))
    ours = attend(
        Layer(),
        q,
        k,
        v,
        None,
        0.1,
        scaling=0.3,
        sliding_window=window,
        is_causal=causal,
        documents=Documents.of(lengths),
    )[0]
    theirs = formula(q * 0.3 * 4, k, v, lengths, causal=causal, window=window, cap=None)
    torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE)
    sees = {(None, True): (True, -1, 0), (None, False): (False, -1, -1), (3, True): (False, 2, 0)}
    is_causal, left, right = sees[window, causal]
    assert said == [9, 9, 0.1, is_causal, False, left, right, True]


def test_the_flash_attention_of_this_torch_takes_what_it_is_given():
    known = [
        each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ]
    assert known[:10] == [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    ]
    assert {"scale", "window_size_left", "window_size_right"} <= set(known)


# ---- batches without documents, and models that stay padded ----


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_padded_batches_and_generation_stay_what_they_were(family):
    model, documents = model_of(family).eval(), documents_of([7, 2, 12])
    prompt = documents[2][None]

    def written() -> list[int]:
        mask = torch.ones_like(prompt)
        return model.generate(
            prompt, attention_mask=mask, max_new_tokens=8, do_sample=False
        ).tolist()[0]  # type: ignore[no-any-return]

    before, text = torch.cat(padded_losses(model, documents)), written()
    go_packed(model)
    torch.testing.assert_close(
        torch.cat(padded_losses(model, documents)), before, rtol=CLOSE, atol=CLOSE
    )
    assert written() == text


def test_padded_encoders_stay_what_they_were():
    model = model_of("bert", "classification").eval()
    ids = torch.stack(documents_of([9, 9]))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    go_packed(model)
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=mask).logits, before, rtol=CLOSE, atol=CLOSE
    )


def test_a_saved_model_knows_nothing_of_the_entry(tmp_path):
    model = model_of("llama")
    go_packed(model)
    assert model.config._attn_implementation == "farthing_varlen"
    model.save_pretrained(tmp_path)
    assert "farthing_varlen" not in (tmp_path / "config.json").read_text()


def test_models_that_must_stay_padded_say_why():
    longt5 = AutoConfig.for_model(
        "longt5", d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=20
    )
    from transformers import AutoModelForSeq2SeqLM, BloomForCausalLM, StableLmForCausalLM

    assert "not among the families" in str(
        can_go_packed(AutoModelForSeq2SeqLM.from_config(longt5), "seq2seq")
    )
    bloom = BloomForCausalLM(
        AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=20)
    )
    assert "ALiBi" in str(can_go_packed(bloom, "causal-lm"))
    stable = StableLmForCausalLM(
        AutoConfig.for_model("stablelm", **{**COMMON, "num_key_value_heads": 4})
    )
    assert "not among" in str(can_go_packed(stable, "causal-lm"))
    llama = model_of("llama")
    assert "not among the families" in str(can_go_packed(llama, "seq2seq"))
    scored = model_of("llama", "classification")
    del scored.score
    assert "head is not known" in str(can_go_packed(scored, "classification"))
    llama.config.layer_types = ["full_attention", "linear_attention"]
    assert "linear_attention" in str(can_go_packed(llama, "causal-lm"))
    mixtral = model_of("mixtral", output_router_logits=True)
    assert "routers" in str(can_go_packed(mixtral, "causal-lm"))
    assert "not among" in str(can_go_packed(model_of("bert", "classification"), "causal-lm"))


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_documents_have_tokens(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        Documents.of(lengths)


def test_attention_with_what_is_not_known_is_refused():
    documents = Documents.of([4])
    with pytest.raises(ValueError, match="s_aux"):
        attend(Layer(), *heads(4), None, s_aux=torch.zeros(4), documents=documents)
    with pytest.raises(ValueError, match="looks ahead"):
        attend(Layer(), *heads(4), None, sliding_window=2, is_causal=False, documents=documents)
