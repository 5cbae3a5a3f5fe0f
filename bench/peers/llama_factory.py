"""B4: LLaMA-Factory through its own front door, `run_exp`, on the token ids and labels of all
contestants.

Arguments, loading of the model, adapter, collator, trainer and saving are LLaMA-Factory's. Tokens
come to it as its
`tokenized_path`, the folder that it keeps its own in, so that nobody tokenizes while the clock
runs. Its packing (`neat_packing`) is a part of its tokenization: rows are packed by its processor
before they are written there. `packing` alone is not offered: documents of a row see each other.
Written for llamafactory 0.9.5, which allows transformers up to 5.6.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from peers import hugging
from peers.assignment import Assignment
from peers.clock import Clock

ROW_MULTIPLE = 8
"""Its collator pads rows to it, but not their positions: packed rows have to be that long already.
"""
DEFAULT_ROWS = 8


def train(assignment: Assignment, clock: Clock) -> dict[str, Any]:
    """`llamafactory-cli train` in this process, with the harness's clock in its trainer."""
    os.environ["LLAMAFACTORY_VERBOSITY"] = "WARN"
    import datasets
    import transformers
    from llamafactory.train.sft import workflow
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
    from llamafactory.train.tuner import run_exp

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    trainers: list[Any] = []

    class Metered(hugging.metered(CustomSeq2SeqTrainer, clock, assignment.task)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    rows = hugging.dataset(assignment, once=True)
    packs = assignment.settings.get("packing", True)
    (_packed(assignment, rows) if packs else _masked(rows)).save_to_disk(f"{assignment.out}/rows")
    workflow.CustomSeq2SeqTrainer = Metered
    run_exp(arguments(assignment, packs))
    return {"model": f"{assignment.out}/model", "first_loss": float(trainers[0].first_losses[0])}


def arguments(assignment: Assignment, packs: bool) -> dict[str, Any]:
    """What a person would write into the file for `llamafactory-cli train`."""
    settings = assignment.settings
    tuned = hugging.tuned(assignment)
    is_checkpointed = tuned.pop("gradient_checkpointing")  # it has a key of its own for that
    a_step = hugging.rows_a_step(assignment) if packs else assignment.batch
    rows = min(settings.get("rows", 1 if packs else DEFAULT_ROWS), a_step)
    adapter = {
        "lora_rank": assignment.lora_r,
        "lora_alpha": int(assignment.lora_alpha),
        "lora_dropout": 0.0,
        "lora_target": ",".join(assignment.targets),
    }
    return {
        **hugging.common(assignment, epochs=assignment.epochs),
        **tuned,
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(assignment.model),
        "template": "empty",
        "dataset": "as tokenized",
        "tokenized_path": f"{assignment.out}/rows",
        "cutoff_len": _row_length(assignment),
        "neat_packing": packs,
        "train_sampling_strategy": "random" if packs else "group_by_length",
        "flash_attn": "sdpa",
        "disable_gradient_checkpointing": not is_checkpointed,
        "finetuning_type": "full" if assignment.method == "full" else "lora",
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": max(1, a_step // rows),
        "bf16": assignment.precision == "bf16",
        "output_dir": f"{assignment.out}/model",
        **({} if assignment.method == "full" else adapter),
    }


def _row_length(assignment: Assignment) -> int:
    """Tokens of a packed row, of which it fills all but the last: the longest example has to fit."""  # noqa: E501
    return -(-(assignment.max_length + 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def _masked(rows: Any) -> Any:
    """With the column that its tokenization adds to ids and labels."""
    return rows.add_column("attention_mask", [[1] * len(ids) for ids in rows["input_ids"]])


def _packed(assignment: Assignment, rows: Any) -> Any:
    """Rows as its own processor packs them."""
    import datasets
    import transformers
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor
    from llamafactory.hparams import DataArguments

    class Given(PackedSupervisedDatasetProcessor):  # type: ignore[misc]
        def _encode_data_example(self, prompt: list[int], **_: Any) -> tuple[list[int], list[int]]:
            row = rows[prompt[0]]
            return row["input_ids"], row["labels"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(assignment.model)
    arguments = DataArguments(cutoff_len=_row_length(assignment), neat_packing=True)
    n = len(rows)
    examples: dict[str, list[Any]] = {
        "_prompt": [[index] for index in range(n)],
        "_response": [[None]] * n,
    }
    examples |= {
        f"_{name}": [None] * n for name in ("system", "tools", "images", "videos", "audios")
    }
    processor = Given(template=None, tokenizer=tokenizer, processor=None, data_args=arguments)
    return datasets.Dataset.from_dict(dict(processor.preprocess_dataset(examples)))
