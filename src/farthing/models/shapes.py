"""config.json -> layer sizes: parameters, adapters, FLOPs and key-value cache, exact and without
weights.

A model is a list of named weights, made from the table of its family and the numbers in its
config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from farthing.errors import InputError
from farthing.models.config_sizes import ConfigSizes, windows_of
from farthing.models.families import BODY, FAMILIES, Family
from farthing.models.weights import Adapters, Flops, Weight
from farthing.objectives.registry import objective_of

# they change layers or masks in ways not told here
_NOT_READ = ("add_cross_attention", "use_bidirectional_attention", "mlp_only_layers")

# what a token reads of the others; of queries, keys and values in one all is computed
_OF_ALL_TOKENS = (
    ".key",
    ".value",
    ".k_proj",
    ".v_proj",
    ".qkv_proj",
    ".query_key_value",
    ".c_attn",
)
# by the names that their layers have in a checkpoint; in other mixtures it leaves experts alone
PEFT_ADAPTS_EXPERTS = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "olmoe": ("gate_proj", "up_proj", "down_proj"),
}


class Shape(NamedTuple):
    """The sizes of a model for a task, read by `read_shape`."""

    model_type: str
    task: str  # or `BODY`: no head and no pooler
    attention: str  # causal, bidirectional or encoder-decoder
    hidden: int
    n_layers: int  # of the encoder, where there are both
    n_decoder_layers: int  # of an encoder-decoder; 0 otherwise
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int | None  # tokens in the longest input; None where positions have no end (T5)
    is_tied: bool  # the output layer is the embedding
    windows: tuple[
        int | None, ...
    ]  # by layer: tokens a token attends to, itself included; None is all before it
    weights: tuple[Weight, ...]
    query_and_value: tuple[str, ...]
    # experts that a token goes to, in a mixture of them; `ffn` is that of these, and of one for all
    n_active: int = 0

    @property
    def scores_tokens(self) -> bool:
        """Whether each token that is scored is held against all words."""
        return self.task != BODY and objective_of(self.task).scores_tokens

    @property
    def n_parameters(self) -> int:
        """Total number of parameters, tied ones once."""
        return sum(weight.n_parameters for weight in self.weights)

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by part: embeddings, positions, attention, mlp, norms, pooler, head. They add
        up to the total.
        """
        found: dict[str, int] = {}
        for weight in self.weights:
            found[weight.part] = found.get(weight.part, 0) + weight.n_parameters
        return found

    @property
    def experts(self) -> tuple[Weight, ...]:
        """The experts' weights: of what goes into them, and of what comes out."""
        return tuple(weight for weight in self.weights if weight.kind == "experts")

    @property
    def linear_layers(self) -> tuple[Weight, ...]:
        """The linear layers, the head's included."""
        return tuple(weight for weight in self.weights if weight.kind == "linear")

    @property
    def products(self) -> tuple[Weight, ...]:
        """What tokens are multiplied with: linear layers, routers and experts."""
        return tuple(
            weight for weight in self.weights if weight.kind in ("linear", "router", "experts")
        )

    @property
    def n_matmul(self) -> int:
        """Weights that tokens are multiplied with, biases and head left out: what LoRA freezes."""
        return sum(w.copies * w.n_weights for w in self.products if w.part != "head")

    def n_met(self, n_tokens: float = 1) -> float:
        """Those of `n_matmul` that so many tokens are multiplied with: of the experts the ones that
        some are sent to.
        """
        return sum(
            w.copies * w.n_weights * (1 - (1 - w.share) ** n_tokens)
            for w in self.products
            if w.part != "head"
        )

    @property
    def n_packed(self) -> int:
        """Those that NF4 packs: bitsandbytes takes linear layers only, and leaves experts as they
        are.
        """
        return sum(w.copies * w.n_weights for w in self.linear_layers if w.part != "head")

    @property
    def n_head_matmul(self) -> int:
        """Weights of the head that are multiplied with; V x h of a language model, tied or not."""
        return sum(w.copies * w.n_weights for w in self.linear_layers if w.part == "head")

    @property
    def window(self) -> int | None:
        """The sliding window in tokens, where some layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    # ---- adapters ----

    def with_lora(
        self,
        r: int,
        target_modules: Sequence[str] = (),
        modules_to_save: Sequence[str] = (),
        *,
        use_dora: bool = False,
    ) -> Adapters:
        """Count a LoRA of rank `r`. Raises `InputError` when no target is there, or one that can't
        be adapted.

        Targets are names as in `peft` (the end of a module's name at a dot, or all of it),
        `all-linear`, or none: then query and value for classification and all linear layers
        otherwise, as `add_adapter` has it. A head for classification is always trained whole. A
        saved module inside another one counts once.
        """
        heads = (
            []
            if self.scores_tokens
            else [w.name.split(".")[0] for w in self.weights if w.part == "head"]
        )
        saved_names = sorted({*heads, *modules_to_save})
        saved_copies = self._matched(lambda name: _is_saved(name, saved_names))
        for wanted in modules_to_save:
            if not any(_is_saved(name, [wanted]) for w in self.weights for name in w.names()):
                raise self._no_module(wanted, "modules_to_save")
        # peft keeps adapters out of whatever these match, at dots
        kept_out = re.compile(
            "|".join(rf"(?:^|.*\.)(?:{name})(?:$|\..*)" for name in saved_names) or r"(?!)"
        )
        if tuple(target_modules) == ("all-linear",) or not (target_modules or heads):
            layers = self.products if self.model_type in PEFT_ADAPTS_EXPERTS else self.linear_layers
            linear = {w.name for w in layers if w.part != "head"}
            adapted_copies = {
                w: n
                for w, n in self._matched(lambda x: not kept_out.match(x)).items()
                if w.name in linear
            }
        else:
            targets = self._of_experts(tuple(target_modules) or self.query_and_value)
            if not targets:
                raise InputError(
                    "the query and value layers of this model are not known",
                    where="method.target_modules",
                    to_do=f"name them, or use all-linear; its linear layers: "
                    f"{', '.join(self._linear_names())}",
                )
            self._must_take_adapters(targets, kept_out)
            names = [name for weight in self.weights for name in weight.names()]
            for target in targets:
                if not any(_ends(name, target) for name in names):
                    raise self._no_module(target, "target_modules")
            adapted_copies = self._matched(
                lambda name: any(_ends(name, t) for t in targets) and not kept_out.match(name)
            )
            if not adapted_copies:
                raise self._no_module(targets[0], "target_modules")
        adapted = tuple((weight, len(copies)) for weight, copies in adapted_copies.items())
        saved = tuple((weight, len(copies)) for weight, copies in saved_copies.items())
        if use_dora and any(w.kind == "experts" for w, _ in adapted):
            to_do = "leave method.use_dora out, or name layers of attention"
            raise InputError("peft has no DoRA for experts", where="method.use_dora", to_do=to_do)
        n_adapter = sum(n * (w.n_adapter(r) + (w.n_out if use_dora else 0)) for w, n in adapted)
        n_saved = sum(n * (w.n_weights + w.n_bias) for w, n in saved)
        n_originals = sum(n * w.n_parameters // w.copies for w, n in saved)
        n_total = self.n_parameters + n_adapter + n_saved - n_originals
        trained = [*adapted_copies.items(), *saved_copies.items()]
        first = min((self._layer_of(weight, copies[0]) for weight, copies in trained), default=0)
        return Adapters(r, adapted, saved, n_adapter, n_saved, n_total, first)

    def _of_experts(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Targets with the names that layers of experts have in a checkpoint changed for those in
        the model, as peft does.
        """
        fused = PEFT_ADAPTS_EXPERTS.get(self.model_type, ())
        found = tuple(
            "mlp.experts.down_proj" if target in fused[2:] else target for target in targets
        )
        halves = [target for target in targets if target.endswith(fused[:2])] if fused else []
        if len(halves) == 1:
            what = f"{' and '.join(fused[:2])} are one layer of this model's experts"
            raise InputError(
                what, where="method.target_modules", to_do="name both of them, or none"
            )
        both = ("mlp.experts.gate_up_proj",) if halves else ()
        return (*(target for target in found if target not in halves), *both)

    def _matched(self, wanted: Callable[[str], bool]) -> dict[Weight, list[int]]:
        """The weights with a name that is wanted, and which of their copies have one."""
        found = {
            weight: [i for i, name in enumerate(weight.names()) if wanted(name)]
            for weight in self.weights
        }
        return {weight: copies for weight, copies in found.items() if copies}

    def _layer_of(self, weight: Weight, copy: int) -> int:
        """The layer, as `Adapters` counts, that a copy of `weight` is in, or the first that stands
        on it.
        """
        if "*" in weight.name or weight.part in ("embeddings", "positions"):
            return copy + (self.n_layers if weight.name.startswith("decoder.") else 0)
        return self.n_layers + (0 if weight.name.startswith("encoder.") else self.n_decoder_layers)

    def _must_take_adapters(self, targets: Sequence[str], kept_out: re.Pattern[str]) -> None:
        """Refuse targets that are norms, or modules with others in them."""
        for weight in self.weights:
            for name in weight.names():
                modules = _with_parents(name) if not kept_out.match(name) else ()
                hit = [target for module in modules for target in targets if _ends(module, target)]
                odd = [target for target in hit if weight.kind == "norm" or not _ends(name, target)]
                if odd:
                    raise InputError(
                        f"`{odd[0]}` is no linear layer of this model",
                        where="method.target_modules",
                        to_do=f"use all-linear, or names among {', '.join(self._linear_names())}",
                    )

    def _no_module(self, wanted: str, key: str) -> InputError:
        names = self._linear_names()
        first = _did_you_mean(wanted, names)
        return InputError(
            f"this model has no module `{wanted}`",
            where=f"method.{key}",
            to_do=f"{first}its linear layers: {', '.join(names)}",
        )

    def _linear_names(self) -> list[str]:
        return sorted({weight.name.split(".")[-1] for weight in self.linear_layers})

    # ---- FLOPs and cache ----

    def n_above(self, first_layer: int) -> tuple[int, int]:
        """Layers from number `first_layer` up, a decoder's counted after its encoder's: of the
        encoder or only stack, of it.
        """
        of_all = self.n_layers + self.n_decoder_layers
        return max(0, self.n_layers - first_layer), max(
            0, min(self.n_decoder_layers, of_all - first_layer)
        )

    def forward_flops(
        self,
        n_tokens: int,
        n_targets: int = 0,
        n_head_tokens: int | None = None,
        first_layer: int = 0,
        *,
        n_read: float | None = None,
    ) -> Flops:
        """FLOPs of one forward pass over a sequence of `n_tokens` (the source, and `n_targets`
        tokens of a seq2seq).

        `n_head_tokens` go through the head: all of them unless said. Attention counts the pairs
        that the mask lets through: half the square where it is causal, fewer in a window. Layers
        below `first_layer` are left out. The last layer is computed for `n_read` tokens where that
        is given, but for its keys and values: for the last ones, or the first one of an encoder;
        that a CPU in fp32 folds those into its queries is not counted.
        """
        n_above = self.n_above(first_layer)

        def n_copies(weight: Weight) -> float:
            """Above, evenly over the layers of its stack."""
            if "*" not in weight.name:
                return weight.copies
            is_decoder = weight.name.startswith("decoder.")
            n_all = self.n_decoder_layers if is_decoder else self.n_layers
            return weight.copies * n_above[is_decoder] / max(1, n_all)

        every = [(weight, n_copies(weight)) for weight in self.products]
        body, head, _ = self._products(every, n_tokens, n_targets, n_head_tokens, n_read)
        pairs = 4.0 * self.n_heads * self.head_dim  # queries with keys, and scores with values
        n_pairs: float = self._n_pairs(n_tokens, n_targets, n_above)
        if n_read is not None and n_above[0]:
            is_causal = self.attention == "causal"
            unread = n_tokens - n_read
            n_pairs -= (
                _causal_pairs(round(unread), self.windows[-1]) if is_causal else n_tokens * unread
            )
        return Flops(body, pairs * n_pairs, head, 0.0, n_tokens + n_targets)

    def training_flops(
        self,
        n_tokens: int,
        n_targets: int = 0,
        n_head_tokens: int | None = None,
        adapters: Adapters | None = None,
        *,
        n_read: float | None = None,
    ) -> Flops:
        """FLOPs of forward and backward for one sequence, without recomputation; without `adapters`
        all is trained.

        A trained weight costs three products (forward, its input's gradient, its own), a frozen one
        two, attention three times its forward. The input's gradient is counted down to the first
        layer with anything trained.
        """
        lengths = n_tokens, n_targets, n_head_tokens
        once = self.forward_flops(*lengths, n_read=n_read)
        if adapters is None:
            return Flops(3 * once.body, 3 * once.attention, 3 * once.head, 0.0, once.n_tokens)
        products = self.products
        body, head, _ = self._products(
            [(w, n) for w, n in adapters.saved if w in products], *lengths
        )
        linear = [(w, n) for w, n in adapters.adapted if w.kind == "linear"]
        low_rank = self._products(linear, *lengths, n_read)[2]
        back = self.forward_flops(*lengths, first_layer=adapters.first_layer, n_read=n_read)
        merged = self._products(
            [(w, n) for w, n in adapters.adapted if w.kind == "experts"], *lengths
        )[0]
        return Flops(
            once.body
            + back.body
            + body
            + merged,  # what comes of experts and adapters has a gradient as if it were trained
            once.attention + 2 * back.attention,
            2 * once.head + head,
            (5 if adapters.keeps_start else 3)
            * adapters.r
            * low_rank,  # what is frozen has no gradient of its own
            once.n_tokens,
        )

    def _products(
        self,
        layers: Sequence[tuple[Weight, float]],
        n_tokens: int,
        n_targets: int,
        n_head_tokens: int | None,
        n_read: float | None = None,
    ) -> tuple[float, float, float]:
        """Forward FLOPs of linear layers outside and inside the head, and of a LoRA of rank 1 on
        them.
        """
        seen = {"all": n_tokens, "source": n_tokens, "target": n_targets, "sequence": 1}
        of_head = (n_targets or n_tokens) if n_head_tokens is None else n_head_tokens
        body = head = low_rank = 0.0
        for weight, n in layers:
            in_head = weight.part == "head" and weight.tokens != "sequence"
            n_seen = n * (of_head if in_head else seen[weight.tokens] * weight.share)
            if (
                n_read is not None
                and n
                and "*" in weight.name
                and not weight.name.endswith(_OF_ALL_TOKENS)
            ):
                n_seen -= (n_tokens - n_read) * weight.share  # in the last of its layers
            product = 2.0 * weight.n_weights * n_seen
            low_rank += 2.0 * (weight.n_in + weight.n_out) * n_seen
            body, head = (body, head + product) if weight.part == "head" else (body + product, head)
        return body, head, low_rank

    def _n_pairs(self, n_tokens: int, n_targets: int, n_above: tuple[int, int]) -> int:
        """Pairs of tokens that attend to one another, summed over the upper layers of each
        stack.
        """
        n_layers, n_decoder_layers = n_above
        if self.attention == "bidirectional":
            return n_layers * n_tokens**2
        if self.attention == "encoder-decoder":
            own = n_targets * (n_targets + 1) // 2
            return n_layers * n_tokens**2 + n_decoder_layers * (own + n_tokens * n_targets)
        return sum(
            _causal_pairs(n_tokens, window) for window in self.windows[self.n_layers - n_layers :]
        )


def read_shape(config: Mapping[str, Any], task: str | None = None, n_labels: int = 0) -> Shape:
    """The sizes of the model that `config` (what config.json holds) describes, with the head of
    `task`.

    Without a task: the family's usual one, or the body alone for encoders. Classification needs the
    number of labels. Raises `InputError`.
    """
    family, task, ends = _family_of(config, task)
    if "->n" in ends[1] and n_labels < 1:
        raise InputError(
            f"{task} needs the number of labels", where="n_labels", to_do="give 1 or more"
        )
    for key in _NOT_READ:
        if config.get(key):
            raise InputError(
                f"{key} is not known here",
                where=f"config.json: {key}",
                to_do="use a model without it",
            )
    says = ConfigSizes(config, family)
    hidden, n_heads, n_layers = (
        says.n("hidden_size"),
        says.n("num_attention_heads"),
        says.n("num_hidden_layers"),
    )
    is_said = "head_dim" in family.defaults and says.value("head_dim") is not None
    head_dim = says.n("head_dim") if is_said else says.share(hidden, n_heads, "num_attention_heads")
    n_kv_heads = says.n("num_key_value_heads", n_heads)
    if says.value("multi_query") is False:
        n_kv_heads = n_heads
    says.share(n_heads, n_kv_heads, "num_key_value_heads")
    is_pair = family.attention == "encoder-decoder"
    n_decoder_layers = says.n("num_decoder_layers", n_layers) if is_pair else 0
    ffn, vocab = says.n("intermediate_size", 4 * hidden), says.n("vocab_size")
    positions = None if is_pair else says.n("max_position_embeddings")
    sizes = {
        "h": hidden,
        "f": ffn,
        "2f": 2 * ffn,
        "V": vocab,
        "a": n_heads,
        "d": head_dim,
        "n": n_labels,
    }
    sizes |= {
        "q": n_heads * head_dim,
        "k": n_kv_heads * head_dim,
        "3h": 3 * hidden,
        "P": positions or 0,
    }
    sizes |= {"qkv": sizes["q"] + 2 * sizes["k"], "T": says.n("type_vocab_size", 1)}
    sizes |= {"h2d": hidden + 2 * sizes["k"], "B": says.n("relative_attention_num_buckets", 1)}
    shared = (
        says.n("shared_expert_intermediate_size")
        if "shared_expert_intermediate_size" in family.defaults
        else 0
    )
    sizes |= {"e": says.n("num_local_experts", 1), "s": shared, "1": 1}
    n_active = says.n("num_experts_per_tok") if sizes["e"] > 1 else 0
    if says.value("decoder_sparse_step") not in (None, 1):
        what = "layers with and without experts are not known here"
        raise InputError(
            what, where="config.json: decoder_sparse_step", to_do="use a model without it"
        )
    if family.positions_follow_padding and positions is not None:
        positions -= (says.value("pad_token_id") or 0) + 1
    return Shape(
        model_type=str(config["model_type"]),
        task=task,
        attention=family.attention,
        hidden=hidden,
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=ffn * max(1, n_active) + shared,
        vocab=vocab,
        max_positions=positions,
        is_tied=says.holds("tie_word_embeddings"),
        windows=windows_of(says, n_decoder_layers or n_layers),
        weights=_weights(family, ends, says, sizes, {"decoder.": n_decoder_layers, "": n_layers}),
        query_and_value=family.query_and_value,
        n_active=n_active,
    )


def _family_of(config: Mapping[str, Any], task: str | None) -> tuple[Family, str, tuple[str, str]]:
    """A model's family, its task (the usual one unless given), and how body and head begin. Raises
    `InputError`.
    """
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    family = FAMILIES.get(str(model_type))
    if family is None:
        first = _did_you_mean(str(model_type).lower(), FAMILIES)
        what = (
            f"no model family `{model_type}` is known"
            if model_type
            else "the configuration names no model_type"
        )
        raise InputError(
            what, where="config.json: model_type", to_do=f"{first}known: {', '.join(FAMILIES)}"
        )
    task = task or next(iter(family.heads))
    head = BODY if task == BODY else objective_of(task).head
    if head not in family.heads:
        known = ", ".join(family.heads)
        raise InputError(
            f"{model_type} is not known for {task}", where="task", to_do=f"use one of {known}"
        )
    return family, task, family.heads[head]


def _weights(
    family: Family,
    ends: tuple[str, str],
    says: ConfigSizes,
    sizes: Mapping[str, int],
    n_copies: Mapping[str, int],
) -> tuple[Weight, ...]:
    """The weights of body and head; `n_copies` by how the name of one of many begins."""
    prefix, head = ends
    rows = [(prefix, row) for row in family.body.splitlines()] + [
        ("", row) for row in head.splitlines()
    ]
    weights = []
    for before, row in [each for each in rows if each[1].strip()]:
        name, part, size, *more = row.split()
        if any(word.startswith("if:") and not says.holds(word[3:]) for word in more):
            continue
        own = [word for word in ("experts", "router", "raw") if word in more]
        kind = (
            own[0] if own else "linear" if "->" in size else "embedding" if "*" in size else "norm"
        )
        n_in, n_out = (
            (sizes[letter] for letter in re.split(r"->|\*", size))
            if size not in sizes
            else (1, sizes[size])
        )
        weights.append(
            Weight(
                name=before + name,
                part=part,
                kind=kind,
                n_in=n_in,
                n_out=n_out,
                has_bias=says.among("bias", more),
                copies=(
                    n_copies["decoder." if name.startswith("decoder.") else ""]
                    if "*" in name
                    else 1
                ),
                is_tied=says.among("tied", more),
                tokens=next((word[3:] for word in more if word.startswith("of:")), "all"),
                share=says.n("num_experts_per_tok") / sizes["e"] if kind == "experts" else 1.0,
                n_experts=sizes["e"] if kind == "experts" else 1,
            )
        )
    return tuple(weights)


def _causal_pairs(n_tokens: int, window: int | None) -> int:
    """Pairs of a token and itself or one before it, no further back than the window."""
    full = min(n_tokens, window or n_tokens)
    return full * (full + 1) // 2 + (n_tokens - full) * full


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib

    longer = [name for name in known if word and name.startswith(word)]
    near = longer or difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean `{near[0]}`? " if near else ""


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _with_parents(name: str) -> Iterator[str]:
    """The name and those of the modules it stands in, inside first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_saved(name: str, wanted: Sequence[str]) -> bool:
    """Whether `peft` trains this module whole: its name, or that of a module it stands in,
    ends so.
    """
    return any(module.endswith(end) for module in _with_parents(name) for end in wanted)
