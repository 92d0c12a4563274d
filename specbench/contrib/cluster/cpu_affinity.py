"""Cores and CUDA devices of this machine that one job has for itself while it runs. Locks in one folder of the machine
say which are taken; a lock ends with its process."""

import contextlib
import itertools
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specbench.errors import ConfigError
from specbench.results.schema import Placement

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOOK = 0.5  # seconds between two looks at cores that others have
NO_PINNING = "this system cannot give a job cores of its own"
LONGEST = 20  # bytes in the file of a lock: the number of a process
THREADS = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICES = "NoDevFiles"  # Slurm's word there for a job without any


class _State:
    """What this process has now."""

    placement: Placement | None = None
    device = ""  # which CUDA is bound to, as long as the process lives


_state = _State()


def placement() -> Placement | None:
    """What the job has that runs now, with those beside it counted again; None outside of `own_cores`."""
    found = _state.placement
    if found is not None and found.cores:
        found.beside = max(found.beside, len(others(found.cores)))
    return found


def can_pin() -> bool:
    """Whether a process can be confined to some cores here."""
    return fcntl is not None and hasattr(os, "sched_setaffinity")


def usable() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them, without initialising CUDA, which
    would read that variable for good."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        shown = list(itertools.takewhile(lambda name: name != "-1", names))  # CUDA reads no further
        return [name for name in shown if name not in ("", NO_DEVICES)]
    return [str(number) for number in range(torch.cuda.device_count())]


def locks() -> Path:
    """The folder of the locks: $SPECBENCH_LOCKS, or one in memory that every user of the machine can write to. Raises
    ConfigError, also if others could replace files of this user's there."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    named = os.environ.get("SPECBENCH_LOCKS")
    folder = Path(named or Path(base) / "specbench-locks")
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o1777)
        found = folder.stat() if named else folder.lstat()
    except OSError as error:
        raise ConfigError(f"SPECBENCH_LOCKS={folder} cannot be used ({error.strerror}): it must be a folder") from error
    own = found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022
    if not stat.S_ISDIR(found.st_mode) or not (own or found.st_mode & stat.S_ISVTX):
        raise ConfigError(
            f"SPECBENCH_LOCKS={folder} cannot be used: it must be a folder of yours that nobody else can write to, or "
            "one with the sticky bit (chmod 1777)"
        )
    return folder


def _open(name: str) -> int:
    """The file of a lock. One of another user's must not be opened as if it were to be made. Raises ConfigError, also
    if it is anything but the file of a lock: its contents are replaced."""
    path = locks() / name
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used ({error.strerror}): set SPECBENCH_LOCKS to another folder") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > LONGEST:
        os.close(descriptor)
        raise ConfigError(f"{path} cannot be used (it is not a lock): set SPECBENCH_LOCKS to another folder")
    return descriptor


def _opened(path: Path) -> int:
    """The file, made if it is not there, and never what a symbolic link leads to. Raises OSError."""
    options = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, options)
    try:
        descriptor = os.open(path, options | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process has just made it
        return os.open(path, options)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)  # whatever the umask is
    return descriptor


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no other process looks at the locks or takes any."""
    descriptor = _open("all")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take(name: str) -> int | None:
    """The file of a lock that this process has now; None if another one has it."""
    descriptor = _open(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _owner(name: str) -> str:
    """The process that has a lock, as it wrote it; "" if nobody has. Only inside of `_alone`."""
    if not (locks() / name).exists():
        return ""
    descriptor = _open(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return os.pread(descriptor, LONGEST, 0).decode(errors="replace") or "(unknown)"
    finally:
        os.close(descriptor)


def others(own: Sequence[int]) -> set[str]:
    """The processes that have cores of this machine which are not among `own`."""
    with _alone():
        names = [path.name for path in locks().glob("core-*")]
        return {owner for name in names if name not in {f"core-{core}" for core in own} and (owner := _owner(name))}


def thread_siblings(core: int, folder: Path = Path("/sys/devices/system/cpu")) -> frozenset[int]:
    """The hardware threads of a core's, itself among them."""
    try:
        text = (folder / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        parts = [part.split("-") for part in text.strip().split(",")]
        return frozenset(n for part in parts for n in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return frozenset((core,))


def chosen(free: Sequence[int], count: int, threads: Callable[[int], frozenset[int]] = thread_siblings) -> list[int]:
    """`count` of the free ones, hardware threads each: first those of cores that are free as a whole."""
    groups: dict[frozenset[int], list[int]] = {}
    for core in free:
        groups.setdefault(threads(core), []).append(core)
    whole = [cores for group, cores in groups.items() if len(cores) == len(group)]
    broken = [cores for group, cores in groups.items() if len(cores) < len(group)]
    return [core for cores in (*whole, *broken) for core in cores][:count]


@contextmanager
def pin_cores(
    launcher: str, count: int | None, device: bool = False, told: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Inside, this process has `count` cores, and with `device` a CUDA device, that no other job on this machine has;
    it waits until so many are free. It runs on these alone, with as many threads. None: nobody knows how many cores are
    the job's, and its results say so. `told` hears of waiting. Raises ConfigError if the machine has not so many."""
    total = usable()
    where = socket.gethostname()
    if count is None or not can_pin():
        why = f"hydra/launcher={launcher}: nothing is known of the cores of its jobs" if count is None else NO_PINNING
        _state.placement = Placement(launcher, where, [], len(total), False, os.environ.get(VISIBLE), 0, [why])
        try:
            yield
        finally:
            _state.placement = None
        return
    if count > len(total):
        raise ConfigError(f"a job of {count} cores is not possible on {where}: {len(total)} are there for it")
    with ExitStack() as stack:
        own, shared = _claim(stack, total, count, chosen_for(launcher, count, total), told)
        devices = _claim_device(stack, told) if device else os.environ.get(VISIBLE)
        stack.enter_context(_confined(own, total))
        found = Placement(launcher, where, own, len(total), True, devices, len(others(own)), shared)
        _state.placement = found
        try:
            yield
        finally:
            _state.placement = None


def chosen_for(launcher: str, count: int, total: Sequence[int]) -> bool:
    """Whether a scheduler has chosen a job's cores: it has confined the job to as many as the job asked for. What
    confines a container, or the shell that a sweep was started in, does so to all jobs together."""
    of_slurm = launcher == "submitit_slurm" and "SLURM_JOB_ID" in os.environ
    return of_slurm and count == len(total) < (os.cpu_count() or 1)


def _claim(
    stack: ExitStack, total: Sequence[int], count: int, bound: bool, told: Callable[[str], None]
) -> tuple[list[int], list[str]]:
    """Cores that nobody else has, and in words what others share of them. With `bound` a scheduler has chosen them: if
    another job has one of these, both share it."""
    waited = False
    while True:
        with _alone():
            free = [core for core in total if not _owner(f"core-{core}")]
            own = list(total) if bound else chosen(free, count)
            if len(own) == count:
                for core in own:
                    if (descriptor := _take(f"core-{core}")) is not None:
                        stack.callback(os.close, descriptor)
                threads = {thread for core in own for thread in thread_siblings(core)} - {*own}
                shared = [f"another job has core {core} too" for core in own if core not in free]
                taken = [thread for thread in sorted(threads) if _owner(f"core-{thread}")]
                shared += [f"another job has the hardware thread {thread} of the same core" for thread in taken]
                return own, shared
        if not waited:
            told(f"waits for {count} of {len(total)} cores: other jobs on this machine have all but {len(free)}")
            waited = True
        time.sleep(LOOK)


def _claim_device(stack: ExitStack, told: Callable[[str], None]) -> str:
    """A CUDA device that nobody else has, which becomes the only one of this process. A process that has used one
    stays with it. Raises ConfigError if there is none."""
    every = [_state.device] if _state.device else visible_devices()
    if not every:
        raise ConfigError("device=cuda is not here: no CUDA device is visible, use cpu")
    waited = False
    while True:
        with _alone():
            for name in every:
                if (descriptor := _take(f"cuda-{name}")) is not None:
                    stack.callback(os.close, descriptor)
                    os.environ[VISIBLE] = _state.device = name
                    return name
        if not waited:
            told(f"waits for one of {len(every)} CUDA devices: other jobs on this machine have them")
            waited = True
        time.sleep(LOOK)


@contextmanager
def _confined(own: Sequence[int], total: Sequence[int]) -> Iterator[None]:
    """Inside, all threads of this process, and processes that it starts, run on these cores, with as many threads for
    torch unless fewer were asked for."""
    before, count = os.environ.get(THREADS), len(own)
    if before is not None and before.isdigit():
        count = min(count, int(before) or count)
    torch = sys.modules.get("torch")
    of_torch = torch.get_num_threads() if torch else None
    try:
        _pin(own)
        os.environ[THREADS] = str(count)
        if torch:
            torch.set_num_threads(count)
        yield
    finally:
        _pin(total)
        os.environ.pop(THREADS)
        if before is not None:
            os.environ[THREADS] = before
        if torch and of_torch:
            torch.set_num_threads(of_torch)


def _pin(cores: Sequence[int]) -> None:
    """Confines every thread of this process."""
    threads = [int(path.name) for path in Path("/proc/self/task").glob("*")] or [0]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)
