# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: configuration, choice of target layers, dropout masks, and directories in PEFT's format.

The layers themselves are in mindvl_model.megatron.lora, because they wrap linear layers of megatron-core.
"""

from mindvl_model.adapters.lora_config import LoRAConfig

__all__ = ["LoRAConfig"]
