"""A Ray cluster on this machine for trying: a head without cores, and two workers with one core each.

Every process of it is in a group of its own that `Node` knows, so nothing else is ended with it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


class Node:
    """One node: `ray start --block`, its raylet, and what that starts."""

    def __init__(self, environment: dict[str, str], *options: str):
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
                 f"--node-ip-address={HOST}", *options]  # fmt: skip
        self.process = subprocess.Popen(words, env=environment, start_new_session=True, cwd=tempfile.gettempdir(),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    def members(self, name: str = "") -> list[int]:
        """Processes of this node whose command holds the name, in sessions of their own too."""
        parents, names = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):  # it has ended meanwhile
                continue
        found, more = set(), {self.process.pid}
        while more:
            found |= more
            more = {number for number, parent in parents.items() if parent in found} - found
        return [number for number in found if name in names.get(number, "")]

    def kill(self) -> None:
        """Ends all of it."""
        for number in self.members():
            kill(number)
        self.process.wait()


def kill(number: int) -> None:
    """SIGKILL, if the process is still there."""
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        return


class RayCluster:
    """A head and two workers."""

    def __init__(self) -> None:
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}  # nobody else can send it jobs
        self.environment = os.environ | own
        self.port = free_port()
        self.head = Node(self.environment, "--head", f"--port={self.port}", "--num-cpus=0",
                         "--include-dashboard=false", f"--ray-client-server-port={free_port()}")  # fmt: skip
        self._wait()
        self.workers = [self._worker(), self._worker()]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def _wait(self) -> None:
        for _ in range(120):
            try:
                socket.create_connection((HOST, self.port), 1).close()
                time.sleep(3)
                return
            except OSError:
                time.sleep(0.5)
        raise SystemExit("Ray's head does not answer")

    def _worker(self) -> Node:
        return Node(self.environment, f"--address={self.address}", "--num-cpus=1")

    def jobs(self) -> list[int]:
        """The processes that run a job now."""
        return sorted(number for worker in self.workers for number in worker.members("_run_job"))

    def kill_raylet(self, place: int) -> None:
        """Kills the raylet of a worker, with which its jobs end, and starts another worker in its place."""
        for number in self.workers[place].members("raylet/raylet"):
            kill(number)
        self.workers[place].kill()
        self.workers[place] = self._worker()

    def down(self) -> None:
        for node in (*self.workers, self.head):
            node.kill()
