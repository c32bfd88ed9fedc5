"""Theoretical peaks of GPUs: what no measurement can exceed.

``data/peaks.csv`` has them by name. A GPU outside it gets its memory peak from what the device reports (memory clock x
bus width x 2), and no arithmetic peak.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mila_kernels.paths import DATA

MIB = 1 << 20


class ImpossibleRate(ValueError):
    """A rate above the device's theoretical peak: the measurement is wrong, whatever it looks like."""


@dataclass(frozen=True)
class Peak:
    """Theoretical peaks of one GPU: GB/s (1e9), dense TFLOP/s at ``sm_mhz``, clocks in MHz; None is not known."""

    gpu: str
    dram_gbps: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp32_tflops: float | None = None
    l2_bytes: int | None = None
    sms: int | None = None
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    source: str = ""

    def most_tflops(self) -> float | None:
        """The fastest arithmetic of the chip at its highest clock: a bound for any operation in any dtype."""
        rates = [rate for rate in (self.bf16_tflops, self.fp8_tflops, self.fp32_tflops) if rate]
        if not rates:
            return None
        boost = self.max_sm_mhz / self.sm_mhz if self.max_sm_mhz and self.sm_mhz else 1.0
        return max(rates) * max(1.0, boost)


def dram_peak_gbps(memory_mhz: float, bus_bits: int) -> float:
    """GB/s of a double-data-rate memory: clock x bus width x 2."""
    return memory_mhz * 1e6 * bus_bits / 8 * 2 / 1e9


def peak(gpu: str) -> Peak | None:
    """The peaks of the GPU of that name as the driver gives it, from ``data/peaks.csv``, or None."""
    return _table(DATA).get(gpu)


def known() -> list[Peak]:
    """The peaks of every GPU in ``data/peaks.csv``, in its order."""
    return list(_table(DATA).values())


@functools.lru_cache(maxsize=4)
def _table(folder: Path) -> dict[str, Peak]:
    with (folder / "peaks.csv").open(encoding="utf-8", newline="") as file:
        return {row["gpu"]: _from_row(row) for row in csv.DictReader(file)}


def _from_row(row: dict[str, str]) -> Peak:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return Peak(
        row["gpu"], number("dram_gbps"), number("bf16_tflops"), number("fp8_tflops"), number("fp32_tflops"),
        int(row["l2_mib"]) * MIB, int(row["sms"]), number("sm_mhz"), number("max_sm_mhz"), row["source"],
    )  # fmt: skip


def device_peak(properties: Any, memory_mhz: float | None = None, bus_bits: int | None = None) -> Peak:
    """The peaks of the device at hand.

    ``properties`` are torch.cuda.get_device_properties(); memory clock and bus width are NVML's, where there is one.
    L2 and SM count are always the device's own. Where table and device disagree about the memory, the larger is taken:
    a peak is there to refuse what cannot be.
    """
    memory_mhz = memory_mhz or getattr(properties, "memory_clock_rate", 0) / 1000
    bus_bits = bus_bits or getattr(properties, "memory_bus_width", 0)
    derived = dram_peak_gbps(memory_mhz, bus_bits) if memory_mhz and bus_bits else None
    known = peak(properties.name) or Peak(properties.name, source="memory clock x bus width x 2 as the device reports")
    rates = [rate for rate in (known.dram_gbps, derived) if rate]
    return replace(
        known, dram_gbps=max(rates, default=None),
        l2_bytes=getattr(properties, "L2_cache_size", 0) or known.l2_bytes, sms=properties.multi_processor_count,
    )  # fmt: skip


def check_rate(
    peak: Peak | None, *, flops: float, bytes: float, seconds: float, cache: str, what: str = "the timing"
) -> None:
    """Raise ImpossibleRate if a timing would need more than the chip can do.

    ``bytes`` is what has to pass device memory. In a cold run that is all of it; in a hot one, what L2 cannot hold.
    """
    if peak is None or seconds <= 0:
        return
    moved = bytes if cache == "cold" else max(0.0, bytes - (peak.l2_bytes or 0))
    gbps, tflops = moved / seconds / 1e9, flops / seconds / 1e12
    if peak.dram_gbps and gbps > peak.dram_gbps:
        raise ImpossibleRate(
            f"{what}: {moved:.0f} bytes in {seconds * 1e6:.3f} us is {gbps:.0f} GB/s, above the {peak.dram_gbps:.0f} "
            f"GB/s of {peak.gpu}'s memory; the data came from a cache, or the time or byte count is wrong"
        )
    most = peak.most_tflops()
    if most and tflops > most:
        raise ImpossibleRate(
            f"{what}: {flops:.4g} operations in {seconds * 1e6:.3f} us is {tflops:.0f} TFLOP/s, above the {most:.0f} "
            f"of {peak.gpu}; the time or the operation count is wrong"
        )
