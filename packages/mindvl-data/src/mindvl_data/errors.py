# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: a base class, and one subclass that does not stop a run.

Messages have the form `WHERE: WHAT IS WRONG, WITH THE VALUE. WHAT TO DO.` Secrets in addresses are redacted.
"""

import re

# Every repetition that a failing match may follow is bounded, so that matching takes linear time on any text.
_SECRETS = (
    # user and password before the host of an address, with or without slashes in the password
    (re.compile(r"(?<=://)[^/?#\s'\"<>]{0,1000}@"), "***@"),
    (re.compile(r"(?<=://)[^/\s'\"<>@:]{1,200}:(?!\d{1,5}[/\s])[^\s'\"<>]{0,1000}@"), "***@"),
    # values of an address's query
    (
        re.compile(
            r"(?i)([?&;](?=([^=&;?\s]{0,80}=))(?=[^=]*(?:sig|token|key|secret|passw|pwd|credential|auth))\2)"
            r"[^&;#\s'\"<>]*[^&;#\s'\"<>:.,)]"
        ),
        r"\1***",
    ),
    # settings as printed by libraries
    (re.compile(r"(?i)(['\"](?:key|secret|token|password|passwd)['\"]\s{0,9}:\s{0,9}['\"])[^'\"]+"), r"\1***"),
    (
        re.compile(
            r"(?i)((?:secret_access_key|access_key_id|session_token|client_secret|account_key|api_key|password|passwd)"
            r"['\"]?\s{0,9}[=:]\s{0,9}['\"]?)[^\s'\",;&]+"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s{1,9})[A-Za-z0-9._~+/=-]{16,}"), r"\1***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}"), "***"),
)


def redact(text: str) -> str:
    """Replace passwords, keys, tokens and signatures in a text by ***, for messages and logs."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class DataError(Exception):
    """A file, recipe or state that the user must correct."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class SampleError(DataError):
    """A sample that fails to decode; the loader counts it and replaces it by a placeholder without loss tokens.

    The message describes the problem only; the caller adds the shard and the sample.
    """
