# SPDX-License-Identifier: Apache-2.0
"""Parts of a model from a transformers directory: MindVL, Qwen2.5-VL of any naming generation, a language model alone.

Comes after the model is built. Every tensor of the directory is accounted for: filled a parameter, belongs to a part that
was not asked for, or is refused by name.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import WeightError
from mindvl_model.parameters import PARTS, Part, initialize_parameter, named_tensors, parameter_group
from mindvl_model.weights.directory import WeightDirectory
from mindvl_model.weights.fp8 import SCALE_SUFFIX
from mindvl_model.weights.layout import WHOLE, Block, Rows, Share, blocks
from mindvl_model.weights.names import canonical_name, further_layer, weight_rules
from mindvl_model.weights.rules import WeightRule
from mindvl_ops import OpsError

FLOATING = ("F32", "BF16", "F16")
OF_VOCABULARY = ("language.embedding.word_embeddings.weight", "language.output_layer.weight")  # a row for each token
NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of every tensor of a directory, under the directory's own names, and of the model's parameters."""

    loaded: tuple[str, ...]  # parameters of the model that were filled
    reshaped: tuple[str, ...]  # tensors that took another form: joined, reordered, a kernel made a matrix
    converted: dict[str, int]  # tensors that took another type, such as {"float32 to bfloat16": 12}
    left_out: tuple[str, ...]  # tensors of parts that were not asked for
    spare: tuple[str, ...]  # tensors that the model can do without: a tied head, rotary tables, layers left unbuilt
    fresh_rows: dict[str, int]  # rows at random of a parameter, for tokens that the directory's vocabulary lacks
    bytes_read: int  # of tensors, by this process


@torch.no_grad()
def load_hf_directory(
    model: torch.nn.Module, config: MindVLConfig, path: Path, parts: Iterable[Part] = PARTS, *, seed: int = 0
) -> LoadReport:
    """Fill parts of a model from a transformers directory: MindVL, Qwen2.5-VL or a language model alone.

    The model may be one rank of any layout, in megatron-core's groups: only its own blocks of the tensors are read.

    Args:
        seed: Of the rows for tokens beyond the directory's vocabulary, which start at random.

    Raises:
        WeightError: A tensor is missing, damaged, unknown, or of another shape or type than the model's.
    """
    from mindvl_model.megatron.share import global_name, share_of

    source = DirectorySource(path, config, parts, seed=seed)
    own: dict[str, list[Tensor]] = {}
    for name, parameter in named_tensors(model).items():
        if parameter_group(name) in source.parts:
            own.setdefault(global_name(model, name), []).append(parameter)
    unknown = sorted(set(own) - {rule.param_name for rule in source.rules})
    assert not unknown, f"no rule makes {unknown}"
    for rule in source.rules:
        if rule.param_name in own:
            source.check(rule, own[rule.param_name][0].shape, share_of(model, rule.param_name))
    for rule in source.rules:
        parameters = own.get(rule.param_name, [])
        if parameters:
            tensor = source.read(rule, parameters[0].dtype, share_of(model, rule.param_name))
            for parameter in parameters:
                parameter.copy_(tensor)
    return source.report()


class DirectorySource:
    """Parts of a model in a directory; every tensor of it is accounted for before the first is read."""

    def __init__(self, path: Path, config: MindVLConfig, parts: Iterable[Part] = PARTS, *, seed: int = 0) -> None:
        self.directory, self.parts, self.config, self.seed = WeightDirectory(path), set(parts), config, seed
        self.rules = [rule for rule in weight_rules(config) if parameter_group(rule.param_name) in self.parts]
        self._stored = _stored_names(self.directory)
        _refuse_missing(self.rules, self._stored, path, config)
        _refuse_quantised(self.directory, [self._stored[name] for rule in self.rules for name in rule.hf_names])
        unused = set(self._stored) - {name for rule in self.rules for name in rule.hf_names}
        self._left_out = sorted(name for name in unused if _part(name) not in self.parts)
        self._spare = _spare(self.directory, self._stored, unused - set(self._left_out), config)
        self._loaded: dict[str, None] = {}  # in order; experts may be read one by one
        self._reshaped: dict[str, None] = {}
        self._converted: Counter[str] = Counter()

    def stored_dtypes(self, rule: WeightRule) -> set[str]:
        """The types of the tensors that make a parameter, as they are given out."""
        return {self.directory.stored(self._stored[name]).dtype for name in rule.hf_names}

    def check(self, rule: WeightRule, shape: Sequence[int], share: Share = WHOLE) -> None:
        """Compare shapes, without reading, with what the model has in the parameter's place.

        Raises:
            WeightError: A tensor is of another shape, or cannot be cut for this share of the model.
        """
        taken = self._taken(rule, share)
        tensors = {name: torch.empty(self.directory.shape_of(name, block), device="meta") for name, block in taken}
        made = _join(rule, tensors, self.directory).shape
        if self._fresh_rows(rule):
            made = torch.Size((shape[0], *made[1:]))
        if made != torch.Size(shape):
            raise WeightError(
                f"{self._file_of(rule)}: {rule.hf_names[0]} makes {rule.param_name} of shape {list(made)}, but "
                f"the model has {list(shape)}. Use the configuration that belongs to these weights."
            )

    def read(self, rule: WeightRule, dtype: torch.dtype, share: Share = WHOLE) -> Tensor:
        """A parameter, or the piece of it that a share of the model holds, in the types of the directory.

        Args:
            dtype: What the model has, for the report.

        Raises:
            WeightError: A tensor is damaged.
        """
        tensors = {name: self.directory.read(name, block) for name, block in self._taken(rule, share)}
        tensor = _join(rule, tensors, self.directory)
        self._loaded[rule.param_name] = None
        if all(tensor is not one for one in tensors.values()):
            self._reshaped |= dict.fromkeys(tensors)
        for name, one in tensors.items():
            kinds = ["float8_e4m3fn"] if self.directory.stored(name).scale else []
            kinds += [str(kind).removeprefix("torch.") for kind in (one.dtype, dtype)]
            self._converted.update(f"{before} to {after}" for before, after in pairwise(kinds) if before != after)
        return torch.cat((tensor, self._drawn(rule, share, tensor))) if self._fresh_rows(rule) else tensor

    def _taken(self, rule: WeightRule, share: Share) -> list[tuple[str, Block | Rows | None]]:
        """What of the directory makes a share of a parameter; of a larger vocabulary, the rows that the directory has."""
        if not self._fresh_rows(rule):
            return [(self._stored[name], block) for name, block in blocks(rule, share)]
        return [(self._stored[name], Rows(*self._own_rows(share))) for name in rule.hf_names]

    def _own_rows(self, share: Share) -> tuple[int, int]:
        """First and end of the vocabulary's rows that a tensor-parallel rank holds."""
        size = self.config.language.vocab_size
        return size * share.tp_rank // share.tp_size, size * (share.tp_rank + 1) // share.tp_size

    def _fresh_rows(self, rule: WeightRule) -> int:
        """Tokens of the model that the directory has no rows for; its matrices must agree on how many it has."""
        if rule.param_name not in OF_VOCABULARY:
            return 0
        names = [other.hf_names[0] for other in self.rules if other.param_name in OF_VOCABULARY]
        shapes = [self.directory.stored(self._stored[name]).shape for name in names]
        if any(len(shape) != 2 for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            return 0
        return max(0, self.config.language.vocab_size - shapes[0][0])

    def _drawn(self, rule: WeightRule, share: Share, like: Tensor) -> Tensor:
        """The fresh rows of a share, the same in every layout."""
        count, end = self._fresh_rows(rule), self.config.language.vocab_size
        drawn = like.new_empty((count, *like.shape[1:]))
        initialize_parameter(f"{rule.param_name}.fresh", drawn, self.config, self.seed)
        first, own_end = (max(row - (end - count), 0) for row in self._own_rows(share))
        return drawn[first:own_end]

    def _file_of(self, rule: WeightRule) -> Path:
        """The file of its first tensor, for messages."""
        return self.directory.stored(self._stored[rule.hf_names[0]]).file

    def report(self) -> LoadReport:
        """What was read so far."""
        return LoadReport(
            loaded=tuple(self._loaded),
            reshaped=tuple(self._reshaped),
            converted=dict(self._converted),
            left_out=tuple(self._stored[name] for name in self._left_out),
            spare=self._spare,
            fresh_rows={rule.param_name: count for rule in self.rules if (count := self._fresh_rows(rule))},
            bytes_read=self.directory.bytes_read,
        )


def _stored_names(directory: WeightDirectory) -> dict[str, str]:
    """The directory's own name of each tensor by its canonical name."""
    stored: dict[str, str] = {}
    for name in directory.names():
        canonical = canonical_name(name, directory.model_type)
        if canonical in stored:
            raise WeightError(
                f"{directory.path}: {name!r:.200} and {stored[canonical]!r:.200} are the same tensor of two naming "
                "generations, and it is not clear which of them counts. Save the model again."
            )
        stored[canonical] = name
    return stored


def _refuse_quantised(directory: WeightDirectory, names: Iterable[str]) -> None:
    for name in names:
        tensor = directory.stored(name)
        if tensor.dtype not in FLOATING:
            raise WeightError(
                f"{tensor.file}: tensor {name!r} is stored as {tensor.dtype}, but only {', '.join(FLOATING)} and fp8 "
                f"with factors ({name}{SCALE_SUFFIX}) are read. Name the directory of the weights before quantisation."
            )


def _refuse_missing(rules: list[WeightRule], stored: dict[str, str], path: Path, config: MindVLConfig) -> None:
    missing = [(name, rule.param_name) for rule in rules for name in rule.hf_names if name not in stored]
    if missing:
        more = f" {len(missing)} tensors are missing, such as {_listed([name for name, _ in missing])}."
        to_do = "Name a directory of this family and size, or leave this part out."
        if all(further_layer(name, config.language) for name, _ in missing):
            to_do = (
                "It was saved without multi-token prediction. Take the model from this directory (model.directory), or "
                "give it num_mtp_layers: 0."
            )
        raise WeightError(f"{path}: no tensor {missing[0][0]!r}, which {missing[0][1]} needs.{more} {to_do}")


def _part(canonical: str) -> Part:
    if canonical.startswith("model.visual.merger."):
        return "projector"
    return "vision" if canonical.startswith("model.visual.") else "language"


def _spare(
    directory: WeightDirectory, stored: dict[str, str], unexpected: set[str], config: MindVLConfig
) -> tuple[str, ...]:
    """Those of the unexpected tensors that say nothing new; any other is refused."""
    spare = {name for name in unexpected if name.endswith("rotary_emb.inv_freq")}
    head, embedding = "lm_head.weight", "model.language_model.embed_tokens.weight"
    if head in unexpected and config.language.tie_embeddings:
        if not torch.equal(directory.read(stored[head]), directory.read(stored[embedding])):
            raise WeightError(
                f"{directory.path}: {stored[head]} differs from {stored[embedding]}, but the model has one matrix for "
                "both. Use a configuration with tie_embeddings=False."
            )
        spare.add(head)
    unknown = sorted(stored[name] for name in unexpected - spare if not further_layer(name, config.language))
    if unknown:
        raise WeightError(
            f"{directory.path}: {len(unknown)} tensors have no place in the model, such as {_listed(unknown)}. "
            "Use the configuration that belongs to these weights."
        )
    return tuple(sorted(stored[name] for name in unexpected))


def _join(rule: WeightRule, tensors: dict[str, Tensor], directory: WeightDirectory) -> Tensor:
    try:
        return rule.join(list(tensors.values()))
    except (RuntimeError, ValueError, OpsError, WeightError) as error:
        named = dict(tensors)
        if len(tensors) > NAMES_IN_MESSAGE:  # experts: all are alike but those that are wrong
            (usual, _), *_ = Counter(one.shape for one in tensors.values()).most_common(1)
            named = {name: one for name, one in tensors.items() if one.shape != usual} or named
        shapes = [f"{name} {list(one.shape)}" for name, one in list(named.items())[:NAMES_IN_MESSAGE]]
        if len(named) < len(tensors):
            shapes.append(f"{len(tensors) - len(named)} of shape {list(usual)}")
        file = directory.stored(next(iter(named))).file
        raise WeightError(
            f"{file}: {' and '.join(shapes)} cannot make {rule.param_name} ({error}). "
            "Use the configuration that belongs to these weights."
        ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMES_IN_MESSAGE]) + (" ..." if len(names) > NAMES_IN_MESSAGE else "")
