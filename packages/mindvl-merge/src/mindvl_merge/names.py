# SPDX-License-Identifier: Apache-2.0
"""Match tensor names of model directories that store one architecture under different prefixes.

Comes after headers.py, before sources.py pairs the tensors of all models. transformers renamed the parts of multimodal models
over time: Qwen2.5-VL was published with `visual.*` and `model.layers.*`, and newer versions save `model.visual.*` and
`model.language_model.layers.*`; a language model without vision has `model.layers.*`. The canonical name is the one that the
language model has when it is stored alone.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

PARTS = ("vision", "projector", "language")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_CANONICAL_PREFIXES = (  # the first that matches is replaced
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.vision_model.", "vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_PROJECTOR_PREFIXES = ("visual.merger.", "visual.deepstack_merger_list.", "multi_modal_projector.", "mlp1.")
_VISION_PREFIXES = ("visual.", "vision_tower.", "vision_model.")
_LANGUAGE_PREFIXES = ("model.", "lm_head.")


def canonical_name(name: str) -> str:
    """The name of a tensor without the prefixes that differ between versions of transformers."""
    for prefix, canonical in _CANONICAL_PREFIXES:
        if name.startswith(prefix):
            return canonical + name[len(prefix) :]
    return name


def part_of(name: str) -> str | None:
    """The part of the model that a tensor belongs to, "vision", "projector" or "language"; None if it is none of them."""
    canonical = canonical_name(name)
    if canonical.startswith(_PROJECTOR_PREFIXES):
        return "projector"
    if canonical.startswith(_VISION_PREFIXES):
        return "vision"
    return "language" if canonical.startswith(_LANGUAGE_PREFIXES) else None


def matches(name: str, pattern: str) -> bool:
    """Whether a tensor is selected by the name of a part, by a pattern with `*`, `?` or `[`, or by a prefix."""
    if pattern in PARTS and part_of(name) == pattern:
        return True
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    return name.startswith(pattern)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns selects the tensor."""
    return any(matches(name, pattern) for pattern in patterns)
