# SPDX-License-Identifier: Apache-2.0
"""Train on curated and on uncurated pages of documents with the same budget, and score both on held-out pages.

The documents (document_corpus.py) are PDFs of real text with planted noise. `mindvl data curate` makes two data sets from the
same PDFs: "curated" with filters and deduplication, "uncurated" with every page that has text. A tiny model is trained from
random weights on each, for the same number of steps and tokens, with three seeds. The score is the share of tokens of held-out
pages that the model predicts when it reads the page and the text before the token; the loss is measured on the same tokens.
Run: mindvl bench documents, or python packages/mindvl-cli/benchmarks/documents.py [--quick] [--json] [--out DIRECTORY].
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from document_corpus import read_documents, write_corpus
from figures import Figure, print_report

from mindvl_cli.demo.recipe import write_recipe
from mindvl_cli.demo.settings import BLOCK, FULL, PhaseSettings
from mindvl_cli.demo.tokenizer import train_tokenizer

EXTRACT = [{"step": "pdf_pages", "dpi": 84}]
STEPS: dict[str, list[dict[str, Any]]] = {
    "uncurated": [*EXTRACT, {"step": "document_text", "min_characters": 1, "max_garbled": 1.0}],
    "curated": [
        *EXTRACT,
        {"step": "document_text", "min_characters": 100},
        {"step": "garbled_text"},
        {"step": "character_ratios"},
        {"step": "repetition"},
        {"step": "exact_duplicates", "content": "text"},
        {"step": "text_duplicates"},
    ],
}
VISUAL_TOKENS = 104  # of a page of 300 x 200 points at 84 dpi
VOCAB_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Pages, steps and seeds of a run."""

    num_pages: int
    num_held_out: int
    steps: int
    seeds: tuple[int, ...]


SIZES = Sizes(num_pages=400, num_held_out=60, steps=150, seeds=(0, 1, 2))
QUICK = Sizes(num_pages=40, num_held_out=8, steps=4, seeds=(0,))


def main() -> None:
    """Run everything and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pages and steps, one seed; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="directory that is kept, for example to read the pages of both runs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        figures = compare(options.out or Path(scratch), QUICK if options.quick else SIZES)
    print_report(figures, as_json=options.json, directory=Path(__file__).parent)


def compare(work: Path, sizes: Sizes) -> list[Figure]:
    """Make the data, train and score; returns the figures."""
    started = time.monotonic()
    training, held_out = read_documents(sizes.num_pages, sizes.num_held_out)
    pages = write_corpus(work / "pdfs", training, noise=True, seed=0)
    write_corpus(work / "held-out-pdfs", held_out, noise=False, seed=1)
    texts = [" ".join(page) for document in training for page in document.pages]
    tokenizer = train_tokenizer(texts, work / "tokenizer", vocab_size=VOCAB_SIZE)
    figures = [
        Figure(name=f"pages in the PDFs: {kind}", value=count, unit="pages") for kind, count in sorted(pages.items())
    ]
    curate(work, "held-out", "held-out-pdfs", [*EXTRACT, {"step": "document_text"}])
    for name, steps in STEPS.items():
        counts = curate(work, name, "pdfs", steps)
        figures.append(Figure(name=f"pages in the {name} data", value=counts["written"], unit="pages"))
        figures.append(Figure(name=f"quarantined PDFs, {name}", value=counts["quarantined"], unit="files"))
    scores: dict[str, list[dict[str, float]]] = {name: [] for name in STEPS}
    for seed in sizes.seeds:
        for name, found in scores.items():
            found.append(score(train(work, name, tokenizer, seed, sizes.steps), work / "held-out" / "shards"))
            print(f"seed {seed}, {name}: {found[-1]}", file=sys.stderr, flush=True)
    for measure, unit in (
        ("accuracy", "% of tokens"),
        ("loss", "nats per token"),
        ("accuracy, white image", "% of tokens"),
    ):
        for number, seed in enumerate(sizes.seeds):
            ours, theirs = (scores[name][number][measure] for name in ("curated", "uncurated"))
            figures.append(
                Figure(
                    name=f"held-out {measure}, seed {seed}",
                    value=ours,
                    unit=unit,
                    rival="uncurated",
                    rival_value=theirs,
                )
            )
    figures.append(Figure(name="duration", value=time.monotonic() - started, unit="s"))
    return figures


def curate(work: Path, name: str, pdfs: str, steps: list[dict[str, Any]]) -> dict[str, int]:
    """Run `mindvl data curate`; returns the counts of its report."""
    inputs = [{"path": str(work / pdfs), "format": "pdf"}]
    config = {"name": name, "seed": 0, "inputs": inputs, "steps": steps, "out": str(work / name)}
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    return mindvl("data", "curate", path)["counts"]  # type: ignore[no-any-return]


def train(work: Path, name: str, tokenizer: Path, seed: int, steps: int) -> Path:
    """Train on a data set and export the model; returns its directory."""
    phase = PhaseSettings(
        weights={"shards": 1}, steps=steps, peak_lr=3e-3, seq_length=1024, global_batch_size=1, max_pixels=VISUAL_TOKENS
    )
    run, model = work / f"run-{name}-{seed}", work / f"model-{name}-{seed}"
    recipe = write_recipe(
        work / f"recipe-{name}-{seed}.yaml",
        dataclasses.replace(FULL, min_pixels=VISUAL_TOKENS // 2),
        phase,
        phase="multitask",
        out=run,
        shards=work / name,
        tokenizer=tokenizer,
        seed=seed,
        init={},
    )
    mindvl("train", recipe)
    mindvl("convert", run, model)
    shutil.rmtree(run)
    return model


def mindvl(*arguments: str | Path) -> dict[str, Any]:
    """Run a command of mindvl and return its JSON document; its progress goes to standard error."""
    program = "from mindvl_cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mindvl {' '.join(map(str, arguments))} failed:\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def score(model_directory: Path, shards: Path) -> dict[str, float]:
    """Accuracy and loss of the next token over the answers of all held-out pages, with the page and with a white image."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model_directory, trust_remote_code=True)
    model = AutoModelForImageTextToText.from_pretrained(model_directory, trust_remote_code=True, dtype=torch.float32)
    model.eval()
    pixels = {"min_pixels": VISUAL_TOKENS // 2 * BLOCK, "max_pixels": VISUAL_TOKENS * BLOCK}
    sums = {"right": 0, "white": 0, "loss": 0.0, "tokens": 0}
    for image, messages in held_out_pages(shards):
        question = processor.apply_chat_template(messages[:1], add_generation_prompt=True)
        text = question + messages[1]["content"][0]["text"] + "<|im_end|>"
        for looks in (image, Image.new("RGB", image.size, "white")):
            inputs = processor(text=[text], images=[looks], return_tensors="pt", **pixels)
            start = processor(text=[question], images=[looks], return_tensors="pt", **pixels)["input_ids"].shape[1]
            with torch.no_grad():
                logits = model(**inputs).logits[0, start - 1 : -1].float()
            labels = inputs["input_ids"][0, start:]
            right = int((logits.argmax(-1) == labels).sum())
            if looks is image:
                sums["right"] += right
                sums["loss"] += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                sums["tokens"] += len(labels)
            else:
                sums["white"] += right
    return {
        "accuracy": 100 * sums["right"] / sums["tokens"],
        "loss": sums["loss"] / sums["tokens"],
        "accuracy, white image": 100 * sums["white"] / sums["tokens"],
    }


def held_out_pages(shards: Path) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Image and messages of every sample of a directory of shards."""
    import io
    import tarfile

    from PIL import Image

    found: list[tuple[Any, list[dict[str, Any]]]] = []
    for path in sorted(shards.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name in sorted(file for file in files if file.endswith(".json")):
            (media,) = [content for other, content in files.items() if other.startswith(name[:-4]) and other != name]
            found.append((Image.open(io.BytesIO(media)).convert("RGB"), json.loads(files[name])["messages"]))
    return found


if __name__ == "__main__":
    main()
