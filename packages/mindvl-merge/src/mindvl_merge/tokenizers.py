# SPDX-License-Identifier: Apache-2.0
"""Differences between tokenizers and chat templates of two model directories.

Comes beside differences.py, before parents.py decides. Embeddings are averaged row by row, so a token must have the
same id in all parents.
"""

from pathlib import Path
from typing import Any

from .differences import MISSING, Difference, shown
from .errors import DirectoryError
from .files import read_json, regular_file, same_bytes

_FAST, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_SLOW = ("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer.model")
_BESIDE_MODEL = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def tokenizer_differences(first: Path, other: Path) -> list[Difference]:
    """Differences in tokenization, special tokens and chat templates.

    Raises:
        DirectoryError: A file is damaged.
    """
    return [*_ids(first, other), *_settings(first, other), *_templates(first, other)]


def _ids(first: Path, other: Path) -> list[Difference]:
    names = [name for name in (_FAST, *_SLOW) if (first / name).exists() or (other / name).exists()]
    have_fast = [(directory / _FAST).exists() for directory in (first, other)]
    if all(have_fast):
        return [] if same_bytes(first / _FAST, other / _FAST) else _compare_fast(first, other)
    have_any = [any((directory / name).exists() for name in names) for directory in (first, other)]
    if have_any[0] != have_any[1]:
        one, two = ("a tokenizer", MISSING) if have_any[0] else (MISSING, "a tokenizer")
        return [Difference(file=_SETTINGS, key="tokenizer", first=one, other=two, is_refused=False)]
    return [
        Difference(file=name, key=name, first="a file", other="another file", is_refused=True)
        for name in names
        if not same_bytes(first / name, other / name)
    ]


def _compare_fast(first: Path, other: Path) -> list[Difference]:
    documents = [read_json(regular_file(directory, _FAST)) for directory in (first, other)]
    models = [
        _section(document, "model", directory) for document, directory in zip(documents, (first, other), strict=True)
    ]
    added = [_added(document, directory / _FAST) for document, directory in zip(documents, (first, other), strict=True)]
    ids = [
        _vocabulary(model, directory / _FAST) | {content: token.get("id") for content, token in tokens.items()}
        for model, tokens, directory in zip(models, added, (first, other), strict=True)
    ]
    found = _first_entry("token", ids[0], ids[1])
    if found is None:
        flags = [{name: _without_id(token) for name, token in tokens.items()} for tokens in added]
        found = _first_entry("added token", flags[0], flags[1])
    differences = [] if found is None else [found]
    for section in _BESIDE_MODEL:
        one, two = (_without_defaults(document.get(section)) for document in documents)
        if one != two:
            differences.append(_differs(section, *map(shown, _first_place(one, two))))
    rest = [
        _without_defaults({key: value for key, value in model.items() if key not in ("vocab", "merges")})
        for model in models
    ]
    for key in sorted(rest[0].keys() | rest[1].keys()):
        if rest[0].get(key) != rest[1].get(key):
            differences.append(_differs(f"model.{key}", shown(rest[0].get(key)), shown(rest[1].get(key))))
    if _merges(models[0]) != _merges(models[1]):
        differences.append(_differs("model.merges", "its merges", "other merges"))
    return differences


def _first_entry(kind: str, first: dict[str, Any], other: dict[str, Any]) -> Difference | None:
    names = [name for name in first | other if first.get(name) != other.get(name)]
    if not names:
        return None
    name = names[0]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return _differs(f"{kind} {name!r:.60}{more}", shown(first.get(name)), shown(other.get(name)))


def _differs(key: str, first: str, other: str) -> Difference:
    return Difference(file=_FAST, key=key, first=first, other=other, is_refused=True)


def _without_defaults(value: Any) -> Any:
    """A section without default values, and without keys that only affect text offsets."""
    if isinstance(value, list):
        return [_without_defaults(one) for one in value]
    if not isinstance(value, dict):
        return value
    default = {"use_regex": True} if value.get("type") == "ByteLevel" else {}
    return {
        key: _without_defaults(one)
        for key, one in (default | value).items()
        if key != "trim_offsets" and one is not None and one is not False and one != ""
    }


def _first_place(one: Any, two: Any) -> tuple[Any, Any]:
    """The first innermost pair of different values, for the message."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(one, dict) and isinstance(two, dict):
        pairs = [(one.get(key), two.get(key)) for key in sorted(one.keys() | two.keys())]
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        pairs = list(zip(one, two, strict=True))
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    return _first_place(*differing[0]) if differing else (one, two)


def _section(document: dict[str, Any], name: str, directory: Path) -> dict[str, Any]:
    section = document.get(name)
    if not isinstance(section, dict):
        raise DirectoryError(f"{directory / _FAST}: has no section {name}. Copy the file again.")
    return section


def _vocabulary(model: dict[str, Any], path: Path) -> dict[str, Any]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    if isinstance(vocabulary, list) and all(isinstance(one, list) and len(one) == 2 for one in vocabulary):
        return {str(token): (number, score) for number, (token, score) in enumerate(vocabulary)}  # Unigram
    raise DirectoryError(f"{path}: model.vocab is not a vocabulary. Copy the file again.")


def _added(document: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    tokens = document.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens
    ):
        raise DirectoryError(f"{path}: added_tokens is not a list of tokens. Copy the file again.")
    return {token["content"]: token for token in tokens}


def _without_id(token: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in token.items() if key != "id"}


def _merges(model: dict[str, Any]) -> Any:
    """Normalized merges: "a b" of older files, ["a", "b"] of newer ones."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        return merges
    return [" ".join(map(str, pair)) if isinstance(pair, list) else pair for pair in merges]


def _settings(first: Path, other: Path) -> list[Difference]:
    differences = []
    for name in (_SETTINGS, "special_tokens_map.json"):
        one, two = (_read(directory, name) for directory in (first, other))
        for key in sorted(one.keys() | two.keys()):
            if key not in ("chat_template", "added_tokens_decoder") and one.get(key) != two.get(key):
                left, right = shown(one.get(key)), shown(two.get(key))
                differences.append(Difference(file=name, key=key, first=left, other=right, is_refused=False))
    decoders = [_read(directory, _SETTINGS).get("added_tokens_decoder") for directory in (first, other)]
    if all(decoders) and decoders[0] != decoders[1]:  # newer transformers omit it: tokenizer.json has all of it
        left, right = shown(decoders[0]), shown(decoders[1])
        key = "added_tokens_decoder"
        differences.append(Difference(file=_SETTINGS, key=key, first=left, other=right, is_refused=True))
    return differences


def _templates(first: Path, other: Path) -> list[Difference]:
    one, two = _read_templates(first), _read_templates(other)
    return [
        Difference(
            file="chat_template.jinja",
            key="chat_template" if name == "default" else f"chat_template {name!r:.60}",
            first=shown(one.get(name)),
            other=shown(two.get(name)),
            is_refused=bool(one and two),
        )
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name)
    ]


def _read_templates(path: Path) -> dict[str, str]:
    """Templates by name, from every file where transformers stores them; chat_template.jinja has precedence."""
    found: dict[str, str] = {}

    def take(templates: Any) -> None:
        if isinstance(templates, str):
            templates = {"default": templates}
        elif isinstance(templates, list):
            templates = {str(one.get("name")): one.get("template") for one in templates if isinstance(one, dict)}
        if isinstance(templates, dict):
            found.update({str(name): _plain(text) for name, text in templates.items()})

    take(_read(path, _SETTINGS).get("chat_template"))
    take(_read(path, "chat_template.json").get("chat_template"))
    take(
        {file.stem: _text(path, str(file.relative_to(path))) for file in path.glob("additional_chat_templates/*.jinja")}
    )
    if (path / "chat_template.jinja").exists():
        take(_text(path, "chat_template.jinja"))
    return found


def _plain(text: Any) -> str:
    return str(text).removesuffix("\n")  # jinja removes it, too


def _text(path: Path, name: str) -> str:
    return regular_file(path, name).read_text(encoding="utf-8", errors="backslashreplace")


def _read(path: Path, name: str) -> dict[str, Any]:
    return read_json(regular_file(path, name)) if (path / name).exists() else {}
