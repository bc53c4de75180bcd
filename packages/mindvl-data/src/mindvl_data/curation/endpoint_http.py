# SPDX-License-Identifier: Apache-2.0
"""One request to an OpenAI-compatible endpoint over HTTP: images as data URLs, bounded in bytes and seconds, no redirects.

Used by endpoint.py, which adds tries, limits and the cache.
"""

import base64
import email.utils
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from PIL import Image

from mindvl_data.config import ImageConfig
from mindvl_data.curation.endpoint_store import Reply
from mindvl_data.decoding import opened
from mindvl_data.errors import DataError, SampleError
from mindvl_data.image_files import open_image, orientation
from mindvl_data.shards.media import media_extension

_MAX_REPLY_BYTES = 10_000_000
_SENT_AS_IS = ("jpg", "png", "webp")


def post(url: str, key: str, body: bytes, timeout_s: float) -> bytes:
    """The reply to a request for a chat completion.

    Raises:
        SampleError: The reply is too large, too slow or incomplete.
        OSError, http.client.HTTPException: The server cannot be reached, or refuses the request (urllib's HTTPError).
    """
    headers = {"Content-Type": "application/json"} | _authorization(key)
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, headers)
    deadline = time.monotonic() + timeout_s
    content = io.BytesIO()
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as reply:
        while block := reply.read1(1 << 16):
            content.write(block)
            if content.tell() > _MAX_REPLY_BYTES:
                raise SampleError(f"the reply has more than {_MAX_REPLY_BYTES} bytes")
            if time.monotonic() > deadline:  # a server that sends byte after byte never exceeds the timeout of a read
                raise SampleError(f"the reply takes more than {timeout_s:g} s")
        if reply.length:
            raise SampleError(f"the connection was closed {reply.length} bytes before the end of the reply")
    return content.getvalue()


def check_server(url: str, key: str, key_variable: str | None) -> None:
    """Check that a server listens and takes the key. Asks no question.

    Raises:
        DataError: Nothing listens, or the key is refused.
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/models", headers=_authorization(key))
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=30.0).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise DataError(
                f"{url}: the key is refused (HTTP {error.code}). Check the variable {key_variable}."
            ) from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: the endpoint does not answer: {error}. Start the server.") from error


def api_key(url: str, variable: str | None) -> str:
    """The API key in an environment variable; "" if none is named.

    Raises:
        DataError: The variable is not set.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise DataError(f"{url}: the environment variable {variable} is not set. Export the API key in it.")
    return key


def parse_reply(content: bytes, expected_tokens: int) -> Reply:
    """The answer in a chat completion.

    Args:
        content: The reply.
        expected_tokens: Taken as used if the server does not count.

    Raises:
        SampleError: It is not a chat completion.
    """
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise SampleError(f"the reply is not a chat completion: {shown(content)}") from error
    if text is None:  # for example only reasoning, or cut before the first token
        text = ""
    if not isinstance(text, str):
        raise SampleError(f"the reply is not a chat completion: {shown(content)}")
    usage = reply.get("usage")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (n if isinstance(n, int) and 0 <= n < 1 << 40 else None for n in counts)
    if prompt is None or completion is None:
        prompt, completion = expected_tokens, 0
    text = text.encode("utf-8", "replace").decode()  # JSON may escape halves of surrogate pairs
    return Reply(text, str(choice.get("finish_reason") or "stop"), prompt, completion)


def image_url(content: bytes, max_pixels: int) -> tuple[str, int]:
    """(data URL, pixels) of an image, reduced to `max_pixels`; upright, as training decodes it.

    Raises:
        SampleError: The image cannot be decoded.
    """
    limit = ImageConfig().decode_limit
    extension = media_extension(content)
    header = open_image(content, limit)
    height, width = header.height, header.width
    is_plain = header.mode in ("RGB", "L") and "transparency" not in header.info and orientation(header, content) == 1
    if extension in _SENT_AS_IS and is_plain and height * width <= max_pixels:
        kind = "jpeg" if extension == "jpg" else extension
    else:
        with opened(content, decode_limit=limit) as decoded:
            image = Image.fromarray(decoded.rows(0, decoded.height)[..., :3])
        width, height = image.size
        scale = min(1.0, (max_pixels / (height * width)) ** 0.5)
        height, width = max(1, int(height * scale)), max(1, int(width * scale))
        file = io.BytesIO()
        image.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95, subsampling=0)
        content, kind = file.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", height * width


def retry_after(value: str | None, now: float) -> float:
    """Seconds of a Retry-After header, which is a number of seconds or a date; 0 without one."""
    if not value:
        return 0.0
    try:
        return float(value)
    except ValueError:
        try:
            return email.utils.parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return 0.0


def shown(content: bytes) -> str:
    """The beginning of a reply, for messages."""
    text = content.decode(errors="backslashreplace")[:200]
    return text if text.isprintable() else repr(text)


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would send the key to another server, and the question as a GET."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
