"""The model families: they parse config.json into a graph of ops and map our tensor names to the checkpoint's.

A family is a table of names and a small function that reads the config and builds the graph; the architectures of one
family differ in a few facts, one table row each. Absent keys take transformers' defaults (configuration_*.py), because
older files lack the keys that were added later. Reading is strict: the parser refuses, by name, any key that it neither
reads nor knows to be inert. No tensors here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tokenwright.checkpoints.blocks import pre_norm
from tokenwright.checkpoints.positions import Slides, read_rope, read_rotary, read_windows
from tokenwright.checkpoints.strict import Keys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import DType, Learned, ModelConfig
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Activation, Graph

_MOST_LAYERS, _MOST_VOCAB = 4096, 1 << 24  # far above any known model: a config beyond is damaged


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint stores one of our tensors; `name` is without the family's prefix."""

    name: str
    transpose: bool = False  # stored as [in, out], as GPT-2's Conv1D does
    part: int | None = None  # 0, 1 or 2: q, k or v of one fused tensor, concatenated along `out`
    paired: int = 0  # the size of a head whose rows are stored as 0, size / 2, 1, size / 2 + 1, ...; 0: in order

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor in the file, where our tensor has `shape`."""
        if self.part is not None:
            shape = (3 * shape[0], *shape[1:])
        return shape[::-1] if self.transpose else shape


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share one config reader and one table of names.

    `parse` returns the ModelConfig and the graph of an architecture. `names` maps our names to the checkpoint's, both
    without `.weight` and `.bias`; {i} is the layer. `prefix` is optional before the names in a file. `inert` matches
    tensors that are not weights.
    """

    architectures: Mapping[str, str]  # architecture -> model_type of config.json
    parse: Callable[[Keys, str], tuple[ModelConfig, Graph]]
    prefix: str
    names: Mapping[str, Source]
    inert: re.Pattern[str]

    def sources(self, graph: Graph) -> dict[str, Source]:
        """The checkpoint's source for every tensor of `graph.shapes`."""
        found = {}
        for name in graph.shapes:
            base, kind = name.rsplit(".", 1)
            layer = re.match(r"layers\.(\d+)\.", base)
            source = self.names[f"layers.{{i}}.{base[layer.end() :]}" if layer else base]
            at = source.name.format(i=layer[1] if layer else "")
            found[name] = Source(f"{at}.{kind}", source.transpose and kind == "weight", source.part)
        return found


class Parsed(NamedTuple):
    """A parsed config.json: the family, the model's hyperparameters and its graph."""

    family: Family
    config: ModelConfig
    graph: Graph


@dataclass(frozen=True, slots=True)
class LlamaLike:
    """The differences between the architectures of the llama family."""

    biases: Literal["none", "qkv", "config"] = "none"  # config: attention_bias covers q, k, v and o
    mlp_bias: bool = False  # whether the config may enable biases in the MLP
    qk_norm: bool = False
    slides: Slides = "none"
    nope: bool = False  # whether some layers have no rotary positions (NoPE)
    tied: bool = False  # default of tie_word_embeddings
    theta: float = 10000.0
    head_size: int | None = None  # default of head_dim; None: width / heads


_LLAMA_LIKE: Mapping[str, LlamaLike] = {
    "LlamaForCausalLM": LlamaLike(biases="config", mlp_bias=True),
    "MistralForCausalLM": LlamaLike(slides="all"),
    "Qwen2ForCausalLM": LlamaLike(biases="qkv", slides="upper"),
    "Qwen3ForCausalLM": LlamaLike(biases="config", qk_norm=True, slides="upper", head_size=128),
    "SmolLM3ForCausalLM": LlamaLike(
        biases="config", mlp_bias=True, slides="nope", nope=True, tied=True, theta=2000000.0
    ),
}

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}

# Keys that a config may only have at a neutral value: the allowed values, and the feature that any other value needs.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "add_cross_attention": ((False,), "cross-attention"),
    "compression_config": ((), "quantised weights"),
    "is_encoder_decoder": ((False,), "an encoder"),
    "pruned_heads": (({},), "pruned heads"),
    "quantization_config": ((), "quantised weights"),
    "rope_interleaved": ((False,), "rotation of neighbouring dimensions"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scaled by the layer"),
    "scale_attn_weights": ((True,), "attention without scaling"),
    "use_mrope": ((False,), "multimodal rotary positions"),
}

# Keys that do not affect the logits: training, generation defaults, classification heads, exporters.
# pretraining_tp and chunk_size_feed_forward split matrix products; reorder_and_upcast_attn changes
# rounding only.
_INERT = frozenset(
    (
        "architectures", "model_type", "transformers_version", "name_or_path", "auto_map",
        "custom_pipelines", "torch_dtype", "dtype", "use_cache", "torchscript", "use_bfloat16",
        "return_dict", "attn_implementation", "output_attentions", "output_hidden_states",
        "output_scores", "return_dict_in_generate", "gradient_checkpointing", "initializer_range",
        "initializer_factor", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
        "attn_pdrop", "pretraining_tp", "chunk_size_feed_forward", "reorder_and_upcast_attn",
        "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size", "tf_legacy_loss",
        "is_llama_config", "n_ctx", "n_special", "predict_special_tokens", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        "finetuning_task", "problem_type", "id2label", "label2id", "num_labels", "classifier_dropout",
        "task_specific_params", "tokenizer_class", "prefix", "loss_type", "bos_token_id",
        "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
        "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "max_length",
        "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
        "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
        "suppress_tokens", "begin_suppress_tokens", "transformers.js_config", "unsloth_fixed",
        "unsloth_version", "use_flash_attn", "mlx_lm_version", "license", "model_name",
    )
)  # fmt: skip
_CONTEXT_REPEATED = ("max_sequence_length", "max_seq_len", "max_seq_length", "model_max_length", "seq_length")
_ADVICE = (
    "Tokenwright cannot tell whether that changes the arithmetic. If it does not, remove it from "
    "config.json; if it does, the model needs a newer Tokenwright"
)


class UnknownArchitectureError(CheckpointError):
    """An architecture that no family has; the message ends with those that Tokenwright runs."""


def parse_config(config: Mapping[str, Any], where: str = "config.json") -> Parsed:
    """Parse a config.json. Raises CheckpointError for an unknown architecture, an unknown key or a bad value."""
    named = {key: value for key, value in config.items() if not key.startswith("_")}  # _name_or_path and the like
    keys = Keys(named, where)
    family, architecture = _find(keys)
    for key, (allowed, why) in _REFUSED.items():
        keys.only(key, *allowed, why=why)
    parsed, graph = family.parse(keys, architecture)
    keys.finish(_INERT, _ADVICE)
    return Parsed(family, parsed, graph)


def _find(keys: Keys) -> tuple[Family, str]:
    """The family and the architecture; without `architectures`, model_type selects them."""
    known = {name: family for family in FAMILIES for name in family.architectures}
    kinds = {kind: name for family in FAMILIES for name, kind in family.architectures.items()}
    listed = keys.raw("architectures") or []
    if not isinstance(listed, list) or len(listed) > 1 or not all(isinstance(name, str) for name in listed):
        raise keys.error("architectures must be a list of one name")
    kind = keys.text("model_type", "")
    if not listed and not kind:
        raise keys.error('it names no architecture; add architectures, such as ["LlamaForCausalLM"], or model_type')
    name = listed[0] if listed else kinds.get(kind, f"of model_type {kind!r}")
    if name not in known:
        told = f"unknown architecture {name}; Tokenwright runs {', '.join(known)}"
        raise UnknownArchitectureError(str(keys.error(told)))
    family = known[name]
    if kind not in ("", family.architectures[name]):
        raise keys.error(f"model_type {kind!r} does not belong to {name}; correct config.json")
    return family, name


def _check_repeats(keys: Keys, *contexts: int) -> None:
    """Refuse a key that repeats the context and says another one than `contexts`: with and without RoPE scaling."""
    for key in _CONTEXT_REPEATED:
        said = keys.whole(key, contexts[0])
        if said not in contexts:
            raise keys.error(
                f"{key} is {said:,}, but the model's context is {contexts[0]:,}; correct the one that is wrong, "
                f"or remove {key}"
            )


def _activation(keys: Keys, key: str, default: str) -> Activation:
    name = keys.text(key, default)
    if name not in _ACTIVATIONS:
        raise keys.error(f"{key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}; Tokenwright lacks it")
    return _ACTIVATIONS[name]


def _dtype(keys: Keys) -> DType:
    """The dtype that the config declares; the dtypes in the weight files override it."""
    name = str(keys.raw("dtype") or keys.raw("torch_dtype") or "").removeprefix("torch.")
    return next((known for known in ("float32", "bfloat16", "float16") if known == name), "float32")


def _size_of_head(keys: Keys, width: int, heads: int) -> int:
    if width % heads:
        raise keys.error(
            f"a width of {width} cannot be divided into {heads} heads; correct config.json (or give head_dim)"
        )
    return width // heads


def _parse_gpt2(keys: Keys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers = keys.whole("n_layer", most=_MOST_LAYERS)
    width = keys.whole("n_embd", most=1 << 20)
    heads = keys.whole("n_head", most=1 << 16)
    context = keys.whole("n_positions", most=MAX_TOKENS)
    _check_repeats(keys, context)
    config = ModelConfig(
        family="gpt2",
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=_size_of_head(keys, width, heads),
        mlp_width=keys.whole("n_inner", 4 * width, most=1 << 24),
        vocab_size=keys.whole("vocab_size", most=_MOST_VOCAB),
        context=context,
        positions=Learned(),
        windows=(None,) * layers,
        rotary=(False,) * layers,
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=_activation(keys, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=_dtype(keys),
    )
    return config, pre_norm(config)


def _parse_llama(keys: Keys, architecture: str) -> tuple[ModelConfig, Graph]:
    like = _LLAMA_LIKE[architecture]
    layers = keys.whole("num_hidden_layers", most=_MOST_LAYERS)
    width = keys.whole("hidden_size", most=1 << 20)
    heads, kv_heads = _heads(keys)
    head_size = keys.whole("head_dim", like.head_size or 0, least=0, most=1 << 16) or _size_of_head(keys, width, heads)
    context = keys.whole("max_position_embeddings", most=MAX_TOKENS)
    rope, reach = read_rope(keys, like.theta, head_size, context)
    _check_repeats(keys, context, reach)
    rotary = read_rotary(keys, layers) if like.nope else (True,) * layers
    qkv_bias, out_bias = _biases(keys, like)
    config = ModelConfig(
        family="llama",
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=keys.whole("intermediate_size", most=1 << 24),
        vocab_size=keys.whole("vocab_size", most=_MOST_VOCAB),
        context=reach,
        positions=rope,
        windows=read_windows(keys, like.slides, rotary),
        rotary=rotary,
        norm="rms",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=_activation(keys, "hidden_act", "silu"),
        gated=True,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=_optional(keys, "mlp_bias", like.mlp_bias, "biases in the MLP"),
        qk_norm=like.qk_norm,
        tied_head=keys.flag("tie_word_embeddings", like.tied),
        dtype=_dtype(keys),
    )
    return config, pre_norm(config)


def _heads(keys: Keys) -> tuple[int, int]:
    heads = keys.whole("num_attention_heads", most=1 << 16)
    kv_heads = keys.whole("num_key_value_heads", heads, most=1 << 16)
    if heads % kv_heads:
        raise keys.error(f"{heads} query heads cannot share {kv_heads} key-value heads evenly; correct config.json")
    return heads, kv_heads


def _optional(keys: Keys, key: str, offered: bool, why: str) -> bool:
    """A flag that only some architectures of the family have."""
    if offered:
        return keys.flag(key, False)
    keys.only(key, False, why=f"{why} in this architecture")
    return False


def _biases(keys: Keys, like: LlamaLike) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether o has one."""
    if like.biases == "qkv":
        keys.only("attention_bias", True, why="Qwen2's attention without its biases")
        return True, False
    both = _optional(keys, "attention_bias", like.biases == "config", "biases of attention")
    return both, both


def _named(pairs: Mapping[str, str | Source]) -> dict[str, Source]:
    return {ours: Source(at) if isinstance(at, str) else at for ours, at in pairs.items()}


GPT2 = Family(
    architectures={"GPT2LMHeadModel": "gpt2"},
    parse=_parse_gpt2,
    prefix="transformer.",
    names=_named(
        {
            "embed": "wte",
            "positions": "wpe",
            "norm": "ln_f",
            "head": "lm_head",
            "layers.{i}.attention_norm": "h.{i}.ln_1",
            "layers.{i}.attention.q": Source("h.{i}.attn.c_attn", transpose=True, part=0),
            "layers.{i}.attention.k": Source("h.{i}.attn.c_attn", transpose=True, part=1),
            "layers.{i}.attention.v": Source("h.{i}.attn.c_attn", transpose=True, part=2),
            "layers.{i}.attention.o": Source("h.{i}.attn.c_proj", transpose=True),
            "layers.{i}.mlp_norm": "h.{i}.ln_2",
            "layers.{i}.mlp.up": Source("h.{i}.mlp.c_fc", transpose=True),
            "layers.{i}.mlp.down": Source("h.{i}.mlp.c_proj", transpose=True),
        }
    ),
    inert=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
)

LLAMA = Family(
    architectures={
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "SmolLM3ForCausalLM": "smollm3",
    },
    parse=_parse_llama,
    prefix="model.",
    names=_named(
        {
            "embed": "embed_tokens",
            "norm": "norm",
            "head": "lm_head",
            "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
            "layers.{i}.attention.q": "layers.{i}.self_attn.q_proj",
            "layers.{i}.attention.k": "layers.{i}.self_attn.k_proj",
            "layers.{i}.attention.v": "layers.{i}.self_attn.v_proj",
            "layers.{i}.attention.o": "layers.{i}.self_attn.o_proj",
            "layers.{i}.attention.q_norm": "layers.{i}.self_attn.q_norm",
            "layers.{i}.attention.k_norm": "layers.{i}.self_attn.k_norm",
            "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_proj",
            "layers.{i}.mlp.up": "layers.{i}.mlp.up_proj",
            "layers.{i}.mlp.down": "layers.{i}.mlp.down_proj",
        }
    ),
    inert=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)

FAMILIES = (GPT2, LLAMA)
