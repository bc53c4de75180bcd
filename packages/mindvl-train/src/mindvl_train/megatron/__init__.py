# SPDX-License-Identifier: Apache-2.0
"""All uses of megatron-core's groups, schedules, optimizer and checkpoints in mindvl_train."""

from mindvl_model import set_up_device

# megatron-core reads torch.cuda during its import, so the device is set up first.
set_up_device()
