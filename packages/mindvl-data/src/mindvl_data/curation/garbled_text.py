# SPDX-License-Identifier: Apache-2.0
"""The step that drops texts with damaged characters: control characters, private use, wrongly decoded UTF-8.

Comes after record.py, beside text_rules.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindvl_data.curation.characters import garbled, measured, table_of
from mindvl_data.curation.limits import Limit, apply_limits, check_range
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Outcome, Step


@dataclass(frozen=True)
class GarbledText:
    """Limit on damaged characters.

    Attributes:
        max_ratio: Maximum share of damaged characters: control characters, private use, unassigned code points, lone
            surrogates, replacement characters, and characters of UTF-8 that was decoded as Latin-1, Windows-1252 or GBK.
    """

    max_ratio: float = 0.02

    def __post_init__(self) -> None:
        check_range("ratio", None, self.max_ratio)


# Images of the bytes 0x80 to 0xBF in Windows-1252 and Latin-1
_AFTER = "".join(
    {bytes([code]).decode("cp1252", "ignore") or chr(code) for code in range(0x80, 0xC0)}
    | {chr(code) for code in range(0x80, 0xC0)}
)
_AFTER_CLASS = f"[{re.escape(_AFTER)}]"
# Two-byte letters of Latin, Greek, Cyrillic, Hebrew and Arabic; three-byte punctuation, CJK and full-width characters; emoji.
# The lead bytes are those that are rare in front of such characters in real text.
_MOJIBAKE = re.compile(
    f"[\xc2\xc3\xce\xcf\xd0\xd1\xd7\xd8\xd9]{_AFTER_CLASS}|[\xe2-\xe9\xef]{_AFTER_CLASS}{{2}}|\xf0{_AFTER_CLASS}{{3}}"
    # UTF-8 in GBK: replacement characters, uninitialized memory, byte order mark, quotes, full stops, commas
    "|\u951f\u65a4\u62f7|\u70eb\u70eb\u70eb|\u5c6f\u5c6f\u5c6f|\u9518\u53f7?|\u9225[\u20ac-\u9fff]|\u951b[\u20ac-\u9fff]"
)
_MOJIBAKE_STARTS = (
    "\xc2\xc3\xce\xcf\xd0\xd1\xd7\xd8\xd9\xe2\xe3\xe4\xe5\xe6\xe7\xe8\xe9\xef\xf0\u951f\u70eb\u5c6f\u9518\u9225\u951b"
)


@Step(
    config=GarbledText,
    summary="Drop texts with damaged characters.",
    section="B.1.1",
    needs=("text",),
    gives=("garbled_ratio",),
    reasons={"garbled": "The share of damaged characters is above max_ratio."},
)
def garbled_text(records: list[Record], config: GarbledText, context: Context) -> Sequence[Outcome]:
    """Drop texts with damaged characters (paper, B.1.1 and B.1.2: garbled characters)."""
    texts = [record.text() for record in records]
    damaged = context.resource("garbled", garbled)
    starts = context.resource("mojibake", lambda: table_of(_MOJIBAKE_STARTS))
    counts = measured(lambda part: part.count(damaged), texts)
    for index in np.flatnonzero(measured(lambda part: part.count(starts), texts)):
        # code points 0x80 to 0x9F are control characters and were counted
        found = "".join(match[0] for match in _MOJIBAKE.finditer(texts[index]))
        counts[index] += sum(not "\x7f" < character < "\xa0" for character in found)
    ratio = counts / np.array([max(1, len(text)) for text in texts])
    return apply_limits(
        records, {"garbled_ratio": ratio}, (Limit("garbled_ratio", None, config.max_ratio, "", "garbled"),)
    )
