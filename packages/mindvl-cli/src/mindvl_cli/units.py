# SPDX-License-Identifier: Apache-2.0
"""Format numbers with readable units.

Used for the text output of commands; JSON has plain numbers.
"""


def count_text(number: float) -> str:
    """Such as 1.50B, 20.00M or 1,500."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.2f}{unit}"
    return f"{number:,.0f}"


def bytes_text(number: float) -> str:
    """Such as 58.3 GB; units are powers of 1,000."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 1e3:,.1f} kB"


def seconds_text(seconds: float) -> str:
    """Such as 46.24 s or 3.1 ms."""
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def percent_text(share: float | None) -> str:
    """Such as 99.87 %; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.2f} %"
