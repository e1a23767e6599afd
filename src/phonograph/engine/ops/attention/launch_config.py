"""Launch configuration of the attention kernel: block sizes, warps, stages and programs, by device and by bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phonograph.devices import Hardware


@dataclass(frozen=True)
class Launch:
    """The launch of buckets up to a size."""

    max_tokens: int
    block_m: int
    """Rows of a tile: tokens times query heads of one KV head."""
    block_n: int
    """Keys of one iteration."""
    num_warps: int
    num_stages: int
    programs: int
    """The keys of a tile are split until there are this many programs, whether they find work or not."""
    part_keys: int
    """Keys of one part at least; a tile with fewer is not split."""
    max_registers: int | None = None
    """Registers of a thread at most, so that more programs fit; None leaves it to the compiler."""
    apart: bool = False
    """Whether blocks that need no mask are walked in a loop of their own: it fills its pipeline once more, which pays
    for long walks."""

    @property
    def bounds(self) -> dict[str, int]:
        """What the compiler is told besides; not every vendor's knows the option."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}

    def splits(self, num_tiles: int, kv_heads: int) -> int:
        """A power of two, of the bucket alone: how many keys there are is known on the device only.

        `num_tiles` is the number that a full bucket of one sequence has.
        """
        wanted = self.programs // max(1, num_tiles * kv_heads)
        return 1 << min(max(wanted, 1).bit_length() - 1, MAX_SPLITS.bit_length() - 1)


@dataclass(frozen=True)
class Launches:
    """Everything for one device; each list is in the order of the buckets."""

    decode: tuple[Launch, ...]
    prefill: tuple[Launch, ...]
    narrow: tuple[Launch, ...] = ()
    """For decode with keys of at most 128 bytes, before those of `decode`."""


MAX_SPLITS = 64
_ANY = 1 << 30

HOPPER = Launches(
    decode=(
        Launch(max_tokens=1, block_m=16, block_n=32, num_warps=2, num_stages=4, programs=256, part_keys=32),
        Launch(max_tokens=16, block_m=16, block_n=32, num_warps=2, num_stages=4, programs=256, part_keys=128),
        Launch(max_tokens=_ANY, block_m=16, block_n=128, num_warps=4, num_stages=2, programs=256, part_keys=512),
    ),
    prefill=(
        Launch(max_tokens=64, block_m=64, block_n=32, num_warps=4, num_stages=3, programs=512, part_keys=256),
        Launch(max_tokens=256, block_m=64, block_n=32, num_warps=4, num_stages=3, programs=512, part_keys=256),
        Launch(max_tokens=1024, block_m=64, block_n=64, num_warps=4, num_stages=3, programs=1, part_keys=0),
        Launch(
            max_tokens=_ANY,
            block_m=128,
            block_n=64,
            num_warps=8,
            num_stages=2,
            programs=1,
            part_keys=0,
            max_registers=128,
            apart=True,
        ),
    ),
    narrow=(Launch(max_tokens=16, block_m=16, block_n=64, num_warps=4, num_stages=3, programs=256, part_keys=64),),
)
"""For an H200 with 8 KV heads of 128 in bfloat16, narrow ones for 3 of 64; `bench/attention.py --sweep` finds them."""

PLAIN = Launches(
    decode=(Launch(max_tokens=_ANY, block_m=16, block_n=32, num_warps=4, num_stages=2, programs=256, part_keys=64),),
    prefill=(Launch(max_tokens=_ANY, block_m=32, block_n=32, num_warps=4, num_stages=2, programs=1, part_keys=0),),
)
"""Small blocks, which fit every device."""

_BY_CAPABILITY = {9: HOPPER}


def launches_for(hardware: Hardware) -> Launches:
    """The launches that were measured for this generation of chips, or those that fit all."""
    if hardware.compute_capability is None:
        return PLAIN
    return _BY_CAPABILITY.get(hardware.compute_capability[0], PLAIN)


def pick(launches: tuple[Launch, ...], num_tokens: int, row_bytes: int) -> Launch:
    """The launch for a bucket; with keys wider than 256 bytes the blocks shrink, so that they still fit on chip."""
    launch = next(entry for entry in launches if num_tokens <= entry.max_tokens)
    if row_bytes > 256:
        launch = replace(launch, block_m=min(launch.block_m, 32), block_n=min(launch.block_n, 32), num_stages=2)
    return launch
