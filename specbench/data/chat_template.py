"""Renders chat templates, which are programs of others, in a process that is ended if one takes too long or too much.

As a script this file is that process: of each line of JSON that it reads, it writes the text or the error.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

SECONDS = 10.0  # for one text
BEGIN_SECONDS = 120.0  # until the process has begun
LARGEST = 2**24  # characters of a text
MEMORY = 2**31  # bytes of the process


class TemplateError(Exception):
    """What a template has done, in words."""


class Renderer:
    """The process, which is begun when it is needed, and again after one was ended."""

    def __init__(self) -> None:
        self._lock, self._owner, self._process = threading.Lock(), 0, None

    _process: "subprocess.Popen[bytes] | None"

    def render(self, template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, Any]) -> str:
        """The text of messages, up to where the model begins its answer. Raises TemplateError."""
        words = {"conversations": [messages], "chat_template": template, "add_generation_prompt": True, **special}
        with self._lock:
            try:
                if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                    self._begin()
                self._send(json.dumps(words).encode() + b"\n")
                found = json.loads(self._line(SECONDS))
            except BaseException:  # also an interruption, after which an answer to this would be taken for the next one
                self._end()
                raise
        if "error" in found:
            raise TemplateError(found["error"])
        text: str = found["text"]
        return text

    def _begin(self) -> None:
        environment = {"USE_TORCH": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._owner, self._process = os.getpid(), None
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,  # signals of the terminal are not for it
        )
        self._line(BEGIN_SECONDS)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _line(self, seconds: float) -> bytes:
        """The next line of the process. Ends it, and raises TemplateError, if there is none in time."""
        assert self._process is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            line, in_time = self._process.stdout.readline(), timer.is_alive()
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self._process.wait()
            raise TemplateError("its process has ended" if in_time else f"it did not end within {seconds:g} s")
        return line


RENDERER = Renderer()


def serve() -> None:
    """Renders what comes by lines from the standard input, until it ends."""
    import resource

    from transformers.utils.chat_template_utils import render_jinja_template

    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(2 * int(SECONDS))  # ends this process if nobody is left who would
        try:
            text = render_jinja_template(**json.loads(line))[0][0]
            if len(text) > LARGEST:
                raise ValueError(f"its text has more than {LARGEST:,} characters")
            found = {"text": text}
        except MemoryError:
            found = {"error": f"it needs more than {MEMORY:,} bytes of memory"}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        print(json.dumps(found), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    serve()
