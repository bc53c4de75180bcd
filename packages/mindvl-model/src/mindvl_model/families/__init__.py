# SPDX-License-Identifier: Apache-2.0
"""Families of decoders: one file each with its preset for recipes and its keys of config.json."""
