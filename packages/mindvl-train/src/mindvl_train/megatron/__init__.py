# SPDX-License-Identifier: Apache-2.0
"""The door to megatron-core's groups, schedules, optimizer and checkpoints."""

from mindvl_model import set_up_device

# megatron-core reads torch.cuda while it is imported, so the device is settled first.
set_up_device()
