# SPDX-License-Identifier: Apache-2.0
"""Directories of tokenizers: read without transformers to exactly what transformers makes of them, or not at all."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from mindvl_data import load_tokenizer
from mindvl_data.tokenization import Tokenizer, wrap_tokenizer
from mindvl_data.tokenizer_directory import read_parts

MESSAGES = [
    {"role": "user", "content": "<b>2+2?</b> caf\u00e9"},
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sum> \u00e9", "parameters": {}}}]
TEXTS = ["it's 1234  \n\n blanks ", "\u4e2d\u6587 e\u0301", "<|im_end|><|image_pad|>x", "A<think>b"]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'robot' %}{{ raise_exception('no') }}{% endif %}{% generation %}{{ m | tojson(indent=1) }}"
    "{% endgeneration %}{{ eos_token }}{% endfor %}{{ strftime_now('%Y') }}{{ image_token }}{{ add_generation_prompt }}"
)
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
Change = Callable[[Path], None]


def qwen_tokenizer(directory: Path) -> Any:
    """Qwen2Tokenizer with one merge, whose saved files are made to differ from it as the published ones do."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    hf = Qwen2Tokenizer(vocab=letters | {"it": 256}, merges=[("i", "t")], extra_special_tokens=SPECIAL_TOKENS)
    hf.add_tokens(["<think>", "   "])
    hf.chat_template = TEMPLATE
    return hf


def plain_tokenizer(directory: Path) -> Any:
    """A tokenizer whose class uses tokenizer.json as it is."""
    hf = AutoTokenizer.from_pretrained(directory)
    hf.chat_template = TEMPLATE
    return hf


def edit(name: str, **changes: Any) -> Change:
    """Set keys of a JSON file; None removes a key."""

    def change(directory: Path) -> None:
        path = directory / name
        document = json.loads(path.read_text()) if path.exists() else {}
        document |= changes
        path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))

    return change


def list_added_tokens(directory: Path) -> None:
    """Write the added tokens into tokenizer_config.json too, as transformers 4 does."""
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added}
    edit("tokenizer_config.json", added_tokens_decoder=decoder)(directory)


def begin_with_bos(directory: Path) -> None:
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    number = next(token["id"] for token in document["added_tokens"] if token["content"] == "<|im_start|>")
    processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", number)])
    document["post_processor"] = json.loads(processor.__getstate__())
    path.write_text(json.dumps(document))
    edit("tokenizer_config.json", bos_token="<|im_start|>")(directory)


def keep_published_pipeline(directory: Path) -> None:
    """Qwen publishes tokenizer.json with other offsets than Qwen2Tokenizer sets."""
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document["decoder"] = document["post_processor"] = document["pre_tokenizer"]["pretokenizers"][1] = byte_level
    path.write_text(json.dumps(document))


def move_template(directory: Path) -> None:
    source = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": source}, {"name": "tool_use", "template": f"tools {source}"}]
    edit("tokenizer_config.json", chat_template=named)(directory)


def null_roles(directory: Path) -> None:
    """A role of null is no role, also where the class has a default."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": None, "bos_token": None}))


CONFIG = "tokenizer_config.json"
READ: dict[str, Change] = {
    "as saved": lambda directory: None,
    "added tokens twice": list_added_tokens,
    "bos": begin_with_bos,
    "add_bos_token without effect": edit(CONFIG, add_bos_token=True, bos_token="<|im_start|>"),
    "templates by name": move_template,
    "token with flags": edit(CONFIG, eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True}),
    "a role of its own": edit(CONFIG, image_token="<|image_pad|>"),
    "roles of null": null_roles,
    "older key": edit(CONFIG, extra_special_tokens=None, additional_special_tokens=["<|im_start|>"]),
    "model directory": edit("config.json", model_type="mindvl", auto_map={"AutoConfig": "configuration.MindVL"}),
    "qwen3 directory": edit("config.json", model_type="qwen3"),
    "qwen2_5_vl directory": edit("config.json", model_type="qwen2_5_vl", vision_config={}, text_config={}),
    "deepseek_v3 directory": edit("config.json", model_type="deepseek_v3"),
    "qwen3_moe directory": edit("config.json", model_type="qwen3_moe"),
    "old class name": edit(CONFIG, tokenizer_class="PreTrainedTokenizerFast"),
    "old Qwen class name": edit(CONFIG, tokenizer_class="Qwen2TokenizerFast"),
    "Llama class with byte-level files": edit(CONFIG, tokenizer_class="LlamaTokenizerFast"),
    "prefix space": edit(CONFIG, add_prefix_space=False),
}
LEFT: dict[str, Change] = {
    "another class": edit(CONFIG, tokenizer_class="GPT2Tokenizer"),
    "another model": edit("config.json", model_type="qwen2"),
    "a token that is not there yet": edit(CONFIG, extra_special_tokens=["<|new|>"]),
    "a role that is not there yet": edit(CONFIG, bos_token="<|first|>"),
    "an unknown key": edit(CONFIG, fix_mistral_regex=True),
    "padding": edit("tokenizer.json", padding={"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of":
                    None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}),
    "an older file of special tokens": edit("special_tokens_map.json", eos_token="<|endoftext|>"),
    "special tokens split": edit(CONFIG, split_special_tokens=True),
    "other added tokens": edit(CONFIG, added_tokens_decoder={"7": {"content": "x", "special": False}}),
}  # fmt: skip


def everything(tokenizer: Tokenizer) -> dict[str, Any]:
    render = tokenizer.template.render
    return {
        "identity": tokenizer.identity,
        "ids": (tokenizer.pad_id, tokenizer.end_id, tokenizer.vision_start_id, tokenizer.video_pad_id),
        "vocab_size": tokenizer.vocab_size,
        "special_ids": tokenizer.special_ids,
        "start_token": tokenizer.template.start_token,
        "encoded": [tokenizer.backend.encode(text).ids for text in TEXTS],
        "decoded": [tokenizer.backend.decode(tokenizer.backend.encode(text).ids) for text in TEXTS],
        "rendered": [render(MESSAGES, asks, tools) for asks in (False, True) for tools in ((), TOOLS)],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [(plain_tokenizer, name) for name in READ if name != "old Qwen class name"]
    + [(qwen_tokenizer, name) for name in READ],
)
def test_a_directory_is_read_to_what_transformers_loads(
    make: Callable[[Path], Any], name: str, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tokenizer_directory).save_pretrained(tmp_path)
    if make is qwen_tokenizer:
        keep_published_pipeline(tmp_path)
    READ[name](tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    expected = everything(wrap_tokenizer(hf))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("loaded by transformers"))
    tokenizer = load_tokenizer(tmp_path)
    assert everything(tokenizer) == expected
    for asks in (False, True):
        text = hf.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=asks)
        assert tokenizer.template.render(MESSAGES, asks, TOOLS) == text
    assert tokenizer.vocab_size == len(hf)


@pytest.mark.parametrize("make", [plain_tokenizer, qwen_tokenizer])
@pytest.mark.parametrize("name", LEFT)
def test_other_directories_are_left_to_transformers(
    make: Callable[[Path], Any], name: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    make(tokenizer_directory).save_pretrained(tmp_path)
    LEFT[name](tmp_path)
    assert read_parts(tmp_path) is None
    hf = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert load_tokenizer(tmp_path).identity == wrap_tokenizer(hf).identity


def test_a_qwen_tokenizer_with_flags_of_its_own_is_left_to_transformers(tmp_path: Path) -> None:
    qwen_tokenizer(tmp_path).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"][0]["lstrip"] = True  # Qwen2Tokenizer resets it
    path.write_text(json.dumps(document))
    assert read_parts(tmp_path) is None


def test_a_llama_tokenizer_of_word_pieces_is_left_to_transformers(tmp_path: Path) -> None:
    LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[]).save_pretrained(tmp_path)
    assert read_parts(tmp_path) is None


def test_a_tokenizer_is_loaded_without_importing_transformers(tokenizer_directory: Path) -> None:
    program = f"import sys; from mindvl_data import load_tokenizer; load_tokenizer({str(tokenizer_directory)!r}); "
    program += "print([name for name in ('transformers', 'huggingface_hub', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
