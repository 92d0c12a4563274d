"""Processes of their own: the command line that runs this job in one, and how one is run to its end."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from specbench.config.paths import conf_dir
from specbench.run.signals import allow_signals, defer_signals

LOOK = 0.2  # seconds between two looks at a process: a signal just before a wait without end would go unseen


def run_process(words: Sequence[str]) -> int:
    """Runs a command to its end, without its table, and returns its exit code. It has a session of its own: a signal
    reaches it once, from here, and KeyboardInterrupt is raised when it has ended."""
    with defer_signals():
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            with allow_signals():
                while (code := process.poll()) is None:
                    time.sleep(LOOK)
                return code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise


def child_overrides(folder: Path, own: Mapping[str, Any] | None = None) -> list[str]:
    """What stands behind `python -m specbench` for this job in `folder`: its overrides, but for `own` values."""
    hydra, own = HydraConfig.get(), own or {}
    sources = {source.provider: str(source.path) for source in hydra.runtime.config_sources}
    quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *("--config-path", sources.get("main", str(conf_dir())), "--config-name", hydra.job.config_name or "config"),
        *(("--config-dir", sources["command-line"]) if "command-line" in sources else ()),
        *(override for override in hydra.overrides.task if _key(override) not in own),
        *(override for override in hydra.overrides.hydra if _key(override).startswith("hydra.searchpath")),
        *(f"{key}={value}" for key, value in own.items()),
        f"hydra.run.dir='{quoted}'",
    ]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
