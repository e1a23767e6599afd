"""Native library: the C++ kernels, compiled once on a machine, for its CPU, by the compiler that is there."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache as memo
from pathlib import Path

from phonograph.errors import DeviceError
from phonograph.graphs.progress import Progress, silent
from phonograph.settings import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
_PARTS = (SOURCE, Path(__file__).with_name("picking.h"))
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC", "-shared")
_COMPILERS = ("g++", "c++", "clang++")
_SIGNATURES = {
    "normed": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "gated": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "projected": (
        *(c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int64, c_int64),
        *(c_void_p, c_int, c_void_p, c_int),
    ),
    "rotated": (
        *(c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_float),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "stepped": (c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int),
    "can_attend": (c_int64,),
    "attended": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    ),
    "picked": (
        *(c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_int),
    ),
    "noises": (c_void_p, c_int64, c_void_p),
}

_RESULTS = {"stepped": c_int64, "can_attend": c_int}


class Library:
    """The functions of `kernels.cpp`, by their names there; tensors are given as addresses."""

    def __init__(self, path: Path, compiler: str) -> None:
        found = ctypes.CDLL(str(path))
        self.compiler = compiler
        self.lanes: int = found.lanes()
        for name, signature in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = signature, _RESULTS.get(name)
        self.normed = found.normed
        self.gated = found.gated
        self.projected = found.projected
        self.rotated = found.rotated
        self.stepped = found.stepped
        self.can_attend = found.can_attend
        self.attended = found.attended
        self.picked = found.picked
        self.noises = found.noises


def library(progress: Progress = silent) -> Library:
    """The kernels, compiled now where that was not done before. Raises DeviceError where it can't be done."""
    compilers = dict.fromkeys(path for name in _COMPILERS if (path := shutil.which(name)))
    problems = []
    for compiler in compilers:
        try:
            return _made_by(compiler, progress)
        except _CompilerError as error:
            problems.append(f"{error}. Install a newer g++.")
        except OSError as error:
            problems.append(f"{error}. Set XDG_CACHE_HOME to a folder that can be written and run from.")
    found = problems[0] if problems else f"found none of {', '.join(_COMPILERS)}. Install one, e.g. apt install g++."
    raise DeviceError(f"compiling the CPU's kernels: {found}")


class _CompilerError(Exception):
    """It does not run, or not to its end."""


def _made_by(compiler: str, progress: Progress) -> Library:
    version = _run([compiler, "--version"])
    path = cache_folder() / "native" / f"kernels-{_key(version)}.so"
    if path.exists():
        try:
            return _opened(path, version.splitlines()[0])
        except OSError:  # half a file, after a crash; or it can't be run from there, which is seen again below
            path.unlink()
    progress("compiling kernels", 0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        _run([compiler, *_FLAGS, str(SOURCE), "-o", str(fresh)])
        fresh.replace(path)  # another process sees the whole file or none
    progress("compiling kernels", 1, 1)
    return _opened(path, version.splitlines()[0])


@memo
def _opened(path: Path, compiler: str) -> Library:
    return Library(path, compiler)


def _key(version: str) -> str:
    """Of everything that another result would come from."""
    everything = (*(part.read_text() for part in _PARTS), version, str(_FLAGS), _cpu())
    return hashlib.sha256("\0".join(everything).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What `-march=native` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _CompilerError(str(error)) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        cause = next((line for line in lines if "error" in line), lines[-1])
        raise _CompilerError(f"{' '.join(command[:1])} failed: {cause.rstrip('.')}")
    return done.stdout
