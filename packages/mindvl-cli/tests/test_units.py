# SPDX-License-Identifier: Apache-2.0
"""Numbers are shown with the unit that leaves a few digits."""

from mindvl_cli.units import bytes_text, count_text, percent_text, seconds_text


def test_every_size_has_its_unit() -> None:
    assert [count_text(number) for number in (999, 1500, 2.5e6, 8.19e9)] == ["999", "1,500", "2.50M", "8.19B"]
    assert [bytes_text(number) for number in (120, 4e6, 60.2e9, 5.6e12)] == ["0.1 kB", "4.0 MB", "60.2 GB", "5.6 TB"]
    assert [seconds_text(seconds) for seconds in (46.238, 0.1, 0.0044, 1.4e-5)] == [
        "46.24 s",
        "0.10 s",
        "4.4 ms",
        "0.014 ms",
    ]
    assert [percent_text(share) for share in (0.99871, None)] == ["99.87 %", "-"]
