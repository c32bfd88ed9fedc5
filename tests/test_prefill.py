"""Every prefill step on inputs that broke software of this kind; the right values follow from arithmetic.

COUNT: with q = 0 the LSE is the log of the number of keys seen. MEAN: with q = 0 and V[j] = j the output is the mean
index seen. MASK: with q = 0 and V[j] = one-hot(j) the nonzero columns are the keys seen.
"""

from __future__ import annotations

import ctypes
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mila_kernels import build, outputs, parity, reference, steps
from mila_kernels.attention import PrefillArgs, prefill

STEPS = [step.id for step in steps.steps("prefill")]
BOUNDS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAN, INF = math.nan, math.inf

every_step = pytest.mark.parametrize("step", STEPS)


def dim(step: str, head_dim: int) -> int:
    """The head dim that a test asks for, or the next larger one that the step takes."""
    return min(d for d in steps.step(step).head_dims if d >= head_dim)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """All steps, both ways, compiled side by side: the tests then find them in the cache."""
    with ThreadPoolExecutor(2) as pool:
        both = [(steps.step(step), check) for step in STEPS for check in (False, True)]
        list(pool.map(lambda one: build.load(one[0], "emulation", check=one[1]), both))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: object = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def indices(kv_len: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """V[j] = j in every column, one sequence and head."""
    j = torch.arange(kv_len, dtype=torch.bfloat16, device=device)
    return j.view(1, kv_len, 1, 1).expand(1, kv_len, 1, head_dim).contiguous()


def zeros(tokens: int, head_dim: int, device: torch.device, heads: int = 1) -> torch.Tensor:
    return torch.zeros(1, tokens, heads, head_dim, dtype=torch.bfloat16, device=device)


def assert_right(out: tuple[torch.Tensor, ...], ref: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    for name, a, b, bound in zip(("O", "LSE"), out, ref, (BOUNDS[dtype], 1e-5), strict=True):
        found = parity.compare(a, b, bound)
        assert found.passed, (name, found)


def check_random(
    step: str, device: torch.device, *, batch: int = 1, q_len: int, kv_len: int, q_heads: int = 2, kv_heads: int = 1,
    head_dim: int | None = None, dtype: torch.dtype = torch.bfloat16, causal: bool = True, window: int | None = None,
    scale: float | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Against float64, as strided views with NaN around them, the outputs between guard zones."""
    head_dim = dim(step, head_dim or 64)
    inputs = {
        "q": normal(batch, q_len, q_heads, head_dim, dtype=dtype, seed=seed, device=device),
        "k": normal(batch, kv_len, kv_heads, head_dim, dtype=dtype, seed=seed + 1, device=device),
        "v": normal(batch, kv_len, kv_heads, head_dim, dtype=dtype, seed=seed + 2, device=device),
    }
    mask = {"causal": causal, "window": window, "scale": scale}
    views, changed_inputs = parity.poison(inputs, seed)
    with outputs.guarding() as changed_guards:
        out = prefill(**views, **mask, step=step, return_lse=True)
    assert_right(out, reference.attention(**inputs, **mask), dtype)
    assert changed_inputs() == 0 and changed_guards() == 0


# ---- any shape ----


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("step", "head_dim"), [(step, d) for step in STEPS for d in steps.step(step).head_dims])
def test_every_head_dim_and_dtype(step, head_dim, dtype, device):
    check_random(step, device, q_len=19, kv_len=40, q_heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("head_dim", range(64, 513, 32))
@pytest.mark.parametrize("order", ["01", "02"])
def test_multiples_of_32_in_check_mode(order, head_dim):
    """The kernel's own head dim is the next power of two: nothing beyond head_dim may be read, written or counted."""
    step = steps.step(f"prefill/{order}")
    assert head_dim in step.head_dims
    with build.emulation(check=True, seed=head_dim):
        check_random(step.id, torch.device("cpu"), q_len=18, kv_len=35, q_heads=3, head_dim=head_dim, seed=head_dim)


def test_the_default_takes_any_multiple_of_32(device):
    for head_dim in (96, 160, 480):
        q, k, v = (normal(1, n, 2, head_dim, seed=n, device=device) for n in (3, 9, 9))
        assert_right(prefill(q, k, v, return_lse=True), reference.attention(q, k, v), torch.bfloat16)
    with pytest.raises(ValueError, match="q: head_dim 80 must be one of 64, 96, 128, 160, 192"):
        prefill(*(normal(1, 3, 2, 80) for _ in range(3)))


@every_step
def test_a_long_prompt(step, device, large):
    d = dim(step, 128)
    tokens, heads = (4000, 8) if large else (150, 2)
    for window in (None, tokens // 4):
        check_random(step, device, q_len=tokens, kv_len=tokens, q_heads=heads, head_dim=d, window=window)
    check_random(step, device, q_len=100, kv_len=16 * tokens if large else tokens, q_heads=heads, head_dim=d)


@every_step
def test_not_causal_and_mqa(step, device):
    check_random(step, device, q_len=5, kv_len=37, q_heads=3, kv_heads=1, head_dim=128, causal=False)


@every_step
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.1])
def test_any_finite_scale(step, scale, device):
    check_random(step, device, q_len=17, kv_len=40, scale=scale)


@every_step
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    q_len=st.integers(0, 70), kv_len=st.integers(0, 90), group=st.integers(1, 5), kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from((64, 64, 128, 128, 256, 512)), window=st.none() | st.integers(1, 100),
    batch=st.integers(0, 2), dtype=st.sampled_from(list(BOUNDS)), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(step, device, q_len, kv_len, group, kv_heads, head_dim, window, batch, dtype, seed):
    check_random(step, device, batch=batch, q_len=q_len, kv_len=kv_len, q_heads=group * kv_heads, kv_heads=kv_heads,
                 head_dim=head_dim, window=window, dtype=dtype, seed=seed)  # fmt: skip


@every_step
def test_transposed_strides(step, device):
    """[batch, heads, tokens, head_dim] in memory, as torch's own attention has it."""
    d = dim(step, 64)
    q, k, v = (normal(2, heads, n, d, seed=heads + n, device=device) for heads, n in ((4, 33), (2, 50), (2, 50)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert_right(prefill(q, k, v, step=step, return_lse=True), reference.attention(q, k, v), torch.bfloat16)


# ---- chunks with an offset ----


@every_step
def test_mean_of_a_chunk(step, device):
    o, lse = prefill(
        zeros(3, 512, device), normal(1, 8, 1, 512, device=device), indices(8, 512, device), step=step, return_lse=True
    )
    assert torch.equal(o.cpu().float(), torch.tensor([2.5, 3.0, 3.5]).view(1, 3, 1, 1).expand(1, 3, 1, 512))
    torch.testing.assert_close(lse.cpu().flatten(), torch.tensor([6.0, 7.0, 8.0]).log(), atol=1e-6, rtol=0)


@every_step
@pytest.mark.parametrize("cut", [(128, 72), (64, 64, 72), (199, 1), (1,) * 200], ids=lambda cut: f"{len(cut)}x{cut[0]}")
def test_a_prompt_in_chunks(step, cut, device):
    q, k, v = (normal(1, 200, 1, dim(step, 64), seed=seed, device=device) for seed in range(3))
    whole, whole_lse = prefill(q, k, v, step=step, return_lse=True)
    ends = torch.tensor(cut).cumsum(0).tolist()
    parts = [
        prefill(q[:, end - n : end], k[:, :end], v[:, :end], step=step, return_lse=True)
        for n, end in zip(cut, ends, strict=True)
    ]
    o, lse = (torch.cat([part[i] for part in parts], dim=i + 1) for i in range(2))
    assert parity.compare(o, whole.double(), BOUNDS[torch.bfloat16]).passed
    torch.testing.assert_close(lse, whole_lse, atol=2e-6, rtol=2e-6)


@every_step
@pytest.mark.parametrize(("q_len", "window"), [(200, None), (72, None), (200, 33)])
def test_mask_of_every_row(step, q_len, window, device):
    kv_len, d = 200, dim(step, 256)
    v = torch.eye(kv_len, d, dtype=torch.bfloat16, device=device).view(1, kv_len, 1, d)
    q, k = zeros(q_len, d, device), normal(1, kv_len, 1, d, device=device)
    o, lse = prefill(q, k, v, step=step, window=window, return_lse=True)
    position = torch.arange(kv_len - q_len, kv_len).view(-1, 1)
    key = torch.arange(d).view(1, -1)
    seen = (key <= position) & (key > position - (window or kv_len))
    assert torch.equal(o[0, :, 0].cpu() != 0, seen)
    torch.testing.assert_close(lse[0, 0].cpu(), seen.sum(1).float().log(), atol=2e-6, rtol=1e-6)


# ---- what is dead must not matter, what lives must ----


@every_step
@pytest.mark.parametrize("value", [NAN, INF])
def test_keys_that_no_query_sees(step, value, device):
    q_len, kv_len, window, d = 20, 90, 16, dim(step, 128)
    dead = kv_len - q_len - window + 1
    q, k, v = normal(1, q_len, 2, d), normal(1, kv_len, 1, d, seed=1), normal(1, kv_len, 1, d, seed=2)
    k[:, :dead], v[:, :dead] = 0.0, 0.0
    q, k, v = (x.to(device) for x in (q, k, v))
    clean = prefill(q, k, v, step=step, window=window, return_lse=True)
    for bad_k, bad_v in ((True, False), (False, True), (True, True)):
        dirty_k, dirty_v = k.clone(), v.clone()
        if bad_k:
            dirty_k[:, :dead] = value
        if bad_v:
            dirty_v[:, :dead] = value
        dirty = prefill(q, dirty_k, dirty_v, step=step, window=window, return_lse=True)
        assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])


@every_step
def test_nan_in_a_live_key_is_not_hidden(step, device):
    for spoiled in range(2):
        q, k, v = (normal(1, n, 1, dim(step, 64), seed=seed) for seed, n in enumerate((3, 40, 40)))
        (k, v)[spoiled][0, 36] = NAN
        o = prefill(q.to(device), k.to(device), v.to(device), step=step)
        assert bool(o.isnan().all())


# ---- windows ----


@every_step
def test_the_current_key_counts(step, device):
    d = dim(step, 256)
    o, lse = prefill(
        zeros(10, d, device), normal(1, 10, 1, d, device=device), indices(10, d, device),
        window=4, step=step, return_lse=True,
    )  # fmt: skip
    assert bool((o[0, -1] == 7.5).all())
    assert lse[0, 0, -1].item() == pytest.approx(1.386294, abs=1e-5)


@every_step
@pytest.mark.parametrize(("length", "seen"), [(5, 5), (1023, 1023), (1024, 1024), (1025, 1024)])
def test_a_window_of_1024(step, length, seen, device):
    q, k = zeros(2, dim(step, 64), device), normal(1, length, 1, dim(step, 64), device=device)
    _, lse = prefill(q, k, k, window=1024, step=step, return_lse=True)
    assert lse[0, 0, -1].exp().item() == pytest.approx(seen, rel=1e-5)


@every_step
@pytest.mark.parametrize("window", [33, 10**9])
def test_a_window_that_holds_everything(step, window, device):
    q, k, v = (normal(1, n, 1, dim(step, 64), seed=n, device=device) for n in (20, 33, 33))
    assert torch.equal(prefill(q, k, v, window=window, step=step), prefill(q, k, v, step=step))


@every_step
@pytest.mark.parametrize("window", [0, -1])
def test_no_window_is_not_zero(step, window):
    x = normal(1, 4, 1, dim(step, 64))
    with pytest.raises(ValueError, match=rf"window: {window} must be positive"):
        prefill(x, x, x, window=window, step=step)


# ---- rows that see nothing ----


@every_step
def test_more_queries_than_keys(step, device):
    v = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device).view(1, 2, 1, 1).expand(1, 2, 1, 512).contiguous()
    o, lse = prefill(zeros(4, 512, device), normal(1, 2, 1, 512, device=device), v, step=step, return_lse=True)
    assert torch.equal(o.cpu().float(), torch.tensor([0.0, 0.0, 1.0, 1.5]).view(1, 4, 1, 1).expand(1, 4, 1, 512))
    assert lse[0, 0, :2].tolist() == [-INF, -INF]
    assert lse[0, 0, 2:].tolist() == pytest.approx([0.0, 0.693147], abs=1e-6)


@every_step
def test_no_keys_and_no_queries(step, device):
    d = dim(step, 128)
    none, some = zeros(0, d, device), normal(1, 20, 1, d, device=device)
    o, lse = prefill(some, none, none, step=step, return_lse=True)
    assert bool((o == 0).all()) and bool((lse == -INF).all())
    o, lse = prefill(none, some, some, step=step, return_lse=True)
    assert o.shape == (1, 0, 1, d) and lse.shape == (1, 1, 0)


@every_step
def test_a_tile_of_empty_rows(step, device):
    k, v = (normal(1, 3, 1, dim(step, 64), seed=seed, device=device) for seed in (1, 2))
    q = normal(1, 200, 1, dim(step, 64), device=device)
    o, lse = prefill(q, k, v, step=step, return_lse=True)
    assert bool((o[:, :197] == 0).all()) and bool((lse[:, :, :197] == -INF).all())
    assert_right((o, lse), reference.attention(q, k, v), torch.bfloat16)


# ---- check mode ----


@every_step
@pytest.mark.parametrize("seed", range(3))
def test_check_mode_finds_nothing(step, seed):
    shape = [
        {"q_len": 35, "kv_len": 75, "head_dim": 64},
        {"q_len": 18, "kv_len": 66, "head_dim": 128, "window": 40, "dtype": torch.float16, "batch": 2},
        {"q_len": 20, "kv_len": 40, "head_dim": 512, "q_heads": 1},
    ][seed]
    with build.emulation(check=True, seed=seed):
        check_random(step, torch.device("cpu"), seed=seed, **shape)


@dataclass(frozen=True)
class Bug:
    """A change of a step, what check mode must say of it, and a part of the line (after the change) it must name."""

    name: str
    source: str
    find: str
    replace: str
    says: str
    at: str


K_BARRIER = "    __syncthreads();  // K is there, and the last tile of V, or Q, has been read\n"
LOAD_V = """\
    load_tile_async<T, HS>(smem.v, args.v, args.v_stride, batch, tile, kv_head, min(Bc, block_keys.end - tile));
"""
BUGS = [
    Bug("ldmatrix with a generic address", "08_ldmatrix",
        "smem_u32(&smem.k[n + tile_row()][first_column + k * 16 + tile_column()])",
        "reinterpret_cast<uintptr_t>(&smem.k[n + tile_row()][first_column + k * 16 + tile_column()])",
        "ldmatrix .*a generic address, cut to 32 bits", "reinterpret_cast<uintptr_t>"),
    Bug("no barrier after the copy of K", "05_cp_async", K_BARRIER, "", "race: .*cp.async", "smem."),
    Bug("V overwritten while it is read", "05_cp_async", "    cp_async_wait_all();\n" + K_BARRIER + LOAD_V,
        LOAD_V + "    cp_async_wait_all();\n    __syncthreads();\n", "race: .*overwrites by cp.async",
        "cp_async_cg_zfill("),
    Bug("V not waited for", "08_ldmatrix", "cp_async_wait_group<1>();", "cp_async_wait_group<2>();", "in flight: ",
        "ldmatrix_x4_trans("),
    Bug("P not waited for", "07_softmax_spread", "    __syncthreads();  // P and V are there\n", "",
        "uninitialised: .*which nobody wrote|race: ", "smem."),
]  # fmt: skip


# One element type and head dim of the eight: a quarter of a minute less to compile, and no line moves.
ONE_KERNEL = (
    "template <typename F> const char* one(const PrefillArgs&, F f) { return f.template operator()<bf16, 64>(); }"
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    text = steps.step(f"prefill/{bug.source}").source
    assert text.count(bug.find) == 1
    text = text.replace(bug.find, bug.replace).replace('"args.cuh"\n\n', f'"args.cuh"\n{ONE_KERNEL}\n')
    text = text.replace("dispatch(*args", "one(*args")
    path = tmp_path / f"{bug.source}.cu"
    path.write_text(text.replace('"../ptx.cuh"', '"ptx.cuh"').replace('"args.cuh"', '"prefill/args.cuh"'))
    with pytest.raises(build.KernelError) as caught:
        launch_source(path)
    report = caught.value.text
    assert re.search(bug.says, report), report
    lines = {i for i, line in enumerate(text.split("\n"), 1) if bug.at in line}
    named = {int(n) for n in re.findall(rf"{bug.source}\.cu:(\d+)", report)}
    assert named & lines, f"lines {sorted(lines)} are not among those of: {report}"


def launch_source(path: Path) -> None:
    """Run a source that is no registered step, in check mode, on four tiles of keys."""
    q, k, v = normal(1, 20, 2, 64), normal(1, 100, 1, 64, seed=1), normal(1, 100, 1, 64, seed=2)
    o = torch.empty_like(q)
    args = PrefillArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr(), lse=None, batch=1, q_len=20, kv_len=100,
        q_heads=2, kv_heads=1, head_dim=64, causal=1, window=0, dtype=0, scale=0.125,
    )  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    step = steps.Step(op="prefill", order=1, name=path.stem, path=path)
    with build.emulation(check=True, seed=0):
        build.launch(step, args, torch.device("cpu"), reads={"q": q, "k": k, "v": v}, writes={"o": o})
