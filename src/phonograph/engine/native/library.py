"""The C++ kernels: compiled once on a machine, for its CPU, by the compiler that is there."""

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

import torch

from phonograph.engine.kernels.tuning import cache_folder
from phonograph.errors import DeviceError
from phonograph.graphs.progress import Progress, silent

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
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
    "can_attend": (c_int64,),
    "attended": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    ),
}


class Library:
    """The functions of `kernels.cpp`, by their names there; tensors are given as addresses."""

    def __init__(self, path: Path, compiler: str) -> None:
        found = ctypes.CDLL(str(path))
        self.compiler = compiler
        self.lanes: int = found.lanes()
        for name, signature in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = signature, c_int if name == "can_attend" else None
        self.normed = found.normed
        self.gated = found.gated
        self.projected = found.projected
        self.rotated = found.rotated
        self.can_attend = found.can_attend
        self.attended = found.attended


def library(progress: Progress = silent) -> Library:
    """The kernels, compiled now where that was not done before. Raises DeviceError where it can't be done."""
    compiler = _compiler()
    version = _run([compiler, "--version"])
    path = cache_folder() / "native" / f"kernels-{_key(version)}.so"
    if not path.exists():
        progress("compiling kernels", 0, 1)
        _compile(compiler, path)
        progress("compiling kernels", 1, 1)
    return _opened(path, version.splitlines()[0])


@memo
def _opened(path: Path, compiler: str) -> Library:
    return Library(path, compiler)


def _compiler() -> str:
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise DeviceError(
            f"compiling the CPU's kernels: found none of {', '.join(_COMPILERS)}. Install a C++ compiler, e.g. apt "
            "install g++."
        )
    return found


def _key(version: str) -> str:
    """Of everything that another result would come from."""
    parts = (SOURCE.read_text(), version, str(_FLAGS), torch.__version__, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What `-march=native` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, path: Path) -> None:
    # torch brings its own OpenMP: with another one there would be two sets of threads, which wait for each other.
    openmp = sorted(str(found) for found in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            _run([compiler, *_FLAGS, str(SOURCE), "-o", str(fresh), "-Wl,--as-needed", *openmp])
            fresh.replace(path)  # another process sees the whole file or none
    except OSError as error:
        raise DeviceError(
            f"compiling the CPU's kernels: {error}. Set XDG_CACHE_HOME to a folder that can be written."
        ) from None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise DeviceError(
            f"compiling the CPU's kernels: {' '.join(command)} failed: {last}. Install g++, which has OpenMP."
        )
    return done.stdout
