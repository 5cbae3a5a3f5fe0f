"""Language models that continue a text: chats, instructions, prompts with answers, plain text."""

from __future__ import annotations

from farthing.metrics import Metrics, perplexity
from farthing.objectives import columns
from farthing.objectives.objective import EvaluationSums, Objective, Starter


def _judge(seen: EvaluationSums) -> Metrics:

    return {"perplexity": perplexity(seen.loss), "document_loss": seen.document_loss}


CAUSAL_LM = Objective(
    name="causal-lm",
    formats=(
        columns.MESSAGES,
        columns.CONVERSATIONS,
        columns.CHATGPT,
        columns.INSTRUCTION,
        columns.PROMPT_COMPLETION,
        columns.INPUT_TARGET,
        columns.TEXT,
    ),
    example_columns="prompt: question, completion: answer",
    max_length=1024,
    metrics={"loss": False, "perplexity": False, "document_loss": False},
    judge=_judge,
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    pipeline_tag="text-generation",
    starter=Starter(
        "Qwen/Qwen2.5-0.5B",
        "2.0e-4",
        "loss",
        "messages | conversations | instruction, input, output | prompt, completion | text",
    ),
)
