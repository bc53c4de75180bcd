# SPDX-License-Identifier: Apache-2.0
"""Images per second and core of the loader, compared with JPEG decoding, transformers, webdataset and energon.

Run: python packages/mindvl-data/benchmarks/loader.py [--quick] [--json]
All implementations read the same half-megapixel photo-like JPEGs in alternating rounds; a figure is the median over the
rounds of images per second of processor time. docs/design/evidence/loader.md explains the comparison.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from figures import Figure, installed, median, print_report, spread
from photos import Source, make_source, make_tokenizer
from PIL import Image

from mindvl_data import DataConfig, ImageConfig, Loader, PackingConfig, SourceConfig, Tokenizer, load_tokenizer
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import open_index
from mindvl_data.shards.reading import read_sample, read_samples
from mindvl_data.types import RawSample

SEQ_LENGTH, BUFFER = 8192, 64
PACK = 11  # photos in a pack of that length
RIVAL_ENVIRONMENT = (
    "uv venv /tmp/rivals && uv pip install --no-config --python /tmp/rivals/bin/python -e packages/mindvl-data "
    "megatron-energon==7.4.1 webdataset==1.0.2 torchvision && "
    "/tmp/rivals/bin/python packages/mindvl-data/benchmarks/loader.py"
)


@dataclass
class Contender:
    """One implementation; `prepare` is not timed and returns the timed function, which returns the number of samples."""

    name: str
    prepare: Callable[[], Callable[[], int]]
    num_samples: int
    cpu_rates: list[float] = field(default_factory=list)  # samples per second of processor time
    wall_rates: list[float] = field(default_factory=list)

    def play(self) -> None:
        go = self.prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        done = go()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        assert done == self.num_samples, f"{self.name}: {done} of {self.num_samples} samples"
        self.cpu_rates.append(done / cpu)
        self.wall_rates.append(done / wall)

    @property
    def rate(self) -> float:
        return median(self.cpu_rates)


def run(*, quick: bool = False) -> list[Figure]:
    """Create the files, run all implementations in turn, and compare them."""
    torch.set_num_threads(1)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    num_photos, num_small, rounds = (48, 400, 3) if quick else (96, 2_000, 5)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        photos = make_source(root / "photos", num_photos)
        small = make_source(root / "small", num_small, sizes=((96, 128),))
        tokenizer = make_tokenizer(root / "tokenizer")
        contenders = {c.name: c for c in contend(photos, small, tokenizer)}
        for number in range(rounds + 1):
            for contender in contenders.values():
                contender.play()
                if number == 0:  # the first round is a warm-up
                    contender.cpu_rates.clear()
                    contender.wall_rates.clear()
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return compare(contenders, photos)


def contend(photos: Source, small: Source, tokenizer_directory: Path) -> list[Contender]:
    """The implementations that are installed on this machine."""
    tokenizer = load_tokenizer(tokenizer_directory)
    found = [
        Contender("decode", lambda: decode_alone(photos), photos.num_samples),
        Contender("loader", lambda: our_loader(photos, tokenizer_directory, num_threads=0), photos.num_samples),
        Contender(
            "loader, 1 thread", lambda: our_loader(photos, tokenizer_directory, num_threads=1), photos.num_samples
        ),
        Contender("PIL + transformers", lambda: processor_path(photos, tokenizer_directory, "Pil"), photos.num_samples),
        Contender("raw photos", lambda: our_raw(photos), photos.num_samples),
        Contender("raw small", lambda: our_raw(small), small.num_samples),
    ]
    if installed("torchvision"):
        found.append(
            Contender(
                "torchvision + transformers",
                lambda: processor_path(photos, tokenizer_directory, ""),
                photos.num_samples,
            )
        )
    if installed("webdataset"):
        found.append(Contender("webdataset photos", lambda: webdataset_raw(photos), photos.num_samples))
        found.append(Contender("webdataset small", lambda: webdataset_raw(small), small.num_samples))
    if installed("megatron-energon"):
        import energon_rival

        energon_rival.prepare(photos.directory)
        for images in ("its decoder", "our functions", "transformers"):
            found.append(
                Contender(
                    f"energon, {images}",
                    lambda images=images: energon_rows(photos, tokenizer, images),  # type: ignore[misc]
                    photos.num_samples,
                )
            )
    return found


def compare(contenders: dict[str, Contender], photos: Source) -> list[Figure]:
    """Figures with their comparisons; for a missing implementation, print the command that installs it."""

    def figure(name: str, rival: str, ratio: float | None = None, **more: Any) -> Figure:
        mine, other = contenders[name], contenders.get(rival)
        note = f"spread {100 * spread(mine.cpu_rates):.0f} %, {median(mine.wall_rates):.0f}/s wall clock"
        if rival and other is None:
            note = f"{rival} is not installed; {note}"
        unit = "samples/s/core" if "raw" in name or "webdataset" in name else "images/s/core"
        return Figure(
            name=name, value=mine.rate, unit=unit, rival=rival, rival_value=other.rate if other else None,
            ratio_at_least=ratio, note=note, **more,
        )  # fmt: skip

    figures = [
        figure("decode", ""),
        figure("loader", "decode", 0.4),
        figure("loader, 1 thread", "decode", 0.4),
        figure("loader", "PIL + transformers", 4.5),
        figure("loader", "torchvision + transformers"),
        figure("loader", "energon, its decoder", 1.5),
        figure("loader", "energon, our functions"),
        figure("loader", "energon, transformers"),
        figure("raw photos", "webdataset photos", 3.0),
        figure("raw small", "webdataset small", 3.0),
        Figure(name="size of a photo", value=photos.pixels / photos.num_samples / 1e6, unit="megapixels",
               note=f"{8 * photos.image_bytes / photos.pixels:.1f} bits a pixel"),
    ]  # fmt: skip
    lacking = [name for name in ("webdataset", "megatron-energon", "torchvision") if not installed(name)]
    if lacking:
        print(f"not installed: {', '.join(lacking)}. To compare with all implementations, run:\n  {RIVAL_ENVIRONMENT}",
              file=sys.stderr)  # fmt: skip
    return figures


def raw_samples(source: Source) -> list[tuple[bytes, bytes]]:
    """(record, image) of every sample, in memory."""
    files = ShardFiles()
    found = []
    for shard in open_index(source.directory).shards:
        for row in range(len(shard.samples)):
            raw = read_sample(shard, row, files)
            found.append((raw.record, raw.media[0]))
    files.close()
    return found


def decode_alone(source: Source) -> Callable[[], int]:
    """The upper limit for any loader: decode JPEG to RGB, nothing else."""
    images = [image for _, image in raw_samples(source)]
    return lambda: sum(simplejpeg.decode_jpeg(image, colorspace="RGB").shape[2] == 3 for image in images)


def our_loader(source: Source, tokenizer: Path, *, num_threads: int) -> Callable[[], int]:
    """The whole loader: read, check, parse, tokenize, decode, resize, split, pack, collate."""
    config = DataConfig(
        sources=(SourceConfig(name="photos", path=source.directory, max_epochs=1),),
        tokenizer=tokenizer,
        packing=PackingConfig(seq_length=SEQ_LENGTH, buffer_size=BUFFER),
        num_threads=num_threads,
    )
    loader = Loader(config, global_batch_size=1, position_kind="rope")

    def go() -> int:
        with loader:
            return sum(len(batch.image_grid_thw) for batch in loader)

    return go


def processor_path(source: Source, directory: Path, backend: str) -> Callable[[], int]:
    """PIL, then transformers' Qwen2-VL image processor and tokenizer, sample by sample, from memory."""
    from transformers import AutoTokenizer

    processor, tokenizer = image_processor(backend), AutoTokenizer.from_pretrained(directory)
    samples = raw_samples(source)

    def one(record: bytes, image: bytes) -> int:
        found = processor(images=Image.open(io.BytesIO(image)).convert("RGB"), return_tensors="np" if backend else "pt")
        visual_tokens = int(found["image_grid_thw"][0].prod()) // 4
        pad = "<|vision_start|>" + "<|image_pad|>" * visual_tokens + "<|vision_end|>"
        messages = [
            {"role": m["role"], "content": "".join(pad if p["type"] == "image" else p["text"] for p in m["content"])}
            for m in json.loads(record)["messages"]
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return int(len(tokenizer(text)["input_ids"]) > visual_tokens)

    return lambda: sum(one(record, image) for record, image in samples)


def image_processor(backend: str) -> Any:
    """The published settings, with Pillow ("Pil") or torchvision ("") as the backend."""
    budget = ImageConfig()
    size = {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels}
    if backend == "Pil":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(size=size)
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(size=size)


def our_raw(source: Source) -> Callable[[], int]:
    """Read and verify record and image bytes of every sample, one pack at a time."""
    index, files = open_index(source.directory), ShardFiles()

    def go() -> int:
        count = 0
        for shard in index.shards:
            for start in range(0, len(shard.samples), PACK):
                rows = range(start, min(start + PACK, len(shard.samples)))
                count += sum(isinstance(raw, RawSample) for raw in read_samples(shard, rows, files))
        files.close()
        return count

    return go


def webdataset_raw(source: Source) -> Callable[[], int]:
    """Read the same bytes with webdataset."""
    import webdataset

    paths = sorted(str(path) for path in source.directory.glob("*.tar"))
    dataset = webdataset.WebDataset(paths, shardshuffle=False)
    return lambda: sum("0.jpg" in sample and "json" in sample for sample in dataset)


def energon_rows(source: Source, tokenizer: Tokenizer, images: Any) -> Callable[[], int]:
    """The same result with megatron-energon."""
    from energon_rival import Encoder, rows

    processor = image_processor("Pil") if images == "transformers" else None
    encoder = Encoder(tokenizer, ImageConfig(), SEQ_LENGTH, images, processor)
    found = rows(source.directory, encoder, buffer_size=BUFFER)
    return lambda: sum(len(row.image_grid_thw) for row in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images and rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # energon prints to stdout
        figures = run(quick=arguments.quick)
    print_report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
