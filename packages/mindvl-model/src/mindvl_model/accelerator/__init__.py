# SPDX-License-Identifier: Apache-2.0
"""The doorway to a device: everything megatron-core needs to run there, done once, before its first import.

megatron-core says "cuda" literally. On an NPU torch_npu's transfer_to_npu answers for it, on a machine without either
our stand-in lets "cuda" mean the CPU. This is the only place of the project that changes another library at run time.
"""

from mindvl_model.accelerator.device import Accelerator, detect, enter

__all__ = ["Accelerator", "detect", "enter"]
