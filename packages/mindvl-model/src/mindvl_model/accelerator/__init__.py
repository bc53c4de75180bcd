# SPDX-License-Identifier: Apache-2.0
"""Device setup: everything megatron-core needs to run on a device, done once, before its first import.

megatron-core uses the literal device name "cuda". On an NPU, torch_npu's transfer_to_npu maps that name to the NPU; on
a machine with neither, `cpu.py` maps it to the CPU. No other module of the project patches another library at run time.
"""

from mindvl_model.accelerator.device import Accelerator, detect, set_up_device

__all__ = ["Accelerator", "detect", "set_up_device"]
