"""All the matvecs of one decoded token, each fed with the output of the one before: 40 local and 8 global layers of
four FP4 matrices, and the FP8 lm_head, in one CUDA graph."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import build, linear, paths, shapes, steps
from .linear import Fp4Weight, Fp8Weight

LOCAL_LAYER = ("local_qkv", "local_o", "gate_up", "fc_down")
GLOBAL_LAYER = ("global_qk", "global_o", "gate_up", "fc_down")
GLOBAL_EVERY = 6  # the 6th layer, the 12th, ... and so the last of 48
LAYERS = 48
CODE_RMS = (sum(m * m for m in linear.FP4_MAGNITUDES) / len(linear.FP4_MAGNITUDES)) ** 0.5


@dataclass(frozen=True)
class TokenChain:
    """Weights in the order in which a token meets them, and the activations ``[1, k]`` that the first is fed with."""

    weights: Sequence[Fp4Weight | Fp8Weight]
    x: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The fewest bytes through device memory: every weight once; activations stay in the cache."""
        return sum(w.nbytes for w in self.weights)

    def run(self, step: str | steps.Step | None = None, *, chained: bool = False) -> torch.Tensor:
        """The last output. ``step`` is of the FP4 matvecs; the lm_head runs its fastest."""
        x = self.x
        for i, w in enumerate(self.weights):
            overlapped = chained and i > 0  # what is in front of the first is not known
            if isinstance(w, Fp4Weight):
                x = linear.matvec_fp4(x[:, : w.k], w, step=step, chained=overlapped)
            else:
                x = linear.matvec_fp8(x[:, : w.k], w, chained=overlapped)
        return x

    def graph(
        self, step: str | steps.Step | None = None, *, chained: bool = False
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """The chain captured in a CUDA graph: what replays it, and the tensor that then holds the last output."""
        return _captured(lambda: self.run(step, chained=chained), self.x.device)


def _captured(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
    run()  # builds, shuffles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return graph.replay, y


# ---- one launch ------------------------------------------------------------------------------------------------------


class ChainMatvec(ctypes.Structure):
    """The mirror of ``ChainMatvec`` in the steps of ``csrc/matvec_fp4/chain``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "x", "y")),
        *((name, ctypes.c_int32) for name in ("tiles", "groups", "chunk_groups", "chunks", "first", "early")),
        ("unused", ctypes.c_int32 * 2),
    ]


class ChainArgs(ctypes.Structure):
    """The mirror of ``ChainArgs`` there; steps before 03 know only the first three."""

    _fields_ = [
        *(("list", ctypes.c_void_p), ("count", ctypes.c_int32), ("blocks", ctypes.c_int32)),
        *(("schedule", ctypes.c_void_p), ("pitch", ctypes.c_int32)),
    ]


CHUNK_GROUPS = 32  # of a tile that the kernel takes at a time
MAX_CHUNKS = 4
MOST_MATVECS = 256  # their list lies in shared memory
MOST_TILES = 0xFFFF  # of a matvec; a block's are listed in 16 bits each


def one_launch_steps() -> list[steps.Step]:
    """The kernels that run a list of FP4 matvecs, in order; no steps of the ladder, so not in the registry."""
    return [steps.from_file(path, op="chain") for path in sorted((paths.CSRC / "matvec_fp4" / "chain").glob("*.cu"))]


def one_launch_step() -> steps.Step:
    """The last of them that was kept."""
    return [step for step in one_launch_steps() if step.kept][-1]


class OneLaunch:
    """The FP4 matvecs of a :class:`TokenChain` in one launch, each fed with the output of the one before; then its FP8
    matvecs, one after the other.

    All blocks have to run at the same time, since they wait for each other's outputs: nothing else may keep a
    multiprocessor until this is done.

    Raises:
        ValueError: no FP4 matvec in front, or one that the kernel cannot take; the text names it.
    """

    def __init__(self, chain: TokenChain, step: steps.Step | None = None) -> None:
        self.chain = chain
        self.step = step or one_launch_step()
        self.layout = linear.step_layout(self.step)
        self.fp4 = [w.in_layout(self.layout) for w in chain.weights if isinstance(w, Fp4Weight)]
        self.rest = list(chain.weights[len(self.fp4) :])
        if not 1 <= len(self.fp4) <= MOST_MATVECS or any(isinstance(w, Fp4Weight) for w in self.rest):
            raise ValueError(f"chain: the first 1 to {MOST_MATVECS} of its weights must be the FP4 ones")
        device = chain.x.device
        self.outputs = torch.empty(sum(w.n for w in self.fp4), dtype=torch.bfloat16, device=device)
        self.blocks = linear._device_limits(device)[0] if device.type == "cuda" else 1
        self.list = torch.frombuffer(bytearray(b"".join(map(bytes, self._list()))), dtype=torch.uint8).to(device)
        rows = even_schedule([(w.n, w.k) for w in self.fp4], self.blocks)
        self.schedule = torch.tensor(_packed(rows), dtype=torch.int32).to(torch.uint16).to(device)

    def _list(self) -> list[ChainMatvec]:
        x, first, found = self.chain.x, 0, []
        for i, (w, y) in enumerate(zip(self.fp4, self.outputs.split([w.n for w in self.fp4]), strict=True)):
            groups, tiles = w.k // linear.KERNEL_GROUP, w.n // linear.TILE_ROWS
            chunks = -(-groups // CHUNK_GROUPS)
            if x.dtype != torch.bfloat16 or w.scales.dtype != torch.bfloat16:
                raise ValueError(f"chain: matvec {i} must have BF16 activations and scales")
            fits = w.k <= x.numel() and w.n % linear.TILE_ROWS == 0 and tiles <= MOST_TILES
            if not fits or groups % (2 * chunks) or chunks > MAX_CHUNKS:
                raise ValueError(
                    f"chain: matvec {i} of shape {w.n} x {w.k} on {x.numel()} columns does not fit the kernel"
                )
            found.append(ChainMatvec(
                w.codes.data_ptr(), w.scales.data_ptr(), x.data_ptr(), y.data_ptr(), tiles, groups, groups // chunks,
                chunks, first, i > 0 and w.k < self.fp4[i - 1].n,
            ))  # fmt: skip
            first = (first + tiles) % self.blocks  # the blocks with one tile more are others each time
            x = y
        return found

    def run(self) -> torch.Tensor:
        """The last output of the chain."""
        self.outputs.view(torch.int16).fill_(-1)  # "not yet written"
        args = ChainArgs(
            self.list.data_ptr(), len(self.fp4), self.blocks, self.schedule.data_ptr(), self.schedule.shape[1]
        )
        weights = {f"{part}{i}": getattr(w, part) for i, w in enumerate(self.fp4) for part in ("codes", "scales")}
        build.launch(
            self.step, args, self.chain.x.device,
            reads={"list": self.list, "schedule": self.schedule, "x": self.chain.x} | weights,
            writes={"outputs": self.outputs},
        )  # fmt: skip
        y = self.outputs[None, -self.fp4[-1].n :]
        for w in self.rest:
            assert isinstance(w, Fp8Weight)
            y = linear.matvec_fp8(y[:, : w.k], w, chained=True)
        return y

    def graph(self) -> tuple[Callable[[], None], torch.Tensor]:
        """As :meth:`TokenChain.graph`."""
        return _captured(self.run, self.chain.x.device)


def even_schedule(matrices: Sequence[tuple[int, int]], blocks: int) -> list[list[list[int]]]:
    """Which tiles of 16 rows each block has of each matrix ``(n, k)``: ``[block][matrix]``, in order.

    A matvec that needs only the first part of the outputs before it finds them written when it begins. Work is even
    over such matvecs and the one in front of them together: who has a tile more of the one has less of the others.
    """
    rows: list[list[list[int]]] = [[[] for _ in matrices] for _ in range(blocks)]
    work = [0] * blocks
    begin = 0
    while begin < len(matrices):
        end = begin + 1
        while end < len(matrices) and matrices[end][1] < matrices[end - 1][0]:
            end += 1
        here = [0] * blocks
        for i in sorted(range(begin, end), key=lambda i: -matrices[i][1]):  # large tiles first
            n, k = matrices[i]
            heap = [(here[b], work[b], b) for b in range(blocks)]
            heapq.heapify(heap)
            counts = [0] * blocks
            for _ in range(n // linear.TILE_ROWS):
                so_far, in_all, b = heap[0]
                counts[b] += 1
                heapq.heapreplace(heap, (so_far + k, in_all + k, b))
            for so_far, in_all, b in heap:
                here[b], work[b] = so_far, in_all
            _deal([row[i] for row in rows], counts)
        begin = end
    return rows


def _deal(hands: list[list[int]], counts: list[int]) -> None:
    """Tiles 0, 1, ... one to each in turn, so that the first ones are done first."""
    tile = 0
    for turn in range(max(counts)):
        for hand, count in zip(hands, counts, strict=True):
            if count > turn:
                hand.append(tile)
                tile += 1


def _packed(rows: list[list[list[int]]]) -> list[list[int]]:
    """A row of numbers a block, all as long, a multiple of 8: how many tiles it has of each matvec, zeros up to a
    multiple of 8, then which."""
    lists = [[*map(len, row), *([0] * (-len(row) % 8)), *(tile for tiles in row for tile in tiles)] for row in rows]
    most = max(map(len, lists))
    return [found + [0] * (most - len(found) + -most % 8) for found in lists]


def layer_names(layers: int = LAYERS) -> list[str]:
    """The matrices of so many layers of Gemma 4 12B, by their names among the linear shapes."""
    return [name for i in range(1, layers + 1) for name in (GLOBAL_LAYER if i % GLOBAL_EVERY == 0 else LOCAL_LAYER)]


def token_chain(
    device: torch.device | str,
    *,
    step: str | steps.Step | None = None,
    layout: str | None = None,
    layers: int = LAYERS,
    lm_head: bool = True,
    seed: int = 0,
    shrink: int = 1,
) -> TokenChain:
    """Random weights for a token's matvecs, scaled so that activations keep their size, in ``layout`` or in that of
    ``step``.

    ``shrink`` divides every dimension (in multiples of 128), for runs in emulation.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    layout = layout or linear.step_layout(linear.fitting_step("matvec_fp4", step, torch.bfloat16, device, rows=1))
    weights: list[Fp4Weight | Fp8Weight] = []
    for name in layer_names(layers):
        n, k = _shrunk(name, shrink)
        weights.append(_random_fp4(n, k, layout, generator))
    if lm_head:
        n, k = _shrunk("lm_head", shrink)
        weights.append(_random_fp8(n, k, generator).shuffle())
    first_k = weights[0].k
    return TokenChain(weights, torch.randn(1, first_k, generator=generator, device=device).bfloat16())


def _shrunk(name: str, shrink: int) -> tuple[int, int]:
    shape = shapes.linear_shape(name)
    unit = linear.KERNEL_GROUP
    return max(1, shape.n // shrink // unit) * unit, max(1, shape.k // shrink // unit) * unit


def _random_fp4(n: int, k: int, layout: str, generator: torch.Generator) -> Fp4Weight:
    """Any bytes are codes in every layout."""
    device, tiles, groups = generator.device, n // linear.TILE_ROWS, k // linear.KERNEL_GROUP
    rows = layout == "rows"
    code_shape = (n, k // 2) if rows else (tiles, groups, linear.TILE_ROWS * linear.KERNEL_GROUP // 2)
    scale_shape = (n, groups) if rows else (tiles, groups, 8, 2)
    codes = torch.randint(0, 256, code_shape, dtype=torch.uint8, generator=generator, device=device)
    spread = torch.rand(scale_shape, generator=generator, device=device) + 0.5
    return Fp4Weight(codes, (spread / (CODE_RMS * k**0.5)).bfloat16(), n, k, layout=layout)


def _random_fp8(n: int, k: int, generator: torch.Generator) -> Fp8Weight:
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8, generator=generator, device=generator.device)
    codes = torch.where(codes == 0x7F, codes + 1, codes)  # the one NaN below 0xFF
    scales = torch.full((n,), 1 / (100 * k**0.5), dtype=torch.float32, device=generator.device)
    return Fp8Weight(codes, scales, n, k)
