"""The MLP half of a decoder layer for few tokens, in one cooperative launch on all SMs.

``out = x + down(silu(gate(n)) * up(n))``, ``n = rmsnorm(x)``, in e4m3, per token x per channel.

    1  normalise, quantise      rows shared out among CTAs; codes to global memory
       -- grid barrier: codes of all rows
    2  gate|up, silu * up       each CTA some channels, all of K; the product to global memory, and
                                the largest magnitude of its part of every token
       -- announced: magnitudes of all CTAs' tokens
    3  quantise                 the CTA's own part of the product; codes to global memory
       -- grid barrier: codes of all products
    4  down, + x                each CTA some channels, all of K

Of few tokens (``MlpConfig.own``) every CTA does 1 and 3 for all of them, into its own shared
memory. Then nobody waits before 2, and after it for the product itself, which is announced
(``grid_barrier.py``): the grid meets once.

Every weight is read once. All stages of both GEMMs are one ring, and weights wait for nobody but a
free stage: at every barrier, and while a phase drains, the next phase's weights are on their way.
The tokens of a stage, codes that other CTAs wrote, follow when their barrier lets them. Where all
weights are few, a multiprocessor has room for two CTAs: the next kernel's begins, and fetches its
weights into L2, when this one's has nothing more to load.

Warp roles
    =========  ======  ================================  ============================  ============
    role       warps   waits on                          arrives on                    of a stage
    =========  ======  ================================  ============================  ============
    math       0-7     full[stage], filled[stage];       empty[stage]; grid (codes)    1 per warp
                       announcements
    weights    8       empty[stage]; full, of earlier    full[stage] (+ tx bytes)      1
    tokens     9       empty[stage]; grid (codes)        filled[stage] (+ tx bytes)    1
    =========  ======  ================================  ============================  ============

Constraints: M at most ``MlpConfig.tokens``; hidden and FFN width multiples of 16, gate|up
interleaved by 8; one CTA on every SM, all resident together; a workspace whose counters are 0,
and what is announced, too, which they are again when the kernel ends.
"""

from __future__ import annotations

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from .arguments import matrix, vector
from .barriers import wait
from .config import WARP_SIZE
from .epilogue import DTYPES
from .grid_barrier import arrive, fence_proxies, wait_for
from .mlp_config import (
    BLOCK,
    COUNTERS,
    HIDDEN_MULTIPLE,
    MMA_THREADS,
    MMA_WARPS,
    SLAB,
    WARPS,
    MlpConfig,
)
from .mlp_math import MlpMath
from .mlp_parts import (
    MMA_BARRIER,
    Loads,
    Problem,
    Ring,
    Tensors,
    counter,
    make_ring,
    place,
    sizes_of,
    steps_of,
    sync_mma_warps,
)
from .mlp_tokens import MlpTokens
from .mlp_weights import MlpWeights
from .mma import Instruction
from .ring import advance, skip
from .smem import tma_load, tma_load_atom
from .weight_blocks import Span, pass_of, passes_of, span_of

#: Counters of the grid, in the order in which they are waited for; then those that have gone.
_NORMED, _QUANTISED, _GONE = range(COUNTERS)
#: Percent of an SM's memory that are to be shared memory, where CTAs of two kernels meet.
_CARVEOUT = 100
#: The named barrier at which the tokens' warp waits for those that multiply.
READ_BARRIER, READ_THREADS = MMA_BARRIER + 1, MMA_THREADS + WARP_SIZE


class Mlp:
    """One specialisation of the kernel: an :class:`MlpConfig` and the MMA of the target."""

    def __init__(self, config: MlpConfig, instruction: Instruction):
        self.config = config.check()
        self.tokens = MlpTokens(config)
        self.math = MlpMath(config, instruction)
        self.weights = MlpWeights(config)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        norm: cute.Tensor,
        gate_up: cute.Tensor,
        gate_up_scales: cute.Tensor,
        down: cute.Tensor,
        down_scales: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        product: cute.Tensor,
        product_codes: cute.Tensor,
        product_scales: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        eps: Float32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``; tensors as in ``fake_arguments``."""
        config = self.config
        loads = Loads(
            weights=[
                tma_load_atom(w, BLOCK * cut.blocks, SLAB, 1)
                for w, cut in zip((gate_up, down), config.cuts, strict=True)
            ],
            tokens=[
                None if k else tma_load_atom(q, config.tokens, SLAB, 1)
                for q, k in zip((codes, product_codes), config.own, strict=True)
            ],
        )
        tensors = Tensors(
            x,
            norm,
            (codes, product_codes),
            (scales, product_scales),
            (gate_up_scales, down_scales),
            product,
            out,
            workspace,
        )
        m, hidden = x.shape
        inverse = Float32(1.0) / hidden.to(Float32)
        problem = Problem(m, hidden, product.shape[1], eps, inverse)
        self.kernel(loads, tensors, problem).launch(
            grid=(ctas, 1, 1),
            block=(32 * WARPS, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=config.ctas,
            preferred_smem_carveout=_CARVEOUT,
            cooperative=True,
            use_pdl=config.pdl,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(self, loads: Loads, tensors: Tensors, problem: Problem):
        warp, lane, thread = place()
        ring = make_ring(loads, self.config, warp)
        if cutlass.const_expr(self.config.pdl):
            if warp == MMA_WARPS:
                self.weights.prefetch(loads, problem, ring)
            # Nothing that an earlier kernel wrote, or still reads, is touched before this.
            cute.arch.griddepcontrol_wait()
        if warp == MMA_WARPS:
            self.weights.load(loads, problem, ring)
            if cutlass.const_expr(self.config.pdl):
                # Not before: the next kernel may fill L2 with its own weights.
                cute.arch.griddepcontrol_launch_dependents()
        elif warp > MMA_WARPS:
            self.load_tokens(loads, tensors, problem, ring, lane)
        else:
            self.compute(tensors, problem, ring, warp, lane, thread)

    @cute.jit
    def load_tokens(
        self, loads: Loads, tensors: Tensors, problem: Problem, ring: Ring, lane: Int32
    ):
        """One warp: every stage's tokens, once all CTAs have written them; then the counters."""
        ctas, _, _ = cute.arch.grid_dim()
        stage, phase = Int32(0), Int32(1)
        for gemm in cutlass.range_constexpr(2):
            cut = self.config.cuts[gemm]
            rows, k = sizes_of(problem, gemm)
            span = span_of(rows)
            if cutlass.const_expr(self.config.own[gemm] > 0):
                steps = passes_of(span, cut.blocks) * steps_of(k, cut)
                stage, phase = skip(stage, phase, steps, self.config.stages)
            else:
                wait_for(counter(tensors.workspace, _QUANTISED if gemm else _NORMED), ctas)
                if cutlass.const_expr(gemm == 0):
                    self.tokens.fetch_scales(tensors, problem, ring, lane)
                stage, phase = self.load_codes(loads, ring, gemm, span, k, stage, phase)
        if cutlass.const_expr(self.config.own[1] > 0):
            # The MMA warps have read what was announced.
            cute.arch.barrier(barrier_id=READ_BARRIER, number_of_threads=READ_THREADS)
        self.reset(tensors.workspace, problem, ctas, lane)

    @cute.jit
    def load_codes(
        self,
        loads: Loads,
        ring: Ring,
        gemm: cutlass.Constexpr,
        span: Span,
        k: Int32,
        stage: Int32,
        phase: Int32,
    ):
        """One warp: the tokens of a GEMM's stages; the ring's position after them."""
        cut = self.config.cuts[gemm]
        tma = loads.tokens[gemm]
        tiles = cute.local_tile(tma.tma_tensor, (self.config.tokens, SLAB), (None, None))
        for _number in cutlass.range(passes_of(span, cut.blocks), unroll=1):
            for step in cutlass.range(steps_of(k, cut), unroll=1):
                wait(ring.empty + stage, phase)
                full = ring.filled + stage
                with cute.arch.elect_one():
                    count = self.config.cuts[gemm].slabs * self.config.tokens * SLAB
                    cute.arch.mbarrier_arrive_and_expect_tx(full, count)
                for slab in cutlass.range_constexpr(self.config.cuts[gemm].slabs):
                    source = tiles[None, None, 0, step * self.config.cuts[gemm].slabs + slab]
                    target = ring.tokens[gemm][None, None, (slab, stage)]
                    tma_load(loads.tokens[gemm], source, target, full)
                stage, phase = advance(stage, phase, self.config.stages)
        return stage, phase

    @cute.jit
    def reset(self, workspace: cute.Tensor, problem: Problem, ctas: Int32, lane: Int32):
        """The last CTA that waits for nothing any more: all counters and announcements to 0."""
        gone = Int32(0)
        if lane == 0:
            pointer = counter(workspace, _GONE)
            gone = cute.arch.atomic_add(pointer, Int32(1), sem="acq_rel", scope="gpu")
        gone = cute.arch.shuffle_sync(gone, 0)
        if gone == ctas - 1:
            workspace[lane] = Int32(0)
            self.tokens.announcements.clear(workspace, problem, lane)

    @cute.jit
    def compute(
        self,
        tensors: Tensors,
        problem: Problem,
        ring: Ring,
        warp: Int32,
        lane: Int32,
        thread: Int32,
    ):
        """Eight warps: normalise, multiply, quantise, multiply."""
        if cutlass.const_expr(self.config.own[0] > 0):
            self.tokens.normalise_own(tensors, problem, ring, thread)
        else:
            self.tokens.normalise(tensors, problem, ring, thread)
            self.meet(tensors.workspace, _NORMED, thread)
        acc = self.math.registers()
        stage, phase = Int32(0), Int32(0)
        rows, k = sizes_of(problem, 0)
        span, cut = span_of(rows), self.config.gate_up
        for number in cutlass.range(passes_of(span, cut.blocks), unroll=1):
            part = pass_of(span, number, cut.blocks)
            channels = self.math.channel_scales(tensors, part, 0, warp, lane)
            stage, phase = self.math.multiply(acc, ring, 0, part.count, k, stage, phase, warp, lane)
            self.math.add_up(acc, ring, self.config.gate_up, warp, lane)
            self.math.finish_product(acc, channels, tensors, problem, ring, part, warp, lane)
        if cutlass.const_expr(self.config.own[1] > 0):
            self.tokens.quantise_own(tensors, problem, ring, thread)
            cute.arch.barrier_arrive(barrier_id=READ_BARRIER, number_of_threads=READ_THREADS)
        else:
            self.exchange(tensors, problem, ring, span, thread)
        rows, k = sizes_of(problem, 1)
        span, cut = span_of(rows), self.config.down
        for number in cutlass.range(passes_of(span, cut.blocks), unroll=1):
            part = pass_of(span, number, cut.blocks)
            channels = self.math.channel_scales(tensors, part, 1, warp, lane)
            residual = self.math.residual(tensors, problem, part, warp, lane)
            stage, phase = self.math.multiply(acc, ring, 1, part.count, k, stage, phase, warp, lane)
            self.math.add_up(acc, ring, self.config.down, warp, lane)
            self.math.finish_output(
                acc, channels, residual, tensors, problem, ring, part, warp, lane
            )

    @cute.jit
    def exchange(self, tensors: Tensors, problem: Problem, ring: Ring, span: Span, thread: Int32):
        """The product of all CTAs as codes, each of which one of them makes."""
        told = self.tokens.announcements
        sync_mma_warps()
        told.magnitudes(tensors.workspace, ring, thread)
        told.gather_magnitudes(tensors.workspace, ring, thread)
        sync_mma_warps()
        self.tokens.quantise(tensors, problem, ring, span, thread)
        self.meet(tensors.workspace, _QUANTISED, thread)

    @cute.jit
    def meet(self, workspace: cute.Tensor, number: cutlass.Constexpr, thread: Int32):
        """Tell the grid that this CTA has come so far."""
        fence_proxies()
        sync_mma_warps()
        if thread == 0:
            arrive(counter(workspace, number))


def fake_arguments(config: MlpConfig) -> list[object]:
    """Arguments to compile with: any sizes, contiguous rows, 16-byte aligned."""
    m = cute.sym_int()
    hidden, ffn = (cute.sym_int(divisibility=HIDDEN_MULTIPLE) for _ in range(2))
    channels = cute.sym_int(divisibility=2 * HIDDEN_MULTIPLE)
    dtype = DTYPES[config.dtype]

    return [
        matrix(dtype, m, hidden),  # x
        vector(DTYPES[config.weight], hidden, aligned=True),
        matrix(Float8E4M3FN, channels, hidden),  # gate|up
        vector(Float32, channels),
        matrix(Float8E4M3FN, hidden, ffn),  # down
        vector(Float32, hidden),
        matrix(Float8E4M3FN, m, hidden),  # codes
        vector(Float32, m),
        matrix(dtype, m, ffn),  # product
        matrix(Float8E4M3FN, m, ffn),
        vector(Float32, m),
        matrix(dtype, m, hidden),  # out
        vector(Int32, cute.sym_int64(), aligned=True),
        Float32(0.0),
        Int32(1),  # ctas
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: MlpConfig, target: str) -> tuple[Mlp, list[object]]:
    """The kernel for ``target``, and what to compile it with."""
    return Mlp(config, Instruction.of(target)), fake_arguments(config)
