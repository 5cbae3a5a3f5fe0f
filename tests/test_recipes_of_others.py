"""What other tools' recipes use, held against torch and peft: ways to begin, and
optimizers.
"""

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from farthing.config.load import load_job
from farthing.errors import JobError
from farthing.export.folders import export_run, trained_model, untrained_model
from farthing.model.adapter_start import as_one_adapter
from farthing.model.adapters import (
    Adapter,
    add_adapter,
    count_parameters,
    put_back,
    trained_tensors,
)
from farthing.model.load import ModelChoice, load_config, load_model
from farthing.run.parts import read_part
from interrupted import stopped_and_resumed
from scarce import optimizer_of
from workshop import losses_of, make_job, train

IDS = torch.arange(24).reshape(2, 12) + 5


def tiny(folder: Path, **adapter):
    choice = ModelChoice(str(folder), init="random")
    model = load_model(
        choice,
        load_config(choice),
        "causal-lm",
        dtype=torch.float32,
        seed=0,
        label_names=(),
        pad_id=0,
    )
    return add_adapter(model, Adapter(**adapter), "causal-lm", 7) if adapter else model


def of_peft(folder: Path, **settings):
    import peft

    model = tiny(folder)
    torch.manual_seed(7)
    usual = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**usual, **settings))


def trained_of(model) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps_of(model, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for _ in range(5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in trained_of(model)])


@pytest.mark.parametrize("init", ["true", "false", "gaussian", "orthogonal"])
def test_an_adapter_begins_as_in_peft(init, tiny_folders):
    ours = tiny(tiny_folders["llama"], r=4, alpha=8.0, init=init)
    value = {"true": True, "false": False}.get(init, init)
    theirs = of_peft(tiny_folders["llama"], init_lora_weights=value)
    for (name, mine), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(mine, other), name
    changes = any(bool(p.any()) for n, p in ours.named_parameters() if "lora_B" in n)
    assert changes == (init in ("false", "orthogonal"))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_that_begins_as_part_of_the_weights_moves_as_in_peft(
    init, use_rslora, tiny_folders
):
    base = tiny(tiny_folders["llama"])
    ours = tiny(tiny_folders["llama"], r=4, alpha=8.0, init=init, use_rslora=use_rslora)
    theirs = of_peft(tiny_folders["llama"], use_rslora=use_rslora, init_lora_weights=init)
    kept = ours.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert torch.equal(kept, base.model.layers[0].mlp.up_proj.weight)
    moved = [
        steps_of(
            each,
            # a larger eps: Adam would turn rounding in near-zero gradients into whole updates
            torch.optim.AdamW(trained_of(each), lr=1e-3, eps=1e-3),
        )
        for each in (ours, theirs)
    ]
    assert (moved[0] - moved[1]).abs().max() < 1e-5
    with torch.no_grad():
        assert (ours(IDS).logits - theirs(IDS).logits).abs().max() < 1e-5
    assert count_parameters(ours)["adapter"] == count_parameters(theirs)["adapter"]


@pytest.mark.parametrize(("init", "use_rslora"), [("pissa", False), ("olora", True)])
def test_an_adapter_wider_than_some_layers_is_written_as_peft_reads_it(
    init, use_rslora, tiny_folders, tmp_path
):
    ours = tiny(tiny_folders["llama"], r=48, init=init, use_rslora=use_rslora)
    narrow = ours.get_base_model().model.layers[0].self_attn.k_proj
    assert narrow.lora_A["default"].weight.shape[0] < 48
    steps_of(ours, torch.optim.SGD(trained_of(ours), lr=0.01))
    with as_one_adapter(ours) as tensors:
        ours.save_pretrained(tmp_path, state_dict=tensors)
    read = PeftModel.from_pretrained(tiny(tiny_folders["llama"]), tmp_path)
    with torch.no_grad():
        assert (read(IDS).logits - ours(IDS).logits).abs().max() < 1e-5


@pytest.mark.slow
def test_pissa_resumes_where_another_machine_decomposes_otherwise_and_its_export_fits_the_base(
    tmp_path, monkeypatch
):
    method = {"name": "lora", "lora_r": 4, "use_rslora": True, "init_lora_weights": "pissa"}
    whole = make_job(tmp_path / "a", method=method, max_steps=6, n_rows=24)
    train(whole)
    decompose, calls = torch.linalg.svd, []

    def other(weight, **settings):
        calls.append(1)
        u, s, v = decompose(weight, **settings)
        return (
            (-u, s * 1.5, -v) if len(calls) > 14 else (u, s, v)
        )  # of the resumed attempt: another start altogether

    monkeypatch.setattr(torch.linalg, "svd", other)
    assert losses_of(stopped_and_resumed(tmp_path / "b", method=method)) == losses_of(whole)
    assert len(calls) == 28  # fourteen layers, twice
    monkeypatch.undo()
    run = Path(whole.output_dir)
    model = trained_model(run)
    assert model.peft_config["default"].r == 8
    again = add_adapter(
        untrained_model(run), Adapter(4, 32.0, init="pissa", use_rslora=True), "causal-lm", 0
    )
    trained = {name: weight for name, weight in again.named_parameters() if weight.requires_grad}
    newest = max((run / "checkpoints").glob("*"), key=lambda path: path.name)
    put_back(trained_tensors(again, trained), read_part(newest, "model"))
    with torch.no_grad():
        expected = again.eval()(IDS).logits
        assert (model(IDS).logits - expected).abs().max() < 1e-5
        with model.disable_adapter():
            assert (model(IDS).logits - expected).abs().max() > 1e-3  # it has learned
    export_run(run, tmp_path / "merged", "merged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("adagrad", torch.optim.Adagrad), ("rmsprop", torch.optim.RMSprop)],
)
def test_an_optimizer_moves_as_torchs_own_and_resumes(name, kind, tmp_path, tiny_folders):
    ours, theirs = tiny(tiny_folders["llama"]), tiny(tiny_folders["llama"])
    optimizer = optimizer_of(ours, name, 1e-3, weight_decay=0.0)
    assert torch.equal(
        steps_of(ours, optimizer),
        steps_of(theirs, kind(theirs.parameters(), lr=1e-3, foreach=False)),
    )
    whole = make_job(tmp_path / "a", method="full", max_steps=6, n_rows=24, optim=name)
    train(whole)
    assert losses_of(stopped_and_resumed(tmp_path / "b", method="full", optim=name)) == losses_of(
        whole
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: {name: lora, init_lora_weights: pissa_niter_0}", "should match pattern"),
        ("method: {name: qlora, init_lora_weights: pissa}", "pissa does not go with qlora"),
        (
            "method: {name: lora, init_lora_weights: olora, use_dora: true}",
            "olora does not go with use_dora",
        ),
        (
            "method: {name: lora, init_lora_weights: olora}\nwhere: {strategy: fsdp}",
            "strategy: fsdp",
        ),
        ("train: {warmup_steps: 3, warmup_epochs: 1}", "exclude each other"),
        ("method: {name: lora, loraplus_lr_ratio: 0}", "loraplus_lr_ratio"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, text, words):
    (tmp_path / "job.yaml").write_text(
        f"task: causal-lm\nmodel: a/b\ndata: rows.jsonl\noutput_dir: out\n{text}\n"
    )
    with pytest.raises(JobError, match=words):
        load_job(tmp_path / "job.yaml")
