# SPDX-License-Identifier: Apache-2.0
"""Normalize config.json: versions of transformers write the configuration of one model differently.

Comes before differences.py compares: a model as published and the same model saved again by another version of
transformers must not differ.
"""

from collections.abc import Mapping
from typing import Any

_RENAMED = {"num_local_experts": "num_experts", "in_chans": "in_channels"}
_ABSENT_MEANS: dict[str, Any] = {  # default values: a key with this value may be absent
    "add_cross_attention": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "in_channels": 3,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleave": True,
    "tie_encoder_decoder": False,
    "tokens_per_second": 4,
}
_OF_SLIDING_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
_USUAL_ROTARY = {"default", "mrope", "axial"}  # kinds implied by the model type
_VISION_ROTARY = {"rope_theta": 10_000.0}
_TEXT, _TIED = "text_config", "tie_word_embeddings"


def same_sections(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configurations with the keys of the language model at the same level; published ones have no section for it."""
    one, two = _with_tied_once(first), _with_tied_once(other)
    have = [isinstance(document.get(_TEXT), dict) for document in (one, two)]
    if have[0] == have[1]:
        return _without_copies(one), _without_copies(two)
    return (_lifted(one), two) if have[0] else (one, _lifted(two))


def language_section(document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the language model alone, whether it is stored inside of a multimodal model or by itself.

    Left out: the sizes of the vocabulary, whose rows are matched by token, and the sections of rotary embedding that name
    axes of images; text has the same position on every axis.
    """
    text = document.get(_TEXT)
    found = _lifted(dict(document)) if isinstance(text, dict) else dict(document)
    found = one_spelling(found, "")
    rotary = found.get("rope_parameters")
    if isinstance(rotary, dict):
        found["rope_parameters"] = {
            key: value for key, value in rotary.items() if key not in ("mrope_section", "mrope_interleaved")
        }
    return {
        key: value
        for key, value in found.items()
        if key not in ("model_type", "vocab_size", _TIED)
        and not key.endswith(("_token_id", "_token_index"))
        and (key == "rope_parameters" or not isinstance(value, dict))
    }


def one_spelling(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of config.json without null, derived, renamed and ineffective keys.

    Args:
        name: Key of the section; empty for the whole document.
    """
    found = {key: value for key, value in _with_one_rotary(section, name).items() if value is not None}
    for old, new in _RENAMED.items():
        if old in found:
            value = found.pop(old)
            found.setdefault(new, value)
    if found.get("use_sliding_window") is False:
        found = {key: value for key, value in found.items() if key not in _OF_SLIDING_WINDOWS}
    derived = _ABSENT_MEANS | _derived(found)
    kept = {key: value for key, value in found.items() if key not in derived or value != derived[key]}
    if name and isinstance(kept.get("model_type"), str):  # transformers 4 has no suffix everywhere
        kept["model_type"] = kept["model_type"].removesuffix("_text").removesuffix("_vision")
    return {key: value for key, value in kept.items() if not (key == "layer_types" and _all_full(value))}


def _derived(section: Mapping[str, Any]) -> dict[str, Any]:
    """Values derived from other keys, which newer versions write."""
    nope, rope = section.get("qk_nope_head_dim"), section.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int):
        return {"qk_head_dim": nope + rope, "head_dim": rope}
    size, heads = section.get("hidden_size"), section.get("num_attention_heads")
    if isinstance(size, int) and isinstance(heads, int) and heads > 0 and size % heads == 0:
        return {"head_dim": size // heads}
    return {}


def _with_tied_once(document: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both keys of tied embeddings; transformers accepts either."""
    found, text = dict(document), document.get(_TEXT)
    if isinstance(text, dict) and isinstance(text.get(_TIED), bool):
        found[_TIED] = bool(text[_TIED] or found.get(_TIED))
        found[_TEXT] = {key: value for key, value in text.items() if key != _TIED}
    return found


def _without_copies(document: dict[str, Any]) -> dict[str, Any]:
    """Remove keys of the language model that some versions wrote at both levels."""
    text = document.get(_TEXT)
    if not isinstance(text, dict):
        return document
    top, text = one_spelling(document, ""), one_spelling(text, _TEXT)
    return {key: value for key, value in top.items() if key not in text or text[key] != value}


def _lifted(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the keys of the language model at the top level, except for name clashes."""
    top = {key: value for key, value in document.items() if key != _TEXT}
    text = one_spelling(document[_TEXT], _TEXT)
    clashing = {key: value for key, value in text.items() if key in top and top[key] != value}
    lifted = top | {key: value for key, value in document[_TEXT].items() if key not in top}
    return lifted | ({_TEXT: clashing} if clashing else {})


def _all_full(layer_types: Any) -> bool:
    return isinstance(layer_types, list) and all(one == "full_attention" for one in layer_types)


def _with_one_rotary(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Rotary embedding under one key: transformers 4 has rope_theta beside rope_scaling, 5 has rope_parameters."""
    spelled = [section.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(one, dict) for one in spelled):
        return dict(section)
    rotary = {"rope_theta": section.get("rope_theta"), **spelled[0], **spelled[1]}
    kinds = {str(rotary.pop(key, "default")) for key in ("type", "rope_type")} - _USUAL_ROTARY
    if kinds:
        rotary["rope_type"] = " and ".join(sorted(kinds))
    rest = {
        key: value for key, value in section.items() if key not in ("rope_scaling", "rope_parameters", "rope_theta")
    }
    rotary = {key: value for key, value in rotary.items() if value is not None}
    if not rotary or (name == "vision_config" and rotary == _VISION_ROTARY):
        return rest
    return rest | {"rope_parameters": rotary}
