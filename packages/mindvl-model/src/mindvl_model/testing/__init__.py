# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of this and other packages: very small models, random weights, runs on several ranks."""
