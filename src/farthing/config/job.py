"""What can be asked for: the sections of a job, frozen, every key with its meaning and its default.

Names are those of the Hugging Face training arguments where one exists.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    model_validator,
)

from farthing.addresses import without_secrets
from farthing.config.values import (
    AsWord,
    ColumnMap,
    File,
    Folder,
    Fraction,
    Hours,
    HubName,
    LabelMap,
    Moment,
    Name,
    Names,
    NonNegative,
    Number,
    Paths,
    Positive,
    PositiveNumber,
    Revision,
    RunName,
    ScheduleSettings,
    Share,
    Store,
    TaskName,
    Trackers,
    Usd,
    Whole,
    check_schedule,
    known_encoding,
    with_own,
)
from farthing.data.rows import Layout, Own
from farthing.data.scored import way_of
from farthing.objectives.objective import ObjectiveSettings
from farthing.objectives.registry import (
    find_objective,
    keys_of_objectives,
    objective_names,
    objective_of,
    read_settings,
    schema,
)


class JobSection(BaseModel):
    """A frozen part of the job; unknown keys are mistakes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelSection(JobSection):
    """Which model. `model: NAME` is short for `model: {model_name_or_path: NAME}`."""

    model_name_or_path: HubName
    """Hub name (`Qwen/Qwen2.5-0.5B`) or local folder in Hugging Face format."""
    revision: Revision | None = None
    """Hub branch, tag or commit."""
    tokenizer_name_or_path: HubName | None = None
    """Where the tokenizer is, when it is not with the model."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` trains from fresh weights: a folder with config.json and a tokenizer is enough."""
    from_run: RunName | None = None
    """Begin with the trained weights of another run of the same model and method: its folder for
    those of its model, or FOLDER:STEP for one of its checkpoints. The receipt names it and adds
    what it has cost. `farthing train JOB --from FOLDER` sets it."""
    attn_implementation: str | None = None
    """Attention of transformers: sdpa (its default), eager, flash_attention_2 ..."""
    rope_scaling: dict[str, Any] | None = None
    """Other rotary positions than the model's, as transformers has them: {rope_type: linear,
    factor: 4.0}. They go into the exported configuration."""
    new_tokens: Names = ()
    """Tokens to add to the vocabulary. Embeddings grow as in transformers'
    `resize_token_embeddings`, and are trained and exported. An adapter needs
    method.modules_to_save with embeddings and output layer."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Needs a Hub `revision` of 40 hex digits, or a local
    folder.
    """


class Above(JobSection):
    """A score from which on answers are learned."""

    above: Number


class DataSection(JobSection):
    """Which examples. `data: FILE` is short for `data: {train: FILE}`."""

    train: Annotated[Paths, Field(min_length=1)]
    """Files (jsonl, json, csv, parquet; local, s3://, gs://, https://; globs), a data set folder,
    or a Hub name.
    """
    eval: Paths = ()
    """The same for evaluation."""
    of_train: tuple[Own, ...] = ()
    """Filled from `train: [{path, weight, columns, split, name}]`: the settings of each file or
    data set."""
    of_eval: tuple[Own, ...] = ()
    """The same of `eval`."""
    eval_fraction: Fraction = 0.0
    """Without `eval`: the fraction of `train` that is held out (rows with equal input stay on one
    side).
    """
    dataset_config_name: str | None = None
    """Configuration of a Hub data set."""
    train_split: str = "train"
    """Split of a Hub data set or data set folder."""
    eval_split: str = "validation"
    """Split for `eval` of a Hub data set or data set folder."""
    columns: ColumnMap = {}
    """Standard column name -> name in the data, e.g. {text: narrative, label: product}; or a
    template of several, "{question}\\n{context}"; or a list of which the first counts whose columns
    are filled."""
    keep: Literal["best"] | Above | None = None
    """Rows with several answers and scores: learn the best, or all that score above a number,
    {above: 0.5}."""
    pairs: Literal["best_worst", "adjacent"] | None = None
    """Rows with several answers and scores: make pairs of the best and the worst, or of
    neighbours."""
    label_map: LabelMap = {}
    """Classification: label in the data -> label to train on, to merge what is the same class."""
    encoding: Annotated[str, AfterValidator(known_encoding)] | None = None
    """Encoding of text files: utf-8, cp1252, utf-16 ... Default: guessed from the bytes."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Separator of CSV files. Default: guessed from the first line."""
    field: Name | None = None
    """JSON files whose rows are a list within an object: its path, such as `data.items`."""
    text_unit: Literal["document", "line"] = "document"
    """What a row of a text file is."""
    max_length: Positive | None = None
    """Longest input in tokens (prompt and completion together for causal-lm). Default: 1024, 512
    for the others.
    """
    max_target_length: Positive = 128
    """Seq2seq: longest target in tokens, at training and when generating."""
    too_long: Literal["truncate", "skip", "error"] | None = None
    """What to do with an example over its limit. It is counted whatever is chosen. Default:
    truncate; skip where answers are compared or scored, which are never cut.
    """
    train_on_prompt: bool = False
    """Causal-lm: take the loss on prompt and user tokens too."""
    source_lang: str | None = None
    """Seq2seq: the language of the inputs, as the tokenizer names it (eng_Latn, en_XX), for models
    that are told it.
    """
    target_lang: str | None = None
    """Seq2seq: the language of the targets."""
    chat_template: File | None = None
    """A Jinja file to use instead of the tokenizer's chat template."""
    max_bad_rows: Share = 0.01
    """Largest share of rows that may be unusable before the run is refused."""
    max_train_samples: Positive | None = None
    """Use only the first N usable examples for training."""
    max_eval_samples: Positive | None = None
    """Use only the first N usable examples for evaluation."""

    @property
    def layout(self) -> Layout:
        """How its files are written."""
        return Layout(self.encoding, self.separator, self.field, self.text_unit)

    def sources(self, role: Literal["train", "eval"]) -> list[tuple[str, Own]]:
        """Each file or data set with its own settings, its split among them."""
        names, own = (self.train, self.of_train) if role == "train" else (self.eval, self.of_eval)
        split = self.train_split if role == "train" else self.eval_split
        several = zip(names, own or (Own(),) * len(names), strict=True)
        return [(name, each._replace(split=each.split or split)) for name, each in several]

    @model_validator(mode="before")
    @classmethod
    def _sources_are_paths(cls, values: Any, info: ValidationInfo) -> Any:
        return with_own(values, info.context) if isinstance(values, dict) else values

    @field_serializer("train", "eval", when_used="json")
    def _no_secrets(self, names: tuple[str, ...]) -> list[str]:
        """What is written beside a run keeps no password or signature of a URL."""
        return [without_secrets(name) for name in names]


_INITS = "^(true|false|gaussian|orthogonal|olora|pissa|pissa_niter_[1-9][0-9]*)$"


class MethodSection(JobSection):
    """How much of the model is trained. `method: lora` is short for `method: {name: lora}`."""

    name: Literal["full", "lora", "qlora"] = "lora"
    """full: every weight. lora: adapters on a frozen model. qlora: the same with 4-bit weights."""
    lora_r: Positive = 16
    """Rank of the adapters."""
    lora_alpha: PositiveNumber = 32.0
    """Adapters are scaled by lora_alpha / lora_r."""
    lora_dropout: Fraction = 0.0
    """Share of the inputs of adapters that training drops."""
    target_modules: Names = ()
    """Layers that get an adapter: names, or `all-linear`. Default: all-linear (query and value for
    classification).
    """
    modules_to_save: Names = ()
    """Further modules trained in full and saved. A classification head is always among them."""
    use_dora: bool = False
    """DoRA (Liu et al. 2024): direction and size of each weight are trained apart."""
    use_rslora: bool = False
    """rsLoRA (Kalajdzievski 2023): adapters are scaled by lora_alpha / sqrt(lora_r)."""
    init_lora_weights: Annotated[str, AsWord, Field(pattern=_INITS)] = "true"
    """How an adapter begins, as in peft: true (A as Kaiming draws it, B zero), false (both drawn:
    it begins as noise), gaussian, orthogonal, or as the main part of the weights themselves: pissa,
    pissa_niter_N (by N rounds, much sooner) and olora. For those three the exported adapter has
    twice the rank, and the base stays as it is."""
    lora_bias: bool = False
    """A bias beside each B matrix, as in peft; for layers that have a bias of their own, else it
    could not be merged.
    """
    loraplus_lr_ratio: PositiveNumber | None = None
    """LoRA+ (Hayou et al. 2024): the learning rate of the B matrices, and of vectors, as a multiple
    of the others'.
    """

    @model_validator(mode="after")
    def _bias_is_of_plain_adapters(self) -> MethodSection:
        if self.lora_bias and (self.use_dora or self.init_lora_weights not in ("true", "false")):
            other = "use_dora" if self.use_dora else "this init_lora_weights"
            raise ValueError(f"peft has no lora_bias with {other}; leave one of the two out")
        return self


class TrainSection(JobSection):
    """The training arguments."""

    num_train_epochs: PositiveNumber = 3.0
    """Passes over the training data; a part of one is allowed."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps, whatever the epochs."""
    global_batch_size: Positive | None = None
    """Examples per optimizer step. Default 16, or the product of the two keys below."""
    per_device_train_batch_size: Positive | None = None
    """As many of the longest examples in one forward pass, and more of shorter ones: an execution
    detail that does not change the result."""
    gradient_accumulation_steps: Positive | None = None
    """With per_device_train_batch_size: their product is the global batch."""
    micro_batch_tokens: Positive | None = None
    """Most tokens in one forward pass; a longer example goes alone. Overrides
    per_device_train_batch_size as the limit of what is computed at once, and like it changes no
    result. Default: planned."""
    probe: bool | Literal["auto"] = "auto"
    """Try other sizes of the forward pass for a minute before the first step: auto where that is
    expected to save more than it takes; false: not even what an earlier `farthing probe` has found
    is used."""
    per_device_eval_batch_size: Positive = 16
    """Most examples in one forward pass of an evaluation."""
    learning_rate: PositiveNumber | None = None
    """Default: 2e-4 for lora and qlora, 2e-5 for full."""
    learning_rate_batch_size: Positive | None = None
    """The global batch the learning rate was tuned for: the rate is scaled linearly to the one in
    use.
    """
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    """How the learning rate changes over the steps, as transformers has it."""
    lr_scheduler_kwargs: ScheduleSettings = {}
    """As transformers has them: `min_lr_rate` or `min_lr` of cosine_with_min_lr; `num_decay_steps`
    of warmup_stable_decay, with `decay_type` (cosine, linear, 1-sqrt), `warmup_type` and
    `min_lr_ratio`; `num_cycles` of the cosines; `lr_end` and `power` of polynomial; `timescale` of
    inverse_sqrt."""
    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises from 0."""
    warmup_steps: Annotated[Whole, Field(ge=0)] | None = None
    """Overrides warmup_ratio."""
    warmup_epochs: NonNegative | None = None
    """The same in passes over the data; only one of the two may be given."""
    fit_schedule_to_budget: bool = False
    """The learning rate comes down to its end when the limits are reached: as many steps as they
    buy, never more than asked. Needs one of the limits."""
    weight_decay: NonNegative = 0.0
    """Decay of the weights in each step, as the optimizer has it."""
    max_grad_norm: NonNegative = 1.0
    """0 switches clipping off."""
    optim: Literal[
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_torch_offload",
        "adamw_bf16_stochastic_round",
        "sgd",
        "adagrad",
        "rmsprop",
        "adafactor",
        "adamw_8bit",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
    ] = "adamw_torch_fused"
    """adamw_torch_offload is ours: fused AdamW with its state and arithmetic on the host, 8 bytes
    less for each trained weight on the GPU, 16 more in the machine. adamw_bf16_stochastic_round
    (after torchao's `bf16_stochastic_round`; method: full) keeps weights, gradients and moments in
    bf16 and no copies in fp32: 8 bytes for each weight instead of 16. adafactor keeps a row and a
    column of each matrix, at a rate that is the job's (`scale_parameter=False`,
    `relative_step=False`). The 8-bit and paged ones need bitsandbytes."""
    adam_beta1: Fraction = 0.9
    """Decay of the mean of gradients in Adam."""
    adam_beta2: Fraction = 0.999
    """Decay of the mean of squared gradients in Adam."""
    adam_epsilon: PositiveNumber = 1e-8
    """Added to Adam's divisor."""
    neftune_noise_alpha: PositiveNumber | None = None
    """NEFTune (Jain et al. 2023): noise on the input embeddings in training, within alpha /
    sqrt(tokens x width) for each document."""
    label_smoothing_factor: Fraction = 0.0
    """Of the loss in training; an evaluation measures the plain loss."""
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 42
    """Order of the examples, dropout, new weights."""
    bf16: bool | None = None
    """Default: on where the GPU has it natively (Ampere and later)."""
    fp16: bool | None = None
    """Default: on for older GPUs (V100, T4)."""
    tf32: bool = True
    """Products of fp32 numbers in TF32, on GPUs that have it."""
    gradient_checkpointing: bool | Positive | Literal["auto"] = "auto"
    """true: every layer; k: every k-th layer; auto: as much as the measured need asks for."""
    torch_compile: bool = False
    """Compile each layer."""
    use_liger_kernel: bool | Literal["auto"] = "auto"
    """Liger's kernels for norms, rotations and gated feed-forwards. auto: on a GPU where
    liger-kernel is installed.
    """
    full_determinism: bool = False
    """CUDA: only deterministic kernels, so that a resume is bit-identical there too. The CPU always
    is.
    """
    eval_strategy: Literal["epoch", "steps", "no"] = "epoch"
    """When the model is evaluated: after each epoch, every eval_steps, or never."""
    eval_steps: Positive | None = None
    """Optimizer steps between evaluations; implies eval_strategy: steps."""
    predict_with_generate: bool = True
    """Seq2seq: generate at evaluation, for exact match and ROUGE."""
    metric_for_best_model: str | None = None
    """loss, document_loss, perplexity, accuracy, f1, precision, recall, exact_match, rouge1,
    rouge2, rougeL. Default: loss.
    """
    greater_is_better: bool | None = None
    """Default: known from the metric."""
    load_best_model_at_end: bool = True
    """Export the best checkpoint, when there is evaluation data; else the last one."""
    early_stopping_patience: Positive | None = None
    """Stop after this many evaluations without an improvement."""
    early_stopping_threshold: NonNegative = 0.0
    """The least gain on the best so far that counts for the patience (min-delta). Which step is
    best does not depend on it.
    """
    save_steps: Positive | None = None
    """Optimizer steps between checkpoints. Default: by time, see save_minutes."""
    save_minutes: PositiveNumber | None = None
    """Minutes between checkpoints. Default: the planned interval, which weighs what saving costs
    against what may be lost.
    """
    save_total_limit: Annotated[Whole, Field(ge=2)] = 2
    """Number of newest checkpoints to keep, besides the best."""
    logging_steps: Positive = 10
    """Steps between two lines of progress and two writes of metrics.prom."""
    max_skipped_steps: Positive = 5
    """Stop after this many steps in a row whose loss or gradient is not a number."""
    push_to_hub: bool = False
    """Publish the exported model on the Hugging Face Hub when the run is finished; the token is
    HF_TOKEN of the environment. Checkpoints do not go there: they stay in `output_store`."""
    hub_model_id: str | None = None
    """Its repository, `owner/name`. Default: the name of the run folder, of the token's owner."""
    hub_private_repo: bool = True
    """false: everyone may read it."""
    report_to: Trackers = ()
    """Trackers that get every step and evaluation (extras of the same names; `track` for
    TensorBoard). A resumed run continues in the same tracker run."""

    @model_validator(mode="after")
    def _schedule_takes_its_settings(self) -> TrainSection:
        check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs)
        return self

    @model_validator(mode="after")
    def _batches_agree(self) -> TrainSection:
        micro, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if self.global_batch_size is None and accumulation is not None and micro is None:
            raise ValueError(
                "gradient_accumulation_steps needs per_device_train_batch_size or global_batch_size"
            )
        if (
            self.global_batch_size
            and micro
            and accumulation
            and self.global_batch_size != micro * accumulation
        ):
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not per_device_train_batch_size"
                f" {micro} x gradient_accumulation_steps {accumulation}; leave one of the three out"
            )
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError(
                "warmup_steps and warmup_epochs exclude each other; leave one of them out"
            )
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude each other; leave one of them out")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            raise ValueError("eval_strategy: steps needs eval_steps")
        return self


class LimitsSection(JobSection):
    """Limits of the run. At a limit it saves, stops and exits with 3."""

    max_usd: Usd | None = None
    """Most dollars of the run, all attempts together. Needs a price."""
    max_hours: Hours | None = None
    """Most hours of the run, all attempts together."""
    max_gpu_hours: Hours | None = None
    """Hours times the GPUs that share each attempt, all attempts together."""
    deadline: Moment | None = None
    """ISO date and time; without a zone it is the machine's own."""

    @property
    def is_set(self) -> bool:
        """Whether there is any."""
        return self != LimitsSection()


class WhereSection(JobSection):
    """Where it runs and what an hour there costs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where torch sees one."""
    usd_per_hour: Usd = 0.0
    """Price of the machine."""
    power_watts: NonNegative = 0.0
    """An owned machine: what it draws under load ..."""
    usd_per_kwh: Usd = 0.0
    """... and what a kWh costs."""
    gpu: Names = ()
    """GPUs that a plan may use, e.g. [H100, RTX 4090]. Default: any."""
    provider: Names = ()
    """Providers that it may rent from."""
    region: Names = ()
    """Regions, or how their names begin: [us-, eu-west-1]."""
    offers: Literal["spot", "on-demand"] | None = None
    """Only one kind of offer."""
    gpus: Annotated[Whole, Field(ge=1, le=1024)] | Literal["all"] | None = None
    """How many GPUs of this machine share the run, or all of them; with device: cpu so many
    processes. Default: one, and as many as torchrun or another launcher has started."""
    patience_s: Annotated[Number, Field(ge=2)] = 60.0
    """Several GPUs: a GPU that is silent for so long is lost, and the run continues with the
    others.
    """
    same_bits: bool = False
    """Several GPUs: gradients are added up in an order that does not depend on how many there are,
    after the backward passes. In full training it takes memory for more gradients."""
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """Several GPUs. ddp: each has all weights. fsdp: weights, gradients and optimizer state are
    spread over them, and gathered layer by layer; of method: lora the frozen weights. hsdp: spread
    over the GPUs of each machine, with a copy on every machine. auto: ddp where everything fits on
    each GPU, else fsdp."""
    reshard_after_forward: bool = True
    """fsdp and hsdp. true: a layer is gathered again for its backward pass (ZeRO-3). false: it is
    kept from the forward pass on (ZeRO-2): less traffic, more memory."""
    offload_weights: bool = False
    """fsdp and hsdp: rows of the weights stay in main memory, with gradients and optimizer state of
    those that are trained, and each layer comes to the GPU while it computes. Slow: for what has no
    room with optim: adamw_torch_offload either."""
    spot: bool = False
    """The machine may be taken away: farthing saves more often and listens for notices."""
    notices: Literal["auto", "aws", "gcp", "azure", "off"] = "auto"
    """Cloud whose metadata service farthing asks for notices. auto: this machine's cloud if it
    can be recognised; otherwise all of them with spot: true, and none without."""


class ValueRange(JobSection):
    """Values between two bounds, both included; whole numbers where both bounds are."""

    low: int | Number
    high: int | Number
    log: bool = False
    """Draw evenly by order of magnitude."""
    step: int | Number | None = None

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> ValueRange:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs a low above 0, and no step")
        if self.step is not None and self.step <= 0:
            raise ValueError("a step is above 0")
        return self


def _kind_of_values(values: Any) -> str:
    return "range" if isinstance(values, dict | ValueRange) else "choices"


OfRange = Annotated[ValueRange, Tag("range")]
OfChoices = Annotated[tuple[Any, ...], Field(min_length=1), Tag("choices")]


class SearchSection(JobSection):
    """What `farthing search` varies. `limits` cap the whole search. Needs farthing[search]."""

    vary: dict[str, Annotated[OfRange | OfChoices, Discriminator(_kind_of_values)]] = {}
    """Key of this job -> its choices, such as [8, 16, 32], or a range, such as {low: 1.0e-5,
    high: 1.0e-3, log: true}."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How Optuna draws settings. tpe learns from earlier scores; grid needs choices everywhere."""
    trials: Positive | None = None
    """Settings to try. Default: as many as the plan expects the cap to pay for."""
    reduction_factor: Annotated[Whole, Field(ge=2)] = 3
    """Successive halving continues the best 1 of so many trials at each rung."""
    min_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.1
    """Least share of its steps that a trial takes before it is compared. 1: every trial in full."""
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = 0
    """Which settings are drawn."""
    stop_at: dict[str, Number] = {}
    """{accuracy: 0.85}: end at the first model that reaches it on evaluation examples that no
    choice was made on. Smaller models are tried first."""
    data_fraction: tuple[Annotated[Number, Field(gt=0, le=1)], ...] = ()
    """Shares of the training data that the winner's settings are trained on as well, to estimate
    what more data adds. Two or more besides all of it."""

    @property
    def is_asked(self) -> bool:
        """Whether the job is a search."""
        return bool(self.vary or self.data_fraction)

    @model_validator(mode="after")
    def _keys_can_vary(self) -> SearchSection:
        for key, values in self.vary.items():
            section, _, name = key.partition(".")
            known = ("model", "data", "method", "train", "objective")
            if section not in known or (name and name not in KEYS[section]):
                near = difflib.get_close_matches(
                    key, [f"{one}.{other}" for one in known for other in KEYS[one]], n=1
                )
                to_do = f"did you mean {near[0]}?" if near else f"use keys of {', '.join(known)}"
                raise ValueError(f"`{key}` is no key that can vary; {to_do}")
            if section == "train" and name in ("eval_strategy", "eval_steps", *_SCORED_BY):
                raise ValueError(f"`{key}` decides how trials are scored; set it for all of them")
            if self.sampler == "grid" and isinstance(values, ValueRange) and values.step is None:
                raise ValueError(f"a grid needs choices for `{key}`; list them, or give a step")
        if len(self.stop_at) > 1:
            raise ValueError("stop_at takes one metric")
        if self.stop_at and self.data_fraction:
            raise ValueError("stop_at and data_fraction exclude each other; leave one of them out")
        if self.data_fraction and len({*self.data_fraction} - {1.0}) < 2:
            raise ValueError("data_fraction needs two shares below 1, such as [0.25, 0.5]")
        return self


_SCORED_BY = ("metric_for_best_model", "greater_is_better", "fit_schedule_to_budget")


def _settings(given: Any) -> Any:
    return None if given is None else read_settings(given)


def _short(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str | list) else value)


class Job(JobSection):
    """A whole job. Every key besides the first three has a default."""

    task: TaskName
    """What the model learns. Omit it when `objective` is set."""
    objective: Annotated[
        SerializeAsAny[ObjectiveSettings] | None,
        BeforeValidator(_settings),
        WithJsonSchema(schema()),
    ] = None
    """An objective with keys of its own: {name: dpo, beta: 0.1}. `objective: dpo` is short for
    `objective: {name: dpo}`.
    """
    model: Annotated[ModelSection, _short("model_name_or_path")]
    data: Annotated[DataSection, _short("train")]
    method: Annotated[MethodSection, _short("name")] = MethodSection()
    train: TrainSection = TrainSection()
    limits: LimitsSection = LimitsSection()
    where: WhereSection = WhereSection()
    search: SearchSection = SearchSection()
    output_dir: Folder
    """The run folder: checkpoints, logs, the receipt and the trained model."""
    output_store: Store | None = None
    """A place of this run alone that outlives the machine: s3://bucket/prefix, gs://bucket/prefix,
    az://container/prefix, or a folder. farthing copies there, in the background, what an empty
    machine needs to resume. Credentials and endpoints come from the environment (AWS_PROFILE,
    AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS ...), never from the job."""
    when_done: str | None = None
    """A shell command that `farthing train` runs once on this machine when the run has ended:
    finished, at a limit, after a mistake or a crash, not after an interruption. For example
    `sudo shutdown -h now`. `farthing train --dry-run` shows it."""
    cache_dir: Folder | None = None
    """Where tokenized data is kept. Default: ~/.cache/farthing."""

    @model_validator(mode="before")
    @classmethod
    def _objective_is_the_task(cls, values: Any) -> Any:
        """`objective` names the task; a task with settings has an objective."""
        if not isinstance(values, dict):
            return values
        given, task = values.get("objective"), values.get("task")
        if given is None:
            found = find_objective(task) if isinstance(task, str) else None
            return (
                values if found is None or found.settings is None else {**values, "objective": task}
            )
        name = given.get("name") if isinstance(given, dict) else getattr(given, "name", given)
        found = find_objective(name) if isinstance(name, str) else None
        if found is None:
            return {**values, "task": task or objective_names()[0]}  # the key says what is wrong
        if task is not None and task not in (name, found.head):
            raise ValueError(f"task: {task} is another than objective: {name}; leave `task` out")
        return {**values, "task": name}

    @model_validator(mode="after")
    def _sections_agree(self) -> Job:
        if self.train.optim == "adamw_bf16_stochastic_round" and self.method.name != "full":
            raise ValueError(
                f"train.optim: {self.train.optim} trains all weights in bf16, and method:"
                f" {self.method.name} adapters in fp32; use optim: adamw_torch_fused, or method:"
                " full"
            )
        if self.train.fit_schedule_to_budget and not self.limits.is_set:
            raise ValueError(
                "train.fit_schedule_to_budget fits to a limit; set limits.max_usd, max_hours or"
                " deadline"
            )
        return self

    # ---- what follows from the keys ----

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step."""
        train = self.train
        if train.global_batch_size is not None:
            return train.global_batch_size
        if train.per_device_train_batch_size is not None:
            return train.per_device_train_batch_size * (train.gradient_accumulation_steps or 1)
        return 16

    @property
    def writes_texts(self) -> bool:
        """Whether evaluations have the model write."""
        return objective_of(self.task).is_pair and self.train.predict_with_generate

    @property
    def says_micro_batch(self) -> bool:
        """Whether the job itself says how much is computed at once, in tokens or in examples."""
        train = self.train
        said = (
            train.micro_batch_tokens,
            train.per_device_train_batch_size,
            train.gradient_accumulation_steps,
        )
        return any(value is not None for value in said)

    @property
    def micro_batch_size(self) -> int:
        """How many of the longest examples fit in one forward pass."""
        train, batch = self.train, self.global_batch_size
        if train.per_device_train_batch_size is not None:
            return min(train.per_device_train_batch_size, batch)
        if train.gradient_accumulation_steps is not None:
            return -(-batch // train.gradient_accumulation_steps)
        return min(8, batch)

    @property
    def learning_rate(self) -> float:
        """The rate in use, scaled linearly when `learning_rate_batch_size` says what it was tuned
        for.
        """
        rate = self.train.learning_rate
        if rate is None:
            of_all, of_adapter = objective_of(self.task).learning_rates
            rate = of_all if self.method.name == "full" else of_adapter
        tuned_for = self.train.learning_rate_batch_size
        return rate * self.global_batch_size / tuned_for if tuned_for else rate

    @property
    def usd_per_hour(self) -> float:
        """Price of an hour: rent plus electricity."""
        return self.where.usd_per_hour + self.where.power_watts / 1000 * self.where.usd_per_kwh

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return self.data.max_length or objective_of(self.task).max_length

    @property
    def scored(self) -> str:
        """What is learned of rows with several answers and scores, in one word."""
        keep = self.data.keep
        return way_of(keep.model_dump() if isinstance(keep, Above) else keep, self.data.pairs)

    @property
    def metric(self) -> str:
        """The metric that chooses the best model."""
        return (self.train.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def too_long(self) -> str:
        """What becomes of an example over its limit."""
        return self.data.too_long or ("skip" if objective_of(self.task).loss else "truncate")

    @property
    def goes_on_behind_its_end(self) -> bool:
        """Whether the learning rate at a step is the same however many steps there are, so that a
        finished run can be asked for more.
        """
        train = self.train
        if train.fit_schedule_to_budget:
            return False
        knows_warmup = train.warmup_steps is not None or train.warmup_epochs is not None
        return train.lr_scheduler_type == "constant" or (
            train.lr_scheduler_type in ("constant_with_warmup", "inverse_sqrt") and knows_warmup
        )

    @property
    def fingerprint(self) -> str:
        """Which job it is, for what was learned by running out of memory: 12 hex digits of its
        settings and its model.
        """
        content = json.dumps(
            [self.identity(), self.model.model_name_or_path], sort_keys=True, default=str
        )
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def identity(self) -> dict[str, object]:
        """The settings that can change the result, flat: a run can only be continued by a job that
        agrees on them.

        Left out on purpose: how the batch is cut, which kernels compute it, evaluation batch size,
        where and how often things are saved or logged, limits, price, device and paths (data,
        tokenizer and model are identified by content).
        """
        train = self.train.model_dump(
            exclude={
                "global_batch_size",
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "learning_rate",
                "micro_batch_tokens",
                "probe",
                "learning_rate_batch_size",
                "per_device_eval_batch_size",
                "gradient_checkpointing",
                "bf16",
                "fp16",
                "torch_compile",
                "use_liger_kernel",
                "load_best_model_at_end",
                "save_steps",
                "save_minutes",
                "save_total_limit",
                "logging_steps",
                "max_skipped_steps",
                "report_to",
                "push_to_hub",
                "hub_model_id",
                "hub_private_repo",
            }
        )
        if self.goes_on_behind_its_end:
            del train["max_steps"], train["num_train_epochs"]
        train |= {"global_batch_size": self.global_batch_size, "learning_rate": self.learning_rate}
        data = self.data.model_dump(
            include={"eval_fraction", "max_train_samples", "max_eval_samples"}
        )
        model = self.model.model_dump(include={"init", "rope_scaling", "new_tokens"})
        # keys that nothing reads may go
        method = MethodSection(name="full") if self.method.name == "full" else self.method
        if self.data.eval:
            data["eval_fraction"] = 0.0
        parts = {"train": train, "data": data, "method": method.model_dump(), "model": model}
        flat = {
            f"{section}.{key}": value
            for section, keys in parts.items()
            for key, value in keys.items()
        }
        flat["task"] = self.task
        if self.objective is not None:
            settings = self.objective.model_dump(mode="json")
            flat |= {f"objective.{key}": value for key, value in settings.items()}
        return dict(json.loads(json.dumps(flat)))


SECTIONS: dict[str, type[JobSection]] = {
    name: each.annotation
    for name, each in Job.model_fields.items()
    if isinstance(each.annotation, type) and issubclass(each.annotation, JobSection)
}
KEYS = {
    "": list(Job.model_fields),
    "objective": keys_of_objectives(),
    **{name: list(section.model_fields) for name, section in SECTIONS.items()},
}
"""The keys of each section, and of the job itself as ""."""
