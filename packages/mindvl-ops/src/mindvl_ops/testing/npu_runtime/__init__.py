# SPDX-License-Identifier: Apache-2.0
"""A stub of the CANN runtime libraries, over which the real torch_npu wheel is imported on a machine without an NPU."""

from .build import stub_environment, wheel_directory
from .fake import prepare_fake_npu

__all__ = ["prepare_fake_npu", "stub_environment", "wheel_directory"]
