"""`phonograph doctor`: versions, device, extras and caches, and the pip line for each missing package."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from phonograph import __version__
from phonograph.errors import CheckpointError
from phonograph.settings import cache_folder, triton_cache_folder

HELP = "show versions, device, extras and caches, and how to get what is missing"

_EXTRAS = {
    "engine": "checkpoints, tokenizers and chat templates: generate, chat",
    "server": "serve",
    "grammar": "answers that follow a schema or a grammar",
    "hf": "models of any architecture, through transformers; phonograph.hf",
    "bench": "bench",
}
_CPU_COMPILERS = ("g++", "c++", "clang++")
_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    area: str
    name: str
    found: str
    remedy: str = ""
    """What to do about it; empty where all is well."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--json", action="store_true", help="as JSON, for bug reports")


def run(args: argparse.Namespace) -> int:
    """Print what was found; status 1 where the graph layer itself can't run."""
    findings = list(examined())
    if args.json:
        print(json.dumps([asdict(one) for one in findings], indent=1))
    else:
        print("\n".join(_lines(findings)))
    return int(any(one.remedy for one in findings if one.area == "versions"))


def examined() -> Iterator[Finding]:
    """Everything, in the order in which it is shown."""
    yield Finding("versions", "phonograph", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("versions", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("versions", "platform", platform.platform())
    yield from _looked_at("versions", "torch", _torch)
    yield from _looked_at("device", "device", _device)
    yield from _looked_at("device", "nvidia-smi", _driver)
    yield from _looked_at("device", "memory", _memory)
    yield from _looked_at("compilers", "C++", _compiler)
    yield from _looked_at("compilers", "triton", _triton)
    wanted = _requirements()
    for extra, serves in _EXTRAS.items():
        yield _extra(extra, serves, wanted.get(extra, []))
    yield from _looked_at("model", "default model", _default_model)
    yield Finding("caches", "phonograph", _size(cache_folder()))
    yield Finding("caches", "triton", _size(triton_cache_folder()))


def _lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(one.name) for one in findings)
    area = ""
    for one in findings:
        if one.area != area:
            yield one.area if not area else f"\n{one.area}"
            area = one.area
        yield f"  {one.name:<{width}}  {one.found}"
        if one.remedy:
            yield f"  {'':<{width}}  -> {one.remedy}"
    missing = sum(bool(one.remedy) for one in findings)
    yield f"\n{missing} of these can be fixed (->)." if missing else "\nNothing is missing."


def _looked_at(area: str, name: str, look: Callable[[], tuple[str, str]]) -> Iterator[Finding]:
    """One finding; an exception becomes a finding too, since this command is for broken installations."""
    try:
        found, remedy = look()
    except Exception as error:
        said = (str(error).strip() or "no message").splitlines()[0]
        found, remedy = f"{type(error).__name__}: {said}", "Reinstall what this names, or report it."
    if found:
        yield Finding(area, name, found, remedy)


def _torch() -> tuple[str, str]:
    if find_spec("torch") is None:
        return "not installed", "pip install 'torch>=2.11'"
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "for CPUs alone"
    wanted = next((one.least for one in _requirements().get("", []) if one.name == "torch"), "")
    remedy = "" if _is_at_least(torch.__version__, wanted) else f"pip install 'torch>={wanted}'"
    return f"{torch.__version__}, {build}", remedy


def _device() -> tuple[str, str]:
    import torch

    from phonograph.devices import open_device

    device = open_device()
    kind = device.torch_device.type
    if kind == "cpu":
        gpu = bool(_smi()) and not torch.version.cuda
        remedy = "This torch has no CUDA: install one that fits the driver, see pytorch.org." if gpu else ""
        return "no accelerator: passes run eagerly; device='emulated' runs the graph path", remedy
    memory, backends = device.memory(), ", ".join(sorted(device.capabilities.backends))
    return f"{kind}: {device.hardware.name}, {memory.total / _GIB:.0f} GiB; backends: {backends}", ""


def _driver() -> tuple[str, str]:
    return "; ".join(_smi()), ""


def _smi() -> list[str]:
    """A line for every GPU that NVIDIA's driver sees."""
    if shutil.which(_SMI[0]) is None:
        return []
    done = subprocess.run(_SMI, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _memory() -> tuple[str, str]:
    try:
        cores = len(os.sched_getaffinity(0))
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not on every platform
        return f"{os.cpu_count()} cores", ""
    return f"{cores} cores, {size / _GIB:.0f} GiB of host memory", ""


def _compiler() -> tuple[str, str]:
    found = next((path for name in _CPU_COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        remedy = "Install g++ for fast kernels on the CPU, and for Triton: apt install g++"
        return f"none of {', '.join(_CPU_COMPILERS)}", remedy
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=20)
    return f"{found}: {done.stdout.splitlines()[0] if done.stdout else 'does not run'}", ""


def _triton() -> tuple[str, str]:
    version = _version("triton")
    if version is not None:
        return version, ""
    return "not installed", "pip install triton" if _smi() else ""


def _default_model() -> tuple[str, str]:
    try:
        from phonograph.engine.checkpoints import INSTALL, default_model
    except ImportError:
        return "not looked for: the extra `engine` is not complete", ""
    try:
        return str(default_model()), ""
    except CheckpointError:
        return "not installed: commands need --model", INSTALL


@dataclass(frozen=True)
class _Requirement:
    name: str
    least: str

    @property
    def missing(self) -> str:
        """What pip is to be told, or nothing."""
        version = _version(self.name)
        is_there = version is not None and _is_at_least(version, self.least)
        return "" if is_there else f"{self.name}>={self.least}"


def _requirements() -> dict[str, list[_Requirement]]:
    """By extra, and "" for what is always needed, as this package's own metadata has them: `name>=version; marker`."""
    found: dict[str, list[_Requirement]] = {}
    for text in metadata.requires("phonograph") or []:
        parts = re.match(r"([\w.-]+)>=([\w.]+)", text)
        extra = re.search(r"extra == ['\"](\w+)['\"]", text)
        if parts is not None:
            found.setdefault(extra[1] if extra else "", []).append(_Requirement(parts[1], parts[2]))
    return found


def _extra(name: str, serves: str, wanted: list[_Requirement]) -> Finding:
    missing = [one.missing for one in wanted if one.missing]
    if not missing:
        return Finding("extras", name, f"complete ({serves})")
    quoted = " ".join(f"'{one}'" for one in missing)
    return Finding("extras", name, f"{len(missing)} of {len(wanted)} missing ({serves})", f"pip install {quoted}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_at_least(version: str, least: str) -> bool:
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    """Of the release: 2.13.0+cpu is 2, 13, 0."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]


def _size(folder: Path) -> str:
    """Where a cache is, and how large; it may be removed at any time."""
    if not folder.is_dir():
        return f"{folder}: empty"
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{folder}: {size / (1 << 20):.1f} MiB"
