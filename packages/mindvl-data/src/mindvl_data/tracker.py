# SPDX-License-Identifier: Apache-2.0
"""The ledger state: the position in the data order, and the identities of everything the order depends on.

Saved with checkpoints. Restoring refuses every mismatch and names it; a user can accept changed data, but not changed
settings. The state does not depend on the number of ranks.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindvl_data.config import DataConfig, SourceConfig
from mindvl_data.errors import DataError
from mindvl_data.order.sources import SourceIndex
from mindvl_data.state_check import check_change, check_order, pack_samples, unpack_samples
from mindvl_data.tokenization import Tokenizer

STATE_VERSION = 3
ORDER_VERSION = 7  # raised when the same configuration gives another order
_VERSION_NAME = "order version"  # in the identities
_INDEX, _SETTINGS = "index of ", "settings of "  # prefixes of the identities of a source
_HASHED = ("tokenizer", "chat template", "encoding of text", "image and video processor")

Change = dict[str, Any]  # step, who, when, sources: name -> [old, new] identity, None if absent
Difference = tuple[str | None, str | None]


def identities(
    config: DataConfig, sources: Sequence[SourceIndex], tokenizer: Tokenizer, global_batch_size: int
) -> dict[str, str]:
    """Name -> value or hash of everything the data order depends on, without paths and performance settings."""
    rules: dict[str, Any] = {
        _VERSION_NAME: ORDER_VERSION,
        "global_batch_size": global_batch_size,
        "seed": config.seed,
        "weight_unit": config.weight_unit,
        "text_share": config.text_share,
        "shuffle_window": config.shuffle_window,
        **{f"packing.{name}": value for name, value in dataclasses.asdict(config.packing).items()},
    }
    return {
        **{name: str(value) for name, value in rules.items()},
        "tokenizer": _digest(tokenizer.backend.to_str()),
        "chat template": _digest(str(tokenizer.chat_template)),
        "encoding of text": tokenizer.identity[:16],  # the two above and the encoding rules of this package
        "image and video processor": _digest([config.image.settings(), config.video.settings()]),
        **{f"settings of {source.name}": _settings(source) for source in config.sources},
        **{
            f"index of {source.name}": _index_identity(source, opened)
            for source, opened in zip(config.sources, sources, strict=True)
        },
    }


def seal_state(
    order_state: dict[str, Any], current: dict[str, str], *, sources: Sequence[str], changes: Sequence[Change] = ()
) -> dict[str, Any]:
    """Add version, identities, accepted changes and a checksum to the state of the data order.

    Args:
        sources: Names of the sources in the order of the configuration; the state refers to them by index.
    """
    body = {
        "version": STATE_VERSION,
        "identities": current,
        "sources": list(sources),
        "changes": list(changes),
        "order": order_state | {"buffer": pack_samples(order_state["buffer"])},
    }
    return {**body, "checksum": _digest(body)}


@dataclass(frozen=True, kw_only=True)
class OpenedState:
    """A checked state from which this run can resume."""

    order: dict[str, Any]  # state of the data order, for the sources of this run
    changes: list[Change]  # accepted at earlier restarts
    changed: dict[str, Difference]  # source -> old and new identity of its data; empty when nothing changed

    @property
    def other_data(self) -> frozenset[str]:
        """Sources of this run whose samples changed, so that their positions are no longer valid."""
        return frozenset(n for n, pair in self.changed.items() if None not in pair and not _raises_max_epochs(*pair))


def open_state(
    state: dict[str, Any],
    current: dict[str, str],
    *,
    sources: Sequence[str],
    accept_change: str | None = None,
    where: str = "checkpoint",
) -> OpenedState:
    """Check a sealed state against this run.

    Args:
        current: Identities of this run.
        sources: Names of its sources, in order.
        accept_change: User who accepts that the index of a source changed, or that a source was added or removed;
            None: changed data are refused.
        where: Place of the state in messages, such as its file.

    Raises:
        DataError: The state has another version, is damaged, or belongs to another recipe, index, tokenizer or
            processor.
    """
    check_state(state, where)
    different = differences(state["identities"], current)
    changed = changed_data(different)
    rules = {name: pair for name, pair in different.items() if not _is_about(name, pair, changed)}
    if _VERSION_NAME in rules:
        raise DataError(
            f"{where}: its data order has version {rules[_VERSION_NAME][0]}, and this mindvl-data computes version "
            f"{ORDER_VERSION}, which selects other samples. Resume with the mindvl-data that wrote the checkpoint, or "
            "start a new run from its weights."
        )
    orders = [
        [name for name in one if name in other]
        for one, other in ((state["sources"], sources), (sources, state["sources"]))
    ]
    if orders[0] != orders[1]:
        rules["order of sources"] = (" ".join(orders[0]), " ".join(orders[1]))
    if rules or (changed and accept_change is None):
        raise DataError(f"{where}: {_refusal(rules, different, may_accept=not rules)}")
    order = saved_order(state)
    if state["sources"] != list(sources):
        order = _renumbered(order, state["sources"], sources)
    if any(not _raises_max_epochs(*pair) for pair in changed.values()):
        order = order | {"derived": None}  # changed data have other averages
    return OpenedState(order=order, changes=state["changes"], changed=changed)


def check_state(state: Any, where: str = "checkpoint") -> None:
    """Check that a value is a complete ledger state of this version, of any run.

    Args:
        where: Place of the state in messages, such as its file.

    Raises:
        DataError: It is not.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        version = f"version {state.get('version')!r:.40}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise DataError(
            f"{where}: the ledger state has {version}, and this mindvl-data reads version {STATE_VERSION}. Resume with "
            "the mindvl-data that wrote the checkpoint, or start a new run from its weights."
        )
    body = {key: value for key, value in state.items() if key != "checksum"}
    if _digest(body) != state.get("checksum"):
        raise DataError(
            f"{where}: the ledger state is damaged, its checksum is wrong. Resume from an older checkpoint."
        )
    try:
        names, sources = state["identities"], state["sources"]
        if type(names) is not dict or any(type(value) is not str for value in names.values()):
            raise TypeError("identities are not text by name")
        if type(sources) is not list or any(type(name) is not str for name in sources):
            raise TypeError("sources are not names")
        for change in state["changes"]:
            check_change(change)
        check_order(state["order"] | {"buffer": unpack_samples(state["order"]["buffer"])}, num_sources=len(sources))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: the ledger state is damaged ({type(error).__name__}: {error}). Resume from an older checkpoint."
        ) from error


def saved_order(state: dict[str, Any]) -> dict[str, Any]:
    """The state of the data order in a sealed state."""
    order: dict[str, Any] = state["order"]
    return order | {"buffer": unpack_samples(order["buffer"])}


def differences(saved: dict[str, str], current: dict[str, str]) -> dict[str, Difference]:
    """Name -> (old, new) of every identity that differs; None if it is absent."""
    found = {
        name: (saved.get(name), current.get(name))
        for name in [*saved, *(name for name in current if name not in saved)]
        if saved.get(name) != current.get(name)
    }
    if {"tokenizer", "chat template"} & found.keys():
        found.pop("encoding of text", None)  # depends on them
    return found


def changed_data(different: dict[str, Difference]) -> dict[str, Difference]:
    """Source -> (old, new) identity of sources that changed, were added or removed, or have a larger max_epochs.

    Only these changes can be accepted. Everything else (recipe, weights, tokenizer, template, processor, version of the
    order) defines a sample or a step: a run that changes it is a new run, which starts from the weights only. A source
    with a larger max_epochs continues at its position; its pair is (old, new) settings.
    """
    raised = {n.removeprefix(_SETTINGS): p for n, p in different.items() if _raises_max_epochs(*p)}
    return raised | {n.removeprefix(_INDEX): p for n, p in different.items() if n.startswith(_INDEX)}


def _is_about(name: str, pair: Difference, changed: dict[str, Difference]) -> bool:
    """Whether a difference is one of data: an index, an added or removed source, or a larger max_epochs."""
    if name.startswith(_SETTINGS):
        return _raises_max_epochs(*pair) or None in changed.get(name.removeprefix(_SETTINGS), ())
    return name.startswith(_INDEX)


def _raises_max_epochs(old: str | None, new: str | None) -> bool:
    """Whether two settings of a source differ only in a larger or removed max_epochs."""
    if old is None or new is None:
        return False
    before, after = ([part for part in text.split() if not part.startswith("max_epochs=")] for text in (old, new))
    caps = [next((int(n) for n in re.findall(r"max_epochs=(\d{1,18})(?!\S)", text)), None) for text in (old, new)]
    return before == after and caps[0] is not None and (caps[1] is None or caps[1] > caps[0])


def _renumbered(order: dict[str, Any], before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """The state with its sources renumbered as in `after`; new sources are at their start, removed ones are deleted.

    Waiting samples of a removed source are counted as dropped, as DataOrder does for changed data.
    """
    index = {name: number for number, name in enumerate(before)}
    number_now = {index[name]: number for number, name in enumerate(after) if name in index}
    removed = Counter(before[source] for source, *_ in order["buffer"] if source not in number_now)
    owed = [order["owed"][index[name]] if name in index else 0.0 for name in after]
    excess = math.fsum(owed) / len(owed)  # balance of the removed sources, distributed over the others
    return order | {
        "drawn_at": [order["drawn_at"][index[name]] if name in index else [0, 0] for name in after],
        "owed": [value - excess for value in owed],
        "buffer": [[number_now[source], *rest] for source, *rest in order["buffer"] if source in number_now],
        "window": [] if removed else order["window"],  # its packs have gaps: their samples are packed again
        "drawn": {name: count - removed[name] for name, count in order["drawn"].items()},
        "dropped": order["dropped"] | {f"{name}: data changed": count for name, count in removed.items()},
    }


def _refusal(rules: dict[str, Difference], different: dict[str, Difference], *, may_accept: bool) -> str:
    what = ", ".join(dict.fromkeys(_shown(name, *pair) for name, pair in (rules or different).items()))
    accept = ", accept the changed data with --accept-data-change" if may_accept else ""
    return f"{what} changed since it was written. Undo the change{accept}, or start a new run from its weights."


def _shown(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        source = name.removeprefix(_INDEX).removeprefix(_SETTINGS)
        return f"{name if source == name else f'source {source}'} ({'added' if old is None else 'removed'})"
    is_hash = name in _HASHED or name.startswith(_INDEX)
    return name if is_hash else f"{name} ({old} -> {new})"


def _settings(source: SourceConfig) -> str:
    named = {name: getattr(source, name) for name in ("weight", "max_epochs", "min_pixels", "max_pixels")}
    return " ".join(f"{name}={value}" for name, value in named.items() if value is not None)


def _index_identity(source: SourceConfig, opened: SourceIndex) -> str:
    """The samples of a source: its index, and the part of it in use."""
    parts = {"first": source.first, "fraction": source.fraction}
    used = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{opened.index.identity[:16]} {used}".rstrip()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode("utf-8", "replace")).hexdigest()[:16]
