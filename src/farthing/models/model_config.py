"""Where a model's config.json is found without transformers: a folder, the Hub's cache here, a
table of known models, the Hub.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import re
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from farthing.errors import ModelError
from farthing.storage.files import Json, small_text

CONFIG = "config.json"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
)
"""Files of which a tokenizer has one."""
_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 20
_YES = ("1", "on", "yes", "true")

MOST_LAYERS = 10_000
"""Or experts: a few hundred in the models known, which are planned and built one by one."""
_LARGEST_SIZE = 1 << 27
_SIZES = re.compile(
    r"(hidden|intermediate|vocab|embedding|encoder_ffn|decoder_ffn)_(size|dim)|d_(model|ff|kv)"
    r"|n_(embd|head|positions)|num_\w*heads|head_dim|max_position_embeddings"
)
_NEVER_NONE = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    *("hidden_size", "vocab_size", "max_position_embeddings"),
)
_COUNTS = re.compile(r"num_\w*layers|n_layers?|(en|de)coder_layers|(n|num)_\w*experts\w*")


def refuse_folder(folder: Path, *, needs_weights: bool) -> None:
    """Raises `ModelError` for a folder without what a model needs in it."""
    why, to_do = "", "name a folder in Hugging Face format"
    if not folder.is_dir():
        why, to_do = "no such folder for the model", "check model: in the job"
    elif not (folder / CONFIG).exists():
        why = f"no {CONFIG} in the folder"
    elif needs_weights and not any(folder.glob("*.safetensors")):
        why = "no weights (*.safetensors) in the folder"
        to_do = "put them there, or train from fresh weights with model.init: random"
        pickles = [p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind)]
        if pickles:
            why = f"weights only as a pickle ({min(pickles)}), which can run code when it is loaded"
            to_do = (
                "convert them to safetensors with transformers' save_pretrained on a machine you"
                " trust"
            )
    if why:
        raise ModelError(why, where=str(folder), to_do=to_do)
    refuse_pipes(folder)


def refuse_pipes(folder: Path) -> None:
    """Raises `ModelError` for a pipe or a device in a model's folder: it would be read for ever."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(
                f"this is no file: {path.name}",
                where=str(folder),
                to_do="copy the model's files into the folder",
            )


def refuse_tokenizer(folder: Path) -> None:
    """Raises `ModelError` for a folder without a tokenizer."""
    why, to_do = "", "check model.tokenizer_name_or_path"
    if not folder.is_dir():
        why = "no such tokenizer folder"
    elif not any((folder / file).exists() for file in TOKENIZERS):
        why = f"no tokenizer in the model folder (none of {', '.join(TOKENIZERS)})"
        to_do = "copy the tokenizer's files there, or name its folder: model.tokenizer_name_or_path"
    if why:
        raise ModelError(why, where=str(folder), to_do=to_do)
    refuse_pipes(folder)


def find_config(
    name_or_path: str, revision: str | None = None, *, ask_hub: bool = True
) -> tuple[Json, str]:
    """The model's config.json, and a sentence on where it came from.

    Looks in this order: a local folder, the Hugging Face cache, the table that comes with farthing,
    and with one quick request the Hub (not with HF_HUB_OFFLINE, nor without `ask_hub`). Raises
    `ModelError`.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        refuse_pipes(folder)
        path = folder / CONFIG
        if not path.is_file():
            raise ModelError(
                f"no {CONFIG} in the folder",
                where=name_or_path,
                to_do="name a folder in Hugging Face format",
            )
        return _read(path), f"{CONFIG} in {name_or_path}"
    if folder.is_absolute() or not is_hub_name(name_or_path):
        raise ModelError(
            "no such folder for the model", where=name_or_path, to_do="check model: in the job"
        )
    snapshot = cached_snapshot(name_or_path, revision)
    if snapshot is not None and (snapshot / CONFIG).is_file():
        words = f"{CONFIG} of {name_or_path} in the Hugging Face cache ({snapshot.name[:7]})"
        return _read(snapshot / CONFIG), words
    known = known_config(name_or_path)
    if known is not None:
        words = f"farthing's table of models ({known_models()['date']})"
        return known, words if revision in (None, "main") else f"{words}, whatever the revision"
    if not ask_hub:
        raise ModelError(
            "its configuration was not found",
            where=name_or_path,
            to_do=f"give a folder with its {CONFIG}",
        )
    nowhere = "neither in the Hugging Face cache nor in farthing's table"
    config = hub_config(name_or_path, revision, nowhere=nowhere)
    return config, f"{CONFIG} of {name_or_path} on the Hub"


# ---- the cache of huggingface_hub ----


def hub_cache() -> Path:
    """The folder in which `huggingface_hub` keeps what it has downloaded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model's files in the cache, as they were at the revision; None when it was
    never downloaded.
    """
    if not is_hub_name(name):
        return None
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    if ".." in commit.split("/") or commit.startswith("/"):
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):  # not there: it is a commit by itself
        commit = (folder / "refs" / commit).read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[\w.-]+", commit) and snapshot.is_dir() else None


# ---- the table ----


@functools.cache
def known_models() -> Json:
    """The table: `models` by name, `same_as` for mirrors and forms with the same sizes, its
    `source` and `date`.
    """
    table: Json = json.loads(
        resources.files("farthing").joinpath("facts/models.json").read_text(encoding="utf-8")
    )
    return table


def known_config(name: str) -> Json | None:
    """The numbers of a known model, in the form of its config.json."""
    table = known_models()
    found = table["models"].get(table["same_as"].get(name, name))
    return None if found is None else dict(found)


def nearest_known(name: str) -> str:
    """The known name most like this one, or nothing; never one of another version (Llama 2 for
    Llama 4).
    """
    table = known_models()
    names = {full.lower(): full for full in (*table["models"], *table["same_as"])}
    by_end = {full.rpartition("/")[2]: full for full in names}
    version = _version_in(name)

    def fits(known: str) -> bool:
        return not version or version == _version_in(known)

    near = [one for one in difflib.get_close_matches(name.lower(), names, cutoff=0.75) if fits(one)]
    if near:
        return names[near[0]]
    end = name.lower().rpartition("/")[2]
    near = [one for one in difflib.get_close_matches(end, by_end, cutoff=0.75) if fits(one)]
    return names[by_end[near[0]]] if near else ""


def _version_in(name: str) -> str:
    """The first number of a name that is no size: `25` of Qwen2.5-7B, `31` of Llama-3.1-8B; nothing
    in gpt-neox-20b.
    """
    found = re.search(
        r"(?<![\d.])v?(\d+(?:\.\d+)?)(?![\d.]*[bmk](?![a-z]))", name.rpartition("/")[2].lower()
    )
    return found[1].replace(".", "") if found else ""


# ---- the Hub ----


def is_offline(variable: str = "HF_HUB_OFFLINE") -> bool:
    """Whether the Hub may not be asked."""
    return os.environ.get(variable, "").lower() in _YES


def hub_config(
    name: str, revision: str | None, *, nowhere: str = "not in the Hugging Face cache"
) -> Json:
    """A model's configuration by one request for one small file, not tried again. Raises
    `ModelError`.

    `nowhere` says where it has been looked for before.
    """
    near = nearest_known(name)
    first = f"did you mean {near}? " if near and near != name else ""
    or_else = f"{first}{'else ' if first else ''}"
    if is_offline():
        raise ModelError(
            f"{nowhere}, and HF_HUB_OFFLINE is set",
            where=name,
            to_do=(
                f"{or_else}check the name or the network: give a folder with its {CONFIG}, or unset"
                " HF_HUB_OFFLINE"
            ),
        )
    quoted = quote(revision or "main", safe="")
    try:
        content = read_from_hub(f"{name}/resolve/{quoted}/{CONFIG}")
    except HubStatusError as error:
        if error.code in (401, 403):
            what, to_do = (
                "the Hub does not show it",
                "check the name; accept its licence on the Hub and set HF_TOKEN",
            )
        elif error.code == 404:
            what, to_do = (
                f"the Hub has no such model, or no {CONFIG} of it",
                "check the name and the revision",
            )
        else:
            what, to_do = (
                f"the Hub answers {error.code}",
                f"try again, or give a folder with its {CONFIG}",
            )
        raise ModelError(what, where=name, to_do=first + to_do) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{nowhere}, and the Hub can't be reached ({error})",
            where=name,
            to_do=f"{or_else}check the name or the network, or give a folder with its {CONFIG}",
        ) from error
    if len(content) > _MOST_BYTES:
        raise ModelError(
            f"its {CONFIG} is larger than {_MOST_BYTES:,} bytes", where=name, to_do="check the name"
        )
    return _parsed(content, name)


class HubStatusError(OSError):
    """The Hub answers with an error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"it answers {code}")
        self.code = code


def read_from_hub(path: str) -> bytes:
    """The first megabyte and a byte of something small on the Hub: one request. Raises
    `HubStatusError`, `OSError`, `ValueError`.
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise ValueError("HF_ENDPOINT is no http address")
    import httpx  # plans of known models need no network

    headers = {"User-Agent": "farthing", "Accept-Encoding": "identity"}
    token = _hub_token()
    if token and endpoint.startswith("https://"):  # httpx does not send it on to other hosts
        headers["Authorization"] = f"Bearer {token}"
    content = b""
    try:
        with httpx.stream(
            "GET",
            f"{endpoint}/{path}",
            headers=headers,
            timeout=_TIMEOUT_S,
            follow_redirects=True,
        ) as answer:
            if answer.is_error:
                raise HubStatusError(answer.status_code)
            for piece in answer.iter_raw():
                content += piece
                if len(content) > _MOST_BYTES:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(str(error) or type(error).__name__) from error
    return content[: _MOST_BYTES + 1]


def _hub_token() -> str:
    """The token of the environment, or of `hf auth login`; nothing without one."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"]
    path = Path(os.environ.get("HF_TOKEN_PATH") or hub_cache().parent / "token")
    try:
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return found if re.fullmatch(r"[\w-]+", found) else ""


def _read(path: Path) -> Json:
    try:
        return _parsed(small_text(path).encode(), str(path))
    except OSError as error:
        what = f"{CONFIG} can't be read: {error.strerror}"
        raise ModelError(what, where=str(path), to_do="copy it again") from error


def _parsed(content: bytes, where: str) -> Json:
    try:
        config = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{CONFIG} is not JSON", where=where, to_do="it is damaged: copy it again"
        ) from error
    is_model = isinstance(config, dict) and isinstance(config.get("model_type", ""), str)
    if not is_model:
        raise ModelError(
            f"{CONFIG} is no object that names its model_type",
            where=where,
            to_do="it is damaged: copy it again",
        )
    _refuse_sizes(config, where)
    return config


def _refuse_sizes(config: Json, where: str) -> None:
    """Raise `ModelError` for sizes that no model has: its shape is computed and allocated."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_sizes(value, where)
        is_count, is_size = _COUNTS.fullmatch(key), _SIZES.fullmatch(key)
        if not (is_count or is_size) or value is None or isinstance(value, list | dict):
            continue
        least, most = (0, MOST_LAYERS) if is_count else (-1, _LARGEST_SIZE)
        least = 1 if key in _NEVER_NONE else least
        if type(value) is not int or not least <= value <= most:
            what = "a number of layers or experts" if is_count else "a size of a model"
            raise ModelError(
                f"{key} is {str(value)[:40]}, not {what} (at most {most:,})",
                where=where,
                to_do="check the model's config.json",
            )


def is_hub_name(name: str) -> bool:
    """Whether a name can be one on the Hub: ORGANISATION/NAME, or an old one of one word."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None and ".." not in name
