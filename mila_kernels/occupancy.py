"""How many blocks of a kernel fit on one multiprocessor, and what stops the next one.

Three pools are shared out: warp slots, registers and shared memory. Registers belong to a warp, in units of 256, and to
one of four partitions with 16,384 each; a block's shared memory is rounded up to 128 bytes after 1 KB that the system
keeps for itself. What a GPU has of each is in the appendix on compute capabilities of NVIDIA's programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import steps

WARP = 32
PARTITIONS = 4
REGISTERS = 65_536  # a multiprocessor, of 32 bits, on every architecture here
REGISTER_UNIT = 256  # of a warp
SMEM_UNIT = 128
SMEM_RESERVED = 1024  # of every block
KB = 1024


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has: warp slots, block slots, bytes of shared memory in all and of one block at most."""

    warps: int
    blocks: int
    smem_bytes: int
    smem_block_bytes: int


LIMITS: Mapping[tuple[int, int], Limits] = {
    (8, 0): Limits(64, 32, 164 * KB, 163 * KB),
    (8, 6): Limits(48, 16, 100 * KB, 99 * KB),
    (8, 9): Limits(48, 24, 100 * KB, 99 * KB),
    (9, 0): Limits(64, 32, 228 * KB, 227 * KB),
    (10, 0): Limits(64, 32, 228 * KB, 227 * KB),
    (12, 0): Limits(48, 24, 100 * KB, 99 * KB),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that are resident at once on one multiprocessor; ``share`` of its warp slots, 0 to 1.

    ``limited_by`` names every pool that has no room for another block: warps, blocks, registers, shared memory.
    """

    blocks: int
    warps: int
    share: float
    limited_by: tuple[str, ...]


def limits(arch: str) -> Limits:
    """What a multiprocessor of an architecture such as ``sm_90a`` has; ValueError lists those known."""
    major, minor, _ = steps.parse_architecture(arch)
    if (major, minor) not in LIMITS:
        known = ", ".join(f"sm_{a}{b}" for a, b in LIMITS)
        raise ValueError(f"arch: {arch!r} is none of {known}")
    return LIMITS[major, minor]


def occupancy(arch: str, *, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Occupancy of a kernel: threads a block, registers a thread, bytes of shared memory a block.

    No block at all is an answer too: one that asks for more than there is. ValueError names an argument out of range.
    """
    has = limits(arch)
    for name, value, least, most in (
        ("threads", threads, 1, 1024), ("registers", registers, 1, 255), ("smem_bytes", smem_bytes, 0, 1 << 30),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ValueError(f"{name}: {value!r} must be from {least} to {most}")
    warps = -(-threads // WARP)
    of_warp = _round_up(registers * WARP, REGISTER_UNIT)
    room = {
        "warps": has.warps // warps,
        "blocks": has.blocks,
        "registers": REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps,
        "shared memory": has.smem_bytes // _round_up(smem_bytes + SMEM_RESERVED, SMEM_UNIT),
    }
    if smem_bytes > has.smem_block_bytes:
        room["shared memory"] = 0
    blocks = min(room.values())
    stopped = tuple(name for name, fit in room.items() if fit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / has.warps, stopped)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
