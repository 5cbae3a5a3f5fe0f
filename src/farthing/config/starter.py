"""What `farthing init` writes: a commented job for each task."""

from __future__ import annotations

from farthing.objectives.registry import objective_of


def starter(task: str) -> str:
    """A job file for `task` with its usual keys; every other key has a default that the start of a
    run prints.
    """
    of = objective_of(task)
    model, learning_rate, metric, formats = of.starter
    return f"""\
# A farthing job. Start it, and continue it after any interruption, with:  farthing train job.yaml
# Check it first with:  farthing doctor job.yaml      All keys:  farthing init --schema

task: {task}
model: {model}        # Hub name or folder

data:
  train: train.jsonl              # .jsonl, .json, .csv, .parquet; s3://, https://; or a Hub name
  eval_fraction: 0.05             # or:  eval: eval.jsonl
  # columns found by name: {formats}
  # columns: {{{of.example_columns}}}
  max_length: {of.max_length}

method: lora                      # full | lora | qlora, or {{name: lora, lora_r: 16, ...}}

train:
  num_train_epochs: 3
  global_batch_size: 16           # examples an optimizer step, however they are cut into passes
  learning_rate: {learning_rate}
  lr_scheduler_type: cosine
  metric_for_best_model: {metric}
  # early_stopping_patience: 2

limits:
  # max_usd: $5                   # saves, stops and exits with 3 when it is reached
  # max_hours: 8h

where:
  usd_per_hour: 0                 # what this machine costs; or power_watts: 350, usd_per_kwh: 0.30

output_dir: runs/my-first         # checkpoints, logs, receipt and the trained model
"""
