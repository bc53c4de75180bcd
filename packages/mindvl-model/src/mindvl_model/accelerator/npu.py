# SPDX-License-Identifier: Apache-2.0
"""Let the literal "cuda" mean the NPU by torch_npu's own transfer_to_npu, and close the gap it leaves.

Comes before the first import of megatron-core. Not run on hardware yet: proved on the real torch_npu
wheel with fake tensors by `nox -s npu_contract` (Tensor.type() strings are what transfer_to_npu leaves alone).
"""

import importlib

from mindvl_model.accelerator.tensor_type import answer_with_cuda_names


def let_cuda_mean_npu() -> None:
    """Apply transfer_to_npu; call once, before megatron-core."""
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    answer_with_cuda_names("npu.")
