# SPDX-License-Identifier: Apache-2.0
"""Forked ranks behave as processes that subprocess would start: variables, output, exit codes, time limits."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from mindvl_model.testing.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.multi]

REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor(float(os.environ["RANK"]) + 1)
dist.all_reduce(value)
print(sys.argv[1], os.environ["LOCAL_RANK"], os.environ["OWN"], value.item(), flush=True)
os.write(2, b"on stderr")
dist.destroy_process_group()
"""


def test_ranks_have_their_variables_meet_each_other_and_return_their_output() -> None:
    outputs = run_ranks(["-c", REDUCE, "word"], 2, timeout_s=300, environment={"OWN": "set"})
    assert outputs == [f"word {rank} set 3.0\non stderr" for rank in range(2)]
    assert "OWN" not in os.environ


def test_files_and_modules_run_as_main_and_nothing_remains_between_ranks(tmp_path: Path) -> None:
    (tmp_path / "neighbor.py").write_text("value = 5")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, os, pickle, torch, neighbor\nclass Own: ...\n"
        "assert pickle.loads(pickle.dumps(Own())).__class__ is Own\n"
        "print(__name__, sys.argv, neighbor.value, hasattr(torch, 'left'), os.getcwd())\ntorch.left = True\n"
    )
    for _ in range(2):
        [output] = run_ranks([str(program), "a"], 1, timeout_s=300)
        assert output.split() == ["__main__", f"['{program}',", "'a']", "5", "False", os.getcwd()]
    [output] = run_ranks(["-m", "this"], 1, timeout_s=300)
    assert output.startswith("The Zen of Python")


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("sys.exit(7)", 7, "before"),
        ("os.kill(os.getpid(), 9)", -9, "before"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_exit_code_and_output(end: str, code: int, reason: str) -> None:
    program = f"import os, sys; print('before', flush=True)\nif os.environ['RANK'] == '1': {end}"
    with pytest.raises(AssertionError) as caught:
        run_ranks(["-c", program], 2, timeout_s=300)
    text = str(caught.value)
    assert f"rank 1, exit code {code}:" in text
    assert reason in text
    assert "rank 0" not in text


def test_a_rank_that_hangs_is_killed_at_the_time_limit(tmp_path: Path) -> None:
    hangs = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_ranks(["-c", hangs, str(pid)], 1, timeout_s=5)
    deadline = time.monotonic() + 120
    while Path("/proc", pid.read_text()).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path("/proc", pid.read_text()).exists()
