# SPDX-License-Identifier: Apache-2.0
"""The model on megatron-core: its blocks with the operators of mindvl_ops. Only this directory imports megatron.core."""

from mindvl_model import accelerator

# megatron-core reads torch.cuda while it is imported, so the device is set up first.
accelerator.set_up_device()
