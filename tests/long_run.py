"""The folder of a run of a month, made up: its ledger by the code that writes one, its log line by
line.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from farthing.report.training_log import keep_digest
from farthing.run.accounts import Account, AttemptMark, as_line
from farthing.run.folder import keep
from farthing.run.ledger import Ledger, Meter
from farthing.storage.logs import line_of

USD_PER_HOUR = 2.5
SPENT_ON = ("start_up", "compute", "optimizer", "data_wait", "checkpoint", "evaluation", "idle")


def make_run(
    folder: Path, n_steps: int, n_evaluations: int, n_attempts: int, seed: int = 0
) -> float:
    """Write the run folder; returns the dollars that its attempts have cost."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    keep(folder / "run.json", {"run_id": "made-up", "identity": {}, "machine": {}})
    kept_bytes = 0
    every = max(1, n_steps // max(1, n_evaluations))
    with open(folder / "log.jsonl", "w", encoding="utf-8") as log:
        for step in range(1, n_steps + 1):
            row: dict[str, Any] = {
                "step": step,
                "loss": 1 + chance.random(),
                "grad_norm": chance.random(),
                "lr": 1e-4,
            }
            row |= {"n_targets": chance.randrange(4000), "n_tokens": chance.randrange(4000, 9000)}
            row["examples"] = [chance.randrange(10**6) for _ in range(8)]
            log.write(line_of(row) + "\n")
            if step % every == 0:
                metrics = {"loss": 1 + chance.random(), "perplexity": 3 + chance.random()}
                log.write(line_of({"step": step, "metrics": metrics, "is_best": False}) + "\n")
                log.flush()
                kept_bytes = keep_digest(
                    folder / "log.jsonl", kept_bytes
                )  # as the loop does when it saves
    return _make_ledger(folder, n_steps, n_attempts, chance)


def _make_ledger(folder: Path, n_steps: int, n_attempts: int, chance: random.Random) -> float:
    spent_s, lines = 0.0, []
    for number in range(1, n_attempts):
        first, last = n_steps * (number - 1) // n_attempts, n_steps * number // n_attempts
        spans = {name: round(chance.uniform(0, 300), 4) for name in SPENT_ON}
        account = Account(
            number, f"{number:012x}", 900, "running", 1e9 + spent_s, 1e9 + spent_s, USD_PER_HOUR
        )
        account.first_step, account.step, account.began, account.spans = first, last, True, spans
        account.past_s, account.past_usd = spent_s, spent_s / 3600 * USD_PER_HOUR
        account.facts = {
            "tokens_per_s": 1e4,
            "mfu": 0.4,
            "takes": {"start_s": 9.0, "step_s": 1.0, "save_s": 1.0},
        }
        account.marks = [AttemptMark(last, last, 1, 9000.0, 100, spans)] * 2
        spent_s += account.wall_s
        lines.append(as_line(account))
    (folder / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
    ledger = Ledger(folder / "ledger.jsonl", Meter(already_s=100.0), USD_PER_HOUR)
    ledger.begin_at(n_steps - n_steps // n_attempts)
    ledger.at_step(n_steps, {"tokens_per_s": 1e4})
    ledger.end("finished")
    return ledger.spent_usd
