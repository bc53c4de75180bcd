# SPDX-License-Identifier: Apache-2.0
"""Errors of this package. Every message has the form `WHERE: WHAT IS WRONG, WITH THE VALUE. WHAT TO DO.`"""


class ModelError(Exception):
    """An invalid model configuration, an invalid model input or an unsupported environment."""


class WeightError(ModelError):
    """Missing, unexpected, damaged or unsupported weights, or weights of the wrong shape."""
