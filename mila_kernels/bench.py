"""How long a step takes, and what the machine can do at most.

Times come from CUDA events on the stream that the kernel runs on, after a warm-up, median of many. Short kernels are
captured in a CUDA graph of many launches, so that the gaps between launches stay out. Cold means that no launch finds
its data in L2: launches rotate over input sets of more than four times L2, or L2 is flushed before each, outside the
timed region. Everything else is labelled hot. Clocks, power and temperature are read, never set.

Run as a script, ``python -m mila_kernels.bench prefill``, it times steps and leaves a run under results/local/.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from . import build, nvml, ops, paths, peaks, peers, shapes, steps
from .ablate import Ablated
from .peaks import ImpossibleRate, Peak, check_rate
from .results import AblationRow, CounterRow, RunWriter, SampleRow, TimingRow
from .shapes import Workload
from .steps import Step

Cache = Literal["cold", "hot"]
Prepare = Callable[..., Callable[[], Any]]  # an op's inputs by keyword -> the call to time

GRAPH_BELOW_US = 300.0  # between two events a launch adds 4 to 8 us on an H200: below this more than 2%
ROTATION = 4  # times L2: what rotating inputs must exceed to be cold
MOST_SETS = 512
MOST_MEMORY = 0.4  # of what is free, for rotating inputs
GRAPH_US = 400.0  # a replay at least this long hides its own start
REPLAYS = 30
SAMPLES = 50
FEWEST_SAMPLES = 10
BUDGET_US = 1e6  # of measuring one part
SECOND_CLOCK = "triton do_bench"  # the metric under which it is recorded
SETTLE_S = 0.05  # memory that is given back is cleared beside what runs: lm_head ran 13% slower for some 15 ms
FADING = 1.03  # samples that begin so much slower than they end were disturbed by what was before them
CEILING_TOLERANCE = 1.05  # a rate this far above a ceiling measured twice is a wrong measurement


class NoDevice(RuntimeError):
    """Times need a CUDA device: what emulation takes says nothing about the kernel, so none is given."""


# ---- rules that need no GPU ------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) with linear interpolation between neighbours; ValueError for no values."""
    if not values:
        raise ValueError("values: at least one is needed")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Samples:
    """Microseconds a launch in order, how they were taken (``graph rotation`` ...), and the state of the device."""

    us: tuple[float, ...]
    warmup: int
    cache: Cache
    method: str
    state: nvml.State = nvml.State()

    @property
    def n(self) -> int:
        return len(self.us)

    @property
    def median(self) -> float:
        return percentile(self.us, 50)

    @property
    def p10(self) -> float:
        return percentile(self.us, 10)

    @property
    def p90(self) -> float:
        return percentile(self.us, 90)

    @property
    def min(self) -> float:
        return min(self.us)


def mean_of_parts(parts: Sequence[Samples]) -> Samples:
    """One figure that is a mean over several launches: sample i is the mean of the parts' samples i.

    ValueError where the parts were not measured alike (number of samples, cache).
    """
    if len({p.n for p in parts}) != 1 or len({p.cache for p in parts}) != 1:
        raise ValueError("parts: all must have the same number of samples and the same cache label")
    us = tuple(statistics.fmean(values) for values in zip(*(p.us for p in parts), strict=True))
    methods = sorted({p.method for p in parts})
    return Samples(us, min(p.warmup for p in parts), parts[0].cache, "+".join(methods), parts[-1].state)


def why_not_cold(working_set: int, sets: int, flush: bool, l2_bytes: int) -> str | None:
    """Why launches over these inputs may not be called cold, or None.

    ``working_set`` is the bytes that one launch touches, ``sets`` how many different inputs take turns.
    """
    if flush or working_set * sets > ROTATION * l2_bytes:
        return None
    return (
        f"{sets} input set{'s' * (sets > 1)} of {working_set} bytes without a flush do not exceed {ROTATION} times the "
        f"{l2_bytes} bytes of L2: a launch may find its data there. Flush, rotate over more inputs, or say cache='hot'"
    )


def rotation_sets(working_set: int, l2_bytes: int) -> int | None:
    """How many input sets make a rotation cold; None where it would take more than MOST_SETS (flush then)."""
    if working_set <= 0:
        return None
    sets = ROTATION * l2_bytes // working_set + 1
    return sets if sets <= MOST_SETS else None


def launches_in_graph(estimate_us: float, sets: int) -> int:
    """Launches to capture: whole rounds over the input sets, long enough that the replay's own start is hidden."""
    rounds = max(1, math.ceil(GRAPH_US / max(estimate_us, 0.5) / sets))
    return rounds * sets


def fading(us: Sequence[float]) -> bool:
    """Whether the first third of the samples is slower than the last, beyond FADING: a disturbance that is over."""
    third = len(us) // 3
    return third > 0 and statistics.median(us[:third]) > FADING * statistics.median(us[-third:])


def steady(sample: Callable[[], tuple[list[float], nvml.State]], tries: int = 3) -> tuple[list[float], nvml.State]:
    """Samples, taken anew where they are fading. What grows slower, as a board does that grows hot, stays as it is."""
    for _ in range(tries - 1):
        found = sample()
        if not fading(found[0]):
            return found
    return sample()


def sample_count(estimate_us: float, most: int) -> int:
    """Samples that fit the time budget of a part, within FEWEST_SAMPLES and ``most``."""
    return int(min(most, max(FEWEST_SAMPLES, BUDGET_US // max(estimate_us, 0.5))))


@dataclass(frozen=True)
class Ceilings:
    """What the device reached at best: GB/s read from device memory, dense TFLOP/s (fp8 None where it has none)."""

    read_gbps: float
    bf16_tflops: float
    fp8_tflops: float | None = None

    def best(self, other: Ceilings) -> Ceilings:
        """The larger of each."""
        fp8 = max((x for x in (self.fp8_tflops, other.fp8_tflops) if x), default=None)
        return Ceilings(max(self.read_gbps, other.read_gbps), max(self.bf16_tflops, other.bf16_tflops), fp8)


def settle_ceiling(observed_gbps: float, ceiling: float, again: Callable[[], float]) -> float:
    """The read ceiling after a cold launch has read at ``observed_gbps``.

    One above the ceiling means that the ceiling was measured badly, so ``again`` measures it, better. If a little is
    still missing, the launch itself has shown what the memory can do. ImpossibleRate where it is more than that.
    """
    if observed_gbps <= ceiling:
        return ceiling
    better = max(ceiling, again())
    if observed_gbps > better * CEILING_TOLERANCE:
        raise ImpossibleRate(
            f"{observed_gbps:.0f} GB/s is above the read ceiling, {better:.0f} GB/s measured twice: the data came from "
            "a cache, or the byte count is wrong"
        )
    return max(better, observed_gbps)


# ---- timing ----------------------------------------------------------------------------------------------------------


def need_cuda(device: torch.device | str | None = None) -> torch.device:
    """The CUDA device to time on; NoDevice where there is none, or where emulation is asked for."""
    place = torch.device("cuda" if device is None else "cpu" if device == "emulation" else device)
    if place.type != "cuda" or not torch.cuda.is_available():
        raise NoDevice(
            "timing needs a CUDA device; emulation shows that a kernel is right, not how fast it is. Recorded times of "
            "GPUs are in results/"
        )
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def l2_bytes(device: torch.device) -> int:
    """Size of the device's L2."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def device_peak(device: torch.device) -> Peak:
    """Theoretical peaks of the device at hand."""
    properties = torch.cuda.get_device_properties(device)
    return peaks.device_peak(properties, *nvml.memory_bus(device.index))


class Flush:
    """Pushes everything out of L2 by reading more than four times its size; leaves no dirty lines to write back."""

    def __init__(self, device: torch.device, l2: int) -> None:
        count = (ROTATION * l2 + (1 << 20)) // 4
        self.buffer = torch.empty(count, dtype=torch.float32, device=device).uniform_(-1, 1)
        self.out = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.out)


def time_cuda(
    calls: Callable[[], Any] | Sequence[Callable[[], Any]],
    *,
    cache: Cache,
    working_set: int,
    l2: int | None = None,
    flush: bool = True,
    n: int | None = None,
    warmup: int = 3,
    graph: bool | None = None,
    device: torch.device | None = None,
) -> Samples:
    """Time a call, or calls that do the same on different inputs in turn, on the current stream.

    Args:
        calls: launch work on the current stream and do not synchronise.
        cache: ``cold`` or ``hot``; a cold timing that would not be cold is a ValueError.
        working_set: bytes that one call touches.
        l2: bytes of L2 (default: the device's).
        flush: flush L2 before each call of a cold timing that does not rotate over enough inputs.
        n: samples (default: what fits about a second, 10 to 50).
        warmup: calls before.
        graph: capture in a CUDA graph; default: where a call takes less than GRAPH_BELOW_US and can be captured.
        device: default the current one.
    """
    place = need_cuda(device)
    todo = [calls] if callable(calls) else list(calls)
    size = l2_bytes(place) if l2 is None else l2
    rotating = why_not_cold(working_set, len(todo), False, size) is None
    refusal = why_not_cold(working_set, len(todo), flush, size)
    if cache == "cold" and refusal:
        raise ValueError(f"cache: {refusal}")
    with torch.cuda.device(place):
        for i in range(max(warmup, len(todo))):  # each set once: a weight may be shuffled at its first call
            todo[i % len(todo)]()
        estimate, ahead = _estimate(todo)
        flusher = Flush(place, size) if cache == "cold" and not rotating else None
        if graph is None:
            graph = estimate < GRAPH_BELOW_US and flusher is None
        kind = "rotation" if cache == "cold" and rotating else "flush" if flusher else "hot"
        if graph and flusher is None:
            captured = _capture(todo, launches_in_graph(estimate, len(todo)))
            if captured is not None:
                us, state = steady(lambda: _time_replays(*captured, n or REPLAYS))
                return Samples(tuple(us), warmup, cache, f"graph {kind}", state)
        us, state = steady(lambda: _time_events(todo, flusher, n or sample_count(estimate, SAMPLES), ahead))
        return Samples(tuple(us), warmup, cache, f"events {kind}", state)


def _sleep(us: float) -> None:
    """Keep the stream busy, so that the host is ahead and what it enqueues next runs without gaps."""
    torch.cuda._sleep(int(us * 2000))  # clocks; at 2 GHz


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _read(
    pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]], launches: int = 1
) -> tuple[list[float], nvml.State]:
    """Microseconds a launch, and the state of the device while it works off what is enqueued."""
    state = nvml.state(torch.cuda.current_device())
    torch.cuda.current_stream().synchronize()
    return [start.elapsed_time(end) * 1000 / launches for start, end in pairs], state


def _estimate(todo: Sequence[Callable[[], Any]]) -> tuple[float, float]:
    """Microseconds a call on the device, roughly, and those that the host should be ahead to launch without gaps."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(3):
        todo[0]()
    host_us = (time.perf_counter() - begun) / 3 * 1e6
    ahead = min(max(100.0, 2 * host_us), 5000.0)
    return min(_time_events(todo[:1], None, 3, ahead)[0]), ahead


def _time_events(
    todo: Sequence[Callable[[], Any]], flush: Flush | None, n: int, ahead_us: float = 200.0
) -> tuple[list[float], nvml.State]:
    pairs = []
    stream = torch.cuda.current_stream()
    for i in range(n):
        start, end = _events()
        _sleep(ahead_us)
        if flush:
            flush()
        start.record(stream)
        todo[i % len(todo)]()
        end.record(stream)
        pairs.append((start, end))
    return _read(pairs)


def _capture(todo: Sequence[Callable[[], Any]], launches: int) -> tuple[torch.cuda.CUDAGraph, int] | None:
    """A graph of so many calls, or None where a call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for i in range(launches):
                todo[i % len(todo)]()
    except RuntimeError as error:
        warnings.warn(f"not captured in a graph, timed by events: {str(error).splitlines()[0]}", stacklevel=3)
        torch.cuda.synchronize()
        return None
    time.sleep(SETTLE_S)  # before a capture torch gives back all memory that it does not use
    return graph, launches


def _time_replays(graph: torch.cuda.CUDAGraph, launches: int, n: int) -> tuple[list[float], nvml.State]:
    for _ in range(2):
        graph.replay()
    pairs = []
    stream = torch.cuda.current_stream()
    for _ in range(n):
        start, end = _events()
        _sleep(100)
        start.record(stream)
        graph.replay()
        end.record(stream)
        pairs.append((start, end))
    return _read(pairs, launches)


# ---- ceilings --------------------------------------------------------------------------------------------------------


class ReadArgs(ctypes.Structure):
    """The mirror of ``ReadArgs`` in ``csrc/ceilings/read/01_read.cu``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("blocks", ctypes.c_int32),
        ("unroll", ctypes.c_int32),
    ]


READ_WARPS = 16


def read_step() -> Step:
    """The kernel that only reads; no step of a ladder, so not in the registry."""
    return steps.from_file(paths.CSRC / "ceilings" / "read" / "01_read.cu", op="ceilings")


def read_all(data: torch.Tensor, blocks: int, unroll: int = 8) -> torch.Tensor:
    """Read all of ``data`` (a multiple of 16 bytes): int32 [blocks * 16], the XOR of the words that each warp read."""
    out = torch.zeros(blocks * READ_WARPS, dtype=torch.int32, device=data.device)
    args = ReadArgs(data.data_ptr(), out.data_ptr(), data.numel() * data.itemsize, blocks, unroll)
    build.launch(read_step(), args, data.device, reads={"data": data}, writes={"out": out})
    return out


def ceilings(device: torch.device | None = None, effort: int = 1) -> Ceilings:
    """Measure what the device can do: the best of several read kernels over 2 GiB, 8192^3 products in bf16 and fp8.

    All on random data. A higher ``effort`` takes more samples and more read kernels.
    """
    place = need_cuda(device)
    with torch.cuda.device(place):
        return Ceilings(_read_ceiling(place, effort), _bf16_ceiling(place, effort), _fp8_ceiling(place, effort))


def _best_us(call: Callable[[], Any], n: int) -> float:
    for _ in range(3):
        call()
    return min(_time_events([call], None, n)[0])


def _read_ceiling(device: torch.device, effort: int) -> float:
    size = 1 << 31
    while size > torch.cuda.mem_get_info(device)[0] // 2:
        size //= 2
    data = torch.empty(size // 4, dtype=torch.float32, device=device).uniform_(-1, 1)
    rows = data.view(-1, 8192)
    vector = torch.randn(8192, device=device)
    half = data.view(torch.bfloat16)
    readers: dict[str, Callable[[], Any]] = {
        "sum": lambda: data.sum(),
        "amax": lambda: data.amax(),
        "rows": lambda: rows.amax(dim=1),
        "norm": lambda: torch.linalg.vector_norm(data),
        "mv": lambda: rows @ vector,
        "half": lambda: half.view(-1, 8192).amax(dim=1),
    }
    readers |= _own_readers(data, device, effort)
    best = min(_best_us(reader, 15 * effort) for reader in readers.values())
    return size / best / 1e3


def _own_readers(data: torch.Tensor, device: torch.device, effort: int) -> dict[str, Callable[[], Any]]:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    grids = [(2, 8), (4, 8), (4, 4)] if effort == 1 else [(b, u) for b in (1, 2, 3, 4, 8, 16) for u in (4, 8, 16)]
    try:
        read_all(data, sms)
    except (build.BuildError, build.KernelError, ValueError, OSError) as error:
        warnings.warn(
            f"the read ceiling is measured without our own kernel: {str(error).splitlines()[0]}", stacklevel=4
        )
        return {}
    return {f"own {b}x{u}": (lambda b=b, u=u: read_all(data, sms * b, u)) for b, u in grids}  # type: ignore[misc]


def _bf16_ceiling(device: torch.device, effort: int) -> float:
    n = 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_us(lambda: torch.mm(a, b, out=out), 20 * effort) / 1e6


def _fp8_ceiling(device: torch.device, effort: int) -> float | None:
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> None:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        return 2 * n**3 / _best_us(product, 20 * effort) / 1e6
    except RuntimeError as error:
        warnings.warn(f"no fp8 ceiling: {str(error).splitlines()[0]}", stacklevel=3)
        return None


def run_ceilings(run: RunWriter, device: torch.device | None = None) -> Ceilings:
    """The run's ceilings: from its row of ``runs``, or measured now and written there."""
    row = run.row
    if row.read_gbps and row.bf16_tflops:
        return Ceilings(row.read_gbps, row.bf16_tflops, row.fp8_tflops)
    return _write_ceilings(run, ceilings(device))


def _write_ceilings(run: RunWriter, found: Ceilings) -> Ceilings:
    state = nvml.state()  # just after the products: what the run's row says of power and clocks is under load
    told = {name: value for name in ("power_w", "temp_c", "sm_mhz") if (value := getattr(state, name)) is not None}
    row = run.update(read_gbps=found.read_gbps, bf16_tflops=found.bf16_tflops, fp8_tflops=found.fp8_tflops, **told)
    return Ceilings(row.read_gbps or 0.0, row.bf16_tflops or 0.0, row.fp8_tflops)


# ---- one case --------------------------------------------------------------------------------------------------------


def bench(
    step: str | Step,
    workload: str | Workload,
    *,
    cache: Cache = "cold",
    seed: int = 0,
    run: RunWriter | None = None,
    n: int | None = None,
    device: torch.device | str | None = None,
) -> TimingRow:
    """Time a step on a workload and return its row of ``timings``, figures in microseconds.

    A workload of several parts (the published instance) gives the mean over them. With ``run`` the row is written when
    the case ends, with its samples and the device's state; a case that raises or exceeds what the device can do leaves
    a row with status ``failed`` and its error, which is returned too. Without ``run`` nothing is written and errors
    are raised.

    A step with a stage left out (:mod:`mila_kernels.ablate`) gives a row of ``ablations``.

    Raises NoDevice without a GPU, and ValueError for a step or workload that is unknown or of another op.
    """
    chosen = steps.step(step)
    op = ops.op(chosen.op)
    return bench_call(
        chosen.name, lambda **inputs: functools.partial(op.run, step=chosen, **inputs), workload, op=chosen.op,
        source_sha=chosen.source_sha, cache=cache, seed=seed, run=run, n=n, device=device,
        kind=AblationRow if isinstance(chosen, Ablated) else TimingRow,
    )  # fmt: skip


def bench_peer(
    peer: peers.Peer,
    workload: str | Workload,
    *,
    cache: Cache = "cold",
    seed: int = 0,
    run: RunWriter | None = None,
    n: int | None = None,
    device: torch.device | str | None = None,
) -> TimingRow:
    """:func:`bench` of what a user would call instead; what it has to prepare is not timed."""
    return bench_call(
        peer.name, peer.prepare, workload, op=peer.op, cache=cache, seed=seed, run=run, n=n, device=device
    )


def bench_call(
    name: str,
    prepare: Prepare,
    workload: str | Workload,
    *,
    op: str | None = None,
    source_sha: str = "",
    cache: Cache = "cold",
    seed: int = 0,
    run: RunWriter | None = None,
    n: int | None = None,
    device: torch.device | str | None = None,
    kind: type[TimingRow] = TimingRow,
) -> TimingRow:
    """Time what ``prepare(**inputs)`` returns for the op's inputs, under ``name``; otherwise as :func:`bench`."""
    if cache not in ("cold", "hot"):
        raise ValueError(f"cache: {cache!r} must be cold or hot")
    case = shapes.workload(workload) if isinstance(workload, str) else workload
    entry = ops.op(op or case.op)
    if case.op != entry.name:
        raise ValueError(f"workload: {case.name or case.shape} is of {case.op}, and {name} of {entry.name}")
    place = need_cuda(device)
    failed = kind(
        run_id=run.run_id if run else "", op=entry.name, step=name, source_sha=source_sha, workload=case.name,
        shape=case.shape, dtype=case.dtype, cache=cache, status="failed", error="the process was killed",
    )  # fmt: skip
    if run is None:
        return _measure(failed, prepare, case, entry, cache, seed, n, place, None)
    from .notebook import open_case

    with open_case(run, failed):
        try:
            return _measure(failed, prepare, case, entry, cache, seed, n, place, run)
        except Exception as error:
            row = run.add(replace(failed, error=f"{type(error).__name__}: {error}"))
            with contextlib.suppress(RuntimeError):  # after a fault every call of CUDA raises; the row is written
                torch.cuda.empty_cache()
            return row


def second_clock(
    step: str | Step,
    workload: str | Workload,
    *,
    seed: int = 0,
    run: RunWriter | None = None,
    device: torch.device | str | None = None,
) -> float:
    """Microseconds a call by ``triton.testing.do_bench``, the median: another's clock, to compare with :func:`bench`.

    It fits calls that take far longer than the host needs to launch them. It times eager calls one at a time, so a
    short one is measured together with its launch, and it clears L2 by writing zeros, which are written back while the
    call runs. With ``run`` the figure becomes a row of ``counters``, metric ``triton do_bench``.

    Raises NoDevice without a GPU or without triton, ValueError for a workload of several parts.
    """
    place = need_cuda(device)
    chosen, case = steps.step(step), shapes.workload(workload) if isinstance(workload, str) else workload
    if len(case.parts()) != 1:
        raise ValueError(f"workload: {case.name} has {len(case.parts())} parts, a second clock times one call")
    try:
        from triton import testing
    except ImportError as error:
        raise NoDevice("triton is not installed; it comes with torch for CUDA") from error
    op = ops.op(chosen.op)
    inputs = op.make_inputs(case, seed, place)
    with torch.cuda.device(place):
        us = float(testing.do_bench(lambda: op.run(step=chosen, **inputs), return_mode="median")) * 1000
    if run:
        run.add(CounterRow(run_id=run.run_id, op=chosen.op, step=chosen.name, source_sha=chosen.source_sha,
                           workload=case.name or case.shape, metric=SECOND_CLOCK, value=us, unit="us"))  # fmt: skip
    return us


def _measure(
    blank: TimingRow, prepare: Prepare, case: Workload, op: ops.Op, cache: Cache, seed: int, n: int | None,
    device: torch.device, run: RunWriter | None,
) -> TimingRow:  # fmt: skip
    if run:
        run_ceilings(run, device)
    parts = sorted(case.parts(), key=op.flops, reverse=True)
    measured: list[Samples] = []
    for part in parts:  # the longest first: its number of samples is that of all
        measured.append(
            _measure_part(prepare, part, op, cache, seed, n or (measured[0].n if measured else None), device)
        )
    whole = mean_of_parts(measured)
    flops = statistics.fmean(op.flops(part) for part in parts)
    moved = statistics.fmean(op.bytes(part) for part in parts)
    row = replace(
        blank, warmup=whole.warmup, n=whole.n, median_us=whole.median, p10_us=whole.p10, p90_us=whole.p90,
        min_us=whole.min, flops=flops, bytes=moved, status="ok", error="",
    )  # fmt: skip
    what = f"{row.op}/{row.step} {row.workload or row.shape} {cache}"
    check_rate(device_peak(device), flops=flops, bytes=moved, seconds=whole.median * 1e-6, cache=cache, what=what)
    if run:
        if cache == "cold":
            _settle(run, moved / whole.median / 1e3, device)
        row = run.add(row)
        _write_details(run, row, parts, measured)
    return row


def _measure_part(
    prepare: Prepare, part: Workload, op: ops.Op, cache: Cache, seed: int, n: int | None, device: torch.device
) -> Samples:
    first = op.make_inputs(part, seed, device)
    held = _tensor_bytes(first)
    touched = int(min(held, op.bytes(part)))  # a window or a page table may leave much of the inputs untouched
    sets = rotation_sets(touched, l2_bytes(device)) if cache == "cold" else None
    if sets is None or sets * held > torch.cuda.mem_get_info(device)[0] * MOST_MEMORY:
        sets = 1
    inputs = [first, *(op.make_inputs(part, seed + i, device) for i in range(1, sets))]
    calls = [prepare(**one) for one in inputs]
    return time_cuda(calls, cache=cache, working_set=touched, n=n, device=device)


def _tensor_bytes(inputs: dict[str, Any]) -> int:
    """Bytes of the tensors among a call's inputs, those inside caches and weights included, each storage once."""
    seen: dict[int, int] = {}

    def visit(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            seen[x.untyped_storage().data_ptr()] = min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
        elif isinstance(x, list | tuple):
            for one in x:
                visit(one)
        elif hasattr(x, "__dict__"):
            for one in vars(x).values():
                visit(one)

    for value in inputs.values():
        visit(value)
    return sum(seen.values())


def _settle(run: RunWriter, observed_gbps: float, device: torch.device) -> None:
    """See that no cold row is above its run's read ceiling: measure that again, better, where one is."""
    before = run_ceilings(run, device)

    def again() -> float:
        return _write_ceilings(run, before.best(ceilings(device, effort=3))).read_gbps

    after = settle_ceiling(observed_gbps, before.read_gbps, again)
    if after > run_ceilings(run).read_gbps:
        warnings.warn(f"read ceiling {before.read_gbps:.0f} GB/s raised to {after:.0f}, which a cold launch has read",
                      stacklevel=2)  # fmt: skip
        run.update(read_gbps=after)


def _write_details(run: RunWriter, row: TimingRow, parts: Sequence[Workload], measured: Sequence[Samples]) -> None:
    state = measured[-1].state
    same = {"run_id": run.run_id, "op": row.op, "step": row.step, "source_sha": row.source_sha}
    for part, samples in zip(parts, measured, strict=True):
        text = " ".join(format(us, ".6g") for us in samples.us)
        run.add(SampleRow(**same, workload=row.workload, shape=part.shape, cache=samples.cache, method=samples.method,
                          samples_us=text))  # fmt: skip
    units = {"power_w": "W", "temp_c": "degC", "sm_mhz": "MHz", "throttle": "bits"}
    for metric, unit in units.items():
        value = getattr(state, metric)
        if value is not None:
            run.add(CounterRow(**same, workload=row.workload or row.shape, metric=f"{row.cache} {metric}",
                               value=float(value), unit=unit))  # fmt: skip
    if state.reasons:
        warnings.warn(
            f"{row.step} {row.workload or row.shape}: clocks held by {', '.join(state.reasons)}", stacklevel=2
        )


# ---- as a script -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Time steps and leave a run; exit code 0, 1 where a case failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m mila_kernels.bench", description=main.__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP|OP", help="default: the ceilings only")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME")
    parser.add_argument("--shape", action="append", default=[], metavar="TEXT", help="such as 'b1 q512h16 kv512h1 d512 "
                        "causal bf16'")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all named workloads of each op (default: its first)")
    parser.add_argument("--cache", choices=("cold", "hot", "both"), default="cold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, help="samples a case")
    args = parser.parse_args(arguments)
    try:
        need_cuda()
    except NoDevice as error:
        print(error, file=sys.stderr)
        return 2
    chosen = steps.select(args.steps) if args.steps else []
    failures = 0
    with RunWriter() as run:
        print(f"run {run.run_id}  {run_ceilings(run)}", flush=True)
        for step in chosen:
            for case in _cases(step.op, args.workload, args.shape, args.all):
                for cache in ("cold", "hot") if args.cache == "both" else (args.cache,):
                    row = bench(step, case, cache=cache, seed=args.seed, run=run, n=args.n)
                    failures += row.status != "ok"
                    print(line(row), flush=True)
        print(f"run {run.run_id}  {run_ceilings(run)}")
    return 1 if failures else 0


def _cases(op: str, names: Sequence[str], texts: Sequence[str], everything: bool) -> list[Workload]:
    named = [w for w in map(shapes.workload, names) if w.op == op]
    free = [shapes.parse_shape(op, text) for text in texts]
    if named or free:
        return [*named, *free]
    table = shapes.workloads(op)
    return table if everything else table[:1]


def line(row: TimingRow) -> str:
    """One timing as a line of text: step, workload, microseconds (p10 to p90), TFLOP/s and, when cold, GB/s."""
    head = f"{row.op}/{row.step}  {row.workload or row.shape}  {row.cache}"
    if row.status != "ok" or row.median_us is None or row.flops is None or row.bytes is None:
        return f"{head}  {row.status}: {row.error}"
    rate = f"{row.flops / row.median_us / 1e6:.1f} TFLOP/s"
    if row.cache == "cold":
        rate += f"  {row.bytes / row.median_us / 1e3:.0f} GB/s"
    return f"{head}  {row.median_us:.2f} us ({row.p10_us:.2f} to {row.p90_us:.2f}, n {row.n})  {rate}"


if __name__ == "__main__":
    sys.exit(main())
