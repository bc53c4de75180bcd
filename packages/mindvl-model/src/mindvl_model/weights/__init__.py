# SPDX-License-Identifier: Apache-2.0
"""Weights between our parameters and a transformers directory."""
