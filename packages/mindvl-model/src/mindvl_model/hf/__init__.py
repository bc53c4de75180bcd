# SPDX-License-Identifier: Apache-2.0
"""The model as a transformers directory: our twin of it in plain transformers, export and import."""
