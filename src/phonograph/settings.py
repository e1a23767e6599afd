"""Machine settings: environment variables, read here only. No variable changes how anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder() -> Path:
    """Where the platform keeps a user's caches, and in it our own folder: the XDG base directories, else ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "phonograph"


def state_folder() -> Path:
    """Where the platform keeps what a user did, as a history, and in it our own folder; else ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME")
    return (Path(named) if named else Path.home() / ".local" / "state") / "phonograph"


def triton_cache_folder() -> Path:
    """Where Triton keeps what it compiles."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path.home() / ".triton" / "cache"


def use_compile_cache(torch_version: str, torchs_own: str) -> Path:
    """Have torch's compiler keep what it compiles in our folder, one for each version of torch; a folder that the
    user's own variable names prevails.

    `torchs_own` is what torch itself sets where nobody did: a temporary folder, which the next start may not find.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", torchs_own) == torchs_own:
        folder = cache_folder() / "compiled" / f"torch-{torch_version}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, and the added ones: for a child process, or to look for names."""
    return {**os.environ, **(added or {})}
