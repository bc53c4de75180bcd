# SPDX-License-Identifier: Apache-2.0
"""One sample at every stage, as data and as a self-contained page.

Stands beside the line: it runs the same functions as the loader, one after another, and keeps what each returned.
"""

import base64
import html
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mindvl_data.config import ImageConfig
from mindvl_data.encode import image_scales
from mindvl_data.errors import DataError
from mindvl_data.images import decode, smart_resize
from mindvl_data.samples import parse_sample
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.index import FolderIndex, key_of, open_index
from mindvl_data.shards.reading import read_sample
from mindvl_data.tokenization import Tokenizer, expand
from mindvl_data.types import IGNORE_INDEX, Batch, Coordinates, RawSample, Sample

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%;image-rendering:pixelated;border:1px solid #ccc;margin:.3em 0}"
    "pre{background:#f6f6f6;padding:.8em;overflow:auto;white-space:pre-wrap}"
    ".t{border-radius:3px;padding:0 1px;margin:0 1px;background:#eee;white-space:pre-wrap}"
    ".l{background:#bfe8c4}.v{background:#cfdcf7}.s{margin-top:.6em}"
)


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """One token as shown, or a run of equal placeholders."""

    text: str
    count: int
    learned: bool  # it is what the model has to say here
    visual: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    key: str
    shard: str
    raw: RawSample
    sample: Sample
    scales: list[tuple[tuple[int, int], tuple[int, int]]]  # (original, resized) size of each picture
    tokens: list[TokenRun]  # empty without a tokenizer

    def as_json(self, stage: str) -> dict[str, Any]:
        """What `stage` (raw, sample or tokens) shows, as JSON values."""
        head: dict[str, Any] = {"key": self.key, "shard": self.shard, "stage": stage}
        if stage == "raw":
            return head | {"record": self.raw.record.decode(), "media_bytes": [len(m) for m in self.raw.media]}
        pictures = [{"size": list(old), "resized": list(new)} for old, new in self.scales]
        if stage == "sample":
            return head | asdict(self.sample) | {"pictures": pictures}
        return head | {"pictures": pictures, "tokens": [asdict(run) for run in self.tokens]}


def preview_sample(
    folder: Path | str, *, key: str | None = None, tokenizer: Tokenizer | None = None, image: ImageConfig | None = None
) -> Preview:
    """Read one sample of an indexed folder, the first when no key is given.

    Raises:
        DataError: The key does not exist, or the sample cannot be used.
    """
    image = image or ImageConfig()
    index = open_index(folder)
    shard_number, row = (0, 0) if key is None else _find(index, key)
    shard = index.shards[shard_number]
    files = ShardFiles()
    try:
        raw = read_sample(shard, row, files)
    finally:
        files.close()
    sample = parse_sample(raw)
    scales = image_scales(raw.sizes, image)
    tokens: list[TokenRun] = []
    if tokenizer is not None:
        encoded = tokenizer.encode(sample, scales)
        merged = [h * w // image.multiple**2 for _, (h, w) in scales]
        input_ids, labels = expand(encoded, merged, tokenizer.media_pad_ids)
        tokens = token_runs(input_ids, labels, tokenizer)
    return Preview(key=raw.key, shard=shard.name, raw=raw, sample=sample, scales=scales, tokens=tokens)


def token_runs(input_ids: Any, labels: Any, tokenizer: Tokenizer) -> list[TokenRun]:
    """Tokens with their text; equal placeholders are counted instead of repeated."""
    learned = np.concatenate(([False], np.asarray(labels)[:-1] != IGNORE_INDEX))
    runs: list[TokenRun] = []
    for token, is_learned in zip(np.asarray(input_ids).tolist(), learned.tolist(), strict=True):
        text = tokenizer.backend.decode([token], skip_special_tokens=False)
        if runs and token in (tokenizer.image_pad_id, tokenizer.pad_id) and runs[-1].text == text:
            last = runs.pop()
            runs.append(TokenRun(text=text, count=last.count + 1, learned=last.learned, visual=last.visual))
        else:
            runs.append(TokenRun(text=text, count=1, learned=is_learned, visual=token == tokenizer.image_pad_id))
    return runs


def sample_page(preview: Preview, image: ImageConfig | None = None) -> str:
    """A page with every stage: record, pictures with patch grid and boxes, tokens coloured by learned or not."""
    image = image or ImageConfig()
    body = [f"<h1>{html.escape(preview.key)}</h1><p>{html.escape(preview.shard)}</p>"]
    record = preview.raw.record.decode()
    if preview.raw.is_json:
        record = json.dumps(json.loads(record), indent=1, ensure_ascii=False)
    body.append(f"<h2>Record</h2><pre>{html.escape(record)}</pre>")
    if preview.raw.media:
        body.append("<h2>Pictures</h2><p>Each square of the grid is one visual token.</p>")
    for number, (content, (old, new)) in enumerate(zip(preview.raw.media, preview.scales, strict=True)):
        drawn = _draw(Image.fromarray(decode(content, decode_limit=image.decode_limit)), preview.sample, number, image)
        tokens = new[0] * new[1] // image.multiple**2
        body.append(
            f"<p class=s>{old[1]}x{old[0]} pixels, resized to {new[1]}x{new[0]}, {tokens} visual tokens<br>"
            f'<img alt="picture {number}" src="data:image/png;base64,{_png(drawn)}"></p>'
        )
    if preview.tokens:
        body.append(f"<h2>Tokens</h2>{_legend()}<p>{_token_spans(preview.tokens)}</p>")
    return _page(preview.key, body)


def row_page(batch: Batch, tokenizer: Tokenizer) -> str:
    """A page with one packed row: its segments and their tokens."""
    ends = batch.cu_seqlens.tolist()
    body = [f"<h1>One row</h1><p>{ends[-1]} tokens, {len(batch.pixel_values)} patches</p>{_legend()}"]
    for segment, start, stop in zip(batch.segments, ends, ends[1:], strict=False):
        runs = token_runs(batch.input_ids[start:stop].numpy(), batch.labels[start:stop].numpy(), tokenizer)
        title = f"{segment.source} / {segment.key}: tokens {start} to {stop}"
        body.append(f"<h2>{html.escape(title)}</h2><p>{_token_spans(runs)}</p>")
    return _page("One row", body)


def _find(index: FolderIndex, key: str) -> tuple[int, int]:
    wanted = np.uint64(key_of(key))
    for number, shard in enumerate(index.shards):
        rows = np.flatnonzero(shard.samples["key_hash"] == wanted)
        if len(rows):
            return number, int(rows[0])
    raise DataError(f"key {key!r} does not exist. {index.folder}. Leave --key out to see the first sample.")


def _draw(picture: Image.Image, sample: Sample, number: int, image: ImageConfig) -> Image.Image:
    height, width = smart_resize(
        picture.height,
        picture.width,
        multiple=image.multiple,
        min_pixels=image.min_pixels,
        max_pixels=image.max_pixels,
    )
    zoom = max(1, 560 // max(height, width))
    canvas = picture.resize((width, height), Image.Resampling.BICUBIC).resize(
        (width * zoom, height * zoom), Image.Resampling.NEAREST
    )
    draw = ImageDraw.Draw(canvas)
    for x in range(0, width, image.multiple):
        draw.line([(x * zoom, 0), (x * zoom, height * zoom)], fill=(90, 140, 230))
    for y in range(0, height, image.multiple):
        draw.line([(0, y * zoom), (width * zoom, y * zoom)], fill=(90, 140, 230))
    scale = (width * zoom / picture.width, height * zoom / picture.height)
    parts = [*sample.content, *(part for message in sample.messages for part in message.parts)]
    for part in parts:
        if isinstance(part, Coordinates) and part.image == number:
            values = [v * scale[i % 2] for i, v in enumerate(part.values)]
            if len(values) == 2:
                values = [values[0] - 5, values[1] - 5, values[0] + 5, values[1] + 5]
            left, right = sorted(values[::2])
            top, bottom = sorted(values[1::2])
            draw.rectangle((left, top, right, bottom), outline=(220, 30, 30), width=2)
    return canvas


def _png(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _legend() -> str:
    return '<p><span class="t l">learned</span> <span class="t">not learned</span> <span class="t v">visual</span></p>'


def _token_spans(runs: list[TokenRun]) -> str:
    spans = []
    for run in runs:
        kind = "t v" if run.visual else "t l" if run.learned else "t"
        text = html.escape(run.text.replace("\n", "\\n")) + (f" x {run.count}" if run.count > 1 else "")
        spans.append(f'<span class="{kind}">{text}</span>')
    return "".join(spans)


def _page(title: str, body: list[str]) -> str:
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>"
