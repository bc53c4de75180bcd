# SPDX-License-Identifier: Apache-2.0
"""Vision tower, projector and language model on megatron-core, and their way to and from transformers folders."""
