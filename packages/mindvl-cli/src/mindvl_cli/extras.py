# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: which extra of mindvl-cli installs what, and the error that names a missing one.

Commands call `require` before they start any work, so that no run ends at the plot it should draw.
"""

from importlib.util import find_spec
from typing import Literal

from mindvl_cli.failures import CliError

# Extra -> importable module and distribution; pyproject.toml declares the same extras.
_EXTRAS = {
    "plots": (("matplotlib", "matplotlib"),),
    "demo": (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")),
    "serve": tuple((name, name) for name in ("accelerate", "fastapi", "openai", "uvicorn")),
}


def require(extra: Literal["plots", "demo", "serve"], where: str) -> None:
    """Check that the distributions of an extra are installed.

    Args:
        where: What the user typed, such as "mindvl demo"; the message begins with it.

    Raises:
        CliError: One is not installed.
    """
    for module, distribution in _EXTRAS[extra]:
        if find_spec(module) is None:
            raise CliError(
                f"{where}: {distribution} is not installed. Install it with pip install 'mindvl-cli[{extra}]'."
            )
