# SPDX-License-Identifier: Apache-2.0
"""Directory of a tokenizer -> its parts, equal to those that transformers loads, without importing transformers.

Comes before tokenization.py. The import of transformers takes about as long as everything else that a rank imports
without PyTorch. What AutoTokenizer does is known here for the tokenizer classes and models below and for the keys that
they write. Every other directory is loaded by transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

# Classes that use tokenizer.json unchanged, and the class that replaces its normalizer, splitting and decoder.
_UNCHANGED = ("TokenizersBackend", "PreTrainedTokenizerFast")
_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")  # unchanged only if tokenizer.json is byte-level
# In config.json; for other models AutoTokenizer may replace the class that tokenizer_config.json names.
_MODEL_TYPES = (None, "mindvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3", "qwen3_moe", "deepseek_v3")
_KNOWN_KEYS = {
    *("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens"),
    *("backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens", "is_local"),
    *("legacy", "local_files_only", "model_input_names", "model_max_length", "padding_side", "processor_class"),
    *("sp_model_kwargs", "split_special_tokens", "tokenizer_class", "truncation_side", "use_default_system_prompt"),
}
_QWEN_DEFAULTS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True)
class TokenizerParts:
    """What tokenization.py needs of a tokenizer."""

    backend: tokenizers.Tokenizer
    chat_template: Any  # Jinja source, or sources by name
    special_tokens: dict[str, str]  # by role, such as eos_token; passed to the chat template


def parts_of(hf: Any) -> TokenizerParts:
    """The parts of a transformers tokenizer."""
    return TokenizerParts(hf.backend_tokenizer, hf.chat_template, dict(hf.special_tokens_map))


def read_parts(directory: Path) -> TokenizerParts | None:
    """Read the parts from the files; None where only transformers knows what to do, including damaged files."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        model_file = directory / "config.json"
        model = json.loads(model_file.read_text(encoding="utf-8")) if model_file.exists() else {}
        return _parts(directory, config, document, model)
    except Exception:  # damaged files raise many types; transformers then says what is wrong
        return None


def _parts(directory: Path, config: Any, document: Any, model: Any) -> TokenizerParts | None:
    kind = config["tokenizer_class"]
    is_byte_level = "ByteLevel" in json.dumps([document["pre_tokenizer"], document["decoder"]])
    if kind not in (*_UNCHANGED, *_QWEN, *(_LLAMA if is_byte_level else ())):
        return None
    if model.get("model_type") not in _MODEL_TYPES or "model_name" in model:
        return None
    is_qwen = kind in _QWEN
    special = _special_tokens(config, _QWEN_DEFAULTS if is_qwen else {})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = {token["content"]: token for token in document["added_tokens"]}
    if (
        any(key not in _KNOWN_KEYS and not key.endswith("_token") for key in config)
        or config.get("split_special_tokens")
        or document["truncation"] is not None
        or document["padding"] is not None
        or (directory / "additional_chat_templates").exists()
        or special is None
        or not isinstance(extra, list)
        or not _same_added_tokens(directory, config, document["added_tokens"])
        or any(text not in listed for text in (*special.values(), *map(_text, extra)))
    ):
        return None
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    if is_qwen:
        again = (listed[text] for text in (*special.values(), *map(_text, extra)))
        options = {key: value for key, value in document["model"].items() if key not in ("vocab", "merges")}
        has_flags = all(token | _FLAGS == token for token in again)
        if not has_flags or options != _QWEN_MODEL or config.get("add_prefix_space"):
            return None
        _set_qwen_pipeline(backend)
    if any(backend.token_to_id(token["content"]) != token["id"] for token in document["added_tokens"]):
        return None
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return TokenizerParts(backend, _chat_template(directory, config), special)


def _special_tokens(config: dict[str, Any], defaults: dict[str, str]) -> dict[str, str] | None:
    """The text of every key `*_token`; None if one of them is neither a text nor a token."""
    named = {key: _text(value) for key, value in (defaults | config).items() if key.endswith("_token")}
    flags = ("add_bos_token", "add_eos_token")  # without effect beside tokenizer.json
    found = {key: text for key, text in named.items() if text is not None and key not in flags}
    unknown = [key for key, text in named.items() if text is None and config[key] is not None and key not in flags]
    return None if unknown else found


def _text(token: Any) -> str | None:
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        return str(token["content"])
    return token if isinstance(token, str) else None


def _same_added_tokens(directory: Path, config: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether the added tokens of tokenizer_config.json, or of older files beside it, are those of tokenizer.json."""
    ids = [token["id"] for token in added]
    if ids != sorted(ids):
        return False
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        return not any((directory / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    return bool({int(number): token for number, token in decoder.items()} == _by_id(added))


def _by_id(added: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {token["id"]: {key: value for key, value in token.items() if key != "id"} for token in added}


def _set_qwen_pipeline(backend: tokenizers.Tokenizer) -> None:
    """Qwen2Tokenizer replaces these parts, whatever tokenizer.json contains."""
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(_QWEN_SPLIT), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()


def _chat_template(directory: Path, config: dict[str, Any]) -> Any:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
