"""The emulation: right results in any order of threads, and every planted bug found with its file and line."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_bugs import LDMATRIX_BUGS, PRODUCT, PRODUCT_BUGS, SMEM_TILES_BUGS, SOURCES, Bug

from mila_kernels.attention import PrefillArgs
from mila_kernels.build import Buffer, KernelError, emulation, load
from mila_kernels.steps import Step


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    ]


class ProbeArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("words", ctypes.c_int64),
        ("what", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("smem_bytes", ctypes.c_int32),
    ]


PROBES = (
    "indices", "block_votes", "atomics", "half_warps", "partial_warp", "fresh_memory", "constants", "neighbours",
    "shuffle_for_barrier", "warp_barrier_for_block", "plain_and_atomic", "endless_wait", "local_arrays", "wait_twice",
    "wild_store", "wild_copy", "deep_stack",
)  # fmt: skip
PROBE = Step(op="emulation", order=3, name="03_probe", path=SOURCES / "03_probe.cu")
BOTH_MODES = pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])


def _buffer(name: str, x: torch.Tensor, writable: bool = False) -> Buffer:
    return Buffer(name, x.data_ptr(), x.numel() * x.element_size(), writable)


def product(
    step: Step = PRODUCT, *, check: bool, seed: int = 0, m: int = 40, n: int = 24, k: int = 104
) -> torch.Tensor:
    """Runs the tests' product on random matrices; the result [m, n], after comparing it with float64."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(n, k, generator=generator).bfloat16()
    c = torch.full((m, n), float("nan"))
    args = ProductArgs(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)
    buffers = [_buffer("a", a), _buffer("b", b), _buffer("c", c, True)]
    with emulation(check=check, seed=seed):
        load(step, "emulation", check=check)(args, buffers=buffers)
    reference = a.double() @ b.double().T
    assert (c - reference).norm() <= 1e-6 * reference.norm()
    return c


def prefill(step: Step, *, check: bool, seed: int = 0) -> None:
    """Runs a prefill step on a small shape of several tiles, straight through its launcher."""
    generator = torch.Generator().manual_seed(5)
    batch, q_len, kv_len, heads, dim = 1, 18, 75, 2, 64
    q = torch.randn(batch, q_len, heads, dim, generator=generator).bfloat16()
    k = torch.randn(batch, kv_len, 1, dim, generator=generator).bfloat16()
    v = torch.randn(batch, kv_len, 1, dim, generator=generator).bfloat16()
    o = torch.empty_like(q)
    lse = torch.empty(batch, heads, q_len)
    args = PrefillArgs()
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
        setattr(args, name, x.data_ptr())
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    args.lse = lse.data_ptr()
    args.batch, args.q_len, args.kv_len, args.q_heads, args.kv_heads, args.head_dim = 1, q_len, kv_len, heads, 1, dim
    args.causal, args.window, args.dtype, args.scale = 1, 0, 0, 0.125
    buffers = [_buffer("q", q), _buffer("k", k), _buffer("v", v), _buffer("o", o, True), _buffer("lse", lse, True)]
    with emulation(check=check, seed=seed):
        load(step, "emulation", check=check)(args, buffers=buffers)


def probe(
    what: str,
    words: int,
    *,
    check: bool,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (64, 1, 1),
    smem_bytes: int = 1024,
    seed: int = 0,
    threads: int | None = None,
    architecture: str | None = None,
    address: int | None = None,
) -> list[int]:
    """Runs one kernel of 03_probe.cu; its ``words`` outputs, zeros before. It is told ``address`` in place of words."""
    out = torch.zeros(words, dtype=torch.int32)
    args = ProbeArgs(out.data_ptr(), words if address is None else address, PROBES.index(what), grid, block, smem_bytes)
    with emulation(check=check, seed=seed, threads=threads, architecture=architecture):
        load(PROBE, "emulation", check=check)(args, buffers=[_buffer("out", out, True)])
    return [int(x) for x in out.numpy().view(np.uint32)]


def report_of(run: Callable[[], object]) -> str:
    with pytest.raises(KernelError) as caught:
        run()
    return caught.value.text


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def _is_found(bug: Bug, folder: Path, run: Callable[..., object]) -> None:
    step = bug.plant(folder)
    text = report_of(lambda: run(step, check=True))
    assert re.search(bug.says, text), text
    lines = {i for i, line in enumerate(step.source.split("\n"), 1) if any(part in line for part in bug.at)}
    assert lines, f"{bug.at} is not in the changed source"
    named = {int(n) for n in re.findall(rf"{step.path.name}:(\d+)", text)}
    assert named & lines, f"none of the lines {sorted(lines)} is named: {text}"


@pytest.mark.parametrize("bug", PRODUCT_BUGS, ids=str)
def test_planted_bug_of_the_product_is_found(bug: Bug, tmp_path: Path) -> None:
    _is_found(bug, tmp_path, product)


@pytest.mark.parametrize("bug", [*SMEM_TILES_BUGS, *LDMATRIX_BUGS], ids=str)
def test_planted_bug_of_a_prefill_step_is_found(bug: Bug, tmp_path: Path) -> None:
    _is_found(bug, tmp_path, prefill)


@pytest.mark.parametrize("name", ["missing barrier", "missing barrier after the first tile", "tile not filled"])
def test_fast_mode_shows_a_planted_bug_in_the_result(name: str, tmp_path: Path) -> None:
    step = next(bug for bug in PRODUCT_BUGS if bug.name == name).plant(tmp_path)
    wrong = 0
    for seed in range(10):
        try:
            product(step, check=False, seed=seed)
        except AssertionError:
            wrong += 1
    assert wrong >= 8


@BOTH_MODES
def test_correct_kernel_is_clean_and_right_in_any_order(check: bool) -> None:
    results = [product(check=check, seed=seed) for seed in range(25)]
    assert all(torch.equal(x, results[0]) for x in results)


# ---- what a kernel sees ----------------------------------------------------------------------------------------------


@BOTH_MODES
def test_every_thread_runs_once_and_knows_its_place(check: bool) -> None:
    for grid, block in (
        ((3, 2, 5), (5, 3, 2)),
        ((70, 1, 1), (1, 1, 1)),
        ((1, 2, 1), (32, 4, 8)),
        ((2, 1, 1), (16, 1, 64)),
    ):
        words = int(np.prod(grid) * np.prod(block))
        assert probe("indices", words, check=check, grid=grid, block=block) == list(range(1, words + 1))


@BOTH_MODES
def test_block_barriers_that_vote(check: bool) -> None:
    out = np.array(probe("block_votes", 96 * 6, check=check, block=(96, 1, 1), seed=3)).reshape(96, 6)
    assert (out == [48, 0, 1, 0, 1, 96]).all()


@BOTH_MODES
def test_atomics_of_all_blocks_at_once(check: bool) -> None:
    n = 12 * 64
    out = probe("atomics", 10, check=check, grid=(12, 1, 1), threads=4)
    assert out[0] == out[9] == n and out[1] == n - 1 and out[2] == 0xFFFFFFFF
    assert np.uint32(out[3]).view(np.float32) == n and out[4:6] == [0, n]
    assert out[6] == 2 * n and out[7] == n % 10 and out[8] == 12


@BOTH_MODES
def test_halves_of_a_warp_meet_apart(check: bool) -> None:
    x = list(range(64))
    for i in range(7):
        step = [x[t ^ 1] + x[t ^ 8] for t in range(64)]
        x = [new if t % 32 >= 16 or i < 3 else old for t, (new, old) in enumerate(zip(step, x, strict=True))]
    for seed in range(5):
        assert probe("half_warps", 64, check=check, seed=seed) == [value & 0xFFFFFFFF for value in x]


@BOTH_MODES
def test_partial_warp(check: bool) -> None:
    out = probe("partial_warp", 40, check=check, block=(40, 1, 1))
    assert out == [(i ^ 1) + 100 * (32 if i < 32 else 8) for i in range(40)]


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    words = probe("fresh_memory", 64, check=False, grid=(3, 1, 1))
    assert set(words) == {0xFFFFFFFF}
    text = report_of(lambda: probe("fresh_memory", 64, check=True))
    assert re.search(r"^uninitialised: .*03_probe.cu:\d+", text), text


@BOTH_MODES
def test_constants_and_variables_of_the_module(check: bool) -> None:
    out = probe("constants", 32, check=check, block=(32, 1, 1))
    assert out == [2, 3, 5, 7] * 8


def test_neighbouring_bytes_do_not_race() -> None:
    for seed in range(5):
        out = probe("neighbours", 256, check=True, block=(256, 1, 1), seed=seed)
        assert out == [2 * i + 2 for i in range(256)]


def test_own_arrays_may_be_passed_about() -> None:
    assert probe("local_arrays", 67, check=True)[:64] == [i + 3 for i in range(64)]


# ---- what it reports -------------------------------------------------------------------------------------------------


def test_shuffle_orders_no_memory() -> None:
    text = report_of(lambda: probe("shuffle_for_barrier", 64, check=True))
    assert re.search(r"race: .*wrote there at .*03_probe.cu:\d+|uninitialised: ", text), text


def test_warp_barrier_orders_no_other_warp() -> None:
    texts = {
        report_of(lambda seed=seed: probe("warp_barrier_for_block", 64, check=True, seed=seed)) for seed in range(6)
    }
    assert all(re.search(r"^(race|uninitialised): .*03_probe.cu:\d+", text) for text in texts), texts


def test_plain_read_beside_an_atomic_is_a_race() -> None:
    text = report_of(lambda: probe("plain_and_atomic", 64, check=True))
    assert re.search(r"race: .*(wrote there|updates by an atomic)", text), text


@BOTH_MODES
def test_deadlock_is_named(check: bool) -> None:
    assert probe("endless_wait", 2, check=check) == [1, 0]
    text = report_of(lambda: probe("endless_wait", 1, check=check))
    assert re.search(r"^deadlock: thread \(\d+, 0, 0\) \[warp 1 .*03_probe.cu:\d+", text), text


@BOTH_MODES
def test_partner_that_never_comes_is_named(check: bool) -> None:
    text = report_of(lambda: probe("wait_twice", 64, check=check))
    assert re.search(r"divergence.*lane 30\] has exited.*lane 31\].*__syncwarp .*03_probe.cu:\d+", text), text


@BOTH_MODES
@pytest.mark.parametrize("what", ["wild_store", "wild_copy"])
def test_unmapped_address_is_a_report(what: str, check: bool) -> None:
    text = report_of(lambda: probe(what, 1, address=0x40, check=check))
    lines = [i for i, line in enumerate(PROBE.source.split("\n"), 1) if "(args.words)" in line]
    line = lines[["wild_store", "wild_copy"].index(what)]
    assert re.search(rf"^out of bounds: .*0x40\b.*03_probe.cu:{line}\b", text), text
    probe("indices", 64, check=check)


@BOTH_MODES
def test_exhausted_stack_is_a_report(check: bool) -> None:
    text = report_of(lambda: probe("deep_stack", 100_000, check=check))
    assert re.search(r"^local memory: .* bytes of stack, at .*03_probe.cu:\d+", text), text
    probe("indices", 64, check=check)


@pytest.mark.parametrize(
    ("architecture", "most"),
    [("sm_80", 163 * 1024), ("sm_89", 99 * 1024), ("sm_90a", 227 * 1024), ("sm_120", 99 * 1024)],
)
def test_shared_memory_limits_of_architectures(architecture: str, most: int) -> None:
    probe("indices", 64, check=False, smem_bytes=most, architecture=architecture)
    refuse = lambda: probe("indices", 64, check=False, smem_bytes=most + 1, architecture=architecture)  # noqa: E731
    assert re.search(rf"invalid argument: {most + 1} bytes.* at most {most}", report_of(refuse))


@pytest.mark.parametrize(
    ("grid", "block"),
    [((1, 65536, 1), (1, 1, 1)), ((1, 1, 70000), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 1, 1), (1, 1, 65)),
     ((1, 1, 1), (33, 32, 1)), ((1, 1, 1), (0, 1, 1))],
)  # fmt: skip
def test_launch_limits(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    text = report_of(lambda: probe("indices", 1, check=False, grid=grid, block=block))
    assert "invalid configuration argument" in text and "at most" in text


# ---- as a part of a process ------------------------------------------------------------------------------------------


def test_a_report_leaves_nothing_behind(tmp_path: Path) -> None:
    step = PRODUCT_BUGS[0].plant(tmp_path)
    with emulation(threads=1):
        first = report_of(lambda: product(step, check=True, seed=4))
        product(check=True, seed=4)
        assert report_of(lambda: product(step, check=True, seed=4)) == first


def test_a_seed_gives_the_same_report_again() -> None:
    def run(seed: int) -> str:
        with emulation(threads=1):
            return report_of(lambda: probe("warp_barrier_for_block", 64, check=True, seed=seed))

    assert [run(seed) for seed in range(8)] == [run(seed) for seed in range(8)]
    assert len({re.sub(r" \(block.*", "", run(seed)) for seed in range(8)}) > 1


def test_launches_from_several_threads_at_once() -> None:
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for check in (False, True):
                product(check=check, seed=seed)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_can_launch() -> None:
    product(check=False)
    child = os.fork()
    if child == 0:
        try:
            code = 0 if probe("indices", 128, check=False, grid=(2, 1, 1)) == list(range(1, 129)) else 1
        except BaseException:  # noqa: BLE001
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
