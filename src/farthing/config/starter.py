"""What `farthing init` writes: a commented job for each task."""

from __future__ import annotations

_MODELS = {
    "causal-lm": "Qwen/Qwen2.5-0.5B",
    "seq2seq": "google/flan-t5-base",
    "classification": "FacebookAI/roberta-base",
}
_FORMATS = {
    "causal-lm": "messages | conversations | instruction, input, output | prompt, completion | text",
    "seq2seq": "input, target | prompt, completion | instruction, input, output",
    "classification": "text, label",
}
_RATES = {"causal-lm": "2.0e-4", "seq2seq": "3.0e-4", "classification": "2.0e-4"}


def starter(task: str) -> str:
    """A job file for `task` with its usual keys; every other key has a default that the start of a run prints."""
    metric = {"classification": "f1", "seq2seq": "rougeL"}.get(task, "loss")
    return f"""\
# A farthing job. Start it, and continue it after any interruption, with:  farthing train job.yaml
# Check it first with:  farthing doctor job.yaml      All keys:  farthing init --schema

task: {task}
model: {_MODELS[task]}        # Hub name or folder

data:
  train: train.jsonl              # jsonl, json, csv, parquet; local, s3://, gs://, https://; or a Hub data set
  eval_fraction: 0.05             # or:  eval: eval.jsonl
  # columns found by name: {_FORMATS[task]}
  # columns: {{{"text: narrative, label: product" if task == "classification" else "prompt: question, completion: answer"}}}
  max_length: {1024 if task == "causal-lm" else 512}

method: lora                      # full | lora | qlora    (more: method: {{name: lora, lora_r: 16, lora_alpha: 32}})

train:
  num_train_epochs: 3
  global_batch_size: 16           # examples an optimizer step; how they are cut into passes never changes the result
  learning_rate: {_RATES[task]}
  lr_scheduler_type: cosine
  metric_for_best_model: {metric}
  # early_stopping_patience: 2

limits:
  # max_usd: $5                   # saves, stops and exits with 3 when it is reached
  # max_hours: 8h

where:
  usd_per_hour: 0                 # what this machine costs; an owned one: power_watts: 350 and usd_per_kwh: 0.30

output_dir: runs/my-first         # checkpoints, logs, receipt and the trained model
"""
