"""Whether the hub can be asked. It imports no other library than the hub's own, so that the answer comes at once."""

import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants


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
