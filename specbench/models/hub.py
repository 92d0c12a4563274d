"""Whether the hub can be asked. It imports no other library than the hub's own, so that the answer comes at once."""

import os
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from specbench.errors import AbsentError, shown


@cache
def hub_answers() -> bool:
    """Whether the hub answers within two seconds, or a proxy is there to be asked. If not, the hub's library looks at
    downloaded files only: otherwise it tries again for half a minute, file by file."""
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies() and not constants.HF_HUB_OFFLINE:
        try:
            socket.create_connection((hub.hostname or "", hub.port or 443), timeout=2).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def refuse_unreachable(role: str, path: str) -> None:
    """Raises AbsentError if a model's path is a hub id whose config.json is not on this machine nor to be had now."""
    if path.count("/") != 1 or path.startswith((".", "~", "/")) or os.path.exists(path) or hub_answers():
        return
    try:
        known = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # another check says what is wrong with it
        return
    if not isinstance(known, str):
        raise AbsentError(
            f"{role}.path={shown(path)} is not on this machine, and {constants.ENDPOINT} cannot be reached: connect to "
            f"it, or give {role}.path=FOLDER of a model downloaded elsewhere, or time a known shape without weights by "
            f"{role}.weights=random"
        )
