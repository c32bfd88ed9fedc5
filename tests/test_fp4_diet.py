"""What the FP4 notebook counts: a token's chain of matvecs, instructions a weight, errors on weights."""

from __future__ import annotations

import pytest
import torch

from mila_kernels import build, fp4_diet, linear, notebook, reference, results, shapes, static, steps
from mila_kernels.token_chain import (
    OneLaunch,
    TokenChain,
    _random_fp4,
    even_schedule,
    layer_names,
    one_launch_steps,
    token_chain,
)

FASTEST = "matvec_fp4/15_two_blocks"


def test_layers_of_a_token() -> None:
    names = layer_names()
    assert len(names) == 4 * 48 and names.count("global_qk") == 8 and names.count("local_qkv") == 40
    assert names[-4] == "global_qk", "the last layer is global"
    assert sum(shapes.linear_shape(name).n for name in names[:4]) == 8192 + 3840 + 30720 + 3840


def test_each_matvec_is_fed_with_the_one_before(device: torch.device) -> None:
    chain = token_chain(device, step=FASTEST, layers=2, shrink=16)
    assert [w.shape for w in chain.weights[:4]] == [(512, 128), (128, 256), (1920, 128), (128, 896)]
    x = chain.x.double()
    for w in chain.weights:
        x = reference.matvec(x[:, : w.k], w.dequantize(torch.float64)).bfloat16().double()
    for chained in (False, True):
        y = chain.run(FASTEST, chained=chained)
        assert y.shape == x.shape and (y.double() - x).norm() < 2e-2 * x.norm()
    assert chain.nbytes == sum(w.nbytes for w in chain.weights)
    assert 0.3 < float(x.std()) < 3, "activations keep their size"


SMALL_CHAIN = ((512, 256), (256, 512), (4608, 256), (256, 4608), (1024, 256), (272, 1024))  # [n, k] of each


def one_launch(device: torch.device, step: steps.Step, large: bool = False) -> OneLaunch:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the chain in one launch is for sm_90a")
    if large:
        return OneLaunch(token_chain(device, step=FASTEST, layers=7, lm_head=False), step)
    generator = torch.Generator(device).manual_seed(3)
    weights = [_random_fp4(n, k, "folded", generator) for n, k in SMALL_CHAIN]
    return OneLaunch(TokenChain(weights, torch.randn(1, 256, generator=generator, device=device).bfloat16()), step)


@pytest.mark.parametrize("step", one_launch_steps(), ids=lambda step: step.name)
def test_one_launch_feeds_each_matvec_with_the_one_before(device: torch.device, large: bool, step: steps.Step) -> None:
    for size in {False, large}:
        chain = one_launch(device, step, size)
        first = chain.run().clone()
        outputs = chain.outputs.clone()
        x = chain.chain.x
        for w, y in zip(chain.fp4, outputs.split([w.n for w in chain.fp4]), strict=True):
            want = reference.matvec(x[:, : w.k], w.dequantize(torch.float64))
            assert (y.double() - want).norm() < 2e-3 * want.norm()
            x = y[None]
        assert torch.equal(first[0], outputs[-chain.fp4[-1].n :])
        for _ in range(3):
            assert torch.equal(chain.run(), first) and torch.equal(chain.outputs, outputs)


def test_tiles_come_out_even_between_borders() -> None:
    matrices = [shapes.linear_shape(name) for name in layer_names(7)]
    rows = even_schedule([(m.n, m.k) for m in matrices], 132)
    for i, m in enumerate(matrices):
        assert sorted(tile for row in rows for tile in row[i]) == list(range(m.n // 16))
        assert all(row[i] == sorted(row[i]) for row in rows)
    work = [len(row[2]) * matrices[2].k + len(row[3]) * matrices[3].k for row in rows]  # gate_up and fc_down
    assert max(work) - min(work) <= matrices[2].k


@pytest.mark.parametrize("step", one_launch_steps(), ids=lambda step: step.name)
def test_one_launch_is_clean_in_check_mode(step: steps.Step) -> None:
    chain = one_launch(torch.device("cpu"), step)
    want = chain.run().clone()
    for seed in range(2):
        with build.emulation(check=True, seed=seed):
            assert torch.equal(chain.run(), want)


@pytest.mark.parametrize("step", one_launch_steps(), ids=lambda step: step.name)
def test_one_launch_with_activations_far_from_one_and_with_nan(step: steps.Step) -> None:
    chain = one_launch(torch.device("cpu"), step)
    chain.chain.x.mul_(2.0**100)
    assert bool(torch.isfinite(chain.run()).all())
    chain.chain.x[0, 5] = torch.nan
    assert bool(torch.isnan(chain.run()).all())


def test_one_launch_refuses_what_it_cannot_take() -> None:
    chain = token_chain("cpu", step=FASTEST, layers=1, lm_head=False, shrink=32)
    with pytest.raises(ValueError, match="first 1 to 256"):
        OneLaunch(TokenChain((), chain.x))
    with pytest.raises(ValueError, match="matvec 0 must have BF16"):
        OneLaunch(TokenChain(chain.weights, chain.x.half()))
    with pytest.raises(ValueError, match="matvec 0 of shape"):
        OneLaunch(TokenChain(chain.weights[3:], chain.x))


def test_a_chain_in_rows_for_the_published_steps() -> None:
    chain: TokenChain = token_chain("cpu", step="matvec_fp4/04_load_ahead", layers=1, lm_head=False, shrink=32)
    assert {w.layout for w in chain.weights} == {"rows"}
    assert torch.equal(chain.run("matvec_fp4/04_load_ahead"), chain.run("matvec_fp4/03_folded_scale"))


@pytest.mark.skipif(static.find_nvcc() is None or static.find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
def test_tensor_cores_take_fewer_instructions() -> None:
    table = fp4_diet.instructions_a_weight(["matvec_fp4/03", "matvec_fp4/06"])
    assert table.loc["03_folded_scale", "all"] > 2 * table.loc["06_folded_layout", "all"] > 2
    assert table.loc["06_folded_layout", "tensor"] == 0.12 and table.loc["03_folded_scale", "tensor"] == 0


def test_errors_of_the_formats() -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    outlier = w.clone()
    outlier[0, 0] = 100.0
    table = fp4_diet.quantisation_errors({"normal": w, "outlier": outlier})
    assert 0.08 < table.loc["normal", "FP4"] < 0.13 and table.loc["normal", "FP8 a row"] < 0.03
    assert table.loc["outlier", "largest / deviation"] > 20
    assert steps.step(FASTEST).op == "matvec_fp4" and linear.step_layout(steps.step(FASTEST)) == "folded"


def test_every_shape_has_the_recorded_time_of_the_step_that_it_chooses() -> None:
    workloads = shapes.workloads("matvec_fp4")
    session = notebook.start("emulation", "h200")
    table = fp4_diet.shapes_table(session, ["matvec_fp4/03_folded_scale"], workloads)
    assert list(table.index) == [w.name for w in workloads]
    recorded = results.table("timings", "h200")
    for w in workloads:
        chosen = steps.step(fp4_diet.fastest(w, session.device))
        rows = recorded[(recorded["workload"] == w.name) & (recorded["step"] == chosen.name)]
        newest = rows[(rows["cache"] == "cold") & (rows["status"] == "ok")].iloc[-1]
        assert table.loc[w.name, "fastest is"] == chosen.name
        assert table.loc[w.name, "fastest, us"] == pytest.approx(newest["median_us"], abs=0.006)
        if newest["source_sha"] != chosen.source_sha:
            assert "fastest" in table.loc[w.name, "stale"]
    peer = recorded[(recorded["workload"] == workloads[0].name) & (recorded["step"] == "torch BF16")].iloc[-1]
    assert table.loc[workloads[0].name, "torch BF16, us"] == pytest.approx(peer["median_us"], abs=0.006)
    assert "torch BF16, % of the read limit" not in table
