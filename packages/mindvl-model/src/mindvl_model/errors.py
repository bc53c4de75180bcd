# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a model or its weights; every message says what, where and what to do."""


class ModelError(Exception):
    """A configuration or an input that no model can be built from or run on."""


class WeightError(ModelError):
    """Weights that are missing, unexpected, damaged or of the wrong shape."""
