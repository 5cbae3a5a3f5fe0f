"""Models with an encoder and a decoder that write a target for an input: translation, summaries."""

from __future__ import annotations

import numpy as np

from farthing.arrays import Arrays
from farthing.metrics import Metrics, text_metrics
from farthing.objectives import columns
from farthing.objectives.objective import (
    IGNORED,
    EvaluationSums,
    Objective,
    Rows,
    Starter,
    filled,
    is_within,
)


def _lay_out(rows: Rows, pad_id: int) -> Arrays:
    """input_ids and attention_mask [N, longest input], labels [N, longest target]; an example is
    its input, then its target.
    """

    upto = np.concatenate([[0], np.cumsum(rows.is_target, dtype=np.int64)])
    stops = np.cumsum(rows.lengths)
    n_targets = upto[stops] - upto[stops - rows.lengths]
    inputs = rows._replace(ids=rows.ids[~rows.is_target], lengths=rows.lengths - n_targets)
    labels = filled(rows.ids[rows.is_target], is_within(n_targets), IGNORED)
    return {**inputs.padded(pad_id), "labels": labels}


def _judge(seen: EvaluationSums) -> Metrics:

    texts = text_metrics(seen.predictions, seen.references) if seen.predictions else {}
    return {"document_loss": seen.document_loss, **texts}


SEQ2SEQ = Objective(
    name="seq2seq",
    formats=(columns.INSTRUCTION, columns.PROMPT_COMPLETION, columns.INPUT_TARGET),
    example_columns="prompt: question, completion: answer",
    max_length=512,
    metrics={
        "loss": False,
        "document_loss": False,
        "exact_match": True,
        "rouge1": True,
        "rouge2": True,
        "rougeL": True,
    },
    judge=_judge,
    lay_out=_lay_out,
    auto_class="AutoModelForSeq2SeqLM",
    peft_type="SEQ_2_SEQ_LM",
    pipeline_tag="text2text-generation",
    starter=Starter(
        "google/flan-t5-base",
        "3.0e-4",
        "rougeL",
        "input, target | prompt, completion | instruction, input, output",
    ),
    is_pair=True,
)
