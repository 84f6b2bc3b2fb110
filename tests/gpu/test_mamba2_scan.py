"""The CUDA Mamba-2 scan, tensor-core and token by token, against a float64 recurrence.

Oracle: reference.mamba2_recurrence in float64 on the same bits. The pool's other slots hold NaN and must keep every
byte; slots that start from zero hold NaN, rings hold NaN outside their live rows, padding's tokens
are NaN, y is NaN before the call.
Expected error: y is one rounding to bf16 (relative 0.21 eps) with fp32 in front of it, in both kernels; an fp32
checkpoint stays within 4 eps(fp32) of float64 whatever the length. Operands rounded to bf16 (1e-3) or to 16 bits (3e-6)
miss that.

Cases: lengths around the chunk of 64 and the span of 16; empty sequences; padding; initial states with a live ring that
wraps; decays near 0 and near 1, and dt that changes from token to token; heads per group that a block's heads do not
divide; head and state sizes of all kernels; every optional argument left out; strided views; bitwise invariants.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, STATE_SCALE, assert_untouched, mamba2_spec, random_slots
from replay_cases import assert_close, assert_same_bits, make_inputs, raw_state, relative_error

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import RecurrenceSpec, ReplayError, SlotLayout, kernels, reference
from trtllm_replayssm.pool import StatePool

NEMOTRON = [s for s in MODELS.values() if s.kind == "mamba2"]
SMALL = [s for s in ODD if s.kind == "mamba2" and s.headdim % 16 == 0]
LENGTHS = (65, 0, 1, 200, 63, 64, 16, 129, 15, 500)
#: ||state - float64|| / ||float64|| of an fp32 checkpoint.
STATE_BOUND = 4.8e-7
FILL = float("nan")


class Prompts:
    """Packed random prompts over a poisoned pool; every second one continues a slot whose live ring rows wrap."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        lengths: tuple[int, ...] = LENGTHS,
        *,
        regime: str = "plain",
        pad: int | None = 3,
        resume: bool = True,
    ) -> None:
        torch.manual_seed(5)  # equal arguments: equal prompts, pools included
        self.spec, self.lengths, rows = spec, lengths, len(lengths)
        inputs = make_inputs(spec, 1, max(sum(lengths), 1), seed=11, regime=regime)
        self.tokens = {n: v[0, : sum(lengths)].to(DEVICE) for n, v in inputs.tokens.items()}
        self.params = {n: v.to(DEVICE) for n, v in inputs.params.items()}
        self.ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        own = random_slots(rows, rows + 3, seed=2)
        memory = torch.full((rows + 3, SlotLayout(spec).slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.pool = StatePool(SlotLayout(spec), memory)
        self.resumes = [resume and i % 2 == 1 for i in range(rows)]
        zero = torch.zeros(spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64, device=DEVICE)
        self.start = [self.fill_slot(int(own[i])) if r else zero for i, r in enumerate(self.resumes)]
        self.slots = own.clone()
        if pad is not None:
            self.slots[pad] = -1
            for value in self.tokens.values():
                value[self.ends[pad] : self.ends[pad + 1]] = FILL

    def fill_slot(self, slot: int) -> torch.Tensor:
        """A random checkpoint, two committed and one pending row around the ring's end; the folded state in float64."""
        spec, R = self.spec, self.spec.ring_rows
        view = {name: self.pool[name][slot] for name in ("state", "ring_x", "ring_b", "ring_dt", "cursor")}
        view["state"].copy_(torch.randn(view["state"].shape, device=DEVICE))
        if "state_scale" in self.pool:
            self.pool["state_scale"][slot] = torch.rand(spec.nheads, 1, device=DEVICE) + 0.01
        view["cursor"].copy_(torch.tensor([R - 2, 2, 1, spec.window], device=DEVICE))
        live = [R - 2, R - 1, 0]
        for name in ("ring_x", "ring_b"):
            view[name][:, live] = torch.randn(view[name][:, live].shape, device=DEVICE).to(view[name].dtype)
        view["ring_dt"][:, live] = torch.rand(spec.nheads, 3, device=DEVICE)
        state, A = self.pool.checkpoint(torch.tensor([slot]))[0].double(), self.params["A"].double()
        for row in live:
            x, B, dt = (view[n][:, row].double() for n in ("ring_x", "ring_b", "ring_dt"))
            B = B.repeat_interleave(spec.nheads // spec.ngroups, dim=0)
            state = torch.exp(A * dt)[:, None, None] * state + (dt[:, None] * x)[..., None] * B[:, None]
        return state

    def run(self, **options: Any) -> torch.Tensor:
        """The scan into NaN-filled outputs."""
        needed = {"cu_seqlens", "has_initial", "out"} - set(options)
        arguments = self.arguments() | options if needed else options
        return kernels.mamba2_scan(self.pool, self.slots, **self.tokens, **self.params, **arguments)

    def arguments(self) -> dict[str, torch.Tensor]:
        """What a scan of these prompts needs beside the tokens, on the device."""
        return {
            "cu_seqlens": torch.tensor(self.ends, dtype=torch.int32, device=DEVICE),
            "has_initial": torch.tensor(self.resumes, device=DEVICE),
            "out": torch.full_like(self.tokens["x"], FILL),
        }

    def oracle(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """float64 outputs and final states of all sequences; those of one length in one go."""
        spec, double = self.spec, {n: v.double() for n, v in self.params.items()}
        limits = {"dt_softplus": spec.dt_softplus, "dt_min": spec.dt_min, "dt_max": spec.dt_max}
        outputs, states = list(self.start), list(self.start)
        for length in set(self.lengths):
            rows = [i for i, n in enumerate(self.lengths) if n == length]
            begins = torch.tensor([self.ends[i] for i in rows], device=DEVICE)
            at = begins[:, None] + torch.arange(length, device=DEVICE)
            exact = {n: v[at].double() for n, v in self.tokens.items()}
            start = torch.stack([self.start[i] for i in rows])
            for i, y, state in zip(rows, *reference.mamba2_recurrence(start, **exact, **double, **limits), strict=True):
                outputs[i], states[i] = y, state
        return outputs, states

    def check(self, **options: Any) -> torch.Tensor:
        """Run and compare everything. Returns y."""
        before = self.pool.memory.clone()
        y = self.run(**options)
        assert_untouched(before, self.pool.memory, self.slots)
        want_y, want_state = self.oracle()
        outputs, states = [], []
        for i, length in enumerate(self.lengths):
            slot, part = int(self.slots[i]), y[self.ends[i] : self.ends[i + 1]]
            if slot < 0:
                assert not part.any(), "a padding sequence is not zero"
                continue
            outputs.append((part, want_y[i]))
            states.append((self.pool.checkpoint(self.slots[i : i + 1])[0], want_state[i]))
            reset = torch.tensor([0, 0, 0, self.spec.first_limit(slot)], device=DEVICE)
            assert (self.pool["cursor"][slot] == reset).all(), f"cursor of sequence {i} of {length} tokens"
        got, want = (torch.cat(column) for column in zip(*outputs, strict=True))
        assert_close(got, want, self.spec.act_dtype)
        got, want = (torch.stack(column) for column in zip(*states, strict=True))
        name = self.spec.state_dtype
        assert_close(got.float(), want, name, scale=STATE_SCALE[name], what="state")
        if name == "float32" and not options.get("exact"):
            assert relative_error(got, want) < STATE_BOUND
        return y


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", NEMOTRON, ids=lambda s: s.name)
def test_model_shapes(shape, exact):
    Prompts(shape.split(4).spec(), (65, 0, 130, 7)).check(exact=exact)


@pytest.mark.parametrize("headdim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dstate", [16, 48, 64, 96, 128, 256])
def test_head_sizes(headdim, dstate):
    Prompts(mamba2_spec(4, 2, headdim, dstate), (65, 0, 1, 100, 16)).check()


@pytest.mark.parametrize("regime", ["plain", "trained", "weak", "strong"])
@pytest.mark.parametrize("headdim", [64, 80])
def test_decays_of_every_strength(regime, headdim):
    """64 rows go through warpgroup products on an H200, 80 warp by warp."""
    Prompts(mamba2_spec(6, 2, headdim, 128), regime=regime).check()


@pytest.mark.parametrize("headdim", [64, 128, 80])
def test_steps_of_very_different_length(headdim):
    """dt from 1e-6 to 30 in turn: a chunk's exponents add up to thousands, and small ones must survive beside them."""
    prompts = Prompts(mamba2_spec(4, 2, headdim, 128, dt_softplus=False), (300, 64, 129, 1))
    dt = prompts.tokens["dt"]
    dt.copy_(10.0 ** (torch.rand_like(dt) * 7.5 - 6.0))
    prompts.params.pop("dt_bias")
    prompts.check()


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [*SMALL, NEMOTRON[1].split(8)], ids=lambda s: s.name)
def test_dtypes(shape, state, act):
    """A state of 16 bits is rounded once, at the end; fp16 and fp32 activations go token by token."""
    Prompts(shape.spec(state_dtype=state, act_dtype=act), (65, 0, 1, 90, 17)).check()


@pytest.mark.parametrize("heads, groups", [(5, 1), (3, 1), (14, 2), (6, 3), (17, 1)])
def test_heads_that_a_block_does_not_divide(heads, groups):
    for headdim in (64, 80):
        Prompts(mamba2_spec(heads, groups, headdim, 128), (65, 130) * 40, pad=None).check()


@pytest.mark.parametrize("options", [{"dt_softplus": False, "dt_max": 0.2}, {"dt_min": 0.05, "dt_max": 0.1}], ids=str)
def test_time_step_limits(options):
    Prompts(mamba2_spec(4, 2, 64, 128, **options)).check()


@pytest.mark.parametrize("left_out", ["D", "z", "dt_bias"])
def test_optional_arguments(left_out):
    for headdim in (64, 80):
        prompts = Prompts(mamba2_spec(4, 2, headdim, 128))
        (prompts.tokens if left_out == "z" else prompts.params).pop(left_out)
        prompts.check()


def test_without_initial_states():
    Prompts(mamba2_spec(4, 2, 64, 128), resume=False).check(has_initial=None)


def test_skip_weight_per_channel_and_16_bit_parameters():
    prompts = Prompts(mamba2_spec(4, 2, 64, 128))
    prompts.params["D"] = torch.randn(4, 64, device=DEVICE, dtype=torch.bfloat16)
    prompts.params["dt_bias"] = prompts.params["dt_bias"].half()
    prompts.tokens["dt"] = prompts.tokens["dt"].bfloat16()
    prompts.check()


def test_views_of_a_convolution_output_and_int64_indices():
    """x, B, C, z as slices of wider rows, as a model passes them, and the same values dense: equal bits."""
    results = []
    for strided in (False, True):
        prompts = Prompts(mamba2_spec(4, 2, 64, 128))
        options = {}
        if strided:
            parts = {n: prompts.tokens[n].flatten(1) for n in ("x", "B", "C", "z")}
            wide = torch.cat([*parts.values(), torch.full_like(parts["x"], FILL)], dim=1)
            pieces = wide.split([p.shape[1] for p in parts.values()] + [256], dim=1)
            for name, piece in zip(parts, pieces, strict=False):
                prompts.tokens[name] = piece.unflatten(1, prompts.tokens[name].shape[1:])
            prompts.slots = prompts.slots.long()
            options["cu_seqlens"] = torch.tensor(prompts.ends, device=DEVICE)
        results.append((prompts.check(**options), prompts.pool))
    (dense, a), (view, b) = results
    own = prompts.slots[prompts.slots >= 0].long()
    assert torch.equal(dense, view)
    assert_same_bits(raw_state(a, own), raw_state(b, own))


def test_bits_do_not_depend_on_company_or_launch():
    """A sequence alone (fewer heads a block), among others, again, and from a CUDA graph: the same bits."""
    spec = mamba2_spec(16, 2, 64, 128)
    together = Prompts(spec, (130, 64, 65, 300) * 12, pad=None, resume=False)
    y = together.run()
    states = raw_state(together.pool, together.slots)
    for _ in range(4):
        assert torch.equal(y, together.run())
        assert_same_bits(raw_state(together.pool, together.slots), states)
    slots, bounds = together.slots[3:4], torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    alone = {n: v[together.ends[3] : together.ends[4]].contiguous() for n, v in together.tokens.items()}
    lone = kernels.mamba2_scan(together.pool, slots, **alone, **together.params, cu_seqlens=bounds)
    assert torch.equal(lone, y[259:559])
    assert_same_bits(raw_state(together.pool, slots), states[3:4])
    graph, arguments = torch.cuda.CUDAGraph(), together.arguments()
    out = arguments["out"]
    together.run(**arguments)
    with torch.cuda.graph(graph):
        together.run(**arguments)
    out.fill_(FILL)
    together.pool["state"].fill_(FILL)
    graph.replay()
    assert torch.equal(out, y)
    assert_same_bits(raw_state(together.pool, together.slots), states)


PIECES = ((False, (64, 1, 100, 63, 272)), (True, (64, 1, 100, 63, 272)), (False, (192, 64, 244)))


@pytest.mark.parametrize("exact, pieces", PIECES)
@pytest.mark.parametrize("headdim", [64, 80])
def test_prefill_in_pieces_is_prefill(headdim, exact, pieces):
    """Pieces of any length, each from the state of the last: the whole prompt's to rounding; to the bit where the scan
    is exact, and where pieces are whole chunks."""
    spec = mamba2_spec(4, 2, headdim, 128)
    whole, parts = (Prompts(spec, (500,), pad=None, resume=False) for _ in range(2))
    y, at, outputs = whole.run(exact=exact), 0, []
    for i, length in enumerate(pieces):
        tokens = {n: v[at : at + length] for n, v in parts.tokens.items()}
        bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        options = {"cu_seqlens": bounds, "has_initial": torch.tensor([i > 0], device=DEVICE), "exact": exact}
        outputs.append(kernels.mamba2_scan(parts.pool, parts.slots, **tokens, **parts.params, **options))
        at += length
    ours, theirs = raw_state(parts.pool, parts.slots), raw_state(whole.pool, whole.slots)
    if exact or pieces[0] == 192:
        assert torch.equal(torch.cat(outputs), y)
        assert_same_bits(ours, theirs)
    else:
        assert_close(torch.cat(outputs), y.double(), "bfloat16")
        assert (
            relative_error(parts.pool.checkpoint(parts.slots), whole.pool.checkpoint(whole.slots).double())
            < STATE_BOUND
        )


def test_state_error_does_not_grow_with_length():
    """4,096 tokens with long memory: the checkpoint is as close to float64 as after 256, and as token by token."""
    errors = {}
    for length in (256, 4096):
        for exact in (False, True):
            prompts = Prompts(mamba2_spec(4, 2, 64, 128), (length,), pad=None, resume=False, regime="trained")
            prompts.run(exact=exact)
            errors[exact, length] = relative_error(prompts.pool.checkpoint(prompts.slots)[0], prompts.oracle()[1][0])
    assert 0 < errors[False, 4096] < STATE_BOUND, errors
    assert errors[False, 4096] < 2 * errors[False, 256] + 1e-7, errors
    assert errors[False, 4096] < 2 * errors[True, 4096] + 1e-7, errors


def test_teeth():
    """The comparison fails once one token's x, B, C or dt, the state, or a live ring row is another."""
    spec = mamba2_spec(4, 2, 64, 128, stagger=False)
    for name in ("x", "B", "C", "dt"):
        prompts = Prompts(spec)
        good = {n: v.clone() for n, v in prompts.tokens.items()}
        prompts.tokens[name][40] *= 1.5
        out = prompts.run()
        prompts.tokens = good
        with pytest.raises(AssertionError):
            assert_close(out[:65], prompts.oracle()[0][0], "bfloat16")
    for region in ("state", "ring_x", "ring_b", "ring_dt"):
        prompts = Prompts(spec)
        view = prompts.pool[region][int(prompts.slots[1])]  # an empty sequence that continues
        if region == "state":
            view[1, 3] *= 1.5
        else:
            view[1, 0] *= 1.5
        with pytest.raises(AssertionError):
            prompts.check()


def test_no_tokens_and_no_sequences():
    """Empty sequences leave zero, or what their slot held with its ring folded in."""
    prompts = Prompts(mamba2_spec(4, 2, 64, 128), (0, 0, 0, 0), pad=0)
    assert prompts.run().shape == (0, 4, 64)
    own = prompts.slots[1:].long()
    assert_close(prompts.pool.checkpoint(own), torch.stack(prompts.start[1:]), "float32", what="state")
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    empty = kernels.mamba2_scan(prompts.pool, prompts.slots[:0], **prompts.tokens, **prompts.params, cu_seqlens=none)
    assert empty.shape == (0, 4, 64)


def test_arguments_are_checked():
    prompts = Prompts(mamba2_spec(4, 2, 64, 128), (5, 3), pad=None)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ReplayError, match=message):
            prompts.run(**options)

    refused("cu_seqlens", cu_seqlens=torch.tensor([0.0, 5.0, 8.0], device=DEVICE))
    refused("has_initial", has_initial=torch.tensor([1, 0], device=DEVICE))
    refused("out", out=torch.empty(8, 4, 32, dtype=torch.bfloat16, device=DEVICE))
