# SPDX-License-Identifier: Apache-2.0
"""Register the classes of MindVL with transformers, so that a MindVL directory loads without its remote code.

Used by servers, which load directories themselves: transformers_server.py of mindvl-cli and vllm_plugin.py. The classes are
those that export.py writes into directories.
"""


def register_mindvl() -> None:
    """Let the Auto classes of this process and `transformers serve` find the classes by `model_type: mindvl`."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    from mindvl_model.hf.configuration_mindvl import MindVLConfig
    from mindvl_model.hf.modeling_mindvl import MindVLForConditionalGeneration, MindVLModel
    from mindvl_model.hf.processing_mindvl import MindVLProcessor

    kind = MindVLConfig.model_type
    AutoConfig.register(kind, MindVLConfig, exist_ok=True)
    AutoModel.register(MindVLConfig, MindVLModel, exist_ok=True)
    for auto_class in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto_class.register(MindVLConfig, MindVLForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(MindVLConfig, MindVLProcessor, exist_ok=True)
    # `transformers serve` decides by this table that a model reads images; `register` does not add to it.
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind] = MindVLForConditionalGeneration.__name__
