# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for real GPUs: the interpreter accepts programs that the compiler refuses."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mindvl_ops.triton_backend import kernels

assert not triton.knobs.runtime.interpret
FLAGS = {"has_residual": True, "has_grad_total": True, "has_norms": True, "interleaved": True, "transposed": True,
         "block": 4096, "token_block": 4, "half_block": 64}
WIDE = {"cos", "sin", "grad_weight", "grad_weights"}  # pointers to float32
NUMBERS = {"width", "rows", "tokens", "groups", "heads", "half"}

def kind(name):
    if name in FLAGS:
        return "constexpr"
    if name == "eps":
        return "fp32"
    if name in NUMBERS or name.endswith("stride"):
        return "i32"
    return "*fp32" if name in WIDE else "*bf16"

for name in kernels.__all__:
    kernel = getattr(kernels, name)
    arguments = kernel.arg_names
    constants = {(arguments.index(flag),): FLAGS[flag] for flag in arguments if flag in FLAGS}
    source = ASTSource(kernel, {argument: kind(argument) for argument in arguments}, constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
    print(name, len(binary))
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_an_a100(tmp_path):
    from mindvl_ops.triton_backend import kernels

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = {name: int(size) for name, size in (line.split() for line in done.stdout.splitlines())}
    assert list(sizes) == kernels.__all__
    assert min(sizes.values()) > 1000
