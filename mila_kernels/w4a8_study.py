"""What the W4A8 notebook counts beside times: long sums, tokens of every magnitude, errors through many layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import pandas as pd
import torch

from . import fp4_diet, gemm, ops, parity, reference, results, static, steps
from .bench import time_cuda
from .linear import Fp4Weight, quantize_fp4
from .notebook import Session, peers_of
from .results import CounterRow, ParityRow, RunWriter
from .shapes import Workload, parse_shape
from .weight_files import load_weight

LAYERS = 48  # of the model whose layers these products are
WIDTH, REAL_WIDTH = 256, 384  # of the stacks' residual streams
SINK_COLUMNS = 4  # of the residual stream, in which one token in sixteen is far larger than the others
LONG_SUM = "sum of ones"
QUANTISED = "us with quantisation"


# ---- long sums -------------------------------------------------------------------------------------------------------


def sum_of_ones(step: str, k: int, device: torch.device) -> float:
    """What a step makes of k products of 1 and 1. The weight's code is the one of 6, its scale 1/6: both exact enough
    that the right answer in BF16 is k."""
    w = quantize_fp4(torch.ones(16, k)).to(device)
    y = gemm.gemm_w4a8(torch.ones(1, k, dtype=torch.bfloat16, device=device), w, step=step)
    return float(y[0, 0])


def long_sums(names: Sequence[str], lengths: Sequence[int], device: torch.device, run: RunWriter) -> None:
    """Sums of ones of each step, written to the run's counters. Only a GPU's tensor cores add as they add."""
    for step in map(steps.step, names):
        for k in lengths:
            value = sum_of_ones(step.id, k, device)
            run.add(CounterRow(run_id="", op=step.op, step=step.name, source_sha=step.source_sha,
                               workload=f"k{k}", metric=LONG_SUM, value=value, unit=""))  # fmt: skip


def long_sums_table(session: Session, names: Sequence[str], lengths: Sequence[int]) -> pd.DataFrame:
    """What a step's sum of k ones is of k, a row a length, a column a step: measured here on a GPU, else as recorded.

    The emulation adds in FP32 and tells nothing; without recorded rows one line says so.
    """
    if session.live:
        with session.run as run:
            long_sums(names, lengths, session.device, run)
    counters = results.table("counters", session.source)
    rows = counters[(counters["metric"] == LONG_SUM) & (counters["op"] == gemm.OP)]
    if rows.empty:
        return pd.DataFrame({"sum of ones": ["only a GPU's tensor cores tell: the emulation adds in FP32"]})
    rows = rows.assign(k=[int(text[1:]) for text in rows["workload"]])
    rows = rows.assign(share=[f"{value / k:.4f}" for value, k in zip(rows["value"], rows["k"], strict=True)])
    return rows.drop_duplicates(["step", "k"], keep="last").pivot(index="k", columns="step", values="share")


# ---- rate against error ----------------------------------------------------------------------------------------------


def time_in_turns(
    session: Session, names: Sequence[str], workloads: Sequence[Workload], peers: bool = False
) -> pd.DataFrame:
    """As ``session.time``, workload by workload, each begun with another step: under load the board's power sets the
    clock, and a step after a slow one finds it 10% higher."""
    found = []
    for i, workload in enumerate(workloads):
        first = i * len(names) // len(workloads)
        found.append(session.time([*names[first:], *names[:first]], [workload], peers=peers))
    return pd.concat(found, ignore_index=True).drop_duplicates(["step", "shape", "workload"], ignore_index=True)


def measure_errors(names: Sequence[str], workloads: Sequence[Workload], seed: int, device: torch.device,
                   run: RunWriter) -> None:  # fmt: skip
    """Errors of steps against float64 on the same codes and FP4 weights, written to the run: one truth a workload."""
    op = ops.op(gemm.OP)
    for w in workloads:
        inputs = op.make_inputs(w, seed, device)
        (want,) = op.reference(**inputs)
        for step in map(steps.step, names):
            (got,) = op.run(step=step, **inputs)
            found = parity.compare(got, want, step.bound or op.bound(w))
            run.add(ParityRow(run_id="", op=op.name, step=step.name, source_sha=step.source_sha,
                              backend="cuda" if device.type == "cuda" else "emulation", shape=w.shape, seed=seed,
                              **asdict(found)))  # fmt: skip


def trade(session: Session, names: Sequence[str], workloads: Sequence[Workload]) -> pd.DataFrame:
    """Rate and error of steps by the number of tokens, a row each: the columns of the timings, ``tokens`` and
    ``rel_l2``. Measured here on a GPU, else as recorded; the error is left open where none was recorded."""
    if session.live:
        with session.run as run:
            measure_errors(names, workloads, session.seed, session.device, run)
    timings = time_in_turns(session, names, workloads)
    errors = results.table("parity", session.source)
    errors = errors[(errors["op"] == gemm.OP) & (errors["backend"] == "cuda")]
    errors = errors.drop_duplicates(["step", "shape"], keep="last")[["step", "shape", "rel_l2"]]
    timings = timings.assign(tokens=[parse_shape(gemm.OP, text).m for text in timings["shape"]])
    return timings.merge(errors, on=["step", "shape"], how="left")


def trade_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of :func:`trade` as TFLOP/s, a column a number of tokens, and each step's largest error."""
    if rows.empty:
        return pd.DataFrame({"TFLOP/s": ["not measured"]})
    rates = [f"{f / us / 1e6:,.0f}" if us > 0 else "" for f, us in zip(rows["flops"], rows["median_us"], strict=True)]
    table = rows.assign(rate=rates).pivot(index="step", columns="tokens", values="rate").fillna("")
    worst = rows.groupby("step")["rel_l2"].max()
    return table.assign(error=[f"{e:.2e}" if e == e else "" for e in worst.reindex(table.index)])


# ---- the quantiser's share -------------------------------------------------------------------------------------------


def time_quantised(step: str, workloads: Sequence[Workload], seed: int, device: torch.device, run: RunWriter) -> None:
    """Microseconds of a step that is given BF16 activations: the quantiser is in front, in the same call."""
    chosen = steps.step(step)
    for w in workloads:
        generator = torch.Generator(device).manual_seed(seed)
        weight = quantize_fp4(torch.randn(w.n, w.k, generator=generator, device=device) / w.k**0.5)
        x = torch.randn(w.m, w.k, generator=generator, device=device).to(torch.bfloat16)
        call: Callable[[], torch.Tensor] = _bound_call(x, weight, chosen.id)
        touched = weight.nbytes + x.numel() * 2
        samples = time_cuda([call], cache="cold", working_set=touched, device=device)
        run.add(CounterRow(run_id="", op=chosen.op, step=chosen.name, source_sha=chosen.source_sha,
                           workload=w.name or w.shape, metric=QUANTISED, value=samples.median, unit="us"))  # fmt: skip


def _bound_call(x: torch.Tensor, w: Fp4Weight, step: str) -> Callable[[], torch.Tensor]:
    return lambda: gemm.gemm_w4a8(x, w, step=step)


def rates_table(session: Session, names: Sequence[str], workloads: Sequence[Workload]) -> pd.DataFrame:
    """TFLOP/s by workload: the fastest of the named steps, the same with quantisation in the call, the peers, the
    target. Measured here on a GPU, else as recorded."""
    timings = time_in_turns(session, names, workloads, peers=True)
    best = {name: steps.step(name).name for name in names}
    if session.live:
        with session.run as run:
            time_quantised(names[-1], workloads, session.seed, session.device, run)
    counters = results.table("counters", session.source)
    counters = counters[(counters["metric"] == QUANTISED) & (counters["op"] == gemm.OP)]
    table = []
    for w in workloads:
        rows = timings[timings["workload"] == w.name]
        rate = {str(row["step"]): row["flops"] / row["median_us"] / 1e6 for row in rows.to_dict("records")}
        flops = 2.0 * w.m * w.n * w.k
        quantised = [flops / us / 1e6 for us in counters[counters["workload"] == w.name]["value"]]
        ours = {step: rate[step] for step in best.values() if step in rate}
        peers = {peer.name: rate[peer.name] for peer in peers_of([w]) if peer.name in rate}
        line: dict[str, object] = {"workload": w.name}
        line["fastest step"] = max(ours, key=lambda step: ours[step]) if ours else "not measured"
        line["TFLOP/s"] = f"{max(ours.values()):,.0f}" if ours else ""
        line["with quantisation"] = f"{quantised[-1]:,.0f}" if quantised else ""
        line |= {name: f"{value:,.0f}" for name, value in peers.items()}
        line["CUTLASS W4A8, measured elsewhere"] = f"{w.peer:,.0f}" if w.peer else ""
        line["target"] = f"{w.target:,.0f}" if w.target else ""
        table.append(line)
    return pd.DataFrame(table).fillna("").set_index("workload")


# ---- tokens of every magnitude ---------------------------------------------------------------------------------------


def magnitudes(names: Sequence[str], device: torch.device, seed: int = 0) -> pd.DataFrame:
    """Relative error of each token against float64 on the BF16 activations, tokens of magnitudes 1e-8 to 1e7 in one
    call: a row a magnitude, a column a step."""
    exponents = list(range(-8, 8))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(exponents), 512, generator=generator) * 10.0 ** torch.tensor(exponents)[:, None]
    x = x.to(torch.bfloat16).to(device)
    w = quantize_fp4(torch.randn(256, 512, generator=generator) / 512**0.5).to(device)
    want = reference.matvec(x, w.dequantize())
    table = {}
    for name in names:
        y = gemm.gemm_w4a8(x, w, step=name).double()
        table[steps.step(name).name] = ((y - want).norm(dim=1) / want.norm(dim=1)).tolist()
    return pd.DataFrame(table, index=pd.Index([f"1e{e}" for e in exponents], name="magnitude"))


# ---- a stack of layers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Gated layers of one width with a residual stream: ``u = norm(h)``, ``h += down(gelu(u gate) * (u up))``.

    What goes into ``down`` is a product of two activations: heavy-tailed, and its size differs from token to token.
    """

    weights: list[tuple[Fp4Weight, Fp4Weight]]  # gate and up in one, [2 width, width], and down

    @property
    def width(self) -> int:
        return self.weights[0][0].k

    def to(self, device: torch.device) -> Stack:
        return Stack([(a.to(device), b.to(device)) for a, b in self.weights])

    def run(self, h: torch.Tensor, product: Callable[[torch.Tensor, Fp4Weight], torch.Tensor]) -> list[torch.Tensor]:
        """The residual stream after each layer, in float64; ``product(x, w)`` is x w^T."""
        h, found = h.double(), []
        for gate_up, down in self.weights:
            u = h / h.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-6)
            gate, up = product(u, gate_up).double().chunk(2, dim=1)
            h = h + product(torch.nn.functional.gelu(gate, approximate="tanh") * up, down).double()
            found.append(h)
        return found


def random_stack(seed: int = 0, layers: int = LAYERS) -> Stack:
    """Normal weights of variance 1 / width, and in every layer one channel such as trained models have: it answers to
    the few columns in which some tokens are large. Their activation there is thousands of times all others."""
    generator = torch.Generator().manual_seed(seed)

    def layer() -> tuple[Fp4Weight, Fp4Weight]:
        gate_up = torch.randn(2 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        for row in (0, WIDTH):
            gate_up[row] = 0
            gate_up[row, :SINK_COLUMNS] = 8
        down[:, 0] = 0
        return quantize_fp4(gate_up), quantize_fp4(down)

    return Stack([layer() for _ in range(layers)])


def real_stack(layers: int = LAYERS) -> Stack | None:
    """The square matrices of all-MiniLM-L6-v2, six layers repeated: query and key as gate and up, attention's output
    projection as down, each scaled to a root mean square of 1 / sqrt(width). None where the package is not there."""
    folder = fp4_diet.real_model_folder()
    if folder is None:
        return None
    file = folder / "model.safetensors"

    def weight(layer: int, *names: str) -> Fp4Weight:
        parts = [load_weight(file, f"encoder.layer.{layer}.attention.{name}.weight").float() for name in names]
        return quantize_fp4(torch.cat([p / (p.pow(2).mean().sqrt() * REAL_WIDTH**0.5) for p in parts]))

    six = [(weight(i, "self.query", "self.key"), weight(i, "output.dense")) for i in range(6)]
    return Stack([six[i % 6] for i in range(layers)])


def tokens(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Normal activations, one token in sixteen a hundred times as large in a few columns, as in trained models."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    x[::16, :SINK_COLUMNS] = 100
    return x


def stack_errors(
    stack: Stack, names: Sequence[str], device: torch.device, count: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Error of the residual stream after each layer: the median token's relative to the same stack in float64, with the
    same FP4 weights. Columns: step, layer, rel_l2."""
    h, stack = tokens(count, stack.width, seed).to(device), stack.to(device)
    dense = {id(w): w.dequantize(torch.float64) for pair in stack.weights for w in pair}
    truth = stack.run(h, lambda x, w: x @ dense[id(w)].T)
    table = []
    for name in names:
        found = stack.run(h, _product(name))
        for layer, (got, want) in enumerate(zip(found, truth, strict=True), 1):
            error = ((got - want).norm(dim=1) / want.norm(dim=1)).median()
            table.append({"step": steps.step(name).name, "layer": layer, "rel_l2": float(error)})
    return pd.DataFrame(table)


def _product(step: str) -> Callable[[torch.Tensor, Fp4Weight], torch.Tensor]:
    return lambda x, w: gemm.gemm_w4a8(x.to(torch.bfloat16), w, step=step)


def stack_curves(errors: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`stack_errors` as plots.growth draws them."""
    return errors.rename(columns={"step": "series", "rel_l2": "value"}).assign(kind="computed")


def stack_table(errors: pd.DataFrame, layers: Sequence[int] = (1, 6, 12, 24, 48)) -> pd.DataFrame:
    """The errors after some of the layers: a row a step, a column a layer."""
    rows = errors[errors["layer"].isin(layers)]
    table = rows.pivot(index="step", columns="layer", values="rel_l2")
    return table.map(lambda error: f"{error:.1e}")


# ---- what mma.sync becomes -------------------------------------------------------------------------------------------


def tensor_instructions(name: str, architectures: Sequence[str]) -> pd.DataFrame:
    """Tensor-core and conversion instructions in a step's SASS, a row an architecture; without nvcc, why there are
    none."""
    table = []
    for arch in architectures:
        try:
            sass = static.compile_step(steps.step(name), arch).sass
        except static.ToolError as error:
            return pd.DataFrame({"instructions": [str(error).splitlines()[0]]})
        counts = {op: sum(f" {op}" in line for line in sass.splitlines()) for op in ("QMMA", "QGMMA", "HMMA", "F2FP")}
        table.append({"architecture": arch, **counts})
    return pd.DataFrame(table).set_index("architecture")
