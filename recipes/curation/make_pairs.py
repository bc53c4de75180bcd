# SPDX-License-Identifier: Apache-2.0
"""Make raw image-text pairs for recipes/curation/pairs.yaml: drawn shapes with captions, and planted faults.

Usage: python recipes/curation/make_pairs.py raw
"""

import io
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue", "orange", "purple", "brown", "gray", "white")
SHAPES = ("circle", "square", "triangle")
ADVERTISEMENT = (
    "CLICK HERE >>> http://shop.example/buy http://shop.example/now !!! $$$ ### 50% %%% >>> http://shop.example"
)


def draw(shape: str, color: str, background: str, generator: random.Random) -> Image.Image:
    """A shape at a random place on a background with noise."""
    size = generator.randint(96, 224)
    image = Image.new("RGB", (320, 240), background)
    pen = ImageDraw.Draw(image)
    left, top = generator.randint(0, 320 - size), generator.randint(0, max(0, 240 - size))
    box = (left, top, left + size, top + min(size, 239))
    if shape == "triangle":
        pen.polygon([(left, box[3]), (left + size // 2, top), (left + size, box[3])], fill=color)
    else:
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=color)
    noise = Image.effect_noise((320, 240), 24 + generator.random()).convert("RGB")
    return Image.blend(image, noise, 0.15)


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    """The image as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def main() -> None:
    """Write images and captions.jsonl."""
    out, generator = Path(sys.argv[1]), random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    pairs: list[tuple[bytes, str]] = []
    for color in COLORS:
        for background in COLORS:
            for shape in SHAPES:
                if color == background:
                    continue
                image = draw(shape, color, background, generator)
                caption = f"A {color} {shape} in front of a {background} background, drawn by a program."
                pairs.append((encoded(image), caption))
                if generator.random() < 0.1:
                    pairs.append((pairs[-1][0], caption))  # the same file again
                if generator.random() < 0.1:
                    pairs.append(
                        (encoded(image.resize((240, 180)), 70), f"Smaller: a {color} {shape} on {background}.")
                    )
                if generator.random() < 0.1:
                    pairs.append((encoded(draw(shape, color, background, generator)), ADVERTISEMENT))
                if generator.random() < 0.05:
                    pairs.append(
                        (encoded(Image.new("RGB", (320, 240), color)), f"Nothing but {color}, everywhere in view.")
                    )
                if generator.random() < 0.05:
                    pairs.append((encoded(image.resize((24, 18))), f"A tiny image of a {color} {shape} for a website."))
                if generator.random() < 0.05:
                    pairs.append((encoded(image)[:2500], "An image whose file ends too early to be decoded."))
    generator.shuffle(pairs)
    with open(out / "captions.jsonl", "w", encoding="utf-8") as captions:
        for number, (content, caption) in enumerate(pairs):
            (out / f"{number:04d}.jpg").write_bytes(content)
            captions.write(json.dumps({"image": f"{number:04d}.jpg", "text": caption}) + "\n")
    print(f"{len(pairs)} pairs in {out}")


if __name__ == "__main__":
    main()
