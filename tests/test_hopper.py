"""What sm_90 adds: the twins against a GPU and the manual, a warp-specialised product, and bugs planted in it."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mila_kernels import paths
from mila_kernels.build import Buffer, KernelError, emulation, load
from mila_kernels.steps import Step

VECTORS = paths.DATA / "ptx_vectors"
sys.path.insert(0, str(VECTORS))
import record_hopper as record  # noqa: E402

SOURCES = Path(__file__).parent / "steps" / "emulation"
PRODUCT = Step(
    op="emulation",
    order=4,
    name="04_warp_specialised",
    path=SOURCES / "04_warp_specialised.cu",
    architectures=("sm_90a",),
)
CLUSTER = Step(op="emulation", order=6, name="06_cluster", path=SOURCES / "06_cluster.cu", architectures=("sm_90a",))
CASES = record.cases()
BOTH_MODES = pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    ]


def product(
    step: Step = PRODUCT, *, check: bool, seed: int = 0, m: int = 150, n: int = 136, k: int = 200
) -> torch.Tensor:
    """Runs the tests' product on random matrices; the result [m, n], after comparing it with float64."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(n, k, generator=generator).bfloat16()
    c = torch.full((m, n), float("nan")).bfloat16()
    args = ProductArgs(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)
    buffers = [Buffer(name, x.data_ptr(), 2 * x.numel(), name == "c") for name, x in (("a", a), ("b", b), ("c", c))]
    with emulation(check=check, seed=seed):
        load(step, "emulation", check=check)(args, buffers=buffers)
    reference = a.double() @ b.double().T
    assert (c - reference).norm() <= 2.0**-8 * reference.norm()
    return c


class ClusterArgs(ctypes.Structure):
    _fields_ = [("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("clusters", ctypes.c_int32)]


def cluster(step: Step = CLUSTER, *, check: bool, seed: int = 0, architecture: str | None = None) -> None:
    """Runs the exchange between the two blocks of each cluster, and looks at what they got."""
    clusters = 3
    given = torch.arange(clusters * 32 * 32, dtype=torch.int32).reshape(clusters, 32, 32)
    out = torch.zeros(clusters, 2, 1024 + 32 + 256, dtype=torch.int32)
    args = ClusterArgs(given.data_ptr(), out.data_ptr(), clusters)
    buffers = [Buffer("in", given.data_ptr(), given.nbytes, False), Buffer("out", out.data_ptr(), out.nbytes, True)]
    with emulation(check=check, seed=seed, architecture=architecture):
        load(step, "emulation", check=check)(args, buffers=buffers)
    for rank in (0, 1):
        assert torch.equal(out[:, rank, :1024], 3 * given.reshape(clusters, -1))
        mine, others = torch.arange(32) + 100 * rank, torch.arange(32) + 100 * (1 - rank)
        assert (out[:, rank, 1024:1056] == others + 65536 * mine).all()
        assert (out[:, rank, 1056:] == 1000 * (1 - rank) + torch.arange(256)).all()


def report_of(run: Callable[[], object]) -> str:
    with pytest.raises(KernelError) as caught:
        run()
    return caught.value.text


# ---- the twins -------------------------------------------------------------------------------------------------------


@BOTH_MODES
@pytest.mark.parametrize("name", list(CASES))
def test_twin_does_what_the_manual_says(name: str, check: bool) -> None:
    for i, trial in enumerate(record.trials(name)):
        assert record.difference(name, trial, record.run(name, trial, check=check, seed=i), trial.words) == ""


def test_twins_give_what_the_gpu_gave() -> None:
    assert (VECTORS / record.FILE).is_file()
    assert record.replay(VECTORS) == []


@pytest.mark.parametrize("name", list(CASES))
def test_one_wrong_output_is_noticed(name: str) -> None:
    for trial in record.trials(name):
        changed = trial.words.copy()
        # of sums with a tolerance the largest, as a small one may lie within it
        at = len(changed) // 3 if trial.exact is None else int(np.argmax(np.abs(trial.exact)))
        changed[at] ^= 0x00C0_0000
        assert record.difference(name, trial, changed, trial.words).startswith(name)
        assert record.digest(changed) != record.digest(trial.words)


def test_recording_is_small_and_says_where_it_comes_from() -> None:
    assert (VECTORS / record.FILE).is_file()
    assert (VECTORS / record.FILE).stat().st_size < 300_000
    assert {"gpu", "driver", "cuda", "nvcc", "utc", "source_sha"} <= record.recorded().about.keys()


def test_every_wrapper_is_among_them() -> None:
    names = set(re.findall(r"^DEVICE \w+ (\w+)\(", (paths.CSRC / "hopper.cuh").read_text(), re.M))
    assert len(names) > 35
    kernels = record.SOURCE.read_text() + PRODUCT.source + CLUSTER.source
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", kernels)) == []


# ---- the product -----------------------------------------------------------------------------------------------------


@BOTH_MODES
def test_product_is_clean_and_the_same_in_any_order(check: bool) -> None:
    results = [product(check=check, seed=seed) for seed in range(15)]
    assert all(torch.equal(x, results[0]) for x in results)


@BOTH_MODES
@pytest.mark.parametrize("shape", [(1, 8, 8), (129, 64, 64), (64, 200, 136)])
def test_product_of_ragged_shapes(shape: tuple[int, int, int], check: bool) -> None:
    m, n, k = shape
    product(check=check, m=m, n=n, k=k)


@dataclasses.dataclass(frozen=True)
class Bug:
    """``find`` in the product's source becomes ``replace``; the report matches ``says``, naming a line with ``at``."""

    name: str
    find: str
    replace: str
    says: str
    at: tuple[str, ...]
    fast: bool = False  # reported in fast mode too

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def plant(self, folder: Path, original: Step = PRODUCT) -> Step:
        assert self.find in original.source, f"{original.id} has changed: {self.find!r} is not in it"
        path = folder / original.path.name
        path.write_text(original.source.replace(self.find, self.replace), encoding="utf-8")
        return dataclasses.replace(original, op="planted", path=path)


_FREE = "mbarrier_wait(smem_u32(&smem.empty[stage]), phase ^ 1);  // the stage is free"
_LANDED = "mbarrier_wait(smem_u32(&smem.full[stage]), phase);  // the stage has landed"
_EXPECT = "sizeof(smem.a[0]) + sizeof(smem.b[0])"
_RELEASE = "if (lane == 0) mbarrier_arrive(smem_u32(&smem.empty[stage]));"
_DONE = "wgmma_wait_group<0>();  // the products are done"
_LEFT = "if (warp % 4 == 0 && lane == 0) cp_async_bulk_wait_group_read<0>();  // the last tile has left"
_FENCE = "fence_proxy_async_shared();  // the copy may read it"
_WGMMA = "wgmma_k16<bf16, BN>(c_regs"
_LOADS = ("cp_async_bulk_tensor_2d_g2s(",)
_NO_PRODUCER_WAIT = "(in flight|race): .*overwrites by a bulk copy|mbarrier: .*arrives where none is expected"

BUGS = [
    Bug("wrong phase of the consumer", _LANDED, _LANDED.replace("phase)", "phase ^ 1)"),
        "uninitialised: .*|in flight: .*reads by wgmma.*bulk copy.*is in flight", (_WGMMA,)),
    Bug("wrong phase of the producer", _FREE, _FREE.replace("phase ^ 1", "phase"),
        r"deadlock: .*waits at mbarrier_wait .*for parity 0 .*in phase 0 \(parity 0\): 8 of 8 arrivals and 0 bytes",
        (_FREE.replace("phase ^ 1", "phase"),), True),
    Bug("short expect_tx", _EXPECT, "sizeof(smem.a[0])",
        "expect_tx: 8192 bytes more than were expected|in flight: .*reads by wgmma", (*_LOADS, _WGMMA), True),
    Bug("expect_tx short by a row", _EXPECT, f"{_EXPECT} - 128", "expect_tx: 128 bytes more", _LOADS, True),
    Bug("long expect_tx", _EXPECT, f"{_EXPECT} + 16", "deadlock: .*0 of 1 arrivals and 16 bytes are pending",
        (_LANDED,), True),
    Bug("missing empty wait", _FREE, "", _NO_PRODUCER_WAIT, (*_LOADS, _WGMMA, "mbarrier_arrive_expect_tx")),
    Bug("missing full wait", _LANDED, "", "uninitialised|in flight: .*reads by wgmma", (_WGMMA,)),
    Bug("missing wgmma wait", _DONE, "", "in flight: .*(reads registers|overwrites by a bulk copy)",
        ("pack2<bf16>(", *_LOADS)),
    Bug("stage released before the wgmma wait", f"{_DONE}\n      {_RELEASE}", f"{_RELEASE}\n      {_DONE}",
        "in flight: .*overwrites by a bulk copy.*wgmma by warpgroup", _LOADS),
    Bug("missing commit", "      wgmma_commit_group();\n", "", "in flight: .*registers|in flight: .*overwrites",
        ("pack2<bf16>(", *_LOADS)),
    Bug("missing wgmma fence", "      wgmma_fence();\n", "", "wgmma by warpgroup .*no wgmma.fence", (_WGMMA,), True),
    Bug("wrong stride offset", "smem_u32(smem.b[stage]), 0, 1024", "smem_u32(smem.b[stage]), 0, 512",
        "wgmma .*operand B: descriptor .*has a stride", (_WGMMA,), True),
    Bug("stride offset of another layout", "smem_u32(smem.b[stage]), 0, 1024", "smem_u32(smem.b[stage]), 0, 4096",
        "uninitialised|in flight|race", (_WGMMA,)),
    Bug("operand start between the swizzle's repeats", "smem.a[stage][group * 64]", "smem.a[stage][group * 64 + 4]",
        "wgmma .*operand A: descriptor .*has a start", (_WGMMA,), True),
    Bug("missing proxy fence", _FENCE, "",
        "async proxy: .*reads by a bulk store.*wrote there at .*no fence.proxy.async", ("_2d_s2g(&c_map",)),
    Bug("proxy fence after the barrier", f"{_FENCE}\n    bar_sync(1 + group, WARPGROUP);",
        f"bar_sync(1 + group, WARPGROUP);\n    {_FENCE}", "async proxy: ", ("_2d_s2g(&c_map",)),
    Bug("missing barrier before the store", f"{_FENCE}\n    bar_sync(1 + group, WARPGROUP);", _FENCE,
        "race: .*reads by a bulk store|uninitialised", ("_2d_s2g(&c_map",)),
    Bug("missing wait before the tile is overwritten", _LEFT, "",
        "in flight: .*writes .*bulk store by .*reads there", ("stmatrix_x4(",)),
    Bug("missing barrier after that wait", f"{_LEFT}\n    bar_sync(1 + group, WARPGROUP);", _LEFT,
        "in flight: .*writes .*bulk store by", ("stmatrix_x4(",)),
    Bug("store that nobody waits for", "if (warp % 4 == 0 && lane == 0) cp_async_bulk_wait_group<0>();", "",
        "in flight: .*exits, and did not wait until its bulk store was read", ("_2d_s2g(&c_map",), True),
    Bug("one arrival too few", "CONSUMERS * 4);", "CONSUMERS * 4 + 1);",
        r"deadlock: .*1 of 9 arrivals and 0 bytes are pending", (_FREE,), True),
    Bug("an arrival of every lane", _RELEASE, _RELEASE.replace("if (lane == 0) ", ""),
        "mbarrier: .*arrives where none is expected|in flight|race|deadlock", (_RELEASE[16:], *_LOADS, _FREE)),
    Bug("missing fence of the barriers", "    fence_mbarrier_init();\n", "",
        "without fence.mbarrier_init or fence.proxy.async after", _LOADS, True),
    Bug("barriers used before they are made", "__syncthreads();  // the barriers are there", "",
        "no mbarrier was made|race: mbarrier.try_wait .*made it at", (_FREE, _LANDED)),
    Bug("an mbarrier overwritten", "  int turn = 0;\n  for",
        "  if (lane == 0) smem.full[1] = 0;\n  int turn = 0;\n  for",
        "mbarrier: .*writes 8 bytes .*where the mbarrier is that was made at", ("smem.full[1] = 0",)),
    Bug("more registers than there are", "setmaxnreg_inc<208>", "setmaxnreg_inc<240>",
        "setmaxnreg: .*520 registers .*at most 504", ("setmaxnreg_",), True),
    Bug("a warp that skips a wgmma", "      for (int i = 0; i < BK / 16; ++i)\n",
        "      for (int i = warp % 4 == 3; i < BK / 16; ++i)\n",
        "divergence within a warpgroup|deadlock|divergence", (_WGMMA, _LANDED, "wgmma_commit_group", _FREE), True),
    Bug("a wait that some warps skip", f"      {_DONE}\n",
        f"      if (warp % 4 == 1) wgmma_wait_group<0>();\n      {_DONE}\n",
        "divergence within a warpgroup: .*, warp 0 .* goes on at .*, and warp 1 at ", ("if (warp % 4 == 1)",), True),
    Bug("a tensor that is larger than its buffer", "args->a, {k, m}", "args->a, {k, m + 9}",
        "out of bounds: .*reads .* bytes (before|from) the start of [abc]", _LOADS),
    Bug("a copy from between 16 bytes", "&a_map, k * BK,", "&a_map, k * BK + 4,",
        "from coordinate 4 of elements of 2 bytes, which is no multiple of 16 bytes", _LOADS, True),
    Bug("a store from before the tensor", "smem.c[group]), tile % tiles_n * BN,",
        "smem.c[group]), tile % tiles_n * BN - 8,", "stores from coordinate -8 of dimension 0, which is negative",
        ("_2d_s2g(&c_map",), True),
    Bug("a map's box beyond the swizzle", "{BK, BN}, Swizzle::b128", "{BK * 2, BN}, Swizzle::b128",
        "tensor map: a row of the box must not be longer than the swizzle", (), True),
]  # fmt: skip


def _is_found(
    bug: Bug, folder: Path, check: bool, seed: int, original: Step = PRODUCT, run: Callable[..., object] = product
) -> None:
    step = bug.plant(folder, original)
    text = report_of(lambda: run(step, check=check, seed=seed))
    assert re.search(bug.says, text), text
    lines = {i for i, line in enumerate(step.source.split("\n"), 1) if any(part in line for part in bug.at)}
    named = {int(n) for n in re.findall(rf"{step.path.name}:(\d+)", text)}
    assert named & lines or not bug.at, f"none of the lines {sorted(lines)} is named: {text}"


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    for seed in range(3):
        _is_found(bug, tmp_path, True, seed)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.fast], ids=str)
def test_planted_bug_is_found_in_fast_mode(bug: Bug, tmp_path: Path) -> None:
    for seed in range(3):
        _is_found(bug, tmp_path, False, seed)


@pytest.mark.parametrize(
    "name",
    ["wrong phase of the consumer", "missing full wait", "missing wgmma wait", "missing empty wait",
     "stride offset of another layout"],
)  # fmt: skip
def test_fast_mode_shows_a_planted_bug_in_the_result(name: str, tmp_path: Path) -> None:
    step = next(bug for bug in BUGS if bug.name == name).plant(tmp_path)
    wrong = 0
    for seed in range(6):
        try:
            product(step, check=False, seed=seed)
        except (AssertionError, KernelError):
            wrong += 1
    assert wrong == 6


# ---- clusters --------------------------------------------------------------------------------------------------------

_MADE = "barrier_cluster_wait();  // the barriers are there, in both"
_TELL = "mbarrier_arrive_cluster(mapa_shared_cluster(empty, block))"
_FREE_WAIT = "      mbarrier_wait(empty, turn % 2 ^ 1);  // both have read the tile\n"
_SENT = "fence_proxy_async_shared();  // the copy may read them"
_OVER = "  barrier_cluster_arrive();\n  mbarrier_wait_cluster(smem_u32(&smem.arrived), 0);"
_REMOTE = (
    "ld_shared_cluster_u32(",
    "ld_shared_cluster_v4_f32(",
    "st_shared_cluster_u32(",
    "st_shared_cluster_v4_f32(",
    "mbarrier_arrive_cluster(",
    "mbarrier_arrive_shared_cluster(",
    "smem.words[thread] +",
)
_MULTICAST = ("cp_async_bulk_tensor_2d_multicast(",)

CLUSTER_BUGS = [
    Bug("no barrier before the first use", f"  barrier_cluster_arrive();\n  {_MADE}", "  __syncthreads();",
        "no mbarrier was made|race: .*made it at", (*_MULTICAST, *_REMOTE)),
    Bug("only its own block is told", _TELL, "if (block == rank) mbarrier_arrive_cluster(empty)",
        r"deadlock: .*64 of 128 arrivals and 0 bytes", ("both have read the tile",), True),
    Bug("multicast to a block that is not there", "full, 3);", "full, 7);", "to the blocks 0x7 of a cluster of 2",
        _MULTICAST, True),
    Bug("multicast to one block only", "full, 3);", "full, 1 << rank);", "deadlock: .*2048 bytes are pending",
        ("both halves have landed",), True),
    Bug("missing wait for the tile to be read", _FREE_WAIT, "",
        "(in flight|race): .*overwrites by a bulk copy|arrives where none is expected|expect_tx",
        (*_MULTICAST, "mbarrier_arrive_expect_tx(full")),
    Bug("missing proxy fence", _SENT, "", "async proxy: .*reads by a bulk copy", ("cp_async_bulk_s2s(",)),
    Bug("arrival that orders nothing", _OVER, _OVER.replace("arrive()", "arrive_relaxed()"),
        "race: .*|uninitialised: ", _REMOTE),
    Bug("an address of another block where its own must be", _TELL, _TELL.replace("_cluster", "", 1),
        "mbarrier.arrive .*where only the thread's own may be",
        ("mbarrier_arrive(mapa",), True),
    Bug("a block that leaves early",
        "  barrier_cluster_arrive_relaxed();\n  barrier_cluster_wait();  // nobody reads here any more\n", "",
        "which has exited", _REMOTE, True),
    Bug("a wait without an arrival", f"  barrier_cluster_arrive();\n  {_MADE}", f"  {_MADE}",
        "waits at barrier.cluster without having arrived", (_MADE,), True),
]  # fmt: skip


@BOTH_MODES
def test_cluster_is_clean_and_right_in_any_order(check: bool) -> None:
    for seed in range(15):
        cluster(check=check, seed=seed)


@pytest.mark.parametrize("bug", CLUSTER_BUGS, ids=str)
def test_planted_bug_of_the_cluster_is_found(bug: Bug, tmp_path: Path) -> None:
    if bug.name == "a block that leaves early":  # in some order of the blocks
        step, found = bug.plant(tmp_path, CLUSTER), set()
        for seed in range(30):
            try:
                cluster(step, check=True, seed=seed)
            except KernelError as error:
                found.add(bool(re.search(bug.says, error.text)))
        assert found == {True}
        return
    for check in (True, False) if bug.fast else (True,):
        for seed in range(3):
            _is_found(bug, tmp_path, check, seed, CLUSTER, cluster)


def test_limits_of_clusters(tmp_path: Path) -> None:
    def changed(find: str, replace: str) -> str:
        folder = tmp_path / replace
        folder.mkdir()
        step = Bug("limit", find, replace, "", ()).plant(folder, CLUSTER)
        return report_of(lambda: cluster(step, check=False))

    assert "not made of clusters of (4, 1, 1)" in changed("cluster(BLOCKS)", "cluster(4)")
    assert "invalid cluster size: (16, 1, 1)" in changed("cluster(BLOCKS)", "cluster(16)")
    assert "up to 1024 together" in changed("THREADS, sizeof(Smem)", "544, sizeof(Smem)")


def test_architecture_without_the_instruction(tmp_path: Path) -> None:
    for step, run in ((PRODUCT, product), (CLUSTER, cluster)):
        path = tmp_path / step.path.name
        path.write_text(step.source, encoding="utf-8")
        old = dataclasses.replace(step, op="planted", path=path, architectures=("sm_89",))
        text = report_of(lambda old=old, run=run: run(old, check=False))  # type: ignore[misc]
        assert re.search("on sm_89, which has none|invalid cluster size", text), text


def test_register_operand_that_is_rewritten_in_flight(tmp_path: Path) -> None:
    original = record.step()
    source = original.source.replace("const uint32_t a_regs[4]", "uint32_t a_regs[4]")
    at = "  a_regs[threadIdx.x % 4] = 0;"
    path = tmp_path / "rewritten.cu"
    path.write_text(
        source.replace("  wgmma_commit_group();\n", f"  wgmma_commit_group();\n{at}\n", 1), encoding="utf-8"
    )
    step = dataclasses.replace(original, op="planted", path=path)
    name = "wgmma_bf16_64_r_k_k"
    text = report_of(lambda: record.run(name, record.trials(name)[0], check=True, of=step))
    line = path.read_text().split("\n").index(at) + 1
    assert re.search(rf"in flight: .*writes registers at rewritten.cu:{line}|in flight: .*rewritten.cu:{line}", text), (
        text
    )


@pytest.mark.parametrize(
    ("find", "replace", "says", "at"),
    [
        ("    mbarrier_wait(barrier, turn);\n", "    if (thread < 64) mbarrier_wait(barrier, turn);\n",
         "uninitialised|in flight: .*reads .*while a cp.async|race: .*cp.async", "THREADS - 1 - thread"),
        ("    cp_async_mbarrier_arrive_noinc(barrier);\n", "    mbarrier_arrive(barrier);\n",
         "in flight: .*reads .*while a cp.async", "THREADS - 1 - thread"),
    ],
    ids=["some threads do not wait", "an arrival that does not await the copies"],
)  # fmt: skip
def test_planted_bug_of_an_arrival_after_copies_is_found(
    find: str, replace: str, says: str, at: str, tmp_path: Path
) -> None:
    step = Bug("arrival", find, replace, "", ()).plant(tmp_path, record.step())
    trial = record.trials("cp_async_arrive")[0]
    for seed in range(5):
        text = report_of(lambda seed=seed: record.run("cp_async_arrive", trial, check=True, seed=seed, of=step))  # type: ignore[misc]
        lines = [i for i, line in enumerate(step.source.split("\n"), 1) if at in line]
        assert re.search(says, text) and any(f"05_hopper_conformance.cu:{line}" in text for line in lines), text
