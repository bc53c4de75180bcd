# SPDX-License-Identifier: Apache-2.0
"""Conversion between the parameters of the model and the tensors of a transformers directory."""
