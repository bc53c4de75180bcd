# SPDX-License-Identifier: Apache-2.0
"""The pages of `mindvl data show`: one sample at every stage, or one packed sequence.

Comes after mindvl_data.preview. Images are shown as the model receives them, after the resize, with one square for each
visual token and with boxes at the coordinates that the text of the sample contains.
"""

import json
from typing import Any

from mindvl_cli.pages.plots import NUM_TONES
from mindvl_cli.pages.render import data_url, render
from mindvl_data import Tokenizer
from mindvl_data.preview import Preview
from mindvl_data.preview_media import Medium, media, packed_samples, turns
from mindvl_data.types import Batch

_MOST_PNG_BYTES = 600_000  # larger images are embedded as JPEG, or the page gets too large


def sample_page(preview: Preview) -> str:
    """A page with every stage: record, turns, media, tokens, and the share of a packed sequence."""
    text = preview.raw.record.decode()
    encoding = preview.encoding
    visual = sum(run.count for run in preview.tokens if run.visual)
    in_loss = sum(run.count for run in preview.tokens if run.in_loss)
    length, limit = (encoding.num_tokens, preview.rules.max_tokens) if encoding else (0, None)
    parts = [("visual", visual), ("loss tokens", in_loss), ("other text", length - visual - in_loss)]
    return render(
        "sample",
        title=preview.key,
        p=preview,
        num_loss_tokens=int(encoding.in_loss.sum()) if encoding else 0,
        record=json.dumps(json.loads(text), indent=1, ensure_ascii=False) if preview.raw.is_json else text,
        media_rows=[
            (
                number,
                f"video, {size.frames} frames at {size.fps:g} per second" if size.frames else "image",
                f"{size.width} x {size.height}",
                f"{len(content):,}",
            )
            for number, (content, size) in enumerate(zip(preview.raw.media, preview.raw.sizes, strict=True))
        ],
        turns=turns(preview),
        media=[(medium, [(moment, data_url(*_image_kind(medium, frame))) for moment, frame in medium.frames])
               for medium in media(preview)],
        bar_parts=_bar([(name, count) for name, count in parts if count], max(length, limit or 0)),
        limit=limit if limit is not None and length > limit else None,
    )  # fmt: skip


def pack_page(batch: Batch, tokenizer: Tokenizer) -> str:
    """A page with one packed sequence: the shares of its samples, then the tokens of each."""
    samples = packed_samples(batch, tokenizer)
    length = int(batch.cu_seqlens[-1])
    return render(
        "pack",
        title="One packed sequence",
        num_tokens=length,
        num_loss_tokens=batch.num_loss_tokens,
        num_patches=len(batch.pixel_values) + len(batch.pixel_values_videos),
        bar_parts=_bar([(f"{one.source} / {one.key}", one.stop - one.start) for one in samples], length),
        samples=samples,
    )


def _image_kind(medium: Medium, pixels: Any) -> tuple[Any, str]:
    return pixels, "PNG" if not medium.size.frames and pixels.size < _MOST_PNG_BYTES else "JPEG"


def _bar(parts: list[tuple[str, int]], total: int) -> list[tuple[str, int, str, str]]:
    """(name, tokens, share in percent, class) of each part, and of what is free."""
    bars = [(name, count, f"tone-{number % NUM_TONES}") for number, (name, count) in enumerate(parts)]
    rest = total - sum(count for _, count in parts)
    if rest > 0:
        bars.append(("free or padding", rest, "free"))
    return [(name, count, f"{100 * count / max(total, 1):.3f}", kind) for name, count, kind in bars]
