"""Hardware counters of a step, by NVIDIA's ``ncu`` where it exists: occupancy, stalls, throughput, instructions."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .paths import python_path
from .results import CounterRow
from .shapes import Workload, parse_shape
from .steps import Step, headers, step

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
    "InstructionStats", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats",
)  # fmt: skip

RATES = ("SpeedOfLight", "SchedulerStats")  # how busy memory and the issue slots are, and little else

TIMEOUT_S = 600

# ncu's own names are kept in the table, so that a row can be looked up in its manual; these are their words here.
# Whole sections are collected and these rows picked, because a name that a GPU lacks would stop ncu.
LABELS = {
    "gpu__time_duration.sum": "duration",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy achieved",
    "sm__maximum_warps_per_active_cycle_pct": "occupancy possible",
    "launch__registers_per_thread": "registers a thread",
    "launch__shared_mem_per_block_dynamic": "dynamic shared memory a block",
    "launch__block_size": "threads a block",
    "launch__grid_size": "blocks",
    "launch__waves_per_multiprocessor": "waves",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM throughput",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory throughput",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM throughput",
    "dram__bytes.sum.per_second": "DRAM rate",
    "dram__bytes_read.sum": "DRAM bytes read",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 throughput",
    "lts__t_sector_hit_rate.pct": "L2 hit rate",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 throughput",
    "l1tex__t_sector_hit_rate.pct": "L1 hit rate",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared memory wavefronts",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": "shared memory throughput",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "shared memory bank conflicts",
    "sm__inst_executed.avg.per_cycle_active": "instructions a clock",
    "smsp__inst_executed.sum": "warp instructions",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots used",
    "smsp__issue_active.avg.per_cycle_active": "issues a clock and scheduler",
    "smsp__warps_eligible.avg.per_cycle_active": "eligible warps",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "load/store pipe",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "FMA pipe",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU pipe",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "XU pipe",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe",
}
_STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+)\(")
_SEPARATOR = "spin_kernel"  # torch's name for what torch.cuda._sleep launches
_ON = " on "


class ProfileError(RuntimeError):
    """ncu is missing, or may not read the counters, or saw no kernel; the text says what to do."""


@dataclass(frozen=True)
class Counter:
    """One counter of one workload: ncu's name, the value, and its unit in base units (ns, byte, %)."""

    metric: str
    value: float
    unit: str


@dataclass(frozen=True)
class Launch:
    """One launch as ncu saw it: the kernel's name with its arguments, and its counters by ncu's names."""

    kernel: str
    counters: dict[str, Counter]


def rows_of(chosen: Step, workload: Workload, found: Iterable[Counter]) -> list[CounterRow]:
    """The rows of the counters table."""
    return [
        CounterRow(
            op=chosen.op, step=chosen.name, source_sha=chosen.source_sha, workload=workload.name or workload.shape,
            metric=counter.metric, value=counter.value, unit=counter.unit,
        )
        for counter in found
    ]  # fmt: skip


def label(metric: str) -> str:
    """A counter's name in words: ``stall: long scoreboard`` for a stall reason (warps stalled per issue)."""
    stall = _STALL.fullmatch(metric)
    return f"stall: {stall[1].replace('_', ' ')}" if stall else LABELS.get(metric, metric)


def kernel_names(chosen: Step) -> set[str]:
    """The kernels that a step's source and its headers define."""
    sources = (chosen.path, *headers(chosen.path))
    return {name for path in sources for name in _KERNEL.findall(path.read_text(encoding="utf-8"))}


def find_ncu() -> Path:
    """Where ncu is. Raises ProfileError when it is nowhere."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [found for home in homes if home and (found := shutil.which("ncu", path=str(Path(home) / "bin")))]
    place = shutil.which("ncu") or (places[0] if places else None)
    if place is None:
        raise ProfileError(
            "ncu (NVIDIA Nsight Compute) is not here: it is in neither PATH nor CUDA_HOME/bin. It comes with the CUDA "
            "toolkit (package nsight-compute). Counters recorded elsewhere are in results/<gpu>/counters.csv."
        )
    return Path(place)


def profile(
    calls: Sequence[tuple[Step, Workload]], seed: int = 0, sections: Sequence[str] = SECTIONS
) -> list[list[Counter]]:
    """Counters of steps on workloads, a list a call, clocks left as they are, caches flushed before each pass by ncu.

    Of a workload of several parts the last is taken, its longest. Of several kernels of one call the figures are those
    of :func:`longest`. Fewer of ncu's ``sections`` take less time. Raises ProfileError.
    """
    ncu = find_ncu()
    names = ", ".join(dict.fromkeys(step.id for step, _ in calls))
    with tempfile.TemporaryDirectory(prefix="mila_kernels_") as folder:
        log = Path(folder) / "ncu.csv"
        line = [str(ncu), "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        line += ["--profile-from-start", "off", "--target-processes", "all", "--log-file", str(log)]
        line += [word for section in sections for word in ("--section", section)]
        line += [sys.executable, "-m", "mila_kernels.counters", str(seed)]
        line += [f"{step.id}{_ON}{workload.parts()[-1].shape}" for step, workload in calls]
        env = {**os.environ, "PYTHONPATH": python_path()}
        try:
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProfileError(f"ncu took more than {TIMEOUT_S} s over {names}") from None
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text + done.stderr:
        raise ProfileError(
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the nvidia module with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    found = parse(text)
    if done.returncode or len(found) != len(calls) or not all(found):
        tail = " ".join(line for line in (text + done.stderr + done.stdout).splitlines()[-6:])
        counts = [len(launches) for launches in found]
        raise ProfileError(f"ncu over {names} ended with {done.returncode} and launches {counts}: {tail}")
    return [longest(step, launches) for (step, _), launches in zip(calls, found, strict=True)]


def parse(text: str) -> list[list[Launch]]:
    """ncu's raw CSV page: for each call, up to its separator, and each of its launches, its kernel and its counters.

    They are those of LABELS and the stall reasons. What follows the last separator is no whole call and is left out.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    names, units, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    wanted = [i for i, name in enumerate(names) if name in LABELS or _STALL.fullmatch(name)]
    kernel = names.index("Kernel Name")
    calls: list[list[Launch]] = [[]]
    for row in rows:
        if len(row) != len(names):
            continue
        if _SEPARATOR in row[kernel]:
            calls.append([])
        else:
            there = (i for i in wanted if row[i].strip())
            counted = {names[i]: Counter(names[i], _number(row[i]), units[i]) for i in there}
            calls[-1].append(Launch(row[kernel], counted))
    return calls[:-1]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def longest(chosen: Step, launches: Sequence[Launch]) -> list[Counter]:
    """The counters of the longest of a step's own kernels.

    What torch launches beside it (a fill, a copy) is no part of the step, and a mean of two kernels' registers or
    blocks is neither's. Raises ProfileError where none is the step's own, as where a library does its work.
    """
    named = re.compile(rf"\b(?:{'|'.join(sorted(kernel_names(chosen)))})\b")
    own = [launch.counters for launch in launches if named.search(launch.kernel)]
    if not own:
        raise ProfileError(f"{chosen.id}: none of its kernels ran, but {', '.join(one.kernel for one in launches)}")
    duration = "gpu__time_duration.sum"
    return list(max(own, key=lambda counted: counted[duration].value if duration in counted else 0.0).values())


def main(arguments: Sequence[str]) -> None:
    """What runs under ncu: each call once, after one that warms it up outside the counters, and a separator."""
    import torch

    from .ops import OPS

    seed, *calls = arguments
    shown = ("", "")
    for name, shape in (call.split(_ON) for call in calls):
        one = step(name)
        op = OPS[one.op]
        if (one.op, shape) != shown:
            inputs, shown = (
                op.make_inputs(parse_shape(op.name, shape), int(seed), torch.device("cuda")),
                (one.op, shape),
            )
        op.run(step=one, **inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        op.run(step=one, **inputs)
        torch.cuda._sleep(1)  # the separator: a step's call may launch any number of kernels
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
