# SPDX-License-Identifier: Apache-2.0
"""Errors of mindvl-ops: what was wrong, where, and what to do."""


class OpsError(Exception):
    """An operator cannot be chosen or was called against its contract."""


class UnknownBackend(OpsError):  # noqa: N818  (named like the other packages' errors, by what happened)
    """A backend or operator was named that the registry does not have."""
