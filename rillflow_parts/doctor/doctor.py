"""Doctor: report what this machine offers, what blocks a run, and how to fix it.

    Python, packages ─┐
    processor, memory ├─ one probe each ─> Finding(ok | warn | fail, what, fix)
    disk, limits ─────┤
    sandbox ──────────┘

Probes change nothing, except that one writes a small file into the folder and removes it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from rillflow.app.machine import available_memory
from rillflow.app.plugins import discovered
from rillflow.config.user_paths import home
from rillflow.errors import ClusterError, RewardError, install_package
from rillflow.isolation.sandbox import SENTENCES, Level
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.supervised import REFUSED
from rillflow.rewards.workers import RewardWorkers
from rillflow.runs.environment import package_version, usable_cores
from rillflow.runs.formatting import size
from rillflow.workers.ray_folder import folder_choice

GIB = 1024**3
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_DISK_BYTES = 2 * GIB
LEAST_SHARED_BYTES = GIB
LEAST_FILES = 256
LEAST_PROCESSES = 64

_PROBE = "def probe(completions):\n    return []\n"
_FIX_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces=10000; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined"
)
_FIX_GROUP = "delegate a memory cgroup: systemd-run --user --scope -p Delegate=yes rillflow run RECIPE"


class Health(StrEnum):
    """Result of a probe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding of one probe.

    Example:
        Finding(name="memory", health=Health.WARN, what="1.2 GiB are free", fix="close other programs")
    """

    name: str
    """Subject of the probe."""
    health: Health
    """Result: ok, a warning or a failure."""
    what: str
    """Measured state, with its number."""
    fix: str = ""
    """How to fix it; empty if there is nothing to fix."""


def examine(folder: Path) -> list[Finding]:
    """Run every probe; ``folder`` is where runs would be written."""
    probes: Sequence[Callable[[], list[Finding]]] = (
        python,
        packages,
        extras,
        torch_and_device,
        processor,
        memory,
        shared_memory,
        ray_folder,
        home_folder,
        screen,
        lambda: disk(folder),
        lambda: writing(folder),
        limits,
        sandbox,
        plugins,
    )
    return [finding for probe in probes for finding in probe()]


def _found(name: str, what: str, fix: str = "", *, fails: bool = False) -> list[Finding]:
    """Return one finding: ok without a fix, else a warning, or a failure if ``fails``."""
    health = Health.FAIL if fails else Health.WARN if fix else Health.OK
    return [Finding(name=name, health=health, what=what, fix=fix)]


def python() -> list[Finding]:
    """Report the interpreter's version."""
    found = f"{platform.python_version()} at {sys.executable}"
    return _found("python", found)


def packages() -> list[Finding]:
    """Report whether Rillflow's dependencies are installed, with versions in their ranges."""
    try:
        written = metadata.requires("rillflow") or []
    except metadata.PackageNotFoundError:
        return _found("rillflow", "not installed; it runs from its source folder", install_package())
    asked = [requirement for requirement in map(Requirement, written) if requirement.marker is None]
    return [finding for requirement in asked for finding in package_finding(requirement)]


def package_finding(requirement: Requirement) -> list[Finding]:
    name, version = requirement.name, package_version(requirement.name)
    fix = f"pip install '{requirement}'"
    if version is None:
        return _found(name, "not installed", fix, fails=True)
    if not requirement.specifier.contains(version.split("+")[0], prereleases=True):
        return _found(name, f"{version}; Rillflow is tested with {requirement.specifier}", fix)
    return _found(name, version)


def extras() -> list[Finding]:
    """Report packages that only some recipes need."""
    found: list[Finding] = []
    for package, extra, use in (
        ("pyarrow", "parquet", "prompts in Parquet files"),
        ("reasoning-gym", "gym", "reasoning-gym tasks"),
        ("ray", "ray", "runs on several ranks"),
    ):
        version = package_version(package)
        what = version or f"not installed; only {use} need it: {install_package(extra)}"
        found += _found(package, what)
    return found


def plugins() -> list[Finding]:
    """Report plugins that cannot be loaded; everything that they bring is missing."""
    found: list[Finding] = []
    for error in discovered().broken.values():
        found += _found("plugin", f"{error.what}: {error.why}", error.fix)
    return found


def torch_and_device() -> list[Finding]:
    """Report whether torch loads, which device ``auto`` selects, and how many threads torch would use."""
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "reinstall torch; the message above names a missing library"
        return _found("device", f"torch cannot be loaded: {error}", fix, fails=True)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found = _found("device", f"cuda: {', '.join(names)}")
    elif Path("/dev/nvidia0").exists():
        what = f"this machine has a GPU, but torch {torch.__version__} does not see it"
        fix = "install a CUDA build of torch that fits the driver"
        found = _found("device", what, fix)
    else:
        found = _found("device", "cpu")
    return [*found, *threads_finding(torch.get_num_threads(), usable_cores())]


def threads_finding(threads: int, cores: float) -> list[Finding]:
    fix = ""
    if threads > cores:
        fix = f"set run.threads = {max(1, int(cores))}: more threads than cores slow each other down"
    elif threads < int(cores) and "OMP_NUM_THREADS" in os.environ:
        now = os.environ["OMP_NUM_THREADS"]
        fix = f"unset OMP_NUM_THREADS (now {now}), or set run.threads = {int(cores)}"
    return _found("threads", f"torch would use {threads} of {cores:g} cores", fix)


def processor() -> list[Finding]:
    """Report whether the processor computes in bfloat16, which torch otherwise emulates."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return []
    wide = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if f" {name}" in flags]
    none = "no bfloat16 arithmetic: on the CPU, float32 is the faster dtype"
    return _found("processor", f"bfloat16 by {wide[0]}" if wide else none)


def memory() -> list[Finding]:
    """Report free memory within a container's limit."""
    free = available_memory()
    if free is None:
        return []
    fix = "close other programs; a small model needs about 1 GiB"
    return _found("memory", f"{size(free)} free", fix if free < LEAST_MEMORY_BYTES else "")


def shared_memory() -> list[Finding]:
    """Report free space in /dev/shm, where Ray keeps batches; containers have 64 MiB by default."""
    if not Path("/dev/shm").is_dir():
        return []
    free = shutil.disk_usage("/dev/shm").free
    fix = "docker run --shm-size=8g; a smaller size only slows down runs on several ranks"
    return _found("shared memory", f"{size(free)} free", fix if free < LEAST_SHARED_BYTES else "")


def ray_folder() -> list[Finding]:
    """Report the folder in which a run on several ranks would start Ray; nothing without Ray."""
    if find_spec("ray") is None:
        return []
    try:
        return _found("ray", f"starts in {folder_choice()}")
    except ClusterError as error:
        return _found("ray", f"cannot start: {error.why}", error.fix)


def home_folder() -> list[Finding]:
    """Report the user's home folder, in which libraries keep what they download."""
    found, fix = home(), "set HOME to a folder of yours, or HF_HOME for downloads of models and data sets"
    if found is None:
        return _found("home", "HOME is not set, and this user has no entry in /etc/passwd", fix)
    if not os.access(found, os.W_OK):
        return _found("home", f"{found} cannot be written", fix)
    return _found("home", str(found))


def screen() -> list[Finding]:
    """Report whether the output takes every character."""
    encoding = (sys.stdout.encoding or "none") if sys.stdout is not None else "none"
    if encoding.lower().replace("-", "") == "utf8":
        return _found("screen", encoding)
    what = f"the output is {encoding}; characters that it lacks are shown as \\x.."
    return _found("screen", what, "set PYTHONIOENCODING=utf-8, or LC_ALL=C.UTF-8")


def disk(folder: Path) -> list[Finding]:
    """Report free space where runs would be written."""
    free = shutil.disk_usage(folder).free
    fix = "free some space, or choose a run directory on another disk with --dir"
    what = f"{size(free)} free in {folder.resolve()}"
    return _found("disk", what, fix if free < LEAST_DISK_BYTES else "")


def writing(folder: Path) -> list[Finding]:
    """Report whether files can be written and locked in the folder, as a run directory requires."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rillflow-doctor-") as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what = f"not possible: {error.strerror} in {folder.resolve()}"
        fix = "choose a run directory on a local, writable disk with --dir"
        return _found("writing", what, fix, fails=True)
    return _found("writing", "files can be written and locked")


def limits() -> list[Finding]:
    """Report limits of this process that a run could reach."""
    return [
        *_limit("open files", resource.RLIMIT_NOFILE, LEAST_FILES, "ulimit -n 1024"),
        *_limit("processes", resource.RLIMIT_NPROC, LEAST_PROCESSES, "ulimit -u 1024"),
        *_limit("address space", resource.RLIMIT_AS, 4 * GIB, "ulimit -v unlimited"),
    ]


def _limit(name: str, kind: int, least: int, fix: str) -> list[Finding]:
    soft = resource.getrlimit(kind)[0]
    if soft == resource.RLIM_INFINITY:
        return _found(name, "no limit")
    if soft < least:
        return _found(name, f"{soft:,} allowed; at least {least:,} are recommended", fix)
    return _found(name, f"{soft:,} allowed")


def sandbox(limit: Level = Level.FULL) -> list[Finding]:
    """Find the sandbox level that this machine gives to rewards and agents, and what a stronger one needs.

    Args:
        limit: the strongest level that is tried.
    """
    probe = FunctionPath(file=Path("doctor.py"), name="probe", text=_PROBE)
    try:
        with RewardWorkers(probe, RewardConfig(sandbox=True), level=limit) as workers:
            workers.load()
            level, missing = workers.level, workers.shortcomings
    except RewardError as error:
        reason = error.what.partition(REFUSED)[2].strip(": ") or error.what
        what = f"{Level.NONE}: {reason}; rewards and agents that run text as code are refused"
        return _found("sandbox", what, _FIX_NAMESPACES)
    fix = "" if level is Level.FULL else "start runs as root, also in containers, to allow mapped user ids"
    found = _found("sandbox", f"{level}: {SENTENCES[level]}", fix)
    return found + (_found("sandbox memory", missing, _FIX_GROUP) if missing else [])
