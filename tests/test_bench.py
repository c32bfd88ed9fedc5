"""Timing: the rules that need no GPU, the refusal to time emulation, and on a GPU what no timing may do."""

from __future__ import annotations

import functools
import operator
import struct

import pytest
import torch

from mila_kernels import bench, nvml, peaks, results, shapes, steps
from mila_kernels.bench import Ceilings, Samples, rotation_sets, settle_ceiling, why_not_cold
from mila_kernels.peaks import ImpossibleRate, Peak, check_rate, device_peak, dram_peak_gbps

MIB = 1 << 20
H200_L2 = 60 * MIB
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- statistics ----


def test_percentiles():
    assert [bench.percentile([4, 1, 3, 2, 5], q) for q in (0, 10, 50, 90, 100)] == [1, 1.4, 3, 4.6, 5]
    assert bench.percentile([7.0], 90) == 7.0
    with pytest.raises(ValueError, match="at least one"):
        bench.percentile([], 50)


def test_samples_tell_their_spread():
    s = Samples((3.0, 1.0, 2.0), 3, "cold", "events flush")
    assert (s.n, s.min, s.median) == (3, 1.0, 2.0) and s.min <= s.p10 <= s.median <= s.p90


def test_the_published_instance_is_the_mean_of_its_parts():
    parts = [Samples((1.0, 2.0), 3, "cold", "graph rotation"), Samples((3.0, 8.0), 4, "cold", "events flush")]
    whole = bench.mean_of_parts(parts)
    assert whole.us == (2.0, 5.0) and whole.warmup == 3 and whole.method == "events flush+graph rotation"
    with pytest.raises(ValueError, match="same number of samples"):
        bench.mean_of_parts([parts[0], Samples((1.0,), 3, "cold", "x")])
    with pytest.raises(ValueError, match="same cache label"):
        bench.mean_of_parts([parts[0], Samples((1.0, 1.0), 3, "hot", "x")])


# ---- cold is cold ----


@pytest.mark.parametrize(
    ("working_set", "sets", "flush", "cold"),
    [
        (8 * MIB, 1, False, False),  # 200 launches over 8 MiB measure the cache
        (8 * MIB, 1, True, True),
        (8 * MIB, 30, False, False),  # exactly four times is not more than four times
        (8 * MIB, 31, False, True),
        (512 * MIB, 1, False, True),
        (200 * MIB, 1, False, False),  # above L2, yet a good part of it may still be there
    ],
)
def test_a_working_set_that_l2_may_hold_is_refused(working_set, sets, flush, cold):
    reason = why_not_cold(working_set, sets, flush, H200_L2)
    assert (reason is None) == cold
    assert cold or ("cache='hot'" in reason and str(working_set) in reason)


@pytest.mark.parametrize("working_set", [1, 4096, MIB, 8 * MIB, 62_700_000, 300 * MIB, 10**10])
def test_rotation_takes_as_many_inputs_as_needed_and_no_more(working_set):
    sets = rotation_sets(working_set, H200_L2)
    if sets is None:
        assert working_set * bench.MOST_SETS <= 4 * H200_L2
        return
    assert why_not_cold(working_set, sets, False, H200_L2) is None
    assert sets == 1 or why_not_cold(working_set, sets - 1, False, H200_L2) is not None


def test_graphs_hold_whole_rounds_and_last_long_enough():
    assert bench.launches_in_graph(5.0, 1) == 80
    assert bench.launches_in_graph(5.0, 31) == 93
    assert bench.launches_in_graph(40.0, 500) == 500
    assert bench.launches_in_graph(0.0, 1) == 800


def test_samples_that_begin_slower_than_they_end_are_taken_anew():
    """As after memory was given back: 19 of 30 replays took 134 us, the others 118."""
    disturbed, after, hotter = [134.0] * 19 + [118.0] * 11, [118.0] * 30, [118.0] * 15 + [130.0] * 15
    assert bench.fading(disturbed) and not bench.fading(after) and not bench.fading(hotter)
    assert not bench.fading([2.0, 1.0])  # too few to tell
    for tries, want in (([disturbed, after, hotter], after), ([hotter, after], hotter), ([disturbed] * 4, disturbed)):
        left = iter(tries)
        assert bench.steady(lambda left=left: (next(left), nvml.State())) == (want, nvml.State())
    assert len(list(left)) == 1  # three tries at most


def test_sample_counts_follow_the_budget():
    assert bench.sample_count(100.0, 50) == 50
    assert bench.sample_count(40_000.0, 50) == 25
    assert bench.sample_count(10**7, 50) == bench.FEWEST_SAMPLES


# ---- rates ----


def test_peaks_are_known_or_derived():
    h200 = peaks.peak("NVIDIA H200")
    assert h200.dram_gbps == 4917 and h200.l2_bytes == H200_L2 and h200.sms == 132
    assert dram_peak_gbps(3201, 6144) == pytest.approx(4917, abs=0.5)
    ada = peaks.peak("NVIDIA GeForce RTX 4070")
    assert (ada.dram_gbps, ada.sms, ada.l2_bytes) == (504, 46, 36 * MIB)
    assert peaks.peak("a GPU of tomorrow") is None

    class Properties:
        name, multi_processor_count, L2_cache_size = "a GPU of tomorrow", 200, 100 * MIB
        memory_clock_rate, memory_bus_width = 4_000_000, 8192

    assert device_peak(Properties).dram_gbps == pytest.approx(8192)
    assert device_peak(Properties, 2000, 4096).dram_gbps == pytest.approx(2048)
    assert device_peak(Properties).most_tflops() is None and device_peak(Properties).l2_bytes == 100 * MIB


def test_every_peak_of_the_table_is_clock_times_width():
    for peak in peaks._table(peaks.DATA).values():
        assert peak.dram_gbps and peak.bf16_tflops and peak.l2_bytes and peak.source
    import csv

    with (peaks.DATA / "peaks.csv").open() as file:
        for row in csv.DictReader(file):
            derived = dram_peak_gbps(float(row["memory_mhz"]), int(row["bus_bits"]))
            assert float(row["dram_gbps"]) == pytest.approx(derived, rel=0.001), row["gpu"]


def test_a_rate_above_the_peak_is_an_error():
    peak = Peak("test", dram_gbps=1000, bf16_tflops=100, l2_bytes=10 * MIB, sm_mhz=1000, max_sm_mhz=1100)
    check_rate(peak, flops=1e9, bytes=1e9, seconds=1.0001e-3, cache="cold")
    with pytest.raises(ImpossibleRate, match="1001 GB/s, above the 1000 GB/s of test's memory"):
        check_rate(peak, flops=1e9, bytes=1.001e9, seconds=1e-3, cache="cold")
    check_rate(peak, flops=109e9, bytes=0, seconds=1e-3, cache="hot")
    with pytest.raises(ImpossibleRate, match="111 TFLOP/s, above the 110 of test"):
        check_rate(peak, flops=111e9, bytes=0, seconds=1e-3, cache="hot")
    check_rate(peak, flops=0, bytes=10 * MIB, seconds=1e-6, cache="hot")  # from L2
    with pytest.raises(ImpossibleRate):
        check_rate(peak, flops=0, bytes=10 * MIB, seconds=1e-6, cache="cold")
    check_rate(None, flops=1e30, bytes=1e30, seconds=1e-6, cache="cold")


def test_a_rate_above_the_ceiling_has_the_ceiling_measured_again():
    calls = []

    def again(value):
        return lambda: calls.append(value) or value

    assert settle_ceiling(4400.0, 4500.0, again(0.0)) == 4500.0 and not calls
    assert settle_ceiling(4550.0, 4500.0, again(4600.0)) == 4600.0 and calls == [4600.0]
    assert settle_ceiling(4650.0, 4500.0, again(4600.0)) == 4650.0
    assert settle_ceiling(4510.0, 4500.0, again(4300.0)) == 4510.0
    with pytest.raises(ImpossibleRate, match="4900 GB/s is above the read ceiling, 4550 GB/s measured twice"):
        settle_ceiling(4900.0, 4500.0, again(4550.0))


def test_the_best_of_two_ceilings():
    a, b = Ceilings(4000.0, 700.0, None), Ceilings(4100.0, 650.0, 1300.0)
    assert a.best(b) == b.best(a) == Ceilings(4100.0, 700.0, 1300.0)
    assert a.best(a).fp8_tflops is None


# ---- no times of emulation ----


def test_emulation_is_not_timed(tmp_path):
    with results.RunWriter(tmp_path) as run, pytest.raises(bench.NoDevice, match="not how fast it is"):
        bench.bench("prefill/01_scalar", "prefill/published-instance", run=run, device="emulation")
    with pytest.raises(bench.NoDevice):
        bench.time_cuda(lambda: None, cache="hot", working_set=1, device=torch.device("cpu"))
    assert not (tmp_path / "timings.csv").exists() and not (tmp_path / "samples.csv").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_the_script_says_so_too(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(results.RUN_FOLDER_VARIABLE, str(tmp_path))
    assert bench.main(["prefill"]) == 2
    assert "timing needs a CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_bad_cases_are_refused_by_name():
    with pytest.raises(ValueError, match="cache: 'warm' must be cold or hot"):
        bench.bench("prefill/01_scalar", "prefill/published-instance", cache="warm")
    with pytest.raises(ValueError, match="is of decode, and 01_scalar of prefill"):
        bench.bench("prefill/01_scalar", "decode/d512-16x1-b1-kv4k-bf16")


# ---- our own read kernel ----


@pytest.mark.parametrize("unroll", [4, 8, 16])
@pytest.mark.parametrize("count", [4, 512 * 4 * 4, 512 * 4 * 16 * 3 + 20])
def test_the_read_kernel_reads_every_word_once(device, count, unroll):
    data = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device)
    out = bench.read_all(data, 2, unroll).cpu()
    words = struct.unpack(f"{count}i", data.cpu().numpy().tobytes())
    assert functools.reduce(operator.xor, out.tolist()) == functools.reduce(operator.xor, words)


def test_the_read_kernel_is_no_step_of_a_ladder():
    assert "ceilings" not in steps.ops() and bench.read_step().op == "ceilings"


# ---- on a GPU: small and large, with and without a flush ----


def _reader(nbytes: int, device: torch.device):
    data = torch.empty(nbytes // 4, dtype=torch.float32, device=device).uniform_(-1, 1)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return lambda: bench.read_all(data, 2 * sms, 8)


@needs_cuda
@pytest.mark.cuda
def test_cold_and_hot_differ_where_they_should(tmp_path):
    device = bench.need_cuda()
    l2, peak = bench.l2_bytes(device), bench.device_peak(device)
    small, large = 8 * MIB, 8 * l2
    reader = _reader(small, device)
    hot = bench.time_cuda(reader, cache="hot", working_set=small, n=200)
    flushed = bench.time_cuda(reader, cache="cold", working_set=small, n=200)
    sets = rotation_sets(small, l2)
    rotated = bench.time_cuda([_reader(small, device) for _ in range(sets)], cache="cold", working_set=small)
    assert flushed.method == "events flush" and rotated.method == "graph rotation" and hot.method == "graph hot"
    assert rotated.median > hot.median and flushed.median > hot.median
    reader = _reader(large, device)
    cold, warm = (bench.time_cuda(reader, cache=c, working_set=large) for c in ("cold", "hot"))
    assert cold.median == pytest.approx(warm.median, rel=0.1)
    for samples, nbytes in ((flushed, small), (rotated, small), (cold, large)):
        check_rate(peak, flops=0, bytes=nbytes, seconds=samples.median * 1e-6, cache="cold")
    with pytest.raises(ValueError, match="without a flush do not exceed"):
        bench.time_cuda(reader, cache="cold", working_set=small, flush=False)


@needs_cuda
@pytest.mark.cuda
def test_ceilings_are_below_the_peaks_and_no_cold_read_is_above_them():
    device = bench.need_cuda()
    found, peak = bench.ceilings(), bench.device_peak(device)
    if peak.dram_gbps:
        assert 0.5 * peak.dram_gbps < found.read_gbps <= peak.dram_gbps
    nbytes = 8 * bench.l2_bytes(device)
    cold = bench.time_cuda(_reader(nbytes, device), cache="cold", working_set=nbytes)
    observed = nbytes / cold.median / 1e3
    assert settle_ceiling(observed, found.read_gbps, lambda: bench.ceilings(effort=3).read_gbps) >= observed


@needs_cuda
@pytest.mark.cuda
def test_a_timed_case_leaves_its_rows(tmp_path):
    case = shapes.parse_shape("prefill", "b1 q512h2 kv512h1 d128 causal bf16")
    with results.RunWriter(tmp_path) as run:
        row = bench.bench("prefill/02", case, run=run)
        assert row.status == "ok" and row.cache == "cold" and row.n >= bench.FEWEST_SAMPLES, row.error
        assert 0 < row.min_us <= row.median_us
        hot = bench.bench("prefill/02", case, run=run, cache="hot")
    assert [r.cache for r in results.read(tmp_path, "timings")] == ["cold", "hot"] and hot.median_us
    assert len(results.read(tmp_path, "samples")) == 2
    (made,) = results.read(tmp_path, "runs")
    assert made.read_gbps and made.bf16_tflops


@needs_cuda
@pytest.mark.cuda
def test_an_exception_leaves_a_failed_row_and_no_figure(tmp_path):
    case = shapes.parse_shape("prefill", "b1 q64h2 kv64h1 d128 causal bf16")

    def broken(**inputs):
        raise RuntimeError("CUDA out of memory: tried to allocate 1 GiB")

    with results.RunWriter(tmp_path) as run:
        run.update(read_gbps=1.0, bf16_tflops=1.0)
        row = bench.bench_call("broken", broken, case, run=run)
    assert row.status == "failed" and "out of memory" in row.error
    (kept,) = results.read(tmp_path, "timings")
    assert kept == row and kept.median_us is None and not (tmp_path / "samples.csv").exists()
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.bench_call("broken", broken, case)


@needs_cuda
@pytest.mark.cuda
def test_events_are_on_the_stream_of_the_kernel():
    """On a side stream that is kept busy, a call is still timed, and not the empty default stream."""
    device = bench.need_cuda()
    nbytes = 8 * bench.l2_bytes(device)
    reader = _reader(nbytes, device)
    expected = bench.time_cuda(reader, cache="cold", working_set=nbytes).median
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bench.time_cuda(reader, cache="cold", working_set=nbytes).median == pytest.approx(expected, rel=0.1)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.alone
def test_two_clocks_agree_on_a_long_call(tmp_path):
    pytest.importorskip("triton")
    case = shapes.parse_shape("prefill", "b1 q2048h16 kv2048h1 d512 causal bf16")
    with results.RunWriter(tmp_path) as run:
        bench.run_ceilings(run)
        ours = bench.bench("prefill/08_ldmatrix", case, run=run)
        theirs = bench.second_clock("prefill/08_ldmatrix", case, run=run)
    assert theirs == pytest.approx(ours.median_us, rel=0.1)
    recorded = [row.value for row in results.read(tmp_path, "counters") if row.metric == bench.SECOND_CLOCK]
    assert recorded == [pytest.approx(theirs, rel=1e-6)]


@needs_cuda
@pytest.mark.cuda
def test_a_second_clock_times_one_call():
    with pytest.raises(ValueError, match="16 parts"):
        bench.second_clock("prefill/08_ldmatrix", "prefill/published-instance")


# ---- the device's state ----


def test_throttle_reasons_are_words():
    assert nvml.throttle_reasons(0x1) == () and nvml.State().reasons == ()
    assert nvml.throttle_reasons(0x1 | 0x4 | 0x40) == ("power cap", "hardware thermal")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_without_a_gpu_the_state_is_empty():
    assert nvml.state() == nvml.State() and nvml.memory_bus() == (None, None)


@needs_cuda
@pytest.mark.cuda
def test_the_state_is_read():
    state = nvml.state()
    assert state.sm_mhz and state.temp_c and nvml.driver()
