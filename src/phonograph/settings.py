"""Machine settings: environment variables, read here only. No variable changes how anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder() -> Path:
    """Where the platform keeps a user's caches, and in it our own folder: the XDG base directories, else ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "phonograph"


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, and the added ones: for a child process, or to look for names."""
    return {**os.environ, **(added or {})}
