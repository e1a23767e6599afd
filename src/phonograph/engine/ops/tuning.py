"""Tuning: the kernel for each product: measured choices, shipped or cached on disk, and a rule where there is none.

Nothing is measured here or while serving; `phonograph.engine.ops.triton.measuring` does it on request.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from phonograph.engine.ops.kernels import Op
from phonograph.numbers import is_whole
from phonograph.settings import cache_folder
from phonograph.sizes import is_power_of_two, next_power_of_two

log = logging.getLogger("phonograph")

FORMAT = 1
MOST_TOKENS = 128
"""Tokens up to which a matrix kernel can be chosen."""
MOST_VECTORS = 8
"""Tokens up to which a vector kernel can be: all are in registers."""
MAX_TILES = 16384
"""Tiles of outputs that a split product may have."""
STREAMED = 2
"""Stages of the vector kernel that holds the next rows in registers."""
_BLOCK = 512
_WHOLE = (4096, 8192, 16384)
"""Columns of a product with one token that nothing was measured for: of a block, and of rows that registers hold."""
_AS_FAST = {torch.float16: (torch.bfloat16,), torch.bfloat16: (torch.float16,)}
"""As wide in memory and as fast in tensor cores: what was measured in one holds for the other."""
SHIPPED = Path(__file__).parent / "tuned.json"

Kind = Literal["library", "library_lt", "vector", "matrix"]
Overlap = Literal["none", "late", "early"]
"""Whether a kernel is launched as a programmatic dependent, and when it lets the next one begin."""


@dataclass(frozen=True)
class Product:
    """One product of a layer: `tokens` rows of `inputs` elements, projected to `outputs`."""

    op: Op
    tokens: int
    outputs: int
    inputs: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Choice:
    """A way to compute a product. A library's product has its norm and gate in launches of their own."""

    kind: Kind
    """`library` is cuBLAS, `library_lt` cublasLt; `vector` takes one token or a few, `matrix` more."""
    rows: int = 0
    """Rows of the weights that a program takes at a time."""
    block: int = 0
    """Columns that it takes at a time; a vector kernel whose block is as wide as the weights keeps x in registers."""
    warps: int = 4
    stages: int = 1
    """Loads in flight per program; with 1 they go to registers, with 2 whole rows for a vector do too."""
    split: int = 1
    """Programs that share a tile of outputs (matrix, without norm)."""
    programs: int = 0
    """Programs that the rows are dealt to (vector, x in registers); 0: one per tile."""
    ahead: int = 0
    """Columns of its first rows that a program prefetches before it reads x."""
    swap: bool = False
    """Whether the weights are the tall operand of the tensor cores (matrix)."""
    fused: bool = False
    """Whether the norm is in the kernel (matrix; a vector kernel always has it)."""
    overlap: Overlap = "none"
    """Also for the norm and the gate where they are launches of their own."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kernel {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        if self.overlap not in get_args(Overlap):
            raise ValueError(f"overlap {self.overlap!r} is not one of {', '.join(get_args(Overlap))}")
        names = ("rows", "block", "warps", "stages", "split", "programs", "ahead")
        sizes = {name: value for name, value in asdict(self).items() if name in names}
        if any(not is_whole(value, 0) for value in sizes.values()):
            raise ValueError(f"sizes of a kernel are whole numbers from 0, not {sizes}")
        if self.kind in ("vector", "matrix") and not all(
            is_power_of_two(n) for n in (self.rows, self.block, self.warps)
        ):
            raise ValueError(f"rows, block and warps of a kernel are powers of two, not {sizes}")


@dataclass(frozen=True)
class Tuning:
    """The choices for one kind of hardware; `notes` say where they come from and what could not be used."""

    measured: Mapping[Product, Choice]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for product, choice in self.measured.items():
            check(product, choice)

    def choose(self, product: Product, *, overlap: Overlap = "none") -> Choice:
        """The measured choice for this many tokens or the next more; beyond what was measured, the rule's.

        `overlap` says how kernels that nothing was measured for begin on this device.
        """
        if product.tokens == 0:
            return by_rule(product)
        for dtype in (product.dtype, *_AS_FAST.get(product.dtype, ())):
            shape = _shape(replace(product, dtype=dtype))
            alike = (p for p in self.measured if _shape(p) == shape and p.tokens >= product.tokens)
            nearest = min(alike, key=lambda p: p.tokens, default=None)
            if nearest is not None:
                return self.measured[nearest]
        return by_rule(product, overlap)


def check(product: Product, choice: Choice) -> None:
    """Raise where a kernel can't compute a product."""
    if product.op not in get_args(Op):
        raise ValueError(f"{product.op!r} is not one of {', '.join(get_args(Op))}")
    most = {"vector": MOST_VECTORS, "matrix": MOST_TOKENS}.get(choice.kind, product.tokens)
    if not 1 <= product.tokens <= most:
        raise ValueError(f"kernel {choice.kind} for {product.tokens} tokens of {product.op}: it takes 1 to {most}")
    if choice.kind == "vector" and product.tokens > 1 and choice.block < product.inputs:
        found = f"a block of {choice.block} columns for {product.inputs}"
        raise ValueError(f"kernel vector for {product.tokens} tokens of {product.op}: {found}, and it holds whole rows")


def by_rule(product: Product, overlap: Overlap = "none") -> Choice:
    """One token: the vector kernel, which needs no tuning to beat a library. Otherwise the library.

    Of 16 products of five models on an H200 it was at most 7 % slower than the best way found. Whole rows are held in
    registers where they fill them; elsewhere they would lose what the next power of two is wider than they are, and
    small blocks of the columns in three stages are better. A library's kernels don't let the next one begin early, so
    that norms and gates among them gain nothing by waiting inside; they lose 2 to 5 % of a step of 64 or 256 tokens.
    """
    if product.tokens != 1:
        return Choice("library")
    block = next_power_of_two(product.inputs)
    if product.inputs <= _BLOCK or product.inputs == block in _WHOLE:
        rows = max(1, min(16, 8192 // block))
        warps = 8 if rows * block >= 8192 else 4
        return Choice("vector", rows=rows, block=block, warps=warps, programs=1024, overlap=overlap)
    late: Overlap = "none" if overlap == "none" else "late"
    return Choice("vector", rows=8, block=_BLOCK, warps=4, stages=3, overlap=late)


def load(hardware: str, folder: Path | None = None) -> Tuning:
    """What was shipped for this hardware, overridden by what was measured here."""
    shipped, note = read(SHIPPED, hardware)
    cached, other = read(_file(folder), hardware, same_versions=True)
    for problem in (note, other):
        if problem.startswith("not used"):
            log.warning("kernel choices: %s", problem)
    return Tuning({**shipped, **cached}, (note, other))


def read(path: Path, hardware: str, *, same_versions: bool = False) -> tuple[dict[Product, Choice], str]:
    """The choices in a file for this hardware, and a sentence on what was found there."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return {}, f"not used: {path} has format {content['format']}, this version reads {FORMAT}. Measure again."
        if same_versions and content["versions"] != versions():
            made = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
            return {}, f"not used: {path} was measured with {made}. Measure again."
        found = dict(_parsed(entry) for entry in content["entries"] if entry["hardware"] == hardware)
    except FileNotFoundError:
        return {}, f"nothing measured on this machine ({path})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"not used: {path} can't be read ({type(error).__name__}: {error}). Measure again, or delete it."
    return found, f"{len(found)} choices for {hardware} from {path}"


def save(choices: Mapping[Product, Choice], hardware: str, path: Path | None = None) -> Path:
    """Write choices for this hardware, next to what the file has for other hardware and other products."""
    path = path or _file(None)
    entries = [
        entry for entry in _entries(path) if (entry["hardware"], _product(entry)) not in _keys(choices, hardware)
    ]
    for product, choice in choices.items():
        key = {"hardware": hardware, **asdict(product), "dtype": str(product.dtype).removeprefix("torch.")}
        entries.append({**key, "choice": compact(choice)})
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(entry) for entry in sorted(entries, key=_order))
    head = f'{{\n  "format": {FORMAT},\n  "versions": {json.dumps(versions())},\n  "entries": ['
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(f"{head}\n{lines}\n  ]\n}}\n")
    fresh.replace(path)  # a reader sees the old file or the new one
    return path


def versions() -> dict[str, str]:
    """What compiles the kernels; measurements hold for these."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"torch": str(torch.__version__), "triton": triton}


def _file(folder: Path | None) -> Path:
    now = versions()
    return (folder or cache_folder()) / f"kernels-torch-{now['torch']}-triton-{now['triton']}.json"


def _entries(path: Path) -> list[dict[str, Any]]:
    """What a file has that can be kept; nothing where its format or versions are others."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["versions"] != versions():
            return []
        return [entry for entry in content["entries"] if _is_sound(entry)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_sound(entry: Mapping[str, Any]) -> bool:
    try:
        _parsed(entry)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return "hardware" in entry


def _parsed(entry: Mapping[str, Any]) -> tuple[Product, Choice]:
    product, choice = _product(entry), Choice(**entry["choice"])
    check(product, choice)
    return product, choice


def _product(entry: Mapping[str, Any]) -> Product:
    dtype = getattr(torch, entry["dtype"])
    return Product(entry["op"], entry["tokens"], entry["outputs"], entry["inputs"], dtype)


def compact(choice: Choice) -> dict[str, Any]:
    """Without what is as it is by default."""
    plain = asdict(Choice("library"))
    return {name: value for name, value in asdict(choice).items() if name == "kind" or value != plain[name]}


def _keys(choices: Iterable[Product], hardware: str) -> set[tuple[str, Product]]:
    return {(hardware, product) for product in choices}


def _order(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("hardware", "dtype", "op", "outputs", "inputs", "tokens"))


def _shape(product: Product) -> tuple[Op, int, int, torch.dtype]:
    return product.op, product.outputs, product.inputs, product.dtype
