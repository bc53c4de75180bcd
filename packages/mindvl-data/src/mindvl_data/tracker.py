# SPDX-License-Identifier: Apache-2.0
"""The ledger state: where the plan stands, and the identities of everything it depends on.

Saved with checkpoints. Restoring refuses a mismatch by name; changed data can be accepted by a person, changed rules
never. The state does not depend on the number of ranks.
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
ORDER_VERSION = 6  # of the data order; raised when the same configuration would give another order
_VERSION_NAME = "order version"  # in the identities
_INDEX, _SETTINGS = "index of ", "settings of "  # of a source, in names of identities
_HASHED = ("tokenizer", "chat template", "encoding of text", "image and video processor")

Change = dict[str, Any]  # step, who, when, sources: name -> [old, new] identity, None where there is none
Difference = tuple[str | None, str | None]


def identities(
    config: DataConfig, sources: Sequence[SourceIndex], tokenizer: Tokenizer, global_batch_size: int
) -> dict[str, str]:
    """Name -> value or hash of everything that decides the plan. Directories may move; speed settings may change."""
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
        "chat template": _digest(str(tokenizer.hf.chat_template)),
        "encoding of text": tokenizer.identity[:16],  # the two above and the rules of this package
        "image and video processor": _digest([dataclasses.asdict(config.image), dataclasses.asdict(config.video)]),
        **{f"settings of {source.name}": _settings(source) for source in config.sources},
        **{
            f"index of {source.name}": _index_identity(source, opened)
            for source, opened in zip(config.sources, sources, strict=True)
        },
    }


def seal_state(
    order_state: dict[str, Any], names: dict[str, str], *, sources: Sequence[str], changes: Sequence[Change] = ()
) -> dict[str, Any]:
    """The plan's state with version, identities, accepted changes and checksum.

    Args:
        sources: Names in the order of the configuration: the plan's state counts them.
    """
    body = {
        "version": STATE_VERSION,
        "identities": names,
        "sources": list(sources),
        "changes": list(changes),
        "order": order_state | {"buffer": pack_samples(order_state["buffer"])},
    }
    return {**body, "checksum": _digest(body)}


@dataclass(frozen=True, kw_only=True)
class OpenedState:
    """A state that may be gone on from."""

    order: dict[str, Any]  # for the sources of this run
    changes: list[Change]  # accepted by earlier restarts
    changed: dict[str, Difference]  # source -> old and new identity of its data; empty when nothing changed

    @property
    def other_data(self) -> frozenset[str]:
        """Sources of this run that had other samples before, so that their positions mean nothing any more."""
        return frozenset(n for n, pair in self.changed.items() if None not in pair and not _raises_max_epochs(*pair))


def open_state(
    state: dict[str, Any], names: dict[str, str], *, sources: Sequence[str], accept_change: str | None = None
) -> OpenedState:
    """Check a sealed state against this run.

    Args:
        names: The identities of this run.
        sources: The names of its sources, in order.
        accept_change: Who accepts that the index of a source changed, or that a source came or went; None: nobody.

    Raises:
        DataError: Other version, damaged, or made with another recipe, index, tokenizer or processor.
    """
    check_state(state)
    different = differences(state["identities"], names)
    changed = changed_data(different)
    rules = {name: pair for name, pair in different.items() if not _is_about(name, pair, changed)}
    if _VERSION_NAME in rules:
        raise DataError(
            f"checkpoint: its data order was decided by version {rules[_VERSION_NAME][0]} of the order, this "
            f"mindvl-data decides by version {ORDER_VERSION}, so other samples would follow. Resume with the "
            "mindvl-data that wrote the checkpoint, or start a new run from its weights."
        )
    orders = [
        [name for name in one if name in other]
        for one, other in ((state["sources"], sources), (sources, state["sources"]))
    ]
    if orders[0] != orders[1]:
        rules["order of sources"] = (" ".join(orders[0]), " ".join(orders[1]))
    if rules or (changed and accept_change is None):
        raise DataError(_refusal(rules, different, may_accept=not rules))
    order = saved_order(state)
    if state["sources"] != list(sources):
        order = _renumbered(order, state["sources"], sources)
    if any(not _raises_max_epochs(*pair) for pair in changed.values()):
        order = order | {"derived": None}  # other data ask for other figures
    return OpenedState(order=order, changes=state["changes"], changed=changed)


def check_state(state: Any) -> None:
    """Whether this is a whole ledger state of this version, whatever run it is of.

    Raises:
        DataError: It is not.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        version = f"version {state.get('version')!r:.40}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise DataError(
            f"checkpoint: the ledger state has {version}, and this mindvl-data reads version {STATE_VERSION}. Resume with "
            "the mindvl-data that wrote the checkpoint, or start a new run from its weights."
        )
    body = {key: value for key, value in state.items() if key != "checksum"}
    if _digest(body) != state.get("checksum"):
        raise DataError(
            "checkpoint: the ledger state is damaged, its checksum is wrong. Resume from an older checkpoint."
        )
    try:
        names, sources = state["identities"], state["sources"]
        if type(names) is not dict or any(type(value) is not str for value in names.values()):
            raise TypeError("identities are no names with values")
        if type(sources) is not list or any(type(name) is not str for name in sources):
            raise TypeError("sources are no names")
        for change in state["changes"]:
            check_change(change)
        check_order(state["order"] | {"buffer": unpack_samples(state["order"]["buffer"])}, num_sources=len(sources))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"checkpoint: the ledger state is damaged ({type(error).__name__}: {error}). Resume from an older checkpoint."
        ) from error


def saved_order(state: dict[str, Any]) -> dict[str, Any]:
    """The plan's state out of a sealed one."""
    order: dict[str, Any] = state["order"]
    return order | {"buffer": unpack_samples(order["buffer"])}


def differences(saved: dict[str, str], names: dict[str, str]) -> dict[str, Difference]:
    """Name -> (old, new) of every identity that differs; None where one side has none."""
    found = {
        name: (saved.get(name), names.get(name))
        for name in [*saved, *(name for name in names if name not in saved)]
        if saved.get(name) != names.get(name)
    }
    if {"tokenizer", "chat template"} & found.keys():
        found.pop("encoding of text", None)  # follows from them
    return found


def changed_data(different: dict[str, Difference]) -> dict[str, Difference]:
    """Source -> (old, new) identity, of the sources whose data changed, that came or went, or may be used more often.

    Only these can be accepted. Everything else (recipe, weights, tokenizer, template, processor, version of the plan)
    decides what a sample or a step is: a run that changes it is another run, which starts from weights alone. A source
    whose max_epochs was raised goes on where it stands; its pair is (old, new) settings.
    """
    raised = {n.removeprefix(_SETTINGS): p for n, p in different.items() if _raises_max_epochs(*p)}
    return raised | {n.removeprefix(_INDEX): p for n, p in different.items() if n.startswith(_INDEX)}


def _is_about(name: str, pair: Difference, changed: dict[str, Difference]) -> bool:
    """Whether a difference is one of data: an index, settings of a source that came or went, a raised max_epochs."""
    if name.startswith(_SETTINGS):
        return _raises_max_epochs(*pair) or None in changed.get(name.removeprefix(_SETTINGS), ())
    return name.startswith(_INDEX)


def _raises_max_epochs(old: str | None, new: str | None) -> bool:
    """Whether two settings of a source differ in nothing but a larger max_epochs, or one that was removed."""
    if old is None or new is None:
        return False
    before, after = ([part for part in text.split() if not part.startswith("max_epochs=")] for text in (old, new))
    caps = [next((int(n) for n in re.findall(r"max_epochs=(\d{1,18})(?!\S)", text)), None) for text in (old, new)]
    return before == after and caps[0] is not None and (caps[1] is None or caps[1] > caps[0])


def _renumbered(order: dict[str, Any], before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """The plan's state with its sources counted as `after` does: new ones at their start, those gone without a trace.

    What waited of a source that went is counted as dropped, like the data_order does with changed data.
    """
    place = {name: number for number, name in enumerate(before)}
    number_now = {place[name]: number for number, name in enumerate(after) if name in place}
    gone = Counter(before[source] for source, *_ in order["buffer"] if source not in number_now)
    owed = [order["owed"][place[name]] if name in place else 0.0 for name in after]
    excess = math.fsum(owed) / len(owed)  # what those that went had owed to them or owed to others
    return order | {
        "drawn_at": [order["drawn_at"][place[name]] if name in place else [0, 0] for name in after],
        "owed": [value - excess for value in owed],
        "buffer": [[number_now[source], *rest] for source, *rest in order["buffer"] if source in number_now],
        "window": [] if gone else order["window"],  # its packs have gaps: what is left of it is packed anew
        "drawn": {name: count - gone[name] for name, count in order["drawn"].items()},
        "dropped": order["dropped"] | {f"{name}: data changed": count for name, count in gone.items()},
    }


def _refusal(rules: dict[str, Difference], different: dict[str, Difference], *, may_accept: bool) -> str:
    what = ", ".join(_shown(name, *pair) for name, pair in (rules or different).items())
    accept = ", accept the changed data (--accept-data-change)" if may_accept else ""
    return (
        f"{what} changed since the checkpoint was written. data. Restore what changed{accept}, or start the data anew."
    )


def _shown(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return f"{name} ({'new' if old is None else 'gone'})"
    is_hash = name in _HASHED or name.startswith("index of ")
    return name if is_hash else f"{name} ({old} -> {new})"


def _settings(source: SourceConfig) -> str:
    named = {name: getattr(source, name) for name in ("weight", "max_epochs", "min_pixels", "max_pixels")}
    return " ".join(f"{name}={value}" for name, value in named.items() if value is not None)


def _index_identity(source: SourceConfig, opened: SourceIndex) -> str:
    """Which samples the source has: its index, and the part of it that is used."""
    parts = {"first": source.first, "fraction": source.fraction}
    used = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{opened.index.identity[:16]} {used}".rstrip()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode("utf-8", "replace")).hexdigest()[:16]
