# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json for each family of language models: written as by transformers 5, read as published.

Used by the modules that read and write whole directories. LANGUAGE_JSON registers the families.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.hf.config_keys import MAX_EXPERTS, MAX_LAYERS, Keys, unsupported_model
from mindvl_model.language_config import (
    DecoderConfig,
    DeepSeekV3LanguageConfig,
    GroupedQueryConfig,
    LanguageConfig,
    Qwen2LanguageConfig,
    Qwen3LanguageConfig,
    Qwen3MoELanguageConfig,
    YarnConfig,
)

# Between these versions, Qwen2.5-VL of transformers changed the position of the text after a video.
LAST_WITH_ALL_AXES, FIRST_WITH_HEIGHT_WIDTH = "5.2.0", "5.3.0"
LATENT_NORM_EPSILON = 1e-6  # of the norms inside DeepSeek-V3's attention; a constant in the code of transformers


@dataclass(frozen=True)
class LanguageJson:
    """Reader and writer of the keys of one family, whose model_type in config.json equals `kind`."""

    read: Callable[[Keys, Keys], LanguageConfig]  # from the section of the decoder and the top-level section
    write: Callable[[Any], dict[str, Any]]


def read_language(kind: str, text: Keys, root: Keys) -> LanguageConfig:
    """Read the configuration of a language model from a section of config.json.

    Raises:
        WeightError: A key is missing, or its value is invalid or not supported.
    """
    try:
        return LANGUAGE_JSON[kind].read(text, root)
    except WeightError:
        raise
    except ModelError as error:
        raise unsupported_model(error, text.where) from error


def write_language(language: LanguageConfig) -> dict[str, Any]:
    """Return the keys of a language model, without the token ids.

    Raises:
        ModelError: The transformers configuration cannot represent the model.
    """
    return LANGUAGE_JSON[language.kind].write(language)


def _read_qwen2(text: Keys, root: Keys) -> Qwen2LanguageConfig:
    sizes = _grouped(text, root)
    theta, kind, more = _rotary(text, 1_000_000.0)
    _check_no_scaling(text, "default" if kind == "mrope" else kind, more.keys() - {"mrope_section"})
    time, height, width = Keys(more, f"{text.where}: rope_scaling").numbers("mrope_section", None, count=3)
    head_dim = sizes["hidden_size"] // sizes["num_heads"]
    return Qwen2LanguageConfig(
        **sizes,
        head_dim=head_dim,
        rotary_base=theta,
        mrope_sections=(time, height, width),
        after_video=_after_video(root),
    )


def _after_video(root: Keys) -> Literal["height_width", "all_axes"]:
    """The rule of the transformers version that saved the directory; Qwen2.5-VL has no key for it."""
    version = str(root.values.get("transformers_version") or FIRST_WITH_HEIGHT_WIDTH)
    found = re.match(r"(\d{1,9})(?:\.(\d{1,9}))?", version)
    if found is None:
        raise WeightError(
            f"{root.where}: transformers_version={version[:40]!r} is not a version, but the positions after a video "
            "depend on it. Set the version of transformers that saved the directory, such as 4.57.0 or 5.3.0."
        )
    first = tuple(map(int, FIRST_WITH_HEIGHT_WIDTH.split(".")[:2]))
    return "height_width" if (int(found[1]), int(found[2] or 0)) >= first else "all_axes"


def _write_qwen2(language: Qwen2LanguageConfig) -> dict[str, Any]:
    if language.head_dim * language.num_heads != language.hidden_size:
        raise ModelError(
            f"language.head_dim: a Qwen2.5-VL model can only be exported if head_dim={language.head_dim} times num_heads="
            f"{language.num_heads} equals hidden_size={language.hidden_size}. Train with such sizes."
        )
    return _write_grouped(language) | {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_window_layers": language.num_layers,
        "rope_theta": language.rotary_base,
        "rope_scaling": {"type": "mrope", "mrope_section": list(language.mrope_sections)},
        "use_sliding_window": False,
        # config.json has no other key for the position of the text after a video; see `_after_video`
        "transformers_version": LAST_WITH_ALL_AXES if language.after_video == "all_axes" else FIRST_WITH_HEIGHT_WIDTH,
    }


def _read_qwen3(text: Keys, root: Keys) -> Qwen3LanguageConfig:
    return Qwen3LanguageConfig(**_qwen3_sizes(text, root))


def _write_qwen3(language: Qwen3LanguageConfig | Qwen3MoELanguageConfig) -> dict[str, Any]:
    return _write_grouped(language) | {
        "model_type": language.kind,
        "head_dim": language.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": language.rotary_base},
    }


def _read_qwen3_moe(text: Keys, root: Keys) -> Qwen3MoELanguageConfig:
    # Every layer must have experts; these keys would make some layers dense.
    text.only("decoder_sparse_step", 1)
    text.only("mlp_only_layers", [], None)
    # Published directories have num_experts, transformers 5 writes num_local_experts.
    count = text.number("num_experts", text.take("num_local_experts", None), most=MAX_EXPERTS)
    return Qwen3MoELanguageConfig(
        **_qwen3_sizes(text, root),
        num_experts=count,
        experts_per_token=text.number("num_experts_per_tok"),
        expert_ffn_hidden_size=text.number("moe_intermediate_size"),
        normalize_router=text.flag("norm_topk_prob", False),
        aux_loss_weight=text.number("router_aux_loss_coef", 0.001, whole=False, least=0),
    )


def _write_qwen3_moe(language: Qwen3MoELanguageConfig) -> dict[str, Any]:
    return _write_qwen3(language) | {
        "num_experts": language.num_experts,
        "num_experts_per_tok": language.experts_per_token,
        "moe_intermediate_size": language.expert_ffn_hidden_size,
        "norm_topk_prob": language.normalize_router,
        "router_aux_loss_coef": language.aux_loss_weight,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read_deepseek_v3(text: Keys, root: Keys) -> DeepSeekV3LanguageConfig:
    sizes = _decoder(text, root)
    text.only("num_key_value_heads", sizes["num_heads"])
    text.only("rms_norm_eps", LATENT_NORM_EPSILON)
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("norm_topk_prob", True)):
        text.only(name, value)
    text.only("moe_layer_freq", 1)
    text.only("rope_interleave", True)
    theta, kind, more = _rotary(text, 10_000.0)
    yarn = _yarn(text, more, sizes["max_positions"]) if kind == "yarn" else None
    _check_no_scaling(text, "default" if yarn else kind, more)
    nope, rope = text.number("qk_nope_head_dim"), text.number("qk_rope_head_dim")
    text.only("qk_head_dim", nope + rope)  # written by transformers 5, derived from other keys, as is head_dim
    text.only("head_dim", rope)
    return DeepSeekV3LanguageConfig(
        **sizes,
        rotary_base=theta,
        yarn=yarn,
        q_lora_rank=text.number("q_lora_rank"),
        kv_lora_rank=text.number("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=text.number("v_head_dim"),
        num_dense_layers=text.number("first_k_dense_replace", least=0, most=MAX_LAYERS),
        num_experts=text.number("n_routed_experts", most=MAX_EXPERTS),
        experts_per_token=text.number("num_experts_per_tok"),
        expert_ffn_hidden_size=text.number("moe_intermediate_size"),
        num_shared_experts=text.number("n_shared_experts"),
        num_expert_groups=text.number("n_group"),
        groups_per_token=text.number("topk_group"),
        routed_scale=text.number("routed_scaling_factor", whole=False),
        num_mtp_layers=text.number(
            "num_nextn_predict_layers", text.take("num_mtp_layers", 0), least=0, most=MAX_LAYERS
        ),
    )


def _write_deepseek_v3(language: DeepSeekV3LanguageConfig) -> dict[str, Any]:
    required = {"norm_epsilon": LATENT_NORM_EPSILON, "num_shared_experts": max(language.num_shared_experts, 1)}
    for name, value in required.items():
        if getattr(language, name) != value:
            raise ModelError(
                f"language.{name}: a DeepSeek-V3 model can only be exported with {value}, which transformers uses, got "
                f"{getattr(language, name)}. Train with this value."
            )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": language.rotary_base}
    if language.yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": language.yarn.factor,
            "original_max_position_embeddings": language.yarn.original_max_positions,
            "beta_fast": language.yarn.beta_fast,
            "beta_slow": language.yarn.beta_slow,
            "mscale": language.yarn.mscale,
            "mscale_all_dim": language.yarn.mscale_all_dim,
        }
    return _write_decoder(language) | {
        "model_type": language.kind,
        "num_key_value_heads": language.num_heads,
        "q_lora_rank": language.q_lora_rank,
        "kv_lora_rank": language.kv_lora_rank,
        "qk_nope_head_dim": language.nope_head_dim,
        "qk_rope_head_dim": language.rope_head_dim,
        "v_head_dim": language.value_head_dim,
        "first_k_dense_replace": language.num_dense_layers,
        "n_routed_experts": language.num_experts,
        "num_experts_per_tok": language.experts_per_token,
        "moe_intermediate_size": language.expert_ffn_hidden_size,
        "n_shared_experts": language.num_shared_experts,
        "n_group": language.num_expert_groups,
        "topk_group": language.groups_per_token,
        "routed_scaling_factor": language.routed_scale,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": language.num_mtp_layers,
        "rope_interleave": True,
        "rope_parameters": rope,
    }


LANGUAGE_JSON: dict[str, LanguageJson] = {
    "qwen2": LanguageJson(_read_qwen2, _write_qwen2),
    "qwen3": LanguageJson(_read_qwen3, _write_qwen3),
    "qwen3_moe": LanguageJson(_read_qwen3_moe, _write_qwen3_moe),
    "deepseek_v3": LanguageJson(_read_deepseek_v3, _write_deepseek_v3),
}


def _decoder(text: Keys, root: Keys) -> dict[str, Any]:
    tied = [section.flag("tie_word_embeddings", False) for section in (text, root)]  # transformers accepts either
    return {
        "hidden_size": text.number("hidden_size"),
        "num_layers": text.number("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": text.number("num_attention_heads"),
        "ffn_hidden_size": text.number("intermediate_size"),
        "vocab_size": text.number("vocab_size"),
        "tie_embeddings": any(tied),
        "norm_epsilon": text.number("rms_norm_eps", 1e-6, whole=False),
        "max_positions": text.number("max_position_embeddings"),
        "init_std": text.number("initializer_range", 0.02, whole=False, least=0),
    }


def _write_decoder(language: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "max_position_embeddings": language.max_positions,
        "rms_norm_eps": language.norm_epsilon,
        "tie_word_embeddings": language.tie_embeddings,
        "initializer_range": language.init_std or 0.02,
    }


def _grouped(text: Keys, root: Keys) -> dict[str, Any]:
    return _decoder(text, root) | {"num_kv_heads": text.number("num_key_value_heads")}


def _write_grouped(language: GroupedQueryConfig) -> dict[str, Any]:
    return _write_decoder(language) | {"num_key_value_heads": language.num_kv_heads}


def _qwen3_sizes(text: Keys, root: Keys) -> dict[str, Any]:
    sizes = _grouped(text, root)
    theta, kind, more = _rotary(text, 1_000_000.0)
    if "mrope_section" in more:
        raise WeightError(
            f"{text.where}: mrope_section={more['mrope_section']!r:.60} is not supported, because Qwen3 has positions "
            "along one axis. Use another directory."
        )
    _check_no_scaling(text, kind, more)
    return sizes | {"head_dim": text.number("head_dim", 128), "rotary_base": theta}


def _rotary(text: Keys, default: float) -> tuple[float, str, dict[str, Any]]:
    """Base, kind and further parameters of the rotary embedding; older directories have the base at the top level."""
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = text.take(name, None) or {}
        if not isinstance(section, dict):
            raise text.unsupported(name, section, "a JSON object")
        given |= section
    outside = text.number("rope_theta", default, whole=False)
    theta = Keys(given, f"{text.where}: rope_parameters").number("rope_theta", outside, whole=False)
    given.pop("rope_theta", None)
    types = [given.pop(name, None) for name in ("type", "rope_type")]
    kinds = {str(kind) for kind in types if kind is not None} or {"default"}
    if len(kinds) > 1:
        kinds -= {"default"}  # Qwen2.5-VL directories saved by transformers have both mrope and default
    return theta, " and ".join(sorted(kinds)), given


def _check_no_scaling(text: Keys, kind: str, more: Iterable[str]) -> None:
    if kind != "default" or set(more):
        raise WeightError(
            f"{text.where}: rotary embedding of type {kind!r:.40} with {sorted(more)!s:.100} is not supported. "
            "Use a model without it."
        )


def _yarn(text: Keys, given: dict[str, Any], max_positions: int) -> YarnConfig:
    """Remove the YaRN keys from `given` and read them; missing keys have the defaults of transformers."""
    rope = Keys(dict(given), f"{text.where}: rope_scaling")
    rope.only("truncate", True, None)
    rope.only("attention_factor", None)
    original = rope.number("original_max_position_embeddings")
    factor = rope.take("factor", None)
    yarn = YarnConfig(
        factor=max_positions / original if factor is None else rope.number("factor", whole=False),
        original_max_positions=original,
        beta_fast=_number_or_zero(rope, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(rope, "beta_slow") or 1.0,
        mscale=_number_or_zero(rope, "mscale"),
        mscale_all_dim=_number_or_zero(rope, "mscale_all_dim"),
    )
    rope.check_remaining()
    given.clear()
    return yarn


def _number_or_zero(rope: Keys, name: str) -> float:
    """The value of a number that may be null or missing, which means 0."""
    return 0.0 if rope.take(name, None) is None else float(rope.number(name, whole=False, least=0))
