# SPDX-License-Identifier: Apache-2.0
"""Errors of mindvl-merge: what was wrong, where, and what to do."""


class MergeError(Exception):
    """Models cannot be merged, or a search cannot be done, as asked."""


class MergeConfigError(MergeError, ValueError):
    """A value of a configuration is out of range."""


class DirectoryError(MergeError):
    """A model directory is missing, damaged, or does not fit the others."""
