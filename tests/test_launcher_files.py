"""Configurations of DeepSpeed and accelerate beside a job: every line is mapped, named or refused."""  # noqa: E501

import json
from pathlib import Path

import pytest

from farthing.config.importers.launchers import beside
from farthing.config.importers.tables import flat
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.errors import InputError
from farthing.run.folder import kept_job
from workshop import job_file, make_job

ZERO = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 100,
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "allgather_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 20, "total_num_steps": 900},
    },
    "my_own_key": 1,
}
FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
    "machine_rank": 0,
    "rdzv_backend": "static",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": True,
    },
}


def read(folder: Path, kind: str, values, **keys):
    """(overrides of a job, what is said of each line); `values` may be the text of the file."""
    name = folder / f"{kind}.json"
    name.write_text(values if isinstance(values, str) else json.dumps(values))
    plain = {"task": "causal-lm", "model": "m", "data": "d.jsonl", "output_dir": "o"}
    overrides, said = beside(Job.model_validate(plain | keys), [(kind, str(name))])
    found = (each.partition("=") for each in overrides)
    return {key: json.loads(value) for key, _, value in found}, said


def test_each_line_of_deepspeed_becomes_a_key_or_is_named(tmp_path):
    found, said = read(tmp_path, "deepspeed", ZERO, method="full", train={"max_grad_norm": 2.0})
    assert found == {
        "where.strategy": "fsdp",
        "where.reshard_after_forward": False,
        "train.optim": "adamw_torch_offload",
        "train.bf16": True,
        "train.global_batch_size": 64,
        "train.learning_rate": 3e-5,
        "train.adam_epsilon": 1e-8,
        "train.weight_decay": 0.1,
        "train.adam_beta1": 0.9,
        "train.adam_beta2": 0.95,
        "train.warmup_steps": 20,
        "train.lr_scheduler_type": "linear",
    }
    for key, _ in flat(ZERO):
        assert sum(f": {key}: " in line for line in said) == 1, key
    text = "\n".join(said)
    assert "gradient_clipping: 0.5 - left out: the job says train.max_grad_norm itself" in text
    assert "gradient_accumulation_steps: 4 - a step is cut by tokens" in text
    assert "my_own_key: 1 - farthing does not know this key" in text


@pytest.mark.parametrize(
    ("stage", "method", "expected"),
    [
        (0, "full", ("ddp", None)),
        (1, "full", ("ddp", None)),
        (2, "full", ("fsdp", False)),
        (3, "full", ("fsdp", True)),
        (2, "lora", ("ddp", None)),
        (3, "lora", ("fsdp", True)),
    ],
)
def test_stages_are_strategies(stage, method, expected, tmp_path):
    beside = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    zero = {"zero_optimization": {"stage": stage}}
    for kind, values in (("deepspeed", zero), ("accelerate", beside)):
        found, _ = read(tmp_path, kind, values, method=method)
        assert (found["where.strategy"], found.get("where.reshard_after_forward")) == expected


def test_each_line_of_accelerate_becomes_a_key_or_is_named(tmp_path):
    found, said = read(tmp_path, "accelerate", FSDP)
    assert found == {
        "where.strategy": "fsdp",
        "where.reshard_after_forward": False,
        "where.gpus": 8,
        "train.bf16": True,
        "where.offload_weights": True,
    }
    assert all(sum(f": {key}: " in line for line in said) == 1 for key, _ in flat(FSDP))
    zero = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert read(tmp_path, "deepspeed", zero)[0]["where.offload_weights"] is True
    older = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 4}}
    found, _ = read(tmp_path, "accelerate", older | {"mixed_precision": False})
    wanted = {"where.strategy": "hsdp", "where.reshard_after_forward": True, "train.bf16": False}
    assert found == wanted
    several = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    found, _ = read(tmp_path, "accelerate", several)
    assert found == {"where.strategy": "ddp", "where.gpus": 2}


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "weights are off-loaded",
        ),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "to main memory",
        ),
        ("deepspeed", {"zero_optimization": {"stage": 4}}, "stages 0 to 3"),
        (
            "deepspeed",
            {"optimizer": {"type": "OneBitAdam"}},
            "OneBitAdam: an optimizer that farthing has not",
        ),
        ("deepspeed", {"tensor_parallel": {"autotp_size": 4}}, "and nothing else"),
        (
            "accelerate",
            {"distributed_type": "MEGATRON_LM"},
            "MEGATRON_LM: farthing does not train by this",
        ),
        ("accelerate", {"mixed_precision": "fp8"}, "fp8: farthing computes in"),
        ("accelerate", {"deepspeed_config": {"deepspeed_config_file": "x.json"}}, "--deepspeed"),
        ("accelerate", ["no", "mapping"], "not a mapping"),
        ("accelerate", "a: &a [*a]", "aliases that expand"),
    ],
)
def test_what_farthing_cannot_do_is_refused(kind, values, why, tmp_path):
    with pytest.raises(InputError, match=why) as refused:
        read(tmp_path, kind, values)
    assert refused.value.to_do


def test_a_run_takes_the_file_and_says_every_line(tmp_path, cli):
    path, file = job_file(tmp_path, max_steps=1), tmp_path / "ds.json"
    values = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25, "train_batch_size": 4}
    file.write_text(json.dumps(values))
    told = cli.err("train", path, "--deepspeed", file, code=0)
    assert "zero_optimization.stage: 1 -> where.strategy: ddp (optimizer state is on each" in told
    assert "train_batch_size: 4 - left out: the job says train.global_batch_size itself" in told
    kept = kept_job(tmp_path / "run")
    assert (kept["train"]["max_grad_norm"], kept["where"]["strategy"]) == (0.25, "ddp")
    assert load_job(path).train.max_grad_norm == make_job(tmp_path / "other").train.max_grad_norm, (
        "the job is as it was"
    )
    file.write_text("{")
    cli("train", path, "--deepspeed", file, code=2)
