"""Quantisers, layouts of weights and reading them from files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mila_kernels import linear
from mila_kernels.layouts import FP4_LAYOUTS
from mila_kernels.linear import FP4_MAGNITUDES, Fp4Weight, quantize_fp4, quantize_fp8
from mila_kernels.weight_files import load_weight, weight_names

FP4_VALUES = torch.tensor([*FP4_MAGNITUDES, *(-m for m in FP4_MAGNITUDES)], dtype=torch.float64)
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def random_weight(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The distance to the nearest value of a grid."""
    return (values[..., None] - grid).abs().amin(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_fp4_codes_are_the_nearest(dtype: torch.dtype, scale_dtype: torch.dtype, group_size: int) -> None:
    w = random_weight(9, 512, dtype=dtype)
    q = quantize_fp4(w, group_size, scale_dtype)
    assert q.codes.shape == (9, 256) and q.scales.shape == (9, 512 // group_size) and q.scales.dtype == scale_dtype
    absmax = w.double().view(9, -1, group_size).abs().amax(-1)
    assert torch.equal(q.scales, (absmax / 6).float().to(scale_dtype))
    scale = q.scales.double().repeat_interleave(group_size, 1)
    error = (w.double() / scale - q.dequantize(torch.float64) / scale).abs()
    assert torch.allclose(error, nearest(w.double() / scale, FP4_VALUES), rtol=1e-3, atol=1e-6)


def test_fp4_rounds_ties_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = torch.zeros(2, 128)
    w[0, :8] = torch.tensor([*ties, 6.0])
    w[1, :8] = -torch.tensor([*ties, 6.0])
    got = quantize_fp4(w).dequantize()[:, :8]
    assert got[0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert torch.equal(got[1], -got[0])


def test_fp4_even_column_is_the_low_nibble() -> None:
    w = torch.zeros(1, 128)
    w[0, :4] = torch.tensor([6.0, -0.5, 3.0, 1.0])
    assert quantize_fp4(w).codes[0, :2].tolist() == [0x7 | 0x9 << 4, 0x5 | 0x2 << 4]


def test_groups_of_zeros_and_of_mixed_magnitudes(device: torch.device) -> None:
    w = torch.zeros(3, 256, device=device)
    w[1, 128:] = 1.5
    w[2] = 1.5
    w[2, 5] = 6e4
    q = quantize_fp4(w)
    assert bool(torch.isfinite(q.scales).all()) and bool((q.scales > 0).all())
    assert q.dequantize()[0].abs().max() == 0 and torch.equal(q.dequantize()[1], w[1])
    assert bool(torch.isfinite(q.dequantize()).all())


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_any_finite_magnitude_stays_finite(magnitude: float) -> None:
    w = random_weight(4, 256).clamp(-1, 1) * magnitude
    for q in (quantize_fp4(w), quantize_fp4(w, scale_dtype=torch.bfloat16), quantize_fp8(w)):
        back = q.dequantize(torch.float64)
        assert bool(torch.isfinite(back).all())
        if magnitude >= 1e-30:
            assert (back - w.double()).norm() < 0.13 * w.double().norm()
        else:  # the scale is at its least, 2^-126, and an error at most half of the smallest step
            assert (back - w.double()).abs().max() <= 2.0**-126


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-120, 120))
def test_fp4_bounds_hold_at_any_exponent(seed: int, exponent: int) -> None:
    w = random_weight(2, 128, seed) * 2.0**exponent
    q = quantize_fp4(w)
    assert ((q.dequantize(torch.float64) - w.double()).abs() <= q.scales.double() * (1 + 1e-6)).all()


def test_fp8_codes_are_the_nearest() -> None:
    w = random_weight(7, 384)
    w[3] = 0
    q = quantize_fp8(w)
    scale = q.scales.double()[:, None]
    assert torch.equal(q.scales[[0, 6]], (w[[0, 6]].double().abs().amax(1) / 448).float())
    scaled = w.double() / scale
    grid = E4M3_VALUES[torch.isfinite(E4M3_VALUES)]
    assert torch.allclose(
        (q.dequantize(torch.float64) / scale - scaled).abs(), nearest(scaled, grid), rtol=1e-3, atol=1e-9
    )
    assert q.dequantize()[3].abs().max() == 0


def test_fp8_rounds_ties_to_even_also_among_subnormals() -> None:
    values = torch.tensor([448.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 0.0, -(2.0**-10)])
    w = torch.zeros(1, 128)
    w[0, :8] = values
    assert quantize_fp8(w).dequantize()[0, :8].tolist() == [448.0, 1.0, 1.25, 0.0, 2.0**-8, 2.0**-9, 0.0, 0.0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CPU and GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_and_gpu_agree(dtype: torch.dtype) -> None:
    w = torch.cat([random_weight(64, 1024, seed=s) * 10.0**s for s in range(-30, 30, 6)]).to(dtype)
    for quantize in (quantize_fp4, quantize_fp8):
        cpu, gpu = quantize(w), quantize(w.cuda())
        assert torch.equal(cpu.codes, gpu.codes.cpu()) and torch.equal(cpu.scales, gpu.scales.cpu())


@pytest.mark.parametrize("n", [1, 16, 40])
@pytest.mark.parametrize("layout", list(FP4_LAYOUTS))
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp4_layouts_lose_nothing(n: int, layout: str, scale_dtype: torch.dtype) -> None:
    q = quantize_fp4(random_weight(n, 384), scale_dtype=scale_dtype)
    shuffled = q.in_layout(layout)
    assert shuffled.layout == layout and shuffled.shape == (n, 384)
    assert torch.equal(shuffled.dequantize(), q.dequantize())
    back = shuffled.in_layout("rows")
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scales, q.scales)
    assert q.in_layout(layout) is shuffled, "made once"


def test_every_word_folds_and_unfolds() -> None:
    words = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(0))
    for layout in FP4_LAYOUTS.values():
        assert torch.equal(layout.pack(layout.unpack(words)), words)


@pytest.mark.parametrize("n", [1, 16, 40])
def test_fp8_layout_loses_nothing(n: int) -> None:
    q = quantize_fp8(random_weight(n, 384))
    shuffled = q.in_layout("fragments")
    assert torch.equal(shuffled.dequantize(), q.dequantize())
    assert torch.equal(shuffled.in_layout("rows").codes, q.codes)


def test_layouts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_weight(100, 256)
    whole4, whole8 = quantize_fp4(w), quantize_fp8(w)
    want = whole4.in_layout("folded").codes
    monkeypatch.setattr(linear, "CHUNK", 4096)
    assert torch.equal(quantize_fp4(w).codes, whole4.codes) and torch.equal(quantize_fp8(w).codes, whole8.codes)
    assert torch.equal(quantize_fp4(w).in_layout("folded").codes, want)
    assert torch.equal(quantize_fp4(w).in_layout("folded").dequantize(), whole4.dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    w = random_weight(5, 384)
    w[3, 300] = bad
    for quantize in (quantize_fp4, quantize_fp8):
        with pytest.raises(ValueError, match=rf"row 3, group 2 \(columns 256 to 383\) holds {bad}"):
            quantize(w)


def test_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="200 .* 128"):
        quantize_fp4(torch.full((3, 200), 1.5))
    with pytest.raises(ValueError, match="200 .* 128"):
        quantize_fp8(torch.full((3, 200), 1.5))
    with pytest.raises(ValueError, match="group_size: 100 must be one of 32, 64, 128, 256"):
        quantize_fp4(torch.ones(3, 200), 100)
    with pytest.raises(ValueError, match="group_size"):
        quantize_fp4(torch.ones(3, 256), 0)
    with pytest.raises(ValueError, match="scale_dtype"):
        quantize_fp4(torch.ones(3, 256), scale_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"w: dtype torch.int32"):
        quantize_fp4(torch.ones(3, 256, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 dims"):
        quantize_fp8(torch.ones(256))
    with pytest.raises(ValueError, match="empty"):
        quantize_fp4(torch.ones(0, 256))
    with pytest.raises(TypeError, match="w: a torch.Tensor"):
        quantize_fp4([[1.0] * 128])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group_size 64 must be 128"):
        quantize_fp4(torch.ones(3, 256), 64).in_layout("folded")
    with pytest.raises(ValueError, match="layout: 'columns'"):
        quantize_fp4(torch.ones(3, 256)).in_layout("columns")


def test_weights_without_values_and_groups_of_another_type() -> None:
    with pytest.raises(ValueError, match="^w: device meta must be a CUDA device or cpu"):
        quantize_fp4(torch.ones(3, 256, device="meta"))
    for quantize in (quantize_fp4, quantize_fp8):
        with pytest.raises(ValueError, match="^w: layout torch.sparse_coo must be torch.strided"):
            quantize(torch.ones(3, 256).to_sparse())
    for size in (128.0, True, "128"):
        with pytest.raises(TypeError, match="^group_size: an int is needed, not "):
            quantize_fp4(torch.ones(3, 256), size)  # type: ignore[arg-type]


def test_strided_weights_are_read_through_their_strides() -> None:
    w = random_weight(256, 40)
    assert torch.equal(quantize_fp4(w.T).codes, quantize_fp4(w.T.contiguous()).codes)
    assert torch.equal(quantize_fp8(w.T[:, ::2]).codes, quantize_fp8(w.T[:, ::2].contiguous()).codes)


def test_a_poisoned_weight_is_the_same_and_sees_writes() -> None:
    for q in (quantize_fp4(random_weight(40, 256)), quantize_fp8(random_weight(40, 256)).in_layout("fragments")):
        twin, changed = q.poisoned()
        assert torch.equal(twin.dequantize(), q.dequantize()) and changed() == 0
        storage = torch.empty(0, dtype=twin.scales.dtype).set_(twin.scales.untyped_storage())
        assert bool(torch.isnan(storage[0])) and bool(torch.isnan(storage[-1]))
        storage[-1] = 0
        twin.codes.view(-1)[3] ^= 1
        assert changed() >= 2


def test_a_weight_says_its_size() -> None:
    q = quantize_fp4(torch.ones(16, 256))
    assert isinstance(q, Fp4Weight) and q.nbytes == 16 * 128 + 16 * 2 * 4
    assert quantize_fp8(torch.ones(16, 256)).nbytes == 16 * 256 + 16 * 4


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], names: dict[torch.dtype, str]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_load_weight(tmp_path: Path) -> None:
    tensors = {
        "layer.0.weight": random_weight(3, 8),
        "layer.1.weight": random_weight(4, 8, dtype=torch.bfloat16),
        "half": random_weight(2, 2, dtype=torch.float16),
    }
    file = tmp_path / "gewichte mit ä.safetensors"
    write_safetensors(file, tensors, {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"})
    for name, x in tensors.items():
        assert torch.equal(load_weight(file, name), x)
    assert weight_names(file) == list(tensors)
    with pytest.raises(ValueError, match="'layer.0.wieght' is not in .*layer.0.weight"):
        load_weight(file, "layer.0.wieght")
    with pytest.raises(ValueError, match="name: None"):
        load_weight(file)
    state = tmp_path / "state.bin"
    torch.save(tensors, state)
    assert torch.equal(load_weight(state, "half"), tensors["half"])


def test_load_weight_of_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="^path: a str or a Path is needed, not int"):
        load_weight(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^name: a str or None is needed, not int"):
        load_weight(tmp_path / "none.safetensors", 3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no file"):
        load_weight(tmp_path / "none.safetensors", "w")
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_weight(junk, "w")
    cut = tmp_path / "cut.safetensors"
    write_safetensors(cut, {"w": torch.ones(64, 64)}, {torch.float32: "F32"})
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short"):
        load_weight(cut, "w")
