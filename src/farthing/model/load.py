"""Models and tokenizers through `transformers`: from a Hub name or a folder, safetensors only, no
code of others.

Every failure of the libraries becomes a `ModelError`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from farthing.data.chat import default_template, read_template
from farthing.data.encode import first_tokens, sides_of
from farthing.device_memory import in_words, reported
from farthing.errors import HardwareError, ModelError
from farthing.model.adapters import new_heads
from farthing.model.loss import decoder_inputs, scores_words
from farthing.model.meta_init import skeleton, without_weights
from farthing.model.positions import max_positions, scale_positions, stretch
from farthing.model.weights import weights_sha256
from farthing.models.model_config import refuse_folder, refuse_tokenizer
from farthing.objectives.objective import class_names, in_models_order
from farthing.objectives.registry import objective_of
from farthing.storage.files import parse_json, sha256_of


def auto_class(task: str) -> Any:
    """The class of transformers that loads models for a task."""
    return getattr(transformers, objective_of(task).auto_class)


@dataclass(frozen=True)
class ModelChoice:
    """Which model, in plain values."""

    name: str
    revision: str | None = None
    tokenizer_name: str | None = None
    init: str = "pretrained"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    rope_scaling: dict[str, Any] | None = None
    """Instead of that of the configuration."""
    new_tokens: tuple[str, ...] = ()
    """That the tokenizer gets besides its own."""

    @property
    def is_local(self) -> bool:
        """Whether the name is a folder here."""
        return Path(self.name).is_absolute()

    @property
    def where_from(self) -> dict[str, object]:
        """Arguments every `from_pretrained` gets."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def quiet_libraries() -> None:
    """Our words are enough: no advice, no bars and no load reports from the libraries."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()
    for name in (
        "liger_kernel",
        "torch._inductor.utils",
    ):  # backends that are not installed; a GPU that is a small one
        logging.getLogger(name).setLevel(logging.ERROR)


def load_config(choice: ModelChoice) -> Any:
    """The model's configuration. Raises `ModelError`."""
    if choice.is_local:
        folder = Path(choice.name)
        refuse_folder(folder, needs_weights=choice.init == "pretrained")
        if (index := folder / "model.safetensors.index.json").exists():
            _must_name_its_own(index)
    try:
        config = AutoConfig.from_pretrained(choice.name, **choice.where_from)
        config.get_text_config()  # of several it names none
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError and errors of the Hub client
        raise _in_words("the model's configuration can't be loaded", choice.name, error) from error
    attention = choice.attn_implementation or getattr(config, "_attn_implementation", None)
    # a repository of compiled kernels, fetched and run
    if "/" in str(attention) and not choice.trust_remote_code:
        raise ModelError(
            f"attention {attention!r} is code from the Hub",
            where=choice.name,
            to_do="use model.attn_implementation: sdpa, or set model.trust_remote_code: true",
        )
    if choice.rope_scaling:
        scale_positions(config.get_text_config(), choice.rope_scaling)
    return config


def load_tokenizer(
    choice: ModelChoice, chat_template: str | None, *, of_words: bool = False
) -> Any:
    """The fast tokenizer, its chat template set (the job's, its own, or farthing's default). Raises
    `ModelError`.

    Of several templates its own is the one named "default"; where none is, it has none.

    Truncation and padding that its files ask for are taken off: they would cut texts without a
    word, here and wherever it is exported to. With `of_words` one that has blanks in its tokens
    reads each word of a list as behind a blank, as transformers asks for.
    """
    name = choice.tokenizer_name or choice.name
    if Path(name).is_absolute():
        refuse_tokenizer(Path(name))
    where_from = choice.where_from
    if name != choice.name:
        del where_from["revision"]
    read = partial(AutoTokenizer.from_pretrained, name, use_fast=True, **where_from)
    try:
        tokenizer = read()
        before = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
        if of_words and getattr(before, "add_prefix_space", True) is False:
            tokenizer = read(add_prefix_space=True)
    except Exception as error:
        raise _in_words("the tokenizer can't be loaded", name, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            "the tokenizer has no fast version", where=name, to_do="convert it to a tokenizer.json"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    _add_tokens(tokenizer, choice.new_tokens)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    elif isinstance(own := tokenizer.chat_template, dict):
        # none is taken that is not the default: chats are refused then, see `formats.converter`
        tokenizer.other_templates, tokenizer.chat_template = own, own.get("default")
    elif own is None:
        tokenizer.chat_template = default_template(bool(first_tokens(tokenizer)))
    return tokenizer


def _add_tokens(tokenizer: Any, new: tuple[str, ...]) -> None:
    """Raises `ModelError` for tokens that are there already."""
    known = tokenizer.get_vocab()
    if there := [token for token in new if token in known]:
        raise ModelError(
            f"the tokenizer has a token {there[0]!r} already",
            where="model.new_tokens",
            to_do="leave it out: it is trained as it is",
        )
    tokenizer.add_tokens(list(dict.fromkeys(new)))


def set_languages(
    tokenizer: Any, task: str, source: str | None, target: str | None
) -> tuple[str, str]:
    """The languages of inputs and targets, which a tokenizer is set to that writes them into each
    text; else empty.

    They are the job's, or the tokenizer's own. Raises `ModelError`: a text marked with the wrong
    language would be learned in silence.
    """
    if not (objective_of(task).is_pair and hasattr(tokenizer, "set_tgt_lang_special_tokens")):
        if source or target:
            raise ModelError(
                "its tokenizer does not write a language into texts",
                where=tokenizer.name_or_path,
                to_do="take data.source_lang and data.target_lang out of the job",
            )
        return "", ""
    for key, name, asked in (
        ("source_lang", "src_lang", source),
        ("target_lang", "tgt_lang", target),
    ):
        language = asked or tokenizer.init_kwargs.get(name)
        if not language or language_id(tokenizer, language) is None:
            what = f"{language!r} is not a language of its tokenizer"
            if not language:
                what = "is not set, and its tokenizer writes the language into each text"
            raise ModelError(
                f"data.{key} {what}",
                where=tokenizer.name_or_path,
                to_do="name it as the tokenizer does, e.g. eng_Latn (NLLB) or en_XX (mBART)",
            )
        setattr(tokenizer, name, language)
    return tokenizer.src_lang, tokenizer.tgt_lang


def language_id(tokenizer: Any, language: str) -> int | None:
    """The token of a language; None where there is none."""
    codes = getattr(tokenizer, "lang_code_to_id", None) or {}
    found = codes.get(language, tokenizer.convert_tokens_to_ids(language))
    return None if found is None or found == tokenizer.unk_token_id else int(found)


def speak(model: Any, tokenizer: Any, language: str) -> None:
    """Have the model generate in a language by itself: with the tokens that the decoder's inputs
    begin with in training.
    """
    own = sides_of(tokenizer, is_pair=True)[1]
    labels = own.encode("").ids  # of an empty text: the language, and the end
    settings = model.generation_config
    settings.decoder_start_token_id = int(decoder_inputs(model, torch.tensor([labels]))[0, 0])
    settings.forced_bos_token_id = (
        labels[0] if labels[0] == language_id(tokenizer, language) else None
    )
    try:
        settings.validate(strict=True)
    except ValueError as error:  # which would come when the trained model is written
        raise ModelError(
            "its generation_config.json can't be written with a language:"
            f" {' '.join(str(error).split())[:200]}",
            where=str(model.config.name_or_path or model.config.model_type),
            to_do="correct that file",
        ) from error


PLAIN = {
    "num_beams": 1,
    "use_cache": True,
    "prompt_lookup_num_tokens": None,
    "return_dict_in_generate": False,
    "stop_strings": None,
}
"""Of `generate`, whatever a base's own settings say: one answer by its tokens, ended by a token."""


def stop_at(model: Any, token: int | None) -> None:
    """Have the model end its answers at a token too, beside those that it names."""
    settings = model.generation_config
    named = settings.eos_token_id
    known = named if isinstance(named, list) else [named] * (named is not None)
    if token is not None and token not in known:
        settings.eos_token_id = [*known, token]


class FourBits(NamedTuple):
    """A model in 4 bits on a device, but for the modules of these names."""

    device: torch.device
    but: tuple[str, ...] = ()


def load_model(
    choice: ModelChoice,
    config: Any,
    task: str,
    *,
    dtype: torch.dtype,
    seed: int,
    label_names: tuple[str, ...] = (),
    pad_id: int | None = None,
    in_four_bits: FourBits | None = None,
    n_words: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> PreTrainedModel:
    """The model in `dtype` on the CPU, or in 4 bits on the device of `in_four_bits`, but for its
    head.

    A new classification head, or all of it with `init: random`, is drawn from `seed`; so is one
    whose classes are not `label_names` in this order, and the embeddings of words up to `n_words`.
    With `init: meta` there are no weights,
    see `without_weights`. Raises `ModelError`.
    """
    labels = objective_of(task).labels
    _tell_padding(config, pad_id)
    trained_for = class_names(config)
    text_config = config.get_text_config()
    grows = n_words is not None and n_words > text_config.vocab_size
    config = copy.deepcopy(config)
    if grows and choice.init != "pretrained":
        config.get_text_config().vocab_size = n_words
    if labels is not None:
        labels.set_head(config, label_names)
    auto = auto_class(task)
    torch.manual_seed(seed)
    how: dict[str, Any] = {"trust_remote_code": choice.trust_remote_code}
    if choice.attn_implementation:
        how["attn_implementation"] = choice.attn_implementation
    try:
        if choice.init == "meta":
            model = without_weights(auto, config, dtype, **how)
        elif choice.init == "random":
            if in_four_bits is not None:
                raise ModelError(
                    "qlora needs pretrained weights", where="model.init", to_do="use method: lora"
                )
            model = _drawn(auto, config, dtype, **how)
        else:
            if in_four_bits is not None:
                skip = [*_head_of(config, choice, task), *in_four_bits.but]
                how |= _four_bit(dtype, in_four_bits.device, skip)
            model, loaded = auto.from_pretrained(
                choice.name,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=labels is not None,  # a head for other classes
                revision=choice.revision,
                **how,
            )
            _keep_weights(model)
            _body_must_be_whole(model, loaded, task, choice.name)
            if grows:
                torch.manual_seed(seed)
                model.resize_token_embeddings(n_words)
            is_other = in_models_order(label_names, trained_for) != list(label_names)
            if labels is not None and label_names and is_other:
                _draw_output_again(model, loaded, seed, trained_for, warn)
    except Exception as error:
        if isinstance(error, ModelError | HardwareError):
            raise
        if in_words(found := reported(error)):
            raise found from error
        raise _in_words(f"can't be loaded for {task}", choice.name, error) from error
    model.config.use_cache = False
    if objective_of(task).is_pair:
        # what it lacks is found now, not at the first step; of padding alone some make no inputs
        pad = getattr(model.config, "pad_token_id", None) or 0
        decoder_inputs(model, torch.tensor([[pad + 1] * 2]))
    return model


def _keep_weights(model: Any) -> None:
    """Without this bitsandbytes writes over its weights at the first evaluation on a CPU."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _tell_padding(config: Any, pad_id: int | None) -> None:
    """Say what padding is where a configuration leaves it open: the part of a composite that reads
    text, and those that ask.
    """
    text_config = config.get_text_config()
    for part in (config, text_config):
        is_open = part is text_config or hasattr(part, "pad_token_id")
        if is_open and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = pad_id


def _drawn(auto: Any, config: Any, dtype: torch.dtype, **how: Any) -> Any:
    """Fresh weights, drawn in fp32 and rounded: the same come again in every precision, as when an
    adapter is merged.
    """
    model = auto.from_config(config, dtype=torch.float32, **how)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _draw_output_again(
    model: Any,
    loaded: Any,
    seed: int,
    trained_for: tuple[str, ...],
    warn: Callable[[str], None],
) -> None:
    """Draw the layer of a head whose scores are of other classes, and say it of a head that was in
    the files.
    """
    layers = [
        (f"{head}.{name}".removesuffix("."), module)
        for head in new_heads(model)
        for name, module in model.get_submodule(head).named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == model.config.num_labels
    ]
    if not layers or f"{layers[-1][0]}.weight" in loaded["missing_keys"]:
        return
    name, layer = layers[-1]
    if f"{name}.weight" not in {key for key, *_ in loaded["mismatched_keys"]}:
        torch.manual_seed(seed)
        for each in (layer, *layer.parameters()):
            each._is_hf_initialized = False
        model._init_weights(layer)
    of_model, of_data = (
        f"{', '.join(map(repr, names[:5]))}{' ...' if len(names) > 5 else ''}"
        for names in (trained_for, class_names(model.config))
    )
    warn(
        f"the model's classifier was trained for {of_model}, the data has {of_data}: its output"
        " layer begins anew. Where they mean the same, give the data the model's names with"
        " data.label_map"
    )


def _body_must_be_whole(model: Any, loaded: Any, task: str, name: str) -> None:
    """Refuse weights that leave a part of the pretrained model to chance. Raises `ModelError`."""
    odd = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    # its head, and the pooler that some encoders come without, are new
    if not scores_words(model):
        body = f"{model.base_model_prefix}."
        odd = {key for key in odd if key.startswith(body) and ".pooler." not in f".{key}"}
    if odd:
        raise ModelError(
            f"{len(odd)} of the weights of a {model.config.model_type} for {task} are not in its"
            f" files or have another shape, e.g. {min(odd)}",
            where=name,
            to_do="name a model that was pretrained for this task, or correct its folder",
        )


def check_fits(config: Any, tokenizer: Any, lengths: dict[str, int], choice: ModelChoice) -> None:
    """Refuse a tokenizer, or lengths by their keys in the job, that the model has no embeddings
    for. Raises `ModelError`.
    """
    name, n_words = choice.name, getattr(config.get_text_config(), "vocab_size", None) or 0
    if len(tokenizer) - len(choice.new_tokens) > n_words:
        raise ModelError(
            f"the tokenizer has {len(tokenizer):,} tokens, the model embeds {n_words:,}",
            where=name,
            to_do="use the model's own tokenizer",
        )
    limit = max_positions(config)
    if limit is not None and choice.rope_scaling:
        limit = int(limit * stretch(choice.rope_scaling))
    for key, length in lengths.items():
        if limit is not None and length > limit:
            raise ModelError(
                f"{key} {length} is more than the model's {limit} positions",
                where=name,
                to_do=f"set {key}: {limit} or less",
            )


def model_sha256(choice: ModelChoice, config: Any, cache_dir: Path | None = None) -> str:
    """Identity of the model: what its files hold, wherever they lie and whichever library reads
    them.

    `config.json` without the path and the version that libraries write into it; of a model on the
    Hub its commit; of a folder every byte of its weight files (noted in `cache_dir`, see
    `weights_sha256`), and the code that the job lets run.
    """
    commit = None if choice.is_local else getattr(config, "_commit_hash", None)
    if choice.is_local:
        written = parse_json((Path(choice.name) / "config.json").read_text(encoding="utf-8"))
    else:
        written, _ = transformers.PretrainedConfig.get_config_dict(
            choice.name, revision=commit or choice.revision
        )
    content = [
        choice.init,
        _without_places(written),
        commit if choice.init == "pretrained" else None,
    ]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    if choice.is_local and choice.trust_remote_code:
        for path in sorted(Path(choice.name).rglob("*.py")):
            digest.update(f"{path.relative_to(choice.name)}:{sha256_of(path)}".encode())
    if choice.is_local and choice.init == "pretrained":
        folder = Path(choice.name)
        digest.update(json.dumps(weights_sha256(folder, cache_dir)).encode())
    return digest.hexdigest()


def _without_places(value: Any) -> Any:
    """A configuration without what tells where it was saved, and by which version of the
    library.
    """
    if isinstance(value, dict):
        places = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
        return {key: _without_places(item) for key, item in value.items() if key not in places}
    return [_without_places(item) for item in value] if isinstance(value, list) else value


def _head_of(config: Any, choice: ModelChoice, task: str) -> list[str]:
    """The names of a model's classification head or output layer."""
    model = skeleton(auto_class(task), config, trust_remote_code=choice.trust_remote_code)
    if not scores_words(model):
        return new_heads(model)
    output = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is output]


def _four_bit(dtype: torch.dtype, device: torch.device, skip: list[str]) -> dict[str, Any]:
    """NF4 with double quantization (Dettmers et al. 2023, arXiv 2305.14314) through
    bitsandbytes.
    """
    need_bitsandbytes("method: qlora")
    return {
        "quantization_config": transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skip,
        ),
        "device_map": {"": device},
    }


def need_bitsandbytes(what: str) -> Any:
    """The bitsandbytes module. Raises `HardwareError` that says how to get it."""
    try:
        import bitsandbytes
    except Exception as error:  # it fails in its own ways where there is no library for the machine
        raise HardwareError(
            f"{what} needs bitsandbytes, which is not installed or does not work here"
            f" ({type(error).__name__})",
            where=what,
            to_do="pip install 'farthing[gpu]', or use method: lora and optim: adamw_torch_fused",
        ) from error
    return bitsandbytes


def _must_name_its_own(index: Path) -> None:
    """Refuse an index that leads to other files than safetensors of its folder: transformers would
    open them.
    """
    try:
        weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"can't be read ({type(error).__name__})"
        raise ModelError(why, where=str(index), to_do="it is damaged: copy it again") from error
    odd = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if odd:
        raise ModelError(
            f"names files outside its folder, e.g. {odd[0]!r}",
            where=str(index),
            to_do="name safetensors files of this folder alone",
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package above it
        return False


_OF_HUB = {
    "gated|401|403": "accept its licence on the Hub and set HF_TOKEN",
    "is not a valid model identifier|404": "check the name; a private model needs HF_TOKEN",
    "": "no such local folder, and the Hub can't be reached: check the name or the network, or give"
    " a folder",
}
"""What the Hub's client says -> what to do."""
_OF_LIBRARIES = {
    "^Unrecognized configuration class": (
        "transformers has no such class for it",
        "change task: or model:",
    ),
    "trust_remote_code": (
        "it needs Python code that comes with it",
        "read that code; if you trust it: model.trust_remote_code: true with a pinned"
        " model.revision",
    ),
    "attn_implementation|(?i:flash.?attention|flash_attn)": (
        "",
        "leave model.attn_implementation out, or set it to eager or sdpa",
    ),
}
"""What a library says -> (what that means, if it is another thing; what to do)."""


def _in_words(what: str, name: str, error: Exception) -> ModelError:
    """The libraries' long explanations as one line, and what to do."""
    message, is_local = " ".join(str(error).split()), Path(name).is_absolute()
    said = f"{type(error).__name__}: {message[:300]}"
    to_do = "copy the folder again: it is damaged" if is_local else "see the model's own page"
    reads = ("sentencepiece", "tiktoken", "protobuf")  # transformers tries one after the other
    absent = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
    if absent and any(name in message.lower() for name in reads):
        said = f"it is a SentencePiece model, and {absent[0]} is not installed"
        to_do = "pip install 'farthing[sentencepiece]'"
    elif not is_local and (isinstance(error, OSError) or "connect" in message.lower()):
        said = message.split(". ")[0][:200]
        to_do = next(do for words, do in _OF_HUB.items() if re.search(words, message))
    else:
        known = (each for words, each in _OF_LIBRARIES.items() if re.search(words, message))
        meaning, to_do = next(known, ("", to_do))
        said = meaning or said
    return ModelError(f"{what}: {said}", where=name, to_do=to_do)
