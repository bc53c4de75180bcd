# SPDX-License-Identifier: Apache-2.0
"""The entry point `mindvl` in the group `vllm.general_plugins`: makes vLLM serve exported MindVL directories.

vLLM calls `register` in each of its processes and imports vllm_model.py when a MindVL directory is loaded. Without vLLM
nothing here is called. VLLM_PLUGINS, an environment variable of vLLM, selects plugins by name.
"""

ARCHITECTURE = "MindVLForConditionalGeneration"  # `architectures` in config.json of an exported directory


def register() -> None:
    """Register the model with vLLM, and its configuration and processor with transformers."""
    from vllm import ModelRegistry

    from mindvl_model.hf.registration import register_mindvl

    register_mindvl()
    ModelRegistry.register_model(ARCHITECTURE, f"mindvl_model.hf.vllm_model:{ARCHITECTURE}")
