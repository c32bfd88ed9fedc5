"""The device's state, read through NVML and never set: power, temperature, clocks, reasons for throttling."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

# Bits of NVML's clocks event reasons.
THROTTLE_BITS = {
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """Power in W, temperature in degrees C, SM and memory clock in MHz, throttle bits; None where it is not told."""

    power_w: float | None = None
    temp_c: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    throttle: int | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the clocks are below their highest, in words; idle clocks between launches are no throttling."""
        return throttle_reasons(self.throttle or 0)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of the bits of a throttle mask, without idle."""
    return tuple(name for bit, name in THROTTLE_BITS.items() if mask & bit and name != "idle")


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: the same to a reader
        return None
    return pynvml


def _handle(device: int | None) -> tuple[Any, Any] | None:
    """NVML's handle of torch's device, found by UUID: the two count devices differently."""
    library = _library()
    if library is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device is None else device
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    for make in (lambda: library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), lambda: _only(library)):
        with contextlib.suppress(Exception):
            return library, make()
    return None


def _only(library: Any) -> Any:
    """The machine's only device: with several, an index would be a guess."""
    if library.nvmlDeviceGetCount() != 1:
        raise LookupError("more than one device")
    return library.nvmlDeviceGetHandleByIndex(0)


def _ask(device: int | None, question: str, *arguments: str) -> Any:
    found = _handle(device)
    if found is None:
        return None
    library, handle = found
    with contextlib.suppress(Exception):
        return getattr(library, question)(handle, *(getattr(library, name) for name in arguments))
    return None


def state(device: int | None = None) -> State:
    """The state now of a CUDA device (torch's index; None: the current one); empty where NVML is absent."""
    milliwatts = _ask(device, "nvmlDeviceGetPowerUsage")
    throttle = _ask(device, "nvmlDeviceGetCurrentClocksEventReasons")
    if throttle is None:
        throttle = _ask(device, "nvmlDeviceGetCurrentClocksThrottleReasons")
    return State(
        power_w=None if milliwatts is None else milliwatts / 1000,
        temp_c=_ask(device, "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        sm_mhz=_ask(device, "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        memory_mhz=_ask(device, "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        throttle=throttle,
    )


def memory_bus(device: int | None = None) -> tuple[float | None, int | None]:
    """Highest memory clock in MHz and bus width in bits, None where they are not told."""
    return _ask(device, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"), _ask(device, "nvmlDeviceGetMemoryBusWidth")


def driver() -> str:
    """The driver's version, or ""."""
    library = _library()
    if library is None:
        return ""
    with contextlib.suppress(Exception):
        version = library.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    return ""
