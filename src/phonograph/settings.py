"""Machine settings: environment variables, read here only. No variable changes how anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder() -> Path:
    """Our folder in the platform's cache directory: XDG_CACHE_HOME, else ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "phonograph"


def state_folder() -> Path:
    """Our folder in the platform's state directory, for the history of `chat`: XDG_STATE_HOME, else ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME")
    return (Path(named) if named else Path.home() / ".local" / "state") / "phonograph"


def triton_cache_folder() -> Path:
    """Triton's cache of compiled kernels."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path.home() / ".triton" / "cache"


def use_compile_cache(torch_version: str, torchs_own: str) -> Path:
    """Point torch's compile cache at our folder, one per version of torch, unless the user has set a folder.

    `torchs_own` is torch's default, which it sets itself: a temporary folder that the next start may not find.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", torchs_own) == torchs_own:
        folder = cache_folder() / "compiled" / f"torch-{torch_version}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, and the added ones: for a child process, or to look for names."""
    return {**os.environ, **(added or {})}
