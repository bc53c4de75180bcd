# SPDX-License-Identifier: Apache-2.0
"""Errors of mindvl-merge; each message is `WHERE: WHAT IS WRONG. WHAT TO DO.`"""


class MergeError(Exception):
    """A merge or a resolution search cannot be done."""


class MergeConfigError(MergeError, ValueError):
    """A value of a configuration is out of range."""


class DirectoryError(MergeError):
    """A model directory is missing, damaged, or incompatible with the others."""


class EvaluationError(MergeError):
    """A benchmark, a metric or a model cannot be evaluated. Several messages are printed one per line."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RequestRefusedError(EvaluationError):
    """An endpoint refuses one request, for example because its prompt is too long; others may succeed."""
