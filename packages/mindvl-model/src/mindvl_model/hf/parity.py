# SPDX-License-Identifier: Apache-2.0
"""Our model beside transformers' own on the same random inputs: how far their logits lie apart.

Comes after loading. The forward check of the paper (A.2): hundreds of inputs, mean absolute and mean relative error
within five thousandths. Ours runs packed rows, theirs one call for each input: packing is part of what is compared.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_model.accelerator import enter
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.hf.folder_config import config_from_folder, language_config_from_folder
from mindvl_model.hf.load import load_hf_folder
from mindvl_model.parameters import PARTS, Part
from mindvl_model.testing.published import hf_inputs, pack_for
from mindvl_model.testing.rows import RandomSegment, random_segment
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.weights.folder import WeightFolder
from mindvl_model.weights.names import TEXT_MODELS

BOUND = 0.005  # of both errors (paper, A.2)
ROUNDINGS = 1.5  # two models that round independently differ by sqrt(2) of what each is away from exact numbers
INPUTS_IN_A_ROW = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOST_INPUTS = ("cu_seqlens", "max_seqlen", "image_grid_thw", "video_grid_thw")  # read on the host

Kind = Literal["text", "picture", "pictures", "video", "mixed"]
Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class InputParity:
    """One input: errors over all logits of all its tokens."""

    number: int
    kind: Kind
    num_tokens: int
    images: str  # patches along time, height, width of each, such as "1x6x4 1x2x10"
    videos: str
    mae: float  # mean of |ours - theirs|
    mre: float  # the same over the mean of |theirs|: single logits pass through zero
    max_difference: float
    max_logit: float  # largest |theirs|
    rounding_mae: float  # in bf16, of their own logits against theirs in fp32; in fp32 zero
    rounding_mre: float

    @property
    def holds(self) -> bool:
        """Whether both errors are within the bound, or in bf16 what rounding alone brings; a NaN is not."""
        allowed = max(BOUND, ROUNDINGS * self.rounding_mae), max(BOUND, ROUNDINGS * self.rounding_mre)
        return self.mae <= allowed[0] and self.mre <= allowed[1]


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """All inputs of one comparison."""

    model_type: str
    dtype: str
    seed: int
    inputs: tuple[InputParity, ...]

    @property
    def failing(self) -> tuple[InputParity, ...]:
        """Inputs beyond a bound."""
        return tuple(one for one in self.inputs if not one.holds)

    def by_kind(self) -> dict[str, tuple[InputParity, ...]]:
        """The inputs of each kind, and of all of them."""
        kinds = dict.fromkeys(one.kind for one in self.inputs)
        return {kind: tuple(one for one in self.inputs if one.kind == kind) for kind in kinds} | {"all": self.inputs}


def check_parity(
    path: Path,
    *,
    num_inputs: int = 200,
    dtype: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    on_inputs: Callable[[int, int], None] = lambda done, total: None,
) -> ParityReport:
    """Compare the model of a transformers folder: MindVL, Qwen2.5-VL, or Qwen3 (text only).

    Both models are in memory at once, with bf16 also theirs in fp32. The code that a MindVL folder carries is run.

    Args:
        on_inputs: Told the number of inputs done, and of all.

    Raises:
        ModelError: The folder cannot be read.
    """
    device = enter().device()
    from mindvl_model.megatron.process import single_process

    model_type = WeightFolder(path).model_type
    config, parts = _config(path, model_type)
    inputs = random_inputs(config, num_inputs, seed, text_only=parts != PARTS)
    results: list[InputParity] = []
    with single_process(), torch.no_grad():
        ours = _load_ours(config, path, parts, DTYPES[dtype]).to(device)
        theirs = _load_theirs(path, model_type, DTYPES[dtype]).to(device)
        exact = None if dtype == "fp32" else _load_theirs(path, model_type, torch.float32).to(device)
        for first in range(0, len(inputs), INPUTS_IN_A_ROW):
            group = inputs[first : first + INPUTS_IN_A_ROW]
            segments = [segment for _, segment in group]
            for place, errors in enumerate(_compare(ours, theirs, exact, segments, config, device)):
                kind, segment = group[place]
                results.append(
                    InputParity(
                        number=first + place,
                        kind=kind,
                        num_tokens=len(segment.input_ids),
                        images=_sizes(segment.image_grid_thw),
                        videos=_sizes(segment.video_grid_thw),
                        **errors,
                    )
                )
            on_inputs(len(results), len(inputs))
    return ParityReport(model_type=model_type, dtype=dtype, seed=seed, inputs=tuple(results))


def random_inputs(
    config: MindVLConfig, count: int, seed: int, *, text_only: bool = False
) -> list[tuple[Kind, RandomSegment]]:
    """Inputs of every kind the model takes, in turn; the same for the same seed."""
    kinds: list[Kind] = ["text"]
    if not text_only:
        kinds += ["picture", "pictures"]
        kinds += ["video", "mixed"] if config.tokens.video is not None else []
    choose = random.Random(seed)
    merge = config.vision.spatial_merge_size

    def grids(low: int, high: int, *, frames: int = 1, blocks: int = 10) -> list[Grid]:
        sides = [(choose.randint(1, blocks), choose.randint(1, blocks)) for _ in range(choose.randint(low, high))]
        return [(choose.randint(1, frames), merge * height, merge * width) for height, width in sides]

    inputs: list[tuple[Kind, RandomSegment]] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        images = {"picture": grids(1, 1), "pictures": grids(2, 4), "mixed": grids(1, 3)}.get(kind, [])
        videos = {"video": grids(1, 2, frames=4, blocks=6), "mixed": grids(1, 1, frames=3, blocks=4)}.get(kind, [])
        num_text = choose.randint(1, 60 if kind == "text" else 15)
        segment = random_segment(config, images, num_text=num_text, videos=videos, seed=choose.getrandbits(40))
        inputs.append((kind, segment))
    return inputs


def _compare(
    ours: Any,
    theirs: Any,
    exact: Any | None,
    segments: Sequence[RandomSegment],
    config: MindVLConfig,
    device: torch.device,
) -> Iterator[dict[str, float]]:
    row = pack_for(theirs, segments, config)
    row = {name: value if name in HOST_INPUTS else value.to(device) for name, value in row.items()}
    packed: Tensor = ours.logits(**row)
    for logits, segment in zip(packed.split([len(one.input_ids) for one in segments]), segments, strict=True):
        arguments = {name: value.to(device) for name, value in hf_inputs(segment, config).items()}
        expected = _their_logits(theirs, arguments)
        errors = _errors(logits, expected)
        rounding = {"mae": 0.0, "mre": 0.0} if exact is None else _errors(expected, _their_logits(exact, arguments))
        yield errors | {
            "max_difference": float((logits.double() - expected).abs().max()),
            "max_logit": float(expected.abs().max()),
            "rounding_mae": rounding["mae"],
            "rounding_mre": rounding["mre"],
        }


def _their_logits(theirs: Any, arguments: dict[str, Tensor]) -> Tensor:
    if hasattr(theirs.model, "rope_deltas"):
        theirs.model.rope_deltas = None  # what it keeps of the call before
    logits: Tensor = theirs(**arguments, use_cache=False).logits[0].double()
    return logits


def _errors(logits: Tensor, expected: Tensor) -> dict[str, float]:
    mae = (logits.double() - expected).abs().mean()
    return {"mae": float(mae), "mre": float(mae / expected.abs().mean())}


def _config(path: Path, model_type: str) -> tuple[MindVLConfig, tuple[Part, ...]]:
    """The model, and which parts of it the folder has."""
    if model_type not in TEXT_MODELS:
        return config_from_folder(path), PARTS
    # A language model alone still needs a tower to be built; no input shows it anything.
    return replace(smallest_config(), language=language_config_from_folder(path)), ("language",)


def _load_ours(config: MindVLConfig, path: Path, parts: tuple[Part, ...], dtype: torch.dtype) -> Any:
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import initialize

    model = MindVLModel(config, Layout(dtype=dtype))
    if parts != PARTS:
        initialize(model, config, seed=0)
    load_hf_folder(model, config, path, parts)
    return model.eval()


def _load_theirs(path: Path, model_type: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM if model_type in TEXT_MODELS else AutoModelForImageTextToText
    try:
        return auto.from_pretrained(
            path, dtype=dtype, trust_remote_code=model_type == "mindvl", local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: transformers cannot load it ({error}). Fetch or export the folder again.") from error


def _sizes(grids: Tensor) -> str:
    return " ".join("x".join(map(str, grid)) for grid in grids.tolist())
