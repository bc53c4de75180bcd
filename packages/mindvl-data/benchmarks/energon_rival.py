# SPDX-License-Identifier: Apache-2.0
"""The task of the loader benchmark with megatron-energon: cooker, pre- and post-encoding, packing.

Used by loader.py if megatron-energon is installed. As its documentation recommends, cheap steps (text, size from the
header) run before packing and expensive ones after it. Packing is a greedy knapsack, as in its examples. Images are
converted to patches in one of three ways: its decoder with Pillow and numpy; its decoder with the processor of
transformers; or the functions of mindvl, so that only the framework differs.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.energon import (
    Cooker,
    CrudeWebdataset,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from packers import greedy_knapsack
from PIL import Image

from mindvl_data import ImageConfig, Tokenizer, smart_resize
from mindvl_data.images import decode, read_size, to_patches
from mindvl_data.samples import parse_record

Images = Literal["its decoder", "our functions", "transformers"]


@edataclass
class Cooked(Sample):
    """The content of the shard."""

    record: bytes
    image: bytes


@edataclass
class Encoded(Sample):
    """The text as tokens, and the encoded image."""

    input_ids: Any  # int64 [S], one placeholder for the image
    in_loss: Any  # bool [S]
    image: bytes
    length: int


@edataclass
class Pack(Sample):
    """A packed sequence."""

    input_ids: Any
    labels: Any
    cu_seqlens: Any
    pixel_values: Any
    image_grid_thw: Any


@stateless
def cook(sample: dict[str, Any]) -> Cooked:
    return Cooked(**basic_sample_keys(sample), record=sample["json"], image=sample["0.jpg"])


def prepare(directory: Path) -> None:
    """Write the index and the dataset description, as `energon prepare` does."""
    CrudeWebdataset.prepare_dataset(
        directory, sorted(path.name for path in directory.glob("*.tar")), split_parts_ratio=[("train", 1.0)], workers=1
    )
    (directory / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def rows(directory: Path, encoder: "Encoder", *, buffer_size: int) -> Iterator[Pack]:
    """One epoch of packed sequences, in this process."""
    dataset = get_train_dataset(
        directory,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        packing_buffer_size=buffer_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=encoder,
        repeat=False,
    )
    return iter(get_loader(dataset))


def plain_patches(image: Image.Image, config: ImageConfig) -> tuple[Any, tuple[int, int, int]]:
    """Resize with Pillow, cut with numpy."""
    height, width = smart_resize(
        image.height,
        image.width,
        multiple=config.multiple,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    pixels = np.asarray(image.resize((width, height), resample=Image.Resampling.BICUBIC))
    side, merge = config.patch_size, config.spatial_merge_size
    rows, columns = height // side, width // side
    blocks = pixels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, config.patch_dim), (1, rows, columns)


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Encodes single samples and packs several of them."""

    decoder = None  # images are decoded after packing
    cookers = [Cooker(cook)]  # noqa: RUF012 - energon's own way

    def __init__(
        self, tokenizer: Tokenizer, image: ImageConfig, seq_length: int, images: Images, processor: Any
    ) -> None:
        super().__init__()
        self._tokenizer, self._image, self._seq_length = tokenizer, image, seq_length
        decoder = SampleDecoder(image_decode="pilrgb")
        decoders: dict[str, Callable[[bytes], Any]] = {
            "its decoder": lambda content: plain_patches(decoder.decode("0.jpg", content), image),
            "our functions": lambda content: to_patches(decode(content, decode_limit=image.decode_limit), image),
            "transformers": lambda content: self._process(decoder.decode("0.jpg", content), processor),
        }
        self._patches = decoders[images]

    @stateless
    def preencode_sample(self, sample: Cooked) -> Encoded:
        height, width = read_size(sample.image, decode_limit=self._image.decode_limit)
        encoded = self._tokenizer.encode(parse_record(json.loads(sample.record), num_images=1), [])
        side = self._image.multiple
        visual_tokens = round(height / side) * round(
            width / side
        )  # the images of the benchmark are within the pixel budget
        return Encoded.derive_from(
            sample,
            input_ids=encoded.ids,
            in_loss=encoded.in_loss,
            image=sample.image,
            length=len(encoded.ids) - 1 + visual_tokens,
        )

    def select_samples_to_pack(self, samples: list[Encoded]) -> list[list[Encoded]]:
        closed = greedy_knapsack([s.length for s in samples], self._seq_length, len(samples))
        return [[samples[number] for number in row] for row, _ in closed]

    @stateless
    def postencode_sample(self, sample: Encoded) -> Pack:
        patches, grid = self._patches(sample.image)
        visual_tokens = grid[1] * grid[2] // self._image.spatial_merge_size**2
        is_pad = sample.input_ids == self._tokenizer.image_pad_id
        repeats = np.where(is_pad, visual_tokens, 1)
        input_ids, in_loss = np.repeat(sample.input_ids, repeats), np.repeat(sample.in_loss, repeats)
        labels = np.full(len(input_ids), -100, np.int64)
        labels[:-1][in_loss[1:]] = input_ids[1:][in_loss[1:]]
        return Pack.derive_from(
            sample, input_ids=input_ids, labels=labels, cu_seqlens=None, pixel_values=patches, image_grid_thw=[grid]
        )

    @stateless
    def pack_selected_samples(self, samples: list[Pack]) -> Pack:
        return Pack.derive_from(
            samples[0],
            input_ids=torch.from_numpy(np.concatenate([s.input_ids for s in samples])),
            labels=torch.from_numpy(np.concatenate([s.labels for s in samples])),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *(len(s.input_ids) for s in samples)], dtype=np.int32)),
            pixel_values=torch.from_numpy(np.concatenate([s.pixel_values for s in samples])),
            image_grid_thw=torch.tensor([grid for s in samples for grid in s.image_grid_thw]),
        )

    @staticmethod
    def _process(image: Any, processor: Any) -> tuple[Any, tuple[int, ...]]:
        found = processor(images=image, return_tensors="np")
        return found["pixel_values"], tuple(found["image_grid_thw"][0].tolist())
