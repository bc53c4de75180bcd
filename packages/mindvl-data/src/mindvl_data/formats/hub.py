# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face hub by address: `hf://datasets/ORG/NAME[@REVISION][/PATH]`.

Comes before the recognition of the format. The files are read from the cache of huggingface_hub and downloaded into it if they
are missing; HF_HUB_OFFLINE=1, a variable of that library, forbids downloads. PATH is a file, a directory or a pattern such as
`data/train-*.parquet`; other files of the data set are then not downloaded.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mindvl_data.errors import DataError

PREFIX = "hf://"
_ADDRESS = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.+))?")
_UNUSED = ["*.py", ".gitattributes"]  # code of a data set is never run


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Files of a data set at one commit."""

    path: Path  # in the cache; the last part may be a pattern
    id: str
    revision: str  # the commit that is read, also if a branch or nothing was asked for

    def as_json(self) -> dict[str, str]:
        """What manifest.json keeps."""
        return {"dataset": self.id, "revision": self.revision}


def open_dataset(address: str) -> HubDataset:
    """Find the files in the cache, and download what is missing.

    Raises:
        DataError: The address is invalid, the data set or revision does not exist, or it can be neither found nor downloaded.
    """
    found = _ADDRESS.fullmatch(address.rstrip("/"))
    if found is None or (found[3] and ".." in found[3].split("/")):
        raise DataError(
            f"{address}: is not the address of a data set. Write hf://datasets/ORG/NAME, hf://datasets/ORG/NAME@REVISION or "
            "hf://datasets/ORG/NAME/PATH."
        )
    name, revision, inside = found[1], found[2], found[3]
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = None if inside is None else [inside, f"{inside}/**"]
    try:
        snapshot = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=wanted, ignore_patterns=_UNUSED
        )
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{address}: is not in the cache of huggingface_hub, and the hub cannot be reached. Check the network and "
            f"HF_HUB_OFFLINE, or run `hf download --repo-type dataset {name}` where there is a network, and copy the cache."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        what = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{address}: cannot be downloaded ({what}). Check id and revision; `hf auth login` gives access to "
            "private data sets."
        ) from error
    root = Path(snapshot)
    return HubDataset(path=root / (inside or ""), id=name, revision=root.name)
