# SPDX-License-Identifier: Apache-2.0
"""One sample at every stage, or one packed pack, as a page that holds everything itself and runs no script.

Comes after preview.py. Images are drawn as the model gets them, after the resize, with one square for each visual
token and with the boxes at the coordinates that its text says.
"""

import base64
import html
import io
import json
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mindvl_data.chat import coordinates_text, move_coordinates
from mindvl_data.encode import Scale
from mindvl_data.errors import SampleError
from mindvl_data.images import decode, resize
from mindvl_data.preview import Preview, TokenRun, token_runs
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import Batch, Coordinates, MediaSize, Message, Part, Sample, Text, Video
from mindvl_data.video import used_frames, video_layout

_STYLE = """
:root{--ink:#1d2430;--soft:#667085;--line:#e3e6ec;--card:#fff;--learn:#c9efd0;--learn-ink:#0b5d24;--see:#d5e1fb}
*{box-sizing:border-box}
body{font:15px/1.55 system-ui,sans-serif;color:var(--ink);background:#f5f6f9;margin:0}
main{max-width:66em;margin:0 auto;padding:2em 1.2em 4em}
h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.05em;margin:0 0 .8em}h2 b{color:var(--soft);margin-right:.5em}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:1.1em 1.3em;margin:1.1em 0}
.soft{color:var(--soft)}.chips span{display:inline-block;background:#eaedf3;border-radius:99px;padding:.1em .8em;
margin:.3em .4em 0 0}pre{background:#f5f6f9;border-radius:8px;padding:.9em;margin:0;overflow:auto;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:26em;font-size:13px}figure{margin:1em 0 0}figcaption{color:var(--soft);margin:.3em 0}
svg{max-width:100%;height:auto;border-radius:8px;display:block;background:#ddd}
.turn{border-left:4px solid #c6ccd8;padding:.3em .9em;margin:.6em 0;white-space:pre-wrap;overflow-wrap:anywhere}
.turn b{display:block;font-size:.8em;color:var(--soft)}.assistant{border-color:#3da35d;background:#f3fbf5}
.cut{opacity:.45;border-left-style:dashed}.part{background:var(--see);border-radius:5px;padding:0 .4em}
.box{background:#fde2e0}.strip{display:flex;gap:6px;overflow-x:auto;padding-bottom:.5em}
.strip div{flex:none;text-align:center;font-size:12px;color:var(--soft)}.strip img{height:110px;display:block;
border-radius:6px}.tokens{line-height:1.9;overflow-wrap:anywhere}.t{border-radius:4px;padding:.1em 1px;margin:0 1px;
background:#eef0f4;white-space:pre-wrap}.l{background:var(--learn);color:var(--learn-ink)}.v{background:var(--see)}
.pack{display:flex;height:26px;border-radius:6px;overflow:hidden;
background:repeating-linear-gradient(45deg,#eceef3 0 6px,#f7f8fa 6px 12px)}
.pack i{border-right:1px solid #fff;min-width:1px}table{border-collapse:collapse;margin-top:.8em}
td,th{text-align:left;padding:.15em 1.2em .15em 0;font-weight:400}th{color:var(--soft)}
.grid{fill:none;stroke:#fff;stroke-opacity:.55;vector-effect:non-scaling-stroke}
.mark{fill:none;stroke:#ffd60a;stroke-width:2.5;vector-effect:non-scaling-stroke;filter:drop-shadow(0 0 1px #000)}
input:not(:checked)~svg .grid{display:none}.bad{color:#b3261e}
"""
_MOST_FRAMES = 64  # shown of one video
_MOST_PNG_BYTES = 600_000  # larger images are shown as JPEG, or the page gets heavy
_SHADES = ("#7aa5f0", "#5cc08a", "#f0b45c", "#c58be0", "#ef8f8f", "#66c4cf")


def sample_page(preview: Preview) -> str:
    """A page with every stage: record, turns, images with patch grid and boxes, videos, tokens, place in a pack."""
    chips = [f"{len(preview.raw.record):,} bytes of text"]
    chips += [f"images: {preview.sample.num_images}"] * (preview.sample.num_images > 0)
    chips += [f"videos: {preview.sample.num_videos}"] * (preview.sample.num_videos > 0)
    if preview.encoding:
        chips.append(f"{preview.encoding.num_tokens:,} tokens")
        chips.append(f"{int(preview.encoding.learned.sum()):,} learned")
        chips.append(f"{preview.encoding.num_patches:,} patches")
    if preview.num_cut:
        chips.append(f"{preview.num_cut} messages cut")
    body = [f"<h1>{html.escape(preview.key)}</h1>", f"<div class=soft>{html.escape(preview.shard)}</div>"]
    body.append(f"<div class=chips>{''.join(f'<span>{chip}</span>' for chip in chips)}</div>")
    body.append(_section("raw", "What lies in the shard", _raw(preview)))
    body.append(_section("sample", "What it says and shows", _turns(preview) + _media(preview)))
    if preview.encoding:
        body.append(_section("tokens", "What the model reads and learns", _legend() + _token_spans(preview.tokens)))
        body.append(_section("pack", "The room it takes in a pack", _room(preview)))
    return _page(preview.key, body)


def pack_page(batch: Batch, tokenizer: Tokenizer) -> str:
    """A page with one packed pack: its segments side by side, then the tokens of each."""
    ends = batch.cu_seqlens.tolist()
    bounds = list(zip(batch.segments, ends, ends[1:], strict=False))
    patches = len(batch.pixel_values) + len(batch.pixel_values_videos)
    chips = [f"{ends[-1]:,} tokens", f"{batch.num_loss_tokens:,} learned", f"{patches:,} patches"]
    body = ["<h1>One pack</h1>", f"<div class=chips>{''.join(f'<span>{chip}</span>' for chip in chips)}</div>"]
    bars = [(f"{s.source} / {s.key}", stop - start) for s, start, stop in bounds]
    body.append(_section("pack", "Samples side by side", _bar(bars, ends[-1])))
    for number, (segment, start, stop) in enumerate(bounds, 1):
        runs = token_runs(batch.input_ids[start:stop].numpy(), batch.labels[start:stop].numpy(), tokenizer)
        title = f"{segment.source} / {segment.key}: tokens {start} to {stop}"
        body.append(_section(str(number), title, (_legend() if number == 1 else "") + _token_spans(runs)))
    return _page("One pack", body)


def _raw(preview: Preview) -> str:
    text = preview.raw.record.decode()
    if preview.raw.is_json:
        text = json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    packs = "".join(
        f"<tr><td>{number}<td>{_kind(size)}<td>{size.width} x {size.height}<td>{len(content):,}</tr>"
        for number, (content, size) in enumerate(zip(preview.raw.media, preview.raw.sizes, strict=True))
    )
    table = f"<table><tr><th>medium<th>kind<th>pixels<th>bytes</tr>{packs}</table>" if packs else ""
    return f"<pre>{html.escape(text)}</pre>{table}"


def _kind(size: MediaSize) -> str:
    return f"video, {size.frames} frames at {size.fps:g} per second" if size.frames else "image"


def _turns(preview: Preview) -> str:
    sample = preview.sample
    if not sample.messages:
        return (
            f'<div class="turn assistant"><b>text without a template</b>{_parts(sample.content, preview.scales)}</div>'
        )
    kept = len(sample.messages) - preview.num_cut
    return "".join(_turn(message, number >= kept, preview.scales) for number, message in enumerate(sample.messages))


def _turn(message: Message, cut: bool, scales: list[Scale]) -> str:
    note = ", cut: the sample is too long" if cut else ""
    kind = f"turn {message.role}{' cut' if cut else ''}"
    return f'<div class="{kind}"><b>{message.role}{note}</b>{_parts(message.parts, scales)}</div>'


def _parts(parts: Iterable[Part], scales: list[Scale]) -> str:
    pieces = []
    for part in parts:
        if isinstance(part, Text):
            pieces.append(html.escape(part.text))
        elif isinstance(part, Coordinates):
            said = coordinates_text(part, scales[part.image])
            pieces.append(f'<span class="part box">{said} of image {part.image}</span>')
        else:
            pieces.append(f"<span class=part>{'video' if isinstance(part, Video) else 'image'} {part.index}</span> ")
    return "".join(pieces)


def _media(preview: Preview) -> str:
    figures, number = [], 0
    used = len(preview.encoding.grids) if preview.encoding else len(preview.raw.media)
    for place, (content, size) in enumerate(zip(preview.raw.media[:used], preview.raw.sizes, strict=False)):
        try:
            if size.frames:
                figures.append(_film(content, size, place, preview))
            else:
                figures.append(_image(content, place, number, preview))
        except SampleError as error:
            figures.append(f"<figure class=bad>medium {place}: {html.escape(str(error))}</figure>")
        number += not size.frames
    return "".join(figures)


def _image(content: bytes, place: int, number: int, preview: Preview) -> str:
    """An image after its resize; lines and boxes are drawn over it and can be hidden."""
    old, (height, width) = preview.scales[number]
    pixels = resize(decode(content, decode_limit=preview.image.decode_limit), height, width)
    step = preview.image.multiple
    lines = "".join(f"M{x} 0V{height}" for x in range(step, width, step))
    lines += "".join(f"M0 {y}H{width}" for y in range(step, height, step))
    marks = "".join(_mark(part, preview.scales[number]) for part in _coordinates(preview.sample, number))
    kind = "PNG" if pixels.size < _MOST_PNG_BYTES else "JPEG"
    shown = max(width, min(3 * width, 480))  # small ones are shown larger
    caption = (
        f"image {place}: {old[1]} x {old[0]} pixels, resized to {width} x {height}, "
        f"{width // step} x {height // step} = {width * height // step**2} visual tokens"
    )
    return (
        f"<figure><figcaption>{caption}</figcaption><input type=checkbox id=g{place} checked> "
        f"<label for=g{place} class=soft>one square for each visual token</label>"
        f'<svg viewBox="0 0 {width} {height}" width="{shown}"><image width="{width}" height="{height}" '
        f'href="{_data_address(pixels, kind)}"/><path class=grid d="{lines}"/>{marks}</svg></figure>'
    )


def _film(content: bytes, size: MediaSize, place: int, preview: Preview) -> str:
    """The frames that are used, in order, with their moments; of very many only some are shown."""
    layout = video_layout(size, preview.rules.video, preview.image)
    every = -(-len(layout.frames) // _MOST_FRAMES)
    height = min(size.height, 110)
    frames = []
    for number, pixels in enumerate(used_frames(content, size, layout)):
        if number % every == 0:
            small = resize(pixels, height, max(1, size.width * height // size.height))
            moment = layout.frames[number] / size.fps
            frames.append(f'<div><img alt="" src="{_data_address(small, "JPEG")}">{moment:.2f} s</div>')
    steps, packs, columns = layout.grid
    merge = preview.image.spatial_merge_size
    caption = (
        f"video {place}: {len(layout.frames)} of {size.frames} frames"
        f"{f', every {every}th of them shown' if every > 1 else ''}; each resized to {layout.width} x {layout.height}; "
        f"{steps} x {packs // merge} x {columns // merge} = {steps * packs * columns // merge**2} visual tokens"
    )
    return f"<figure><figcaption>{caption}</figcaption><div class=strip>{''.join(frames)}</div></figure>"


def _coordinates(sample: Sample, number: int) -> list[Coordinates]:
    parts = [*sample.content, *(part for message in sample.messages for part in message.parts)]
    return [part for part in parts if isinstance(part, Coordinates) and part.image == number]


def _mark(part: Coordinates, scale: Scale) -> str:
    values = move_coordinates(part, scale)
    if len(values) == 2:
        return f'<circle class=mark cx="{values[0]}" cy="{values[1]}" r="4"/>'
    left, right = sorted(values[::2])
    top, bottom = sorted(values[1::2])
    return f'<rect class=mark x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>'


def _room(preview: Preview) -> str:
    assert preview.encoding is not None
    length, limit = preview.encoding.num_tokens, preview.rules.max_tokens
    visual = sum(run.count for run in preview.tokens if run.visual)
    learned = sum(run.count for run in preview.tokens if run.learned)
    parts = [("visual", visual), ("learned text", learned), ("other text", length - visual - learned)]
    kept = "" if limit is None or length <= limit else f"<p class=bad>It does not fit a pack of {limit:,} tokens.</p>"
    return _bar([(name, count) for name, count in parts if count], max(length, limit or 0)) + kept


def _bar(parts: list[tuple[str, int]], total: int) -> str:
    bars, packs = [], []
    for number, (name, count) in enumerate(parts):
        shade, escaped = _SHADES[number % len(_SHADES)], html.escape(name)
        bars.append(f'<i style="width:{100 * count / max(total, 1):.3f}%;background:{shade}" title="{escaped}"></i>')
        packs.append(
            f'<tr><td><span style="color:{shade}">&#9632;</span> {escaped}<td>{count:,} tokens'
            f"<td>{100 * count / max(total, 1):.1f} %</tr>"
        )
    rest = total - sum(count for _, count in parts)
    if rest > 0:
        packs.append(f"<tr><td>free or padding<td>{rest:,} tokens<td>{100 * rest / total:.1f} %</tr>")
    return f"<div class=pack>{''.join(bars)}</div><table>{''.join(packs)}</table>"


def _data_address(pixels: NDArray[np.uint8], kind: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _legend() -> str:
    return '<p><span class="t l">learned</span> <span class="t">not learned</span> <span class="t v">visual</span></p>'


def _token_spans(runs: list[TokenRun]) -> str:
    spans = []
    for run in runs:
        kind = "t v" if run.visual else "t l" if run.learned else "t"
        text = html.escape(run.text.replace("\n", "\\n")) + (f" x {run.count}" if run.count > 1 else "")
        spans.append(f'<span class="{kind}">{text}</span>' + ("<br>" if "\n" in run.text else ""))
    return f"<div class=tokens>{''.join(spans)}</div>"


def _section(stage: str, title: str, content: str) -> str:
    return f"<section><h2><b>{html.escape(stage)}</b>{html.escape(title)}</h2>{content}</section>"


def _page(title: str, body: list[str]) -> str:
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(body)}</main></body></html>"
