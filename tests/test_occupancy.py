"""Occupancy from registers, threads and shared memory, against figures that others have published or measured."""

from __future__ import annotations

import pytest
import torch

from mila_kernels import occupancy
from mila_kernels.occupancy import Occupancy


def test_the_published_wmma_step_fits_once_on_an_rtx_4070() -> None:
    # Published: 83.65 KB of shared memory, one block of 8 warps, occupancy 16.7 %.
    found = occupancy.occupancy("sm_89", threads=256, registers=64, smem_bytes=int(83.65 * 1000))
    assert found == Occupancy(1, 8, 8 / 48, ("shared memory",))
    half = occupancy.occupancy("sm_89", threads=256, registers=64, smem_bytes=41_000)
    assert (half.blocks, half.limited_by) == (2, ("shared memory",))


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem", "blocks", "limited_by"),
    [
        ("sm_90a", 128, 32, 0, 16, ("warps", "registers")),
        ("sm_90a", 128, 33, 0, 12, ("registers",)),  # 40 a thread: 12 warps of 1,280 in a partition
        ("sm_90a", 256, 255, 0, 1, ("registers",)),
        ("sm_90a", 384, 168, 0, 1, ("registers",)),
        ("sm_90a", 512, 128, 0, 1, ("registers",)),
        ("sm_90a", 32, 16, 0, 32, ("blocks",)),
        ("sm_90a", 256, 64, 113 * 1024, 2, ("shared memory",)),
        ("sm_90a", 256, 64, 113 * 1024 + 1, 1, ("shared memory",)),
        ("sm_90a", 256, 64, 227 * 1024, 1, ("shared memory",)),
        ("sm_90a", 256, 64, 227 * 1024 + 1, 0, ("shared memory",)),
        ("sm_89", 256, 64, 99 * 1024 + 1, 0, ("shared memory",)),
        ("sm_80", 1024, 65, 0, 0, ("registers",)),
        ("sm_90a", 512, 91, 65536, 1, ("registers",)),  # 96 a thread
        ("sm_89", 256, 32, 49152, 2, ("shared memory",)),
        ("sm_89", 512, 255, 0, 0, ("registers",)),
    ],
)
def test_each_pool_in_turn(
    arch: str, threads: int, registers: int, smem: int, blocks: int, limited_by: tuple[str, ...]
) -> None:
    found = occupancy.occupancy(arch, threads=threads, registers=registers, smem_bytes=smem)
    assert (found.blocks, found.limited_by) == (blocks, limited_by)
    assert found.warps == blocks * -(-threads // 32)


def test_what_is_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match="arch: 'sm_70' is none of"):
        occupancy.limits("sm_70")
    with pytest.raises(ValueError, match="threads: 0"):
        occupancy.occupancy("sm_80", threads=0, registers=1, smem_bytes=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_limits_are_those_the_device_reports() -> None:
    device = torch.cuda.get_device_properties(0)
    has = occupancy.limits(f"sm_{device.major}{device.minor}")
    assert has.warps * 32 == device.max_threads_per_multi_processor
    assert has.smem_block_bytes == getattr(device, "shared_memory_per_block_optin", has.smem_block_bytes)
    assert device.regs_per_multiprocessor == occupancy.REGISTERS
