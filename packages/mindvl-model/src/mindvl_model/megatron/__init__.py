# SPDX-License-Identifier: Apache-2.0
"""The door to megatron-core: its blocks with our operators. No other directory of the package imports it."""

from mindvl_model import accelerator

# megatron-core reads torch.cuda while it is imported, so the device is settled first.
accelerator.enter()
