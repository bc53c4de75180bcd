# SPDX-License-Identifier: Apache-2.0
"""Load parts of a model from a transformers directory: MindVL, Qwen2.5-VL of any naming version, a language model.

Runs after the model is built. Every tensor of the directory is loaded, belongs to a part that is not loaded, or is
known to be redundant; otherwise an error names it.
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
from mindvl_model.weights.names import canonical_name, further_layer, mtp_layers, vision_part, weight_rules
from mindvl_model.weights.rules import WeightRule
from mindvl_model.weights.sharding import WHOLE, Block, Rows, Share, blocks
from mindvl_ops import OpsError

FLOATING = ("F32", "BF16", "F16")
VOCABULARY_WEIGHTS = ("language.embedding.word_embeddings.weight", "language.output_layer.weight")  # [V, H]
NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded: parameters of the model, and tensors under their names in the directory."""

    loaded: tuple[str, ...]  # parameters that were loaded
    reshaped: tuple[str, ...]  # tensors that were concatenated, reordered or reshaped
    converted: dict[str, int]  # number of tensors by conversion of data type, such as {"float32 to bfloat16": 12}
    skipped: tuple[str, ...]  # tensors of parts that were not requested
    redundant: tuple[str, ...]  # tensors that the model does not need: tied head, rotary tables, unused MTP layers
    untrained_rows: dict[str, int]  # by parameter: random rows, of tokens beyond the vocabulary of the directory
    bytes_read: int  # of tensor data, by this process


@torch.no_grad()
def load_hf_directory(
    model: torch.nn.Module, config: MindVLConfig, path: Path, parts: Iterable[Part] = PARTS, *, seed: int = 0
) -> LoadReport:
    """Load parts of a model from a transformers directory: MindVL, Qwen2.5-VL or a language model.

    With model parallelism each rank reads only its blocks of the tensors.

    Args:
        model: The model, or one pipeline stage of it.
        config: Configuration of the whole model.
        path: The directory.
        parts: Parts to load.
        seed: Seed of the embedding rows beyond the vocabulary of the directory, which are initialized randomly.

    Raises:
        WeightError: A tensor is missing, damaged or unknown, or has a shape or data type that does not fit the model.
    """
    from mindvl_model.megatron.share import global_name, share_of

    source = DirectorySource(path, config, parts, seed=seed)
    own: dict[str, list[Tensor]] = {}
    for name, parameter in named_tensors(model).items():
        if parameter_group(name) in source.parts:
            own.setdefault(global_name(model, name), []).append(parameter)
    unknown = sorted(set(own) - {rule.param_name for rule in source.rules})
    assert not unknown, f"no weight rule for {unknown}"
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
    """The tensors of parts of a model in a directory. All names are checked before the first tensor is read.

    Raises:
        WeightError: A tensor is missing, unknown or of an unsupported data type.
    """

    def __init__(self, path: Path, config: MindVLConfig, parts: Iterable[Part] = PARTS, *, seed: int = 0) -> None:
        self.directory, self.parts, self.config, self.seed = WeightDirectory(path), set(parts), config, seed
        self.rules = [rule for rule in weight_rules(config) if parameter_group(rule.param_name) in self.parts]
        self._stored = _stored_names(self.directory)
        _check_complete(self.rules, self._stored, path, config)
        _check_dtypes(self.directory, [self._stored[name] for rule in self.rules for name in rule.hf_names])
        unused = set(self._stored) - {name for rule in self.rules for name in rule.hf_names}
        self._skipped = sorted(name for name in unused if _part(name) not in self.parts)
        self._redundant = _redundant(self.directory, self._stored, unused - set(self._skipped), config)
        self._loaded: dict[str, None] = {}  # ordered set, as experts may be read one at a time
        self._reshaped: dict[str, None] = {}
        self._converted: Counter[str] = Counter()

    def stored_dtypes(self, rule: WeightRule) -> set[str]:
        """Data types of the tensors of a parameter, after dequantization."""
        return {self.directory.stored(self._stored[name]).dtype for name in rule.hf_names}

    def check(self, rule: WeightRule, shape: Sequence[int], share: Share = WHOLE) -> None:
        """Check that the tensors of a parameter give this shape, without reading their data.

        Raises:
            WeightError: They give another shape, or cannot be split for this share of the model.
        """
        blocks = self._blocks(rule, share)
        tensors = {name: torch.empty(self.directory.shape_of(name, block), device="meta") for name, block in blocks}
        found = _join(rule, tensors, self.directory).shape
        if self._num_untrained_rows(rule):
            found = torch.Size((shape[0], *found[1:]))
        if found != torch.Size(shape):
            raise WeightError(
                f"{self._file_of(rule)}: {rule.hf_names[0]} gives {rule.param_name} the shape {list(found)}, but the "
                f"model has {list(shape)}. Use the configuration that belongs to these weights."
            )

    def read(self, rule: WeightRule, dtype: torch.dtype, share: Share = WHOLE) -> Tensor:
        """Read a parameter, or the shard of a rank, in the data type of the directory.

        Args:
            rule: The rule of the parameter.
            dtype: Data type of the parameter in the model, for the report.
            share: Coordinates of the rank.

        Raises:
            WeightError: A tensor is damaged.
        """
        tensors = {name: self.directory.read(name, block) for name, block in self._blocks(rule, share)}
        tensor = _join(rule, tensors, self.directory)
        self._loaded[rule.param_name] = None
        if all(tensor is not one for one in tensors.values()):
            self._reshaped |= dict.fromkeys(tensors)
        for name, one in tensors.items():
            kinds = ["float8_e4m3fn"] if self.directory.stored(name).scale else []
            kinds += [str(kind).removeprefix("torch.") for kind in (one.dtype, dtype)]
            self._converted.update(f"{before} to {after}" for before, after in pairwise(kinds) if before != after)
        return (
            torch.cat((tensor, self._untrained_rows(rule, share, tensor))) if self._num_untrained_rows(rule) else tensor
        )

    def _blocks(self, rule: WeightRule, share: Share) -> list[tuple[str, Block | Rows | None]]:
        """The tensors of a shard with the block to read; with a larger vocabulary, the rows that the directory has."""
        if not self._num_untrained_rows(rule):
            return [(self._stored[name], block) for name, block in blocks(rule, share)]
        return [(self._stored[name], Rows(*self._own_rows(share))) for name in rule.hf_names]

    def _own_rows(self, share: Share) -> tuple[int, int]:
        """Start and end of a tensor-parallel rank's rows of the vocabulary."""
        size = self.config.language.vocab_size
        return size * share.tp_rank // share.tp_size, size * (share.tp_rank + 1) // share.tp_size

    def _num_untrained_rows(self, rule: WeightRule) -> int:
        """Number of rows that the model has and the directory lacks; 0 if its matrices differ in their number of rows."""
        if rule.param_name not in VOCABULARY_WEIGHTS:
            return 0
        names = [other.hf_names[0] for other in self.rules if other.param_name in VOCABULARY_WEIGHTS]
        shapes = [self.directory.stored(self._stored[name]).shape for name in names]
        if any(len(shape) != 2 for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            return 0
        return max(0, self.config.language.vocab_size - shapes[0][0])

    def _untrained_rows(self, rule: WeightRule, share: Share, like: Tensor) -> Tensor:
        """The randomly initialized rows of a shard, the same for every parallel layout."""
        count, end = self._num_untrained_rows(rule), self.config.language.vocab_size
        drawn = like.new_empty((count, *like.shape[1:]))
        initialize_parameter(f"{rule.param_name}.fresh", drawn, self.config, self.seed)
        first, own_end = (max(row - (end - count), 0) for row in self._own_rows(share))
        return drawn[first:own_end]

    def _file_of(self, rule: WeightRule) -> Path:
        """The file of the first tensor of a parameter, for messages."""
        return self.directory.stored(self._stored[rule.hf_names[0]]).file

    def report(self) -> LoadReport:
        """Return the report of everything read so far."""
        return LoadReport(
            loaded=tuple(self._loaded),
            reshaped=tuple(self._reshaped),
            converted=dict(self._converted),
            skipped=tuple(self._stored[name] for name in self._skipped),
            redundant=self._redundant,
            untrained_rows={rule.param_name: count for rule in self.rules if (count := self._num_untrained_rows(rule))},
            bytes_read=self.directory.bytes_read,
        )


def _stored_names(directory: WeightDirectory) -> dict[str, str]:
    """Name of each tensor in the directory, by its canonical name."""
    stored: dict[str, str] = {}
    for name in directory.names():
        canonical = canonical_name(name)
        if canonical in stored:
            raise WeightError(
                f"{directory.path}: {name!r:.200} and {stored[canonical]!r:.200} are two names of the same tensor, so its "
                "value is ambiguous. Save the model again."
            )
        stored[canonical] = name
    return stored


def _check_dtypes(directory: WeightDirectory, names: Iterable[str]) -> None:
    for name in names:
        tensor = directory.stored(name)
        if tensor.dtype not in FLOATING:
            raise WeightError(
                f"{tensor.file}: tensor {name!r} is stored as {tensor.dtype}, but only {', '.join(FLOATING)} and fp8 "
                f"with scales ({name}{SCALE_SUFFIX}) are supported. Use the weights before quantization."
            )


def _check_complete(rules: list[WeightRule], stored: dict[str, str], path: Path, config: MindVLConfig) -> None:
    missing = [(name, rule.param_name) for rule in rules for name in rule.hf_names if name not in stored]
    if missing:
        what = (
            f"{len(missing)} tensors are missing: {_listed([name for name, _ in missing])} (the first is needed by "
            f"{missing[0][1]})"
        )
        to_do = "Use a directory of this model family and size, or do not load this part."
        if all(further_layer(name, config.language) for name, _ in missing):
            what += "; the model was saved without multi-token prediction"
            to_do = "Set model.directory to this directory, or model.language.num_mtp_layers to 0."
        raise WeightError(f"{path}: {what}. {to_do}")


def _part(canonical: str) -> Part:
    return vision_part(canonical) or "language"


def _redundant(
    directory: WeightDirectory, stored: dict[str, str], unexpected: set[str], config: MindVLConfig
) -> tuple[str, ...]:
    """Check that unexpected tensors are redundant, and return their names in the directory."""
    redundant = {name for name in unexpected if name.endswith("rotary_emb.inv_freq")}
    head, embedding = "lm_head.weight", "model.language_model.embed_tokens.weight"
    if head in unexpected and config.language.tie_embeddings:
        if not torch.equal(directory.read(stored[head]), directory.read(stored[embedding])):
            raise WeightError(
                f"{directory.path}: {stored[head]} differs from {stored[embedding]}, but the model shares one matrix "
                "between them. Use a configuration with tie_embeddings=False."
            )
        redundant.add(head)
    mtp = mtp_layers(unexpected, config.language)
    redundant |= {name for name in unexpected if further_layer(name, config.language) in mtp}
    unknown = sorted(stored[name] for name in unexpected - redundant)
    if unknown:
        raise WeightError(
            f"{directory.path}: {len(unknown)} tensors do not belong to the model: {_listed(unknown)}. "
            "Use the configuration that belongs to these weights."
        )
    return tuple(sorted(stored[name] for name in unexpected))


def _join(rule: WeightRule, tensors: dict[str, Tensor], directory: WeightDirectory) -> Tensor:
    try:
        return rule.join(list(tensors.values()))
    except (RuntimeError, ValueError, OpsError, WeightError) as error:
        named = dict(tensors)
        if len(tensors) > NAMES_IN_MESSAGE:  # experts have equal shapes, except those with an error
            (usual, _), *_ = Counter(one.shape for one in tensors.values()).most_common(1)
            named = {name: one for name, one in tensors.items() if one.shape != usual} or named
        shapes = [f"{name} {list(one.shape)}" for name, one in list(named.items())[:NAMES_IN_MESSAGE]]
        if len(named) < len(tensors):
            shapes.append(f"{len(tensors) - len(named)} of shape {list(usual)}")
        file = directory.stored(next(iter(named))).file
        raise WeightError(
            f"{file}: {' and '.join(shapes)} cannot be converted to {rule.param_name} ({str(error).rstrip('.')}). "
            "Use the configuration that belongs to these weights."
        ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMES_IN_MESSAGE]) + (" ..." if len(names) > NAMES_IN_MESSAGE else "")
