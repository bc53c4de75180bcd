# SPDX-License-Identifier: Apache-2.0
"""Time of writing, indexing, measuring and loading tiny pictures.

Run: python packages/mindvl-data/benchmarks/loader.py --tokenizer FOLDER [--samples 5000]
FOLDER holds any tokenizer with Qwen's special tokens and a chat template.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from mindvl_data.lengths import measure_folder
from PIL import Image

from mindvl_data import (
    DataConfig,
    ImageConfig,
    Loader,
    PackingConfig,
    SourceConfig,
    index_folder,
    load_tokenizer,
    write_shards,
)


def make_source(folder: Path, count: int) -> Path:
    """LLaVA rows about pictures of 56x168 pixels, half PNG, half JPEG."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        file = io.BytesIO()
        small = generator.integers(0, 256, (14, 42), dtype=np.uint8)
        extension = "png" if number % 2 else "jpg"
        Image.fromarray(small).resize((168, 56)).save(file, "PNG" if number % 2 else "JPEG")
        (folder / f"{number}.{extension}").write_bytes(file.getvalue())
        turns = [
            {"from": "human", "value": "<image>\nRead the number."},
            {"from": "gpt", "value": str(generator.integers(10**6))},
        ]
        rows.append({"id": str(number), "image": f"{number}.{extension}", "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=5_000)
    arguments = parser.parse_args()
    count = arguments.samples
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        source = make_source(root, count)

        def timed(name: str, started: float, cpu: float) -> None:
            wall, core = time.perf_counter() - started, time.process_time() - cpu
            rate = f"{count / wall:8.0f} samples/s, {32e3 * core / count:6.2f} core-ms per 32"
            print(f"{name:<8} {wall:6.2f} s  {rate}")

        clock = (time.perf_counter(), time.process_time())
        write_shards(source, root / "shards", format="llava")
        timed("write", *clock)
        clock = (time.perf_counter(), time.process_time())
        index_folder(root / "shards")
        timed("index", *clock)
        tokenizer = load_tokenizer(arguments.tokenizer)
        image = ImageConfig(min_pixels=28 * 28, max_pixels=56 * 168)
        clock = (time.perf_counter(), time.process_time())
        measure_folder(root / "shards", tokenizer, image)
        timed("measure", *clock)
        config = DataConfig(
            sources=(SourceConfig(name="tiny", path=root / "shards", max_epochs=1),),
            tokenizer=arguments.tokenizer,
            packing=PackingConfig(seq_length=1024),
            image=image,
        )
        with Loader(config, packs_per_step=1, position_kind="rope") as loader:
            clock = (time.perf_counter(), time.process_time())
            used = sum(len(batch.segments) for batch in loader)
            timed("load", *clock)
            assert used == count
            print(f"fill {100 * loader.report()['fill']:.2f} %")


if __name__ == "__main__":
    main()
