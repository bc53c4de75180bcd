# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: one base, one child that the run survives.

Messages have three parts: what was wrong, where, what to do.
"""


class DataError(Exception):
    """A file, recipe or state that the user has to mend before going on."""


class BadSample(DataError):  # noqa: N818 - the name says what it is about; it is counted, not raised to the user
    """One sample that cannot be used; the loader counts it by source and puts a zero-loss placeholder in its place."""
