# SPDX-License-Identifier: Apache-2.0
"""Choose the values of a first recipe from a sample of the data, a model directory and the devices of this machine.

Comes after the index of the data; used by `mindvl init`, which writes the result. Each choice has a comment that names
the number it was made from.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindvl_cli.failures import CliError
from mindvl_cli.load import to_yaml

if TYPE_CHECKING:
    from mindvl_data.config import ImageConfig, VideoConfig
    from mindvl_data.shards.index import DirectoryIndex
    from mindvl_data.tokenization import Tokenizer

MAX_SHARDS, MAX_SAMPLES, MAX_SECONDS = 16, 4096, 30.0  # bounds of the sample that is measured
SEQ_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # shorter ones leave a device idle between its launches
QUANTILE = 0.999
SAMPLES_PER_STEP = 64
MIN_STEPS_PER_EPOCH = 10
PEAK_LR = 1e-5  # SFT of the 8B model in Table 1 of the paper
CHECKPOINTS = 10


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is read from the model directory."""

    min_pixels: int
    max_pixels: int
    has_pixels: bool  # whether the directory has a preprocessor; otherwise the limits are defaults
    max_positions: int | None  # longest sequence of the language model in tokens
    dtype: str | None  # data type of the weights, as in config.json


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Lengths of a sample of the data under given image limits."""

    lengths: NDArray[np.int64]  # tokens of each valid sample, visual tokens included
    visual: NDArray[np.int64]  # visual tokens of each valid sample
    areas: NDArray[np.int64]  # pixels of each image, before resizing
    num_samples: int  # of the whole directory

    @property
    def longest(self) -> int:
        """Tokens that 99.9 % of the samples do not exceed."""
        return int(np.quantile(self.lengths, QUANTILE, method="higher"))


def model_facts(directory: Path) -> Facts:
    """Read image limits, longest sequence and data type from the JSON files of a model directory."""
    from mindvl_data import ImageConfig
    from mindvl_model.hf.image_processor import pixel_limits
    from mindvl_model.weights.json_file import read_json

    config = read_json(directory / "config.json")
    text = config.get("text_config") or {}
    found = pixel_limits(directory)
    limits = found or {"min_pixels": ImageConfig.min_pixels, "max_pixels": ImageConfig.max_pixels}
    keys = ("dtype", "torch_dtype")
    return Facts(
        **limits,
        has_pixels=bool(found),
        max_positions=text.get("max_position_embeddings") or config.get("max_position_embeddings"),
        dtype=next((str(part[key]) for key in keys for part in (config, text) if part.get(key)), None),
    )


def measure_sample(
    index: "DirectoryIndex", tokenizer: "Tokenizer", image: "ImageConfig", video: "VideoConfig | None" = None
) -> Measured:
    """Measure samples of evenly spaced shards, for at most half a minute.

    Raises:
        CliError: No sample is valid.
    """
    from mindvl_data.config import SampleRules, VideoConfig
    from mindvl_data.measure import sample_lengths
    from mindvl_data.shards.files import ShardFiles

    rules = SampleRules(image=image, video=video or VideoConfig())
    start, files = time.monotonic(), ShardFiles()
    chosen = np.unique(np.linspace(0, len(index.shards) - 1, min(MAX_SHARDS, len(index.shards))).astype(int))
    lengths, patches, areas = [], [], []
    try:
        for number in chosen:
            shard = index.shards[int(number)]
            count = min(len(shard.samples), MAX_SAMPLES // len(chosen))
            rows = np.linspace(0, len(shard.samples) - 1, count).astype(np.int64)
            found = sample_lengths(shard, rows, rules=rules, tokenizer=tokenizer, files=files)
            lengths.append(found[0].astype(np.int64))
            patches.append(found[1].astype(np.int64))
            images = shard.members[(shard.members["height"] > 0) & (shard.members["frames"] == 0)]
            areas.append(images["height"].astype(np.int64) * images["width"])
            if time.monotonic() - start > MAX_SECONDS:
                break
    finally:
        files.close()
    tokens = np.concatenate(lengths)
    if not (tokens > 0).any():
        raise CliError(
            f"{index.directory}: none of {len(tokens)} samples is valid. Run `mindvl data show {index.directory} --stage tokens "
            "--tokenizer MODEL` to see why."
        )
    return Measured(
        lengths=tokens[tokens > 0],
        visual=np.concatenate(patches)[tokens > 0] // image.spatial_merge_size**2,
        areas=np.concatenate(areas),
        num_samples=index.num_samples,
    )


def choose_image(facts: Facts, image: "ImageConfig", measured: Measured) -> tuple["ImageConfig", str]:
    """Image limits and their comment: those of the model, or the largest image if all are much smaller."""
    limit = (
        "the model's preprocessor" if facts.has_pixels else "mindvl, because the model directory has no preprocessor"
    )
    why = f"The limits of {limit}."
    if not len(measured.areas):
        return image, f"{why} No image was found in the data."
    largest = int(measured.areas.max())
    why += f" {len(measured.areas)} images were measured: median {int(np.median(measured.areas))} pixels, largest {largest}."
    if largest * 4 > image.max_pixels:
        return image, why
    block = image.multiple**2
    fitted = max(image.min_pixels, -(-largest // block) * block)
    why += f" max_pixels was lowered from {image.max_pixels} to the largest image, because no larger one is trained."
    return replace(image, max_pixels=fitted), why


def choose_seq_length(facts: Facts, measured: Measured) -> tuple[int, str]:
    """Sequence length and its comment: the shortest standard length that holds 99.9 % of the samples."""
    most = min(facts.max_positions or SEQ_LENGTHS[-1], SEQ_LENGTHS[-1])
    lengths = [length for length in SEQ_LENGTHS if length <= most] or [1 << (most.bit_length() - 1)]
    chosen = next((length for length in lengths if length >= measured.longest), lengths[-1])
    why = (
        f"99.9 % of {len(measured.lengths)} samples have at most {measured.longest} tokens, mean "
        f"{measured.lengths.mean():.0f}, of which {measured.visual.mean():.0f} are visual tokens. Samples are packed: "
        f"about {chosen / measured.lengths.mean():.1f} fill one sequence."
    )
    too_long = int((measured.lengths > chosen).sum())
    if too_long:
        why += f" The {too_long} longer samples among them are dropped."
    if measured.longest > chosen:
        limit = (
            f"The model is limited to {most} tokens"
            if most == facts.max_positions
            else f"{chosen} is the longest default"
        )
        why += f" {limit}: lower data.image.max_pixels, or set data.packing.overflow to trim_turns."
    return chosen, why


def choose_steps(measured: Measured, seq_length: int, *, epochs: float, num_devices: int) -> tuple[int, int, str, str]:
    """(global_batch_size, steps, comment, comment) for about `epochs` passes over the data."""
    used = measured.lengths[measured.lengths <= seq_length]
    if not len(used):
        raise CliError(
            f"DATA: each of {len(measured.lengths)} measured samples is longer than {seq_length} tokens, the longest sequence "
            "of this model. Shorten the samples, or use smaller images."
        )
    samples = measured.num_samples * len(used) / len(measured.lengths)
    packs = samples * used.mean() / seq_length  # of one epoch
    wanted = min(SAMPLES_PER_STEP * used.mean() / seq_length, packs / MIN_STEPS_PER_EPOCH)
    batch = max(1, round(wanted / num_devices)) * num_devices
    steps = max(1, round(epochs * packs / batch))
    batch_why = f"Packed sequences per optimizer step: about {batch * seq_length / used.mean():.0f} samples"
    batch_why += f", a multiple of the {num_devices} devices of this machine." if num_devices > 1 else "."
    steps_why = (
        f"About {epochs:g} epochs: {measured.num_samples} samples are about {packs:.1f} packed sequences in each epoch, and "
        f"a step uses {batch}."
    )
    return batch, steps, batch_why, steps_why


def choose_precision(dtype: str | None) -> tuple[str, str]:
    """Precision and its comment: bf16 for a directory of 16-bit weights."""
    name = (dtype or "").removeprefix("torch.")
    if name in ("bfloat16", "float16"):
        return "bf16", f"The weights of the model directory are {name}; fp32 copies of the weights are updated."
    return "fp32", f"The weights of the model directory are {name or 'of an unnamed data type, read as fp32'}."


def recipe_text(values: dict[str, Any], comments: dict[str, str], head: str) -> str:
    """The recipe as YAML, with `head` at the top and each comment above the line of its key path."""
    lines = [_comment(head, "")]
    parents: list[tuple[int, str]] = []  # (indentation, key) of the mappings around a line
    for line in to_yaml(values).splitlines():
        key = line.strip().partition(":")[0]
        indent = len(line) - len(line.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        if not key.startswith("- "):
            parents.append((indent, key))
            comment = comments.get(".".join(name for _, name in parents))
            lines += [_comment(comment, " " * indent)] if comment else []
        lines.append(line)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> str:
    """Text as YAML comment lines of at most 120 columns; line ends of the text are kept."""
    from textwrap import wrap

    prefix = f"{indent}# "
    parts = (wrap(part, 120, initial_indent=prefix, subsequent_indent=prefix) for part in text.splitlines())
    return "\n".join(line for part in parts for line in part)
