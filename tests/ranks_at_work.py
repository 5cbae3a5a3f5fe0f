"""Jobs and processes of several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

from farthing.config.job import Job
from workshop import make_job, rows_of


def lora_job(folder: Path, **keys: Any) -> Job:
    method = {"name": "lora", "lora_r": 2, "lora_dropout": 0.1}
    where = {"gpus": 1, "patience_s": 60, "same_bits": True, **keys.pop("where", {})}
    settings = {
        "n_rows": 29,
        "eval_rows": rows_of("llama", 9, 5),
        "max_steps": 6,
        "global_batch_size": 11,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "micro_batch_tokens": 90,
        "size": {"hidden": 32, "layers": 1},
        "save_total_limit": 20,
        "pretrained": True,
    }
    return make_job(folder, method=method, where=where, **(settings | keys))


def child(code: str) -> Popen[bytes]:
    return Popen([sys.executable, "-S", "-c", f"import os,sys,time,signal\n{code}"])
