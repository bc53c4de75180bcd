# SPDX-License-Identifier: Apache-2.0
"""`mindvl eval` prints a table or JSON and leaves a report."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from mindvl_cli.commands.eval import evaluate
from mindvl_merge.evaluation import Endpoint, Predictor
from mindvl_ops.runtime.ports import reserved_port


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory that answers 2 to everything; the real model is tested beside predict.py."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr(Predictor, "fingerprint", "f")
    monkeypatch.setattr(Predictor, "default_limits", (784, 7840))
    monkeypatch.setattr(Predictor, "_length", lambda self, question: 1)
    monkeypatch.setattr(Predictor, "sizes", lambda self, item, low, high: ())
    monkeypatch.setattr(
        Predictor, "answer", lambda self, batches: ((n, ["2"] * len(batch), 1.0) for n, batch in enumerate(batches))
    )
    (tmp_path / "sum.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n')
    return directory


def test_a_table_is_shown_and_a_report_left(model, tmp_path):
    arguments = [str(model), "-b", str(tmp_path / "sum.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "overall" in result.stdout
    assert "50.0" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "sum.html", "predictions.jsonl"}


def test_json_is_one_document(model, tmp_path):
    arguments = [str(model), "-b", str(tmp_path / "sum.jsonl"), "--json", "--max-pixels", "1568"]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert (document["overall"], document["min_pixels"], document["max_pixels"]) == (0.5, 784, 1568)


def test_a_tsv_is_scored_as_its_benchmark_and_the_reason_is_shown(model, tmp_path):
    path = tmp_path / "ChartQA_TEST.tsv"
    path.write_text("index\tquestion\tanswer\tsplit\n1\tsum?\t1.96\thuman\n2\tmean?\t9\taugmented\n")
    arguments = [str(model), "-b", str(path), "--json", "--compat", "lmms-eval"]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["metrics"] == {"ChartQA_TEST": {"overall": 50.0, "human": 100.0, "augmented": 0.0}}
    assert (document["overall"], document["compat"]) == (0.5, "lmms-eval")
    assert "scored as ChartQA_TEST (relaxed_accuracy), because of the name 'ChartQA_TEST'" in result.stderr


def test_a_benchmark_that_needs_a_judge_is_refused_before_a_question_is_asked(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Predictor, "answer", lambda self, batches: pytest.fail("asked"))
    (tmp_path / "vet.tsv").write_text("index\tquestion\tanswer\n1\tq\ta\n")
    arguments = [str(model), "-b", str(tmp_path / "vet.tsv"), "--kind", "mmvet"]
    result = CliRunner().invoke(evaluate, arguments)
    assert "mmvet needs a judge" in str(result.exception)


def test_the_judge_its_prompts_and_its_replies_are_kept_with_the_scores(model, tmp_path, monkeypatch):
    replies = {"first": "A", "second": "<b>?"}
    monkeypatch.setattr(
        Endpoint, "ask", lambda self, messages, **_: next(r for q, r in replies.items() if q in messages[0]["content"])
    )
    rows = [{"question": question, "answer": "x", "metric": "simpleqa"} for question in replies]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = ["--judge", "http://localhost:1/v1", "--judge-model", "grader"]
    out = tmp_path / "out"
    arguments = [str(model), "-b", str(tmp_path / "facts.jsonl"), *judge, "--out", str(out)]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert "facts: 1 items have no valid judgement and score 0" in result.stderr
    kept = [json.loads(line) for line in (out / "judged.jsonl").read_text().splitlines()]
    assert [(row["score"], row["is_failed"], row["judge"]["model"]) for row in kept] == [
        (1.0, False, "grader"), (0.0, True, "grader"),
    ]  # fmt: skip
    assert "Question: first" in kept[0]["judgements"][0]["prompt"]
    page = (out / "facts.html").read_text()
    assert all(text in page for text in ("grader at http://localhost:1/v1", "judgement failed", "&lt;b&gt;?"))


@pytest.fixture(scope="module")
def served(model_directory):
    """The URL of transformers' own server with a tiny model."""
    with reserved_port() as port:
        program = Path(sys.executable).parent / "transformers"
        at = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--trust-remote-code"]
        command = [program, "serve", str(model_directory), *at]
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 600
            while True:
                with socket.socket() as attempt:
                    if attempt.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, "transformers serve ended"
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_real_server_gives_the_answers_of_this_process(served, model_directory, benchmark_file, tmp_path):
    limits = ["--min-pixels", "3136", "--max-pixels", "12544", "--max-new-tokens", "5", "--batch-size", "1", "--json"]
    arguments = [str(model_directory), "-b", str(benchmark_file), *limits, "--trust-remote-code"]
    local = CliRunner().invoke(evaluate, [*arguments, "--out", str(tmp_path / "local")], catch_exceptions=False)
    command = [*arguments, "--endpoint", served, "--num-workers", "2", "--out", str(tmp_path / "served")]
    remote = CliRunner().invoke(evaluate, command, catch_exceptions=False)
    reports = [json.loads(one.stdout) for one in (local, remote)]
    assert reports[0]["by_task"] == reports[1]["by_task"]
    answers = [
        sorted(json.loads(line)["answer"] for line in (tmp_path / name / "predictions.jsonl").read_text().splitlines())
        for name in ("local", "served")
    ]
    assert len(answers[0]) == len(answers[1]) > 3
    assert answers[0] == answers[1]


def test_a_model_that_is_no_directory_needs_an_endpoint(tmp_path, benchmark_file):
    result = CliRunner().invoke(evaluate, ["some-model", "-b", str(benchmark_file)])
    assert (result.exit_code, "directory some-model does not exist" in result.output) == (2, True)
    result = CliRunner().invoke(
        evaluate, ["m", "-b", str(benchmark_file), "--endpoint", "http://x/v1", "--judge", "http://y"]
    )
    assert (result.exit_code, "--judge and --judge-model" in result.output) == (2, True)


@pytest.fixture
def text_tasks(tmp_path):
    """A directory with one task that compares log-likelihoods and one that generates; their data lies beside them."""
    rows = [{"question": f"read {number}?", "choices": ["the", "number"], "label": number % 2} for number in range(4)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\ndoc_to_text: question\n"
    choose = "task: choose\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\n"
    write = (
        "task: write\noutput_type: generate_until\ndoc_to_target: '{{choices[label]}}'\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 4\nmetric_list:\n  - metric: exact_match\n"
    )
    (tasks / "choose.yaml").write_text(source + choose)
    (tasks / "write.yaml").write_text(source + write)
    return tasks


@pytest.mark.slow
def test_tasks_of_lm_eval_run_offline_and_continue_from_their_answers(
    model_directory, text_tasks, tmp_path, monkeypatch
):
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    out = ["--out", str(tmp_path / "scores"), "--device", "cpu", "--trust-remote-code", "--json"]
    arguments = [str(model_directory), "-b", f"lm-eval:{text_tasks}", *out]
    first = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    figures = json.loads(first.stdout)["lm_eval"][f"lm-eval:{text_tasks}"]
    assert set(figures) == {"choose", "write"}
    assert figures["choose"]["acc"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert figures["write"] == {"exact_match": 0.0}
    assert json.loads((tmp_path / "scores" / "report.json").read_text())["lm_eval"]
    monkeypatch.setattr(lm_eval.HFLM, "_model_call", lambda *_, **__: pytest.fail("asked again"))
    monkeypatch.setattr(lm_eval.HFLM, "_model_generate", lambda *_, **__: pytest.fail("asked again"))
    again = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert json.loads(again.stdout) == json.loads(first.stdout)


@pytest.mark.slow
def test_tasks_of_lm_eval_need_a_model_directory_and_are_named_if_unknown(model, tmp_path):
    result = CliRunner().invoke(evaluate, ["m", "-b", "lm-eval:gsm8k", "--endpoint", "http://localhost:1/v1"])
    assert (result.exit_code, "--endpoint: cannot run lm-eval:gsm8k" in result.output) == (2, True)
    pytest.importorskip("lm_eval.models.huggingface")
    result = CliRunner().invoke(evaluate, [str(model), "-b", "lm-eval:no-such-task"])
    assert "lm-eval:no-such-task: is neither a directory with task files nor a task of lm-eval" in str(result.exception)


def test_a_model_with_larger_visual_tokens_answers_about_images(qwen3_vl_directory, benchmark_file, tmp_path):
    options = ["--max-new-tokens", "2", "--json", "--out", str(tmp_path / "out")]
    command = [str(qwen3_vl_directory), "-b", str(benchmark_file), *options]
    report = json.loads(CliRunner().invoke(evaluate, command, catch_exceptions=False).stdout)
    assert (report["min_pixels"], report["max_pixels"]) == (4 * 1024, 16 * 1024)
    assert sum(task["num_items"] for task in report["by_task"].values()) == 9


def test_images_for_a_server_have_the_sizes_of_the_given_processor(
    qwen3_vl_directory, benchmark_file, tmp_path, monkeypatch
):
    sent = []

    def ask(self, messages, **options):
        sent.extend(part["image_url"]["url"] for part in messages[0]["content"] if part["type"] == "image_url")
        return "1"

    monkeypatch.setattr(Endpoint, "ask", ask)
    options = ["--endpoint", "http://localhost:1/v1", "--processor", str(qwen3_vl_directory), "--json"]
    command = ["m", "-b", str(benchmark_file), *options]
    report = json.loads(CliRunner().invoke(evaluate, command, catch_exceptions=False).stdout)
    assert (report["min_pixels"], report["max_pixels"]) == (4 * 1024, 16 * 1024)
    contents = [base64.b64decode(url.partition(",")[2]) for url in sent]
    sizes = {Image.open(io.BytesIO(content)).size for content in contents}
    # 60 x 40 is below 4 visual tokens of 32 x 32 pixels, and 200 x 90 would be 18 of them.
    assert sizes == {(96, 64), (160, 64), (32, 160)}
    wrong = CliRunner().invoke(evaluate, [str(qwen3_vl_directory), "-b", str(benchmark_file), *options[2:]])
    assert (wrong.exit_code, "--processor: is only used with --endpoint" in wrong.output) == (2, True)
