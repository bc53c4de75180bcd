# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of the documents into docs/figures: `python docs/generate/figures.py`.

The data order, the packed sequence and the sample come from the loader, on small made-up sources; the pipeline schedule
comes from the layout search. tests/test_site.py draws them again and compares.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

from drawing import Drawing
from PIL import Image, ImageDraw
from transformers import AutoTokenizer

from mindvl_cli.demo.tokenizer import train_tokenizer
from mindvl_data import (
    IGNORE_INDEX,
    Batch,
    DataConfig,
    DataOrder,
    ImageConfig,
    Loader,
    PackingConfig,
    ShardFiles,
    SourceConfig,
    SourceIndex,
    index_directory,
    load_tokenizer,
    packs_of_rank,
    write_shards,
)
from mindvl_train.layout_search.memory import schedule

FIGURES = Path(__file__).parents[1] / "figures"
SOURCES = ("captions", "charts", "text")
SOURCE_COLORS = ("image", "label", "text")


def architecture() -> str:
    """Packages and data, from raw files to an exported model."""
    drawing = Drawing(790, 330)
    drawing.box(10, 20, 120, 56, "images, text", "LLaVA, parquet, ...")
    drawing.box(170, 20, 130, 56, "shards + index", "mindvl data write", color="text")
    drawing.box(340, 20, 130, 56, "data order", "which sample when", color="text")
    drawing.box(510, 20, 150, 56, "loader", "decode, tokenize, pack", color="text")
    for left in (130, 300, 470):
        drawing.arrow((left, 48), (left + 38, 48))
    drawing.text(670, 48, "mindvl-data", size=11, bold=True)

    drawing.box(170, 130, 490, 86, color="plain", strong=0.08)
    drawing.box(182, 150, 110, 50, "vision encoder", "window attention", color="image")
    drawing.box(310, 150, 90, 50, "projector", "2x2 patches", color="image")
    drawing.box(418, 150, 130, 50, "language model", "Qwen3, Llama, ...", color="image")
    drawing.box(566, 150, 82, 50, "loss", "summed", color="image")
    for left, right in ((292, 308), (400, 416), (548, 564)):
        drawing.arrow((left, 175), (right, 175))
    drawing.arrow((585, 76), (585, 104), (237, 104), (237, 148))
    drawing.text(400, 96, "packed sequence: input_ids, labels, pixel_values, cu_seqlens", anchor="middle")
    drawing.text(670, 166, "mindvl-model", bold=True)
    drawing.text(670, 182, "on mindvl-ops", bold=True)
    drawing.text(670, 198, "and megatron-core")

    drawing.box(510, 256, 150, 56, "optimizer step", "recipe, ParallelConfig", color="label")
    drawing.box(340, 256, 130, 56, "checkpoint", "resume in any layout", color="label")
    drawing.box(170, 256, 130, 56, "model directory", "for transformers", color="warm")
    drawing.box(10, 256, 120, 56, "merged model", "eval, resolution", color="warm")
    drawing.arrow((607, 200), (607, 254))
    drawing.arrow((510, 284), (472, 284))
    drawing.arrow((340, 284), (302, 284))
    drawing.arrow((170, 284), (132, 284))
    drawing.text(321, 246, "mindvl convert", anchor="middle", size=10)
    drawing.text(151, 246, "mindvl merge", anchor="middle", size=10)
    drawing.text(70, 322, "mindvl-merge", anchor="middle", bold=True)
    drawing.text(670, 284, "mindvl-train", bold=True)
    return drawing.svg()


def sample(pack: Batch, tokens: list[str]) -> str:
    """The first sample of a pack, from its image to its loss, with its real sizes."""
    end = int(pack.cu_seqlens[1])
    _, height, width = pack.image_grid_thw[0].tolist()
    drawing = Drawing(760, 306)
    drawing.box(10, 20, 24 * width / 2, 24 * height / 2, color="plain", strong=0.1)
    drawing.text(10 + 6 * width, 20 + 6 * height, "4071", anchor="middle", size=22)
    drawing.text(10, 36 + 12 * height, f"image of {14 * height} x {14 * width} pixels")
    left = 240
    for row in range(height):
        for column in range(width):
            drawing.box(left + 13 * column, 20 + 13 * row, 12, 12, color="image")
    drawing.text(left, 36 + 13 * height, f"{height * width} patches of 14 x 14: pixel_values [{height * width}, 588]")
    left = 560
    for number in range(height * width // 4):
        drawing.box(
            left + 26 * (number % (width // 2)), 20 + 26 * (number // (width // 2)), 25, 25, color="image", strong=0.5
        )
    drawing.text(left, 36 + 13 * height, f"{height * width // 4} visual tokens [{height * width // 4}, H]")
    drawing.arrow((10 + 12 * width + 8, 44), (232, 44))
    drawing.arrow((240 + 13 * width + 8, 44), (552, 44))
    drawing.text((240 + 13 * width + 560) / 2, 32, "encoder, projector", anchor="middle", size=10)

    labels = pack.labels[:end].tolist()
    size, top = 740 / end, 150
    drawing.text(10, top - 14, f"input_ids [{end}]: text, and a placeholder for each visual token")
    drawing.text(
        10, top + 64, "labels: the next token, in the answer of the assistant only; all other positions hold -100"
    )
    for place, token in enumerate(tokens[:end]):
        is_visual = token == "<|image_pad|>"
        drawing.cell(10 + size * place, top, size - 1.5, 24, "image" if is_visual else "text")
        is_learned = labels[place] != IGNORE_INDEX
        drawing.cell(
            10 + size * place, top + 76, size - 1.5, 24, "label" if is_learned else "pad", 0.8 if is_learned else 0.25
        )
        if len(token) == 1 and token.isprintable():
            drawing.text(10 + size * (place + 0.5), top + 12, token, anchor="middle", size=10)
    for place, token in enumerate(labels):
        if token != IGNORE_INDEX and len(shown := tokens[place + 1]) == 1 and shown.isprintable():
            drawing.text(10 + size * (place + 0.5), top + 88, shown, anchor="middle", size=10)
    drawing.text(
        10,
        top + 124,
        f"loss: the sum over {sum(label != IGNORE_INDEX for label in labels)} loss tokens; the step divides by"
        " the number of loss tokens of all packs and ranks",
    )
    drawing.text(10, top + 142, "orange: visual token, blue: text token, green: loss token", size=10)
    return drawing.svg()


def packed_sequence(pack: Batch, placeholders: tuple[int, ...]) -> str:
    """A packed sequence and which positions attend to which."""
    borders = pack.cu_seqlens.tolist()
    total, side = borders[-1], 300
    scale = side / total
    drawing = Drawing(760, 380)
    is_visual = [token in placeholders for token in pack.input_ids.tolist()]
    labels = pack.labels.tolist()
    kinds = [
        "pad" if place >= borders[len(pack.samples)] else "image" if is_visual[place] else "text"
        for place in range(total)
    ]
    for color, first, last in _runs(kinds):
        drawing.cell(50 + scale * first, 30, scale * (last - first), 12, color, 0.8)
        drawing.cell(32, 48 + scale * first, 12, scale * (last - first), color, 0.8)
    for color, first, last in _runs(["pad" if label == IGNORE_INDEX else "label" for label in labels]):
        if color == "label":
            drawing.cell(50 + scale * first, 20, scale * (last - first), 8, color, 0.9)
    for first, last in pairwise(borders):
        is_padding = first >= borders[len(pack.samples)]
        corners = [(50 + scale * x, 48 + scale * y) for x, y in ((first, first), (last, last), (first, last))]
        drawing.polygon(corners, "pad" if is_padding else "plain")
        drawing.line(50 + scale * last, 16, 50 + scale * last, 48 + side)
        drawing.line(28, 48 + scale * last, 50 + side, 48 + scale * last)
    drawing.text(50, 10, "keys", size=10)
    drawing.text(32, 364, "queries run downwards", size=10)
    right = 400
    drawing.text(right, 40, f"One packed sequence of {total} tokens", bold=True, size=13)
    lines = [
        f"{len(pack.samples)} samples of {', '.join(str(b - a) for a, b in pairwise(borders))} tokens",
        f"cu_seqlens: {borders}",
        "Attention is causal inside each sample and never",
        "crosses from one sample to the next.",
        "Position ids start again at every sample.",
    ]
    for number, line in enumerate(lines):
        drawing.text(right, 66 + 20 * number, line, size=12)
    legend = [("image", "visual tokens"), ("text", "text tokens"), ("label", "loss tokens, above the keys")]
    for number, (color, what) in enumerate([*legend, ("plain", "the query attends to the key")]):
        drawing.cell(right, 184 + 22 * number, 14, 14, color, 0.8)
        drawing.text(right + 22, 191 + 22 * number, what, size=12)
    return drawing.svg()


def _runs(kinds: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(kind, first, end) of neighbours that are alike."""
    end = 0
    for kind, group in groupby(kinds):
        first, end = end, end + len(list(group))
        yield kind, first, end


def data_order(config: DataConfig) -> str:
    """Which samples make the packs of the first steps, and which rank trains them."""
    files, tokenizer = ShardFiles(), load_tokenizer(config.tokenizer)
    order = DataOrder(
        config, [SourceIndex(one, config, tokenizer, files) for one in config.sources], global_batch_size=4
    )
    drawing = Drawing(760, 300)
    width, capacity = 150, config.packing.seq_length
    for number in range(4):
        step = order.next_step()
        assert step is not None
        left = 90 + 166 * number
        drawing.text(left + width / 2, 14, f"step {step.step}", anchor="middle", bold=True, size=12)
        for rank in range(2):
            for place, pack in enumerate(packs_of_rank(step.packs, dp_rank=rank, dp_size=2)):
                x, y = float(left), 30 + 110 * rank + 46 * place
                for one in pack:
                    part = width * one.length / capacity
                    drawing.cell(x, y, part - 1, 34, SOURCE_COLORS[one.source], 0.65)
                    if part > 22:
                        drawing.text(x + part / 2, y + 17, f"{one.sample_index}", anchor="middle", size=10)
                    x += part
                drawing.outline(left, y, width, 34)
    for rank in range(2):
        drawing.text(10, 70 + 110 * rank, f"dp rank {rank}", size=12)
    for number, name in enumerate(SOURCES):
        drawing.cell(90 + 130 * number, 252, 14, 14, SOURCE_COLORS[number], 0.65)
        drawing.text(110 + 130 * number, 259, f"{name}, {100 * order.shares[number]:.0f} %", size=12)
    drawing.text(
        90,
        286,
        "Numbers are samples of a source, widths their lengths; each pack has room for the same number of tokens.",
    )
    return drawing.svg()


def pipeline(size: int = 4, virtual: int = 2, num_microbatches: int = 8) -> str:
    """When each pipeline rank runs which microbatch: 1F1B, and the same interleaved over virtual stages."""
    drawing = Drawing(760, 330)
    _draw_schedule(drawing, 24, size, 1, num_microbatches)
    _draw_schedule(drawing, 176, size, virtual, num_microbatches)
    drawing.text(8, 308, "Time runs to the right; numbers are microbatches; empty: pipeline bubble.", size=10)
    drawing.text(
        8, 322, "Blue: forward, orange: backward (twice as long); darker: the second chunk of the rank.", size=10
    )
    return drawing.svg()


def _draw_schedule(drawing: Drawing, top: int, size: int, virtual: int, num_microbatches: int) -> None:
    times = _simulate(size, virtual, num_microbatches)
    total = max(end for *_, end in times)
    busy = 3 * num_microbatches
    name = "1F1B" if virtual == 1 else f"interleaved, {virtual} virtual stages"
    drawing.text(8, top - 10, f"{name}: bubble {100 * (total - busy) / total:.0f} % of the step", bold=True, size=12)
    scale = 690 / (1.5 * (size + num_microbatches) * 2)
    for rank, is_forward, chunk, microbatch, start, end in times:
        color = "text" if is_forward else "image"
        x, width = 68 + scale * start, scale * (end - start)
        drawing.cell(x, top + 30 * rank, width - 1, 26, color, 0.8 if chunk else 0.45)
        if width > 9:
            drawing.text(x + width / 2, top + 30 * rank + 13, str(microbatch), anchor="middle", size=9)
    for rank in range(size):
        drawing.text(8, top + 30 * rank + 13, f"pp rank {rank}")


def _simulate(size: int, virtual: int, num_microbatches: int) -> list[tuple[int, bool, int, int, float, float]]:
    """(rank, forward, chunk, microbatch, start, end): every rank runs its own order, as soon as its input is there."""
    orders = [list(_whole_order(size, virtual, rank, num_microbatches)) for rank in range(size)]
    done: dict[tuple[bool, int, int], float] = {}  # (forward, stage of all, microbatch) -> end
    clock, times = [0.0] * size, []
    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            is_forward, chunk, microbatch = order[0]
            stage, last = chunk * size + rank, size * virtual - 1
            if is_forward:
                needed = (True, stage - 1, microbatch) if stage else None
            else:
                needed = (False, stage + 1, microbatch) if stage < last else (True, stage, microbatch)
            if needed is not None and needed not in done:
                continue
            start = max(clock[rank], done[needed] if needed else 0.0)
            clock[rank] = start + (1 if is_forward else 2) / virtual
            done[is_forward, stage, microbatch] = clock[rank]
            times.append((rank, is_forward, chunk, microbatch, start, clock[rank]))
            order.pop(0)
    return times


def _whole_order(size: int, virtual: int, rank: int, num_microbatches: int) -> list[tuple[bool, int, int]]:
    """The order of the layout search, which stops when nothing new is held, continued over all microbatches."""
    head = schedule(size, virtual, rank, num_microbatches)
    warmup = next(number for number, (is_forward, _) in enumerate(head) if not is_forward) - 1
    total = num_microbatches * virtual
    forward = [(True, *_chunk_and_microbatch(step, size, virtual)) for step in range(total)]
    backward = [
        (False, virtual - 1 - chunk, microbatch)
        for chunk, microbatch in (_chunk_and_microbatch(step, size, virtual) for step in range(total))
    ]
    order = forward[:warmup]
    for step in range(total - warmup):
        order += [forward[warmup + step], backward[step]]
    order += backward[total - warmup :]
    assert [(one, chunk) for one, chunk, _ in order[: warmup + 2]] == list(head[: warmup + 2])
    return order


def _chunk_and_microbatch(step: int, size: int, virtual: int) -> tuple[int, int]:
    if virtual == 1:
        return 0, step
    return step // size % virtual, step // (size * virtual) * size + step % size


def make_data(directory: Path) -> DataConfig:
    """Three small sources, always the same, and a tokenizer for them."""
    choose = random.Random(0)
    for name, count, words in (("captions", 40, 2), ("charts", 40, 10)):
        raw = directory / f"{name}-raw"
        raw.mkdir()
        records = []
        for number in range(count):
            size = (168, 56) if number == 0 else choose.choice([(84, 56), (112, 84), (168, 112)])
            image = Image.new("RGB", size, "white")
            answer = "4071" if number == 0 else str(choose.randrange(10**4))
            ImageDraw.Draw(image).text((4, 4), answer, fill="black")
            image.save(raw / f"{number}.png")
            answer = " ".join([answer] * words if name == "charts" else [answer])
            turns = [{"from": "human", "value": "<image>Read it."}, {"from": "gpt", "value": answer}]
            records.append({"id": str(number), "image": f"{number}.png", "conversations": turns})
        (raw / "data.json").write_text(json.dumps(records))
        write_shards(raw / "data.json", directory / name, format="llava")
    lines = [json.dumps({"text": "some words " * choose.randint(3, 20)}) for _ in range(40)]
    (directory / "text.jsonl").write_text("\n".join(lines))
    write_shards(directory / "text.jsonl", directory / "text", format="text")
    for name in SOURCES:
        index_directory(directory / name)
    train_tokenizer(["Read it. 0123456789", "some words"], directory / "tokenizer")
    weights = (2.0, 1.0, 1.0)
    return DataConfig(
        sources=tuple(
            SourceConfig(name=name, path=directory / name, weight=weight)
            for name, weight in zip(SOURCES, weights, strict=True)
        ),
        tokenizer=directory / "tokenizer",
        packing=PackingConfig(seq_length=192, buffer_size=16),
        image=ImageConfig(min_pixels=784, max_pixels=100352),
        num_threads=0,
    )


def draw_all() -> dict[str, str]:
    """Name of each figure and its SVG."""
    with tempfile.TemporaryDirectory() as name:
        config = make_data(Path(name))
        tokenizer = load_tokenizer(config.tokenizer)
        with Loader(config, global_batch_size=4, position_kind="rope") as loader:
            packs = [next(loader) for _ in range(8)]
        chosen = max(packs, key=lambda pack: len({one.source for one in pack.samples}) * 100 + len(pack.samples))
        only = SourceConfig(name="captions", path=Path(name) / "captions", first=1)
        with Loader(replace(config, sources=(only,)), global_batch_size=1, position_kind="rope") as loader:
            page = next(loader)
        decode = AutoTokenizer.from_pretrained(config.tokenizer).decode
        tokens = [decode([token]) for token in page.input_ids.tolist()]
        return {
            "architecture": architecture(),
            "data-order": data_order(config),
            "packed-sequence": packed_sequence(chosen, tokenizer.media_pad_ids),
            "pipeline": pipeline(),
            "sample": sample(page, tokens),
        }


def main() -> None:
    """Write every figure."""
    for name, text in draw_all().items():
        (FIGURES / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
