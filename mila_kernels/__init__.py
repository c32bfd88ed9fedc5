"""Attention and quantised matrix kernels of Gemma 4, one optimisation step at a time, on a GPU or in emulation.

    import mila_kernels as mk

    o = mk.prefill(q, k, v)                        # q [B, Tq, Hq, D], k and v [B, Tk, Hkv, D]
    o = mk.decode(q, mk.PagedCache(...), lengths)  # one to eight new tokens over a cache
    y = mk.matvec_fp4(x, mk.quantize_fp4(w))       # x [M, K], w [N, K]
    y = mk.gemm_w4a8(x, mk.quantize_fp4(w))        # the same for many rows

    mk.steps.steps("prefill")                      # the ladder
    print(mk.diff("prefill/01", "prefill/02"))     # what one step changed
    mk.check("prefill/02", "prefill/published-instance")

CUDA tensors run on their GPU, CPU tensors in emulation. Only names listed here are public.
"""

from . import steps
from .attention import prefill
from .attention_decode import decode, merge
from .attention_ring import largest_chunk, prefill_ring, prefill_through_ring
from .build import KernelError, emulation
from .cache import ContiguousCache, PagedCache, RingCache
from .gemm import gemm_w4a8, quantize_activations
from .linear import Fp4Weight, Fp8Weight, matvec_fp4, matvec_fp8, quantize_fp4, quantize_fp8
from .parity import check
from .shapes import Geometry, Workload, geometry, workload, workloads
from .steps import Step, diff, step
from .weight_files import load_weight

__all__ = [
    "ContiguousCache",
    "Fp4Weight",
    "Fp8Weight",
    "Geometry",
    "KernelError",
    "PagedCache",
    "RingCache",
    "Step",
    "Workload",
    "check",
    "decode",
    "diff",
    "emulation",
    "gemm_w4a8",
    "geometry",
    "largest_chunk",
    "load_weight",
    "matvec_fp4",
    "matvec_fp8",
    "merge",
    "prefill",
    "prefill_ring",
    "prefill_through_ring",
    "quantize_activations",
    "quantize_fp4",
    "quantize_fp8",
    "step",
    "steps",
    "workload",
    "workloads",
]
