# SPDX-License-Identifier: Apache-2.0
"""Our model beside transformers' own on the same random inputs: how far their logits lie apart.

Comes after loading. The forward check of the paper (A.2): hundreds of inputs, mean absolute and mean relative error
within five thousandths. Ours runs packed packs, theirs one call for each input: packing is part of what is compared.
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
from mindvl_model.hf.directory_config import WHOLE_MODELS, config_from_directory, language_config_from_directory
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.parameters import PARTS, Part
from mindvl_model.testing.packs import RandomSegment, random_segment
from mindvl_model.testing.published import hf_inputs, pack_for
from mindvl_model.testing.tiny import smallest_config
from mindvl_model.weights.directory import WeightDirectory, write_weights
from mindvl_model.weights.names import TEXT_MODELS

BOUND = 0.005  # of both errors (paper, A.2)
ROUNDINGS = 1.5  # two models that round independently differ by sqrt(2) of what each is away from exact numbers
INPUTS_IN_A_PACK = 4
FAMILIES = (*WHOLE_MODELS, *TEXT_MODELS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOST_INPUTS = ("cu_seqlens", "max_seqlen", "image_grid_thw", "video_grid_thw")  # read on the host

Kind = Literal["text", "image", "images", "video", "mixed"]
Grid = tuple[int, int, int]
Groups = list[list[RandomSegment]]  # inputs of one pack each
Models = dict[str, Callable[[], Any]]  # what loads "theirs", in bf16 "exact", and "ours"


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
    one_at_a_time: bool = False,
    trust_remote_code: bool = False,
    on_inputs: Callable[[int, int], None] = lambda done, total: None,
) -> ParityReport:
    """Compare the model of a transformers directory: MindVL, Qwen2.5-VL, or a language model alone (text only).

    Both models are in memory at once, with bf16 also theirs in fp32. Families that transformers has are compared with
    its own classes, whatever code the directory carries.

    Args:
        one_at_a_time: Never hold two models; theirs runs first, and its logits wait in files of the temporary directory.
        trust_remote_code: Run the code that a MindVL directory carries; it is what ours is compared with.
        on_inputs: Told the number of inputs done, and of all; one at a time, those of every model count.

    Raises:
        ModelError: The directory cannot be read, or needs its own code and that is not allowed.
    """
    device = set_up_device().device()
    from mindvl_model.megatron.process import single_process

    model_type = WeightDirectory(path).model_type
    if model_type not in FAMILIES:
        raise ModelError(
            f"{path / 'config.json'}: model_type={model_type!r:.60} is not supported. The check takes directories of "
            f"{', '.join(FAMILIES)}."
        )
    config, parts = _config(path, model_type)
    inputs = random_inputs(config, num_inputs, seed, text_only=parts != PARTS)
    trusted = trust_remote_code and model_type == "mindvl"
    models = {"theirs": lambda: _load_theirs(path, model_type, DTYPES[dtype], trusted).to(device)}
    if dtype != "fp32":
        models["exact"] = lambda: _load_theirs(path, model_type, torch.float32, trusted).to(device)
    models["ours"] = lambda: _load_ours(config, path, parts, DTYPES[dtype]).to(device)
    groups = [[one for _, one in inputs[at : at + INPUTS_IN_A_PACK]] for at in range(0, len(inputs), INPUTS_IN_A_PACK)]
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
    """Inputs of every kind the model takes, in turn; the same for the same seed."""
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
    models: Models, groups: Groups, config: MindVLConfig, device: torch.device, on_inputs: Callable[[int, int], None]
) -> Iterator[dict[str, float]]:
    """Errors of every input, with all models in memory."""
    loaded = {name: load() for name, load in models.items()}
    total = sum(map(len, groups))
    for number, group in enumerate(groups):
        pack = pack_for(loaded["theirs"], group, config)
        answers = [_ask(loaded[name], group, config, device) for name in models if name != "ours"]
        yield from _judge(loaded["ours"], pack, answers, device)
        on_inputs(min((number + 1) * INPUTS_IN_A_PACK, total), total)


def _in_turn(
    models: Models, groups: Groups, config: MindVLConfig, device: torch.device, on_inputs: Callable[[int, int], None]
) -> Iterator[dict[str, float]]:
    """The same with one model in memory: logits of theirs wait in files."""
    rivals = [name for name in models if name != "ours"]
    done, total = 0, len(models) * sum(map(len, groups))
    packs: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="mindvl-parity-") as directory:
        for name in rivals:
            model = models[name]()
            for number, group in enumerate(groups):
                if name == "theirs":
                    packs.append(pack_for(model, group, config))
                torch.save(_ask(model, group, config, device), f"{directory}/{name}-{number}")
                done += len(group)
                on_inputs(done, total)
            del model  # before the next is loaded
        ours = models["ours"]()
        for number, group in enumerate(groups):
            files = [Path(directory, f"{name}-{number}") for name in rivals]
            yield from _judge(
                ours,
                packs[number],
                [torch.load(file, map_location=device, weights_only=True) for file in files],
                device,
            )
            for file in files:
                file.unlink()
            done += len(group)
            on_inputs(done, total)


def _judge(
    ours: Any, pack: dict[str, Any], answers: Sequence[list[Tensor]], device: torch.device
) -> Iterator[dict[str, float]]:
    """Errors of each input of a pack against theirs, and what rounding alone brings where the second answer is exact."""
    pack = {name: value if name in HOST_INPUTS else value.to(device) for name, value in pack.items()}
    packed: Tensor = ours.logits(**pack)
    theirs, exact = answers[0], answers[-1]
    for place, logits in enumerate(packed.split([len(one) for one in theirs])):
        expected = theirs[place].double()
        rounding = {"mae": 0.0, "mre": 0.0}
        if len(answers) > 1:
            rounding = _errors(expected, exact[place].double())
        yield _errors(logits, expected) | {
            "max_difference": float((logits.double() - expected).abs().max()),
            "max_logit": float(expected.abs().max()),
            "rounding_mae": rounding["mae"],
            "rounding_mre": rounding["mre"],
        }


def _ask(theirs: Any, group: Sequence[RandomSegment], config: MindVLConfig, device: torch.device) -> list[Tensor]:
    """Their logits [S, V] of each input, one call for each."""
    answers = []
    for segment in group:
        if hasattr(theirs.model, "rope_deltas"):
            theirs.model.rope_deltas = None  # what it keeps of the call before
        arguments = {name: value.to(device) for name, value in hf_inputs(segment, config).items()}
        answers.append(theirs(**arguments, use_cache=False).logits[0])
    return answers


def _errors(logits: Tensor, expected: Tensor) -> dict[str, float]:
    mae = (logits.double() - expected).abs().mean()
    return {"mae": float(mae), "mre": float(mae / expected.abs().mean())}


def _config(path: Path, model_type: str) -> tuple[MindVLConfig, tuple[Part, ...]]:
    """The model, and which parts of it the directory has."""
    if model_type not in TEXT_MODELS:
        return config_from_directory(path), PARTS
    # A language model alone still needs a vision encoder to be built; no input shows it anything.
    return replace(smallest_config(), language=language_config_from_directory(path)), ("language",)


def _load_ours(config: MindVLConfig, path: Path, parts: tuple[Part, ...], dtype: torch.dtype) -> Any:
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import initialize

    model = MindVLModel(config, Layout(dtype=dtype))
    if parts != PARTS:
        initialize(model, config, seed=0)
    load_hf_directory(model, config, path, parts)
    return model.eval()


def _load_theirs(path: Path, model_type: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM if model_type in TEXT_MODELS else AutoModelForImageTextToText
    with _without_fp8(path) as plain:
        return from_pretrained(
            auto,
            plain,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            experts_implementation="eager",  # the plain one; their grouped one wants sizes that small models lack
        ).eval()


@contextmanager
def _without_fp8(path: Path) -> Iterator[Path]:
    """The directory, or a copy for a while with weights in bf16: transformers itself reads fp8 with more packages only."""
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
