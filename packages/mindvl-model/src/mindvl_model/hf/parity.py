# SPDX-License-Identifier: Apache-2.0
"""Compare the logits of MindVLModel with those of the transformers implementation on random inputs.

Both load the same directory. This is the forward check of the paper (A.2): hundreds of inputs, mean absolute and mean
relative error at most 0.005. MindVLModel runs packed sequences, transformers one input per call, so that the check
covers packing.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_model.accelerator import set_up_device
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.families.registry import TEXT_MODELS
from mindvl_model.hf.directory_config import SUPPORTED, config_from_directory, language_config_from_directory
from mindvl_model.hf.inputs import hf_inputs, pack_for
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.parameters import PARTS, Part
from mindvl_model.random_inputs import RandomSegment, random_segment
from mindvl_model.sizes import named_config
from mindvl_model.weights.directory import WeightDirectory, write_weights

BOUND = 0.005  # largest mean absolute and mean relative error (paper, A.2)
ROUNDINGS = 1.5  # two models that round independently differ by sqrt(2) times the rounding error of one
INPUTS_PER_PACK = 4
FAMILIES = (*SUPPORTED, *TEXT_MODELS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOST_INPUTS = ("cu_seqlens", "max_seqlen", "image_grid_thw", "video_grid_thw", "loss_positions")  # stay on the host

Kind = Literal["text", "image", "images", "video", "mixed"]
Grid = tuple[int, int, int]
Groups = list[list[RandomSegment]]  # the inputs of each pack
Models = dict[str, Callable[[], Any]]  # loaders of "transformers", with bf16 "transformers_fp32", and "mindvl"
OnInputs = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class InputParity:
    """Errors of one input over the logits of all its tokens, relative to transformers."""

    number: int
    kind: Kind
    num_tokens: int
    images: str  # patches along time, height, width of each image, such as "1x6x4 1x2x10"
    videos: str  # the same for each video
    mae: float  # mean absolute error
    mre: float  # mean absolute error divided by the mean absolute logit of transformers, as single logits may be 0
    max_difference: float  # largest absolute error
    max_logit: float  # largest absolute logit of transformers
    rounding_mae: float  # with bf16: mean absolute error of transformers in bf16 against fp32; with fp32: 0
    rounding_mre: float  # the same as a mean relative error

    @property
    def holds(self) -> bool:
        """Whether both errors are within BOUND, or with bf16 within ROUNDINGS times the rounding error. False for NaN."""
        allowed = max(BOUND, ROUNDINGS * self.rounding_mae), max(BOUND, ROUNDINGS * self.rounding_mre)
        return self.mae <= allowed[0] and self.mre <= allowed[1]


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Results of a comparison for all inputs."""

    model_type: str
    dtype: str
    seed: int
    inputs: tuple[InputParity, ...]

    @property
    def failing(self) -> tuple[InputParity, ...]:
        """Inputs with an error above the bound."""
        return tuple(one for one in self.inputs if not one.holds)

    def by_kind(self) -> dict[str, tuple[InputParity, ...]]:
        """Results of each kind of input; "all" has every input."""
        kinds = dict.fromkeys(one.kind for one in self.inputs)
        return {kind: tuple(one for one in self.inputs if one.kind == kind) for kind in kinds} | {"all": self.inputs}


def check_parity(
    path: Path,
    *,
    num_inputs: int = 200,
    dtype: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    one_at_a_time: bool = False,
    trust_remote_code: bool = False,
    on_inputs: OnInputs = lambda done, total: None,
) -> ParityReport:
    """Compare both implementations of the model in a directory: a whole model, or a language model (text only).

    By default both models are in memory at once, with bf16 also the transformers model in fp32. Model families of
    transformers use its own classes, even if the directory contains remote code.

    Args:
        path: A transformers directory.
        num_inputs: Number of random inputs.
        dtype: Data type of both models.
        seed: Seed of the inputs.
        one_at_a_time: Hold one model in memory at a time; the logits of transformers are kept in temporary files.
        trust_remote_code: Run the code in a MindVL directory, which is the transformers implementation of MindVL.
        on_inputs: Called with the number of processed inputs and their total; with `one_at_a_time` summed over models.

    Raises:
        ModelError: The directory cannot be loaded, or it needs remote code and `trust_remote_code` is False.
    """
    device = set_up_device().device()
    from mindvl_model.megatron.process import single_process

    model_type = WeightDirectory(path).model_type
    if model_type not in FAMILIES:
        raise ModelError(
            f"{path / 'config.json'}: model_type={model_type!r:.60} is not supported. Use a directory of one of "
            f"{', '.join(FAMILIES)}."
        )
    config, parts = _config(path, model_type)
    inputs = random_inputs(config, num_inputs, seed, text_only=parts != PARTS)
    trusted = trust_remote_code and model_type == "mindvl"
    models = {"transformers": lambda: _load_transformers(path, model_type, DTYPES[dtype], trusted).to(device)}
    if dtype != "fp32":
        models["transformers_fp32"] = lambda: _load_transformers(path, model_type, torch.float32, trusted).to(device)
    models["mindvl"] = lambda: _load_mindvl(config, path, parts, DTYPES[dtype]).to(device)
    starts = range(0, len(inputs), INPUTS_PER_PACK)
    groups = [[segment for _, segment in inputs[start : start + INPUTS_PER_PACK]] for start in starts]
    results: list[InputParity] = []
    with single_process(), torch.no_grad():
        compare = _in_turn if one_at_a_time else _together
        for errors in compare(models, groups, config, device, on_inputs):
            kind, segment = inputs[len(results)]
            results.append(
                InputParity(
                    number=len(results),
                    kind=kind,
                    num_tokens=len(segment.input_ids),
                    images=_sizes(segment.image_grid_thw),
                    videos=_sizes(segment.video_grid_thw),
                    **errors,
                )
            )
    return ParityReport(model_type=model_type, dtype=dtype, seed=seed, inputs=tuple(results))


def random_inputs(
    config: MindVLConfig, count: int, seed: int, *, text_only: bool = False
) -> list[tuple[Kind, RandomSegment]]:
    """Make inputs that cycle through the kinds of input the model supports, from a seed."""
    kinds: list[Kind] = ["text"]
    if not text_only:
        kinds += ["image", "images"]
        kinds += ["video", "mixed"] if config.tokens.video is not None else []
    choose = random.Random(seed)
    merge = config.vision.spatial_merge_size

    def grids(low: int, high: int, *, frames: int = 1, blocks: int = 10) -> list[Grid]:
        sides = [(choose.randint(1, blocks), choose.randint(1, blocks)) for _ in range(choose.randint(low, high))]
        return [(choose.randint(1, frames), merge * height, merge * width) for height, width in sides]

    inputs: list[tuple[Kind, RandomSegment]] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        images = {"image": grids(1, 1), "images": grids(2, 4), "mixed": grids(1, 3)}.get(kind, [])
        videos = {"video": grids(1, 2, frames=4, blocks=6), "mixed": grids(1, 1, frames=3, blocks=4)}.get(kind, [])
        num_text = choose.randint(1, 60 if kind == "text" else 15)
        segment = random_segment(config, images, num_text=num_text, videos=videos, seed=choose.getrandbits(40))
        inputs.append((kind, segment))
    return inputs


def _together(
    models: Models, groups: Groups, config: MindVLConfig, device: torch.device, on_inputs: OnInputs
) -> Iterator[dict[str, float]]:
    """Yield the errors of every input, with all models in memory."""
    loaded = {name: load() for name, load in models.items()}
    total = sum(map(len, groups))
    for number, group in enumerate(groups):
        pack = pack_for(loaded["transformers"], group, config)
        references = [_logits(loaded[name], group, config, device) for name in models if name != "mindvl"]
        yield from _compare(loaded["mindvl"], pack, references, device)
        on_inputs(min((number + 1) * INPUTS_PER_PACK, total), total)


def _in_turn(
    models: Models, groups: Groups, config: MindVLConfig, device: torch.device, on_inputs: OnInputs
) -> Iterator[dict[str, float]]:
    """Yield the same with one model in memory at a time; the logits of transformers are kept in files."""
    names = [name for name in models if name != "mindvl"]
    done, total = 0, len(models) * sum(map(len, groups))
    packs: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="mindvl-parity-") as directory:
        for name in names:
            model = models[name]()
            for number, group in enumerate(groups):
                if name == "transformers":
                    packs.append(pack_for(model, group, config))
                torch.save(_logits(model, group, config, device), f"{directory}/{name}-{number}")
                done += len(group)
                on_inputs(done, total)
            del model  # free its memory before the next is loaded
        model = models["mindvl"]()
        for number, group in enumerate(groups):
            files = [Path(directory, f"{name}-{number}") for name in names]
            yield from _compare(
                model,
                packs[number],
                [torch.load(file, map_location=device, weights_only=True) for file in files],
                device,
            )
            for file in files:
                file.unlink()
            done += len(group)
            on_inputs(done, total)


def _compare(
    model: Any, pack: dict[str, Any], references: Sequence[list[Tensor]], device: torch.device
) -> Iterator[dict[str, float]]:
    """Yield the errors of each input of a pack; a second reference, in fp32, gives the rounding errors of the first."""
    pack = {name: value if name in HOST_INPUTS else value.to(device) for name, value in pack.items()}
    packed: Tensor = model.logits(**pack)
    reference, exact = references[0], references[-1]
    for index, logits in enumerate(packed.split([len(one) for one in reference])):
        expected = reference[index].double()
        rounding = {"mae": 0.0, "mre": 0.0}
        if len(references) > 1:
            rounding = _errors(expected, exact[index].double())
        yield _errors(logits, expected) | {
            "max_difference": float((logits.double() - expected).abs().max()),
            "max_logit": float(expected.abs().max()),
            "rounding_mae": rounding["mae"],
            "rounding_mre": rounding["mre"],
        }


def _logits(hf_model: Any, group: Sequence[RandomSegment], config: MindVLConfig, device: torch.device) -> list[Tensor]:
    """Logits [S, V] of a transformers model for each input, with one call per input."""
    logits = []
    for segment in group:
        if hasattr(hf_model.model, "rope_deltas"):
            hf_model.model.rope_deltas = None  # state of the previous call
        arguments = {name: value.to(device) for name, value in hf_inputs(segment, config).items()}
        logits.append(hf_model(**arguments, use_cache=False).logits[0])
    return logits


def _errors(logits: Tensor, expected: Tensor) -> dict[str, float]:
    mae = (logits.double() - expected).abs().mean()
    return {"mae": float(mae), "mre": float(mae / expected.abs().mean())}


def _config(path: Path, model_type: str) -> tuple[MindVLConfig, tuple[Part, ...]]:
    """The configuration of the model, and the parts that the directory contains."""
    if model_type not in TEXT_MODELS:
        return config_from_directory(path), PARTS
    # MindVLModel cannot be built without a vision encoder; inputs of text do not use it.
    return replace(named_config("tiny"), language=language_config_from_directory(path)), ("language",)


def _load_mindvl(config: MindVLConfig, path: Path, parts: tuple[Part, ...], dtype: torch.dtype) -> Any:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import initialize

    model = MindVLModel(config, BuildConfig(dtype=dtype))
    if parts != PARTS:
        initialize(model, config, seed=0)
    load_hf_directory(model, config, path, parts)
    return model.eval()


def _load_transformers(path: Path, model_type: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM if model_type in TEXT_MODELS else AutoModelForImageTextToText
    with _without_fp8(path) as directory:
        model, report = from_pretrained(
            auto,
            directory,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            experts_implementation="eager",  # the grouped implementation needs sizes that small models do not have
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{path}: transformers finds no tensors for {len(missing)} parameters, such as {missing[0]}, and initializes them "
            "randomly. Save the model under the names of its class in transformers."
        )
    return model.eval()


@contextmanager
def _without_fp8(path: Path) -> Iterator[Path]:
    """Yield the directory, or a temporary bf16 copy of fp8 weights, which transformers reads only with more packages."""
    directory = WeightDirectory(path)
    if directory.config.pop("quantization_config", None) is None:
        yield path
        return
    with TemporaryDirectory(prefix="mindvl-parity-") as copy:
        write_weights(Path(copy), ((name, directory.read(name)) for name in directory.names()))
        for file in path.glob("*.py"):
            shutil.copyfile(file, Path(copy, file.name))
        Path(copy, "config.json").write_text(json.dumps(directory.config))
        yield Path(copy)


def _sizes(grids: Tensor) -> str:
    return " ".join("x".join(map(str, grid)) for grid in grids.tolist())
