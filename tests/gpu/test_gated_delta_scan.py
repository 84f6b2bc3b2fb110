"""The CUDA scans of GDN and KDA, in chunks on tensor cores and token by token, against a float64 recurrence.

Oracle: reference.gated_delta_recurrence in float64 on the same bits. The pool's other slots hold NaN and must keep
every byte; slots that start from zero hold NaN, rings hold NaN outside their live rows, padding's tokens
are NaN, o is NaN before the call.
Expected error: o is one rounding to act_dtype (relative 0.21 eps) with fp32 in front of it. A checkpoint from chunks
stays within 2 eps(fp32) of float64, as operands keep 24 bits (16 bits: 3e-6, bf16: 1e-3); token by token a state that
does not decay collects a rounding per token.

Cases: lengths around the chunk of 16 and around four of them, which have room for their outputs; empty sequences;
padding; initial states with a live ring that wraps; g = -5 at every token, g near 0, gates that change from token to
token or are infinite, keys that are all alike; head and state sizes of all kernels; every dtype; strided views; bitwise
invariants, and those of a step's fold.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, STATE_SCALE, assert_untouched, random_slots
from replay_cases import assert_close, assert_same_bits, make_inputs, raw_state, relative_error

from benchmarks.shapes import MODELS, ODD
from trtllm_replayssm import RecurrenceSpec, ReplayError, SlotLayout, kernels, reference
from trtllm_replayssm.pool import StatePool

DELTA = ("gated_delta", "kimi_delta")
SHAPES = {s.name: s for s in MODELS.values() if s.kind in DELTA}
SMALL = [s for s in ODD if s.kind in DELTA and s.headdim % 16 == 0]
LENGTHS = (65, 0, 1, 200, 63, 64, 16, 129, 15, 500)
#: ||state - float64|| / ||float64|| of an fp32 checkpoint that a scan in chunks leaves.
STATE_BOUND = 4.8e-7
FILL = float("nan")


def delta_spec(kind: str, nheads: int, ngroups: int, headdim: int, dstate: int, **options: Any) -> RecurrenceSpec:
    """RecurrenceSpec of kind gated_delta or kimi_delta."""
    return RecurrenceSpec(kind, nheads, ngroups, headdim, dstate, **options)


def recur(spec: RecurrenceSpec, state: torch.Tensor, tokens: dict[str, Any], params: dict[str, Any]) -> Any:
    """float64 outputs [n, T, HV, V] and state."""
    t, p = ({n: v.double() for n, v in group.items()} for group in (tokens, params))
    limits = {"gate": spec.gate, "lower_bound": spec.gate_lower_bound}
    g, beta = reference.delta_gates(t["a"], t["b"], p["A_log"], p["dt_bias"], **limits)
    return reference.gated_delta_recurrence(state, t["q"], t["k"], t["v"], g, beta, qk_l2norm=spec.qk_l2norm)


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
        self.bounds = torch.tensor(self.ends, dtype=torch.int32, device=DEVICE)
        self.flags = torch.tensor(self.resumes, device=DEVICE)

    def fill_slot(self, slot: int) -> torch.Tensor:
        """A random checkpoint, two committed and one pending row around the ring's end; the folded state in float64."""
        spec, R = self.spec, self.spec.ring_rows
        names = ("state", "ring_k", "ring_k_rnorm", "ring_v", "ring_g", "ring_beta", "cursor")
        view = {name: self.pool[name][slot] for name in names}
        view["state"].copy_(torch.randn(view["state"].shape, device=DEVICE))
        if "state_scale" in self.pool:
            self.pool["state_scale"][slot] = torch.rand(spec.nheads, 1, device=DEVICE) + 0.01
        view["cursor"].copy_(torch.tensor([R - 2, 2, 1, spec.window], device=DEVICE))
        live = [R - 2, R - 1, 0]
        for name in ("ring_k", "ring_v"):
            view[name][:, live] = torch.randn(view[name][:, live].shape, device=DEVICE).to(view[name].dtype)
        view["ring_k_rnorm"][:, live] = 1.0 / view["ring_k"][:, live].float().norm(dim=-1)
        view["ring_g"][:, live] = -torch.rand(view["ring_g"][:, live].shape, device=DEVICE)
        view["ring_beta"][:, live] = torch.rand(spec.nheads, 3, device=DEVICE)
        state = self.pool.checkpoint(torch.tensor([slot]))[0].double()
        per_group = spec.nheads // spec.ngroups
        for row in live:
            k, norm, v, g, beta = (view[n][:, row].double() for n in names[1:6])
            k = (k * norm[:, None]).repeat_interleave(per_group, dim=0)
            state = torch.exp(g.reshape(spec.nheads, 1, -1)) * state
            d = beta[:, None] * (v - (state * k[:, None]).sum(-1))
            state = state + d[..., None] * k[:, None]
        return state

    def run(self, **options: Any) -> torch.Tensor:
        """The scan into NaN-filled outputs."""
        arguments = {"cu_seqlens": self.bounds, "has_initial": self.flags}
        arguments["out"] = torch.full_like(self.tokens["v"], FILL)
        return kernels.gated_delta_scan(self.pool, self.slots, **self.tokens, **self.params, **(arguments | options))

    def oracle(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """float64 outputs and final states of all sequences; those of one length in one go."""
        outputs, states = list(self.start), list(self.start)
        for length in set(self.lengths):
            rows = [i for i, n in enumerate(self.lengths) if n == length]
            begins = torch.tensor([self.ends[i] for i in rows], device=DEVICE)
            at = begins[:, None] + torch.arange(length, device=DEVICE)
            start = torch.stack([self.start[i] for i in rows])
            tokens = {n: v[at] for n, v in self.tokens.items()}
            for i, o, state in zip(rows, *recur(self.spec, start, tokens, self.params), strict=True):
                outputs[i], states[i] = o, state
        return outputs, states

    def check(self, **options: Any) -> torch.Tensor:
        """Run and compare everything. Returns o."""
        before = self.pool.memory.clone()
        o = self.run(**options)
        assert_untouched(before, self.pool.memory, self.slots)
        want_o, want_state = self.oracle()
        outputs, states = [], []
        for i, length in enumerate(self.lengths):
            slot, part = int(self.slots[i]), o[self.ends[i] : self.ends[i + 1]]
            if slot < 0:
                assert not part.any(), "a padding sequence is not zero"
                continue
            outputs.append((part, want_o[i]))
            states.append((self.pool.checkpoint(self.slots[i : i + 1])[0], want_state[i]))
            reset = torch.tensor([0, 0, 0, self.spec.first_limit(slot)], device=DEVICE)
            assert (self.pool["cursor"][slot] == reset).all(), f"cursor of sequence {i} of {length} tokens"
        got, want = (torch.cat(column) for column in zip(*outputs, strict=True))
        assert_close(got, want, self.spec.act_dtype)
        got, want = (torch.stack(column) for column in zip(*states, strict=True))
        name = self.spec.state_dtype
        assert_close(got.float(), want, name, scale=STATE_SCALE[name], what="state")
        if name == "float32" and self.in_chunks(**options):
            assert relative_error(got, want) < STATE_BOUND
        return o

    def in_chunks(self, **options: Any) -> bool:
        """Whether the library's default has a tensor-core kernel for this."""
        s = self.spec
        return s.act_dtype == "bfloat16" and s.dstate <= 128 and s.qk_l2norm and not options.get("exact")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-122b", "qwen3.5-27b", "kimi-linear-48b", "kimi-k3"])
def test_model_shapes(name, exact):
    Prompts(SHAPES[name].split(4).spec(), (65, 0, 130, 7)).check(exact=exact)


@pytest.mark.parametrize("kind", DELTA)
@pytest.mark.parametrize("headdim", [16, 64, 80, 112, 128, 144, 256])
@pytest.mark.parametrize("dstate", [16, 64, 80, 112, 128, 192, 256])
def test_head_sizes(kind, headdim, dstate):
    Prompts(delta_spec(kind, 4, 2, headdim, dstate), (65, 0, 1, 100, 16)).check()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("regime", ["plain", "trained", "weak", "strong"])
@pytest.mark.parametrize("kind", DELTA)
def test_decays_of_every_strength(kind, regime, exact):
    Prompts(delta_spec(kind, 4, 2, 128, 128), regime=regime).check(exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
@pytest.mark.parametrize("gate", [-1e-6, -5.0, -80.0])
def test_the_same_gate_at_every_token(kind, gate, exact):
    """Next to nothing (within a factor of 2, since a constant exp(g) is rounded the same way at every token), KDA's
    bound, and more than fp32's exponent holds."""
    prompts = Prompts(delta_spec(kind, 4, 2, 128, 128))
    prompts.params["A_log"].zero_()
    prompts.params["dt_bias"].zero_()
    raw = torch.log(torch.expm1(torch.tensor(-gate, dtype=torch.float64))) if gate > -20 else torch.tensor(-gate)
    prompts.tokens["a"].fill_(float(raw))
    if gate > -1:
        prompts.tokens["a"].add_(torch.rand_like(prompts.tokens["a"]))
    prompts.check(exact=exact)


def test_kda_bounded_gate_at_its_bound():
    spec = delta_spec("kimi_delta", 4, 4, 128, 128, gate="bounded")
    for regime in ("plain", "strong"):
        Prompts(spec, regime=regime).check()
        Prompts(spec, regime=regime).check(exact=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_gates_that_change_from_token_to_token(kind, exact):
    """Log-decays from -1e-6 to -30 in turn: sums reach hundreds, and small ones must survive beside them."""
    prompts = Prompts(delta_spec(kind, 4, 2, 128, 128), (300, 64, 129, 1))
    prompts.params["A_log"].zero_()
    prompts.params["dt_bias"].zero_()
    prompts.tokens["a"].uniform_(-14.0, 30.0)
    prompts.check(exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DELTA)
def test_gates_that_are_infinite(kind, dtype, exact):
    """One gate in eight erases at once, by a log-decay of -inf or beyond; no exponent of a difference may see them."""
    prompts = Prompts(delta_spec(kind, 4, 2, 128, 128))
    a = prompts.tokens["a"]
    torch.manual_seed(3)
    a[torch.rand(a.shape, device=DEVICE) < 0.125] = 3e38
    a[torch.rand(a.shape, device=DEVICE) < 0.05] = float("inf")
    prompts.tokens["a"] = a.to(dtype)
    prompts.tokens["a"][prompts.ends[3] : prompts.ends[4]] = FILL
    prompts.check(exact=exact)


@pytest.mark.parametrize("kind", DELTA)
def test_keys_that_are_all_alike(kind):
    """The systems' matrices have entries near 1: beta near 1, no decay, keys that differ by 5 %."""
    prompts = Prompts(delta_spec(kind, 4, 2, 128, 128), regime="weak")
    k = prompts.tokens["k"]
    k.copy_(torch.randn_like(k[:1]) + 0.05 * torch.randn_like(k))
    prompts.tokens["b"].fill_(4.0)
    prompts.check()


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("act", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [*SMALL, SHAPES["qwen3.5-4b"].split(16)], ids=lambda s: s.name)
def test_dtypes(shape, state, act):
    """A state of 16 bits is rounded once, at the end; fp16 and fp32 activations go token by token."""
    Prompts(shape.spec(state_dtype=state, act_dtype=act), (65, 0, 1, 90, 17)).check()


@pytest.mark.parametrize("kind", DELTA)
def test_without_normalisation_and_initial_states(kind):
    """Keys of norm below 1 come normalised from the model, say; this goes token by token."""
    prompts = Prompts(delta_spec(kind, 4, 2, 64, 64, qk_l2norm=False), resume=False)
    for name in ("q", "k"):
        prompts.tokens[name].mul_(0.1)
    prompts.check(has_initial=None)


@pytest.mark.parametrize("kind", DELTA)
def test_scale_and_16_bit_gates(kind):
    outputs = []
    for options in ({}, {"scale": 0.25}):  # the default is 1 / 8
        prompts = Prompts(delta_spec(kind, 4, 2, 64, 64))
        for name in ("a", "b"):
            prompts.tokens[name] = prompts.tokens[name].bfloat16()
        outputs.append(prompts.run(**options) if options else prompts.check())
    assert_close(outputs[1], 2.0 * outputs[0].double(), "bfloat16")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_views_of_a_convolution_output_and_int64_indices(kind, exact):
    """q, k, v as slices of wider rows, as a model passes them, gates with gaps, and dense: equal bits."""
    results = []
    for strided in (False, True):
        prompts = Prompts(delta_spec(kind, 4, 2, 64, 128))
        options: dict[str, Any] = {"exact": exact}
        if strided:
            parts = {n: prompts.tokens[n].flatten(1) for n in ("q", "k", "v")}
            wide = torch.cat([*parts.values(), torch.full_like(parts["v"], FILL)], dim=1)
            pieces = wide.split([p.shape[1] for p in parts.values()] + [256], dim=1)
            for name, piece in zip(parts, pieces, strict=False):
                prompts.tokens[name] = piece.unflatten(1, prompts.tokens[name].shape[1:])
            for name in ("a", "b"):
                prompts.tokens[name] = torch.stack([prompts.tokens[name]] * 3, dim=-1)[..., 1]
            prompts.slots = prompts.slots.long()
            options["cu_seqlens"] = torch.tensor(prompts.ends, device=DEVICE)
        results.append((prompts.check(**options), prompts.pool))
    (dense, a), (view, b) = results
    own = prompts.slots[prompts.slots >= 0].long()
    assert torch.equal(dense, view)
    assert_same_bits(raw_state(a, own), raw_state(b, own))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_bits_do_not_depend_on_company_or_launch(kind, exact):
    """A sequence alone (other cuts of its heads), among others, again, and from a CUDA graph: the same bits."""
    spec = delta_spec(kind, 8, 4, 128, 128)
    together = Prompts(spec, (130, 64, 65, 300) * 12, pad=None, resume=False)
    o = together.run(exact=exact)
    states = raw_state(together.pool, together.slots)
    for _ in range(4):
        assert torch.equal(o, together.run(exact=exact))
        assert_same_bits(raw_state(together.pool, together.slots), states)
    slots, bounds = together.slots[3:4], torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    alone = {n: v[together.ends[3] : together.ends[4]].contiguous() for n, v in together.tokens.items()}
    lone = kernels.gated_delta_scan(together.pool, slots, **alone, **together.params, cu_seqlens=bounds, exact=exact)
    assert torch.equal(lone, o[259:559])
    assert_same_bits(raw_state(together.pool, slots), states[3:4])
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(o, FILL)
    together.run(out=out, exact=exact)
    with torch.cuda.graph(graph):
        together.run(out=out, exact=exact)
    out.fill_(FILL)
    together.pool["state"].fill_(FILL)
    graph.replay()
    assert torch.equal(out, o)
    assert_same_bits(raw_state(together.pool, together.slots), states)


PIECES = ((False, (64, 1, 100, 63, 272)), (True, (64, 1, 100, 63, 272)), (False, (192, 64, 244)))


@pytest.mark.parametrize("exact, pieces", PIECES)
@pytest.mark.parametrize("kind", DELTA)
def test_prefill_in_pieces_is_prefill(kind, exact, pieces):
    """Pieces of any length, each from the state of the last: the whole prompt's to rounding; to the bit where the scan
    is exact, and where pieces are whole chunks."""
    spec = delta_spec(kind, 4, 2, 64, 128)
    whole, parts = (Prompts(spec, (500,), pad=None, resume=False) for _ in range(2))
    o, at, outputs = whole.run(exact=exact), 0, []
    for i, length in enumerate(pieces):
        tokens = {n: v[at : at + length] for n, v in parts.tokens.items()}
        bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        options = {"cu_seqlens": bounds, "has_initial": torch.tensor([i > 0], device=DEVICE), "exact": exact}
        outputs.append(kernels.gated_delta_scan(parts.pool, parts.slots, **tokens, **parts.params, **options))
        at += length
    ours, theirs = raw_state(parts.pool, parts.slots), raw_state(whole.pool, whole.slots)
    if exact or pieces[0] == 192:
        assert torch.equal(torch.cat(outputs), o)
        assert_same_bits(ours, theirs)
    else:
        assert_close(torch.cat(outputs), o.double(), "bfloat16")
        assert (
            relative_error(parts.pool.checkpoint(parts.slots), whole.pool.checkpoint(whole.slots).double())
            < 2 * STATE_BOUND
        )


@pytest.mark.parametrize("kind", DELTA)
@pytest.mark.parametrize("headdim, dstate", [(128, 128), (64, 128), (80, 96), (64, 256)])
def test_prefill_and_steps_leave_the_bits_of_a_longer_prefill(kind, headdim, dstate):
    """Exact mode, fp32 state: prefill(100) and 37 decoded tokens, folded, have the state of prefill(137)."""
    spec = delta_spec(kind, 4, 2, headdim, dstate)
    longer, shorter = (Prompts(spec, (137,), pad=None, resume=False) for _ in range(2))
    longer.run(exact=True)
    bounds = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    first = {n: v[:100] for n, v in shorter.tokens.items()}
    slots = shorter.slots
    kernels.gated_delta_scan(shorter.pool, slots, **first, **shorter.params, cu_seqlens=bounds, exact=True)
    for t in range(100, 137):
        token = {n: v[None, t : t + 1] for n, v in shorter.tokens.items()}
        kernels.gated_delta_step(shorter.pool, slots, **token, **shorter.params)
    kernels.materialize(shorter.pool, slots, torch.full_like(slots, -1), slots)
    assert_same_bits(raw_state(shorter.pool, slots), raw_state(longer.pool, slots))


@pytest.mark.parametrize("kind", DELTA)
def test_state_error_does_not_grow_with_length(kind):
    """4,096 tokens with long memory: the checkpoint is as close to float64 as after 256, and as token by token."""
    errors = {}
    for length in (256, 4096):
        for exact in (False, True):
            spec = delta_spec(kind, 4, 2, 64, 128)
            prompts = Prompts(spec, (length,), pad=None, resume=False, regime="trained")
            prompts.run(exact=exact)
            errors[exact, length] = relative_error(prompts.pool.checkpoint(prompts.slots)[0], prompts.oracle()[1][0])
    assert 0 < errors[False, 4096] < STATE_BOUND, errors
    assert errors[False, 4096] < 2 * errors[False, 256] + 1e-7, errors
    assert errors[False, 4096] < 2 * errors[True, 4096] + 1e-7, errors


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_teeth(kind, exact):
    """The comparison fails once one token's input, the state, or a live ring row is another."""
    spec = delta_spec(kind, 4, 2, 64, 128, stagger=False)
    for name in ("q", "k", "v", "a", "b"):
        prompts = Prompts(spec)
        good = {n: v.clone() for n, v in prompts.tokens.items()}
        prompts.tokens[name][40] = prompts.tokens[name][40] * 1.5 + 0.5
        out = prompts.run(exact=exact)
        prompts.tokens = good
        with pytest.raises(AssertionError):
            assert_close(out[:65], prompts.oracle()[0][0], "bfloat16")
    for region in ("state", "ring_k", "ring_k_rnorm", "ring_v", "ring_g", "ring_beta"):
        prompts = Prompts(spec)
        view = prompts.pool[region][int(prompts.slots[1])]  # an empty sequence that continues
        view[1, 3 if region == "state" else 0] *= 1.5
        with pytest.raises(AssertionError):
            prompts.check(exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DELTA)
def test_no_tokens_and_no_sequences(kind, exact):
    """Empty sequences leave zero, or what their slot held with its ring folded in."""
    prompts = Prompts(delta_spec(kind, 4, 2, 64, 128), (0, 0, 0, 0), pad=0)
    assert prompts.run(exact=exact).shape == (0, 4, 64)
    own = prompts.slots[1:].long()
    assert_close(prompts.pool.checkpoint(own), torch.stack(prompts.start[1:]), "float32", what="state")
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    empty = kernels.gated_delta_scan(
        prompts.pool, prompts.slots[:0], **prompts.tokens, **prompts.params, cu_seqlens=none
    )
    assert empty.shape == (0, 4, 64)


def test_arguments_are_checked():
    prompts = Prompts(delta_spec("gated_delta", 4, 2, 64, 128), (5, 3), pad=None)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ReplayError, match=message):
            prompts.run(**options)

    refused("cu_seqlens", cu_seqlens=torch.tensor([0.0, 5.0, 8.0], device=DEVICE))
    refused("has_initial", has_initial=torch.tensor([1, 0], device=DEVICE))
    refused("out", out=torch.empty(8, 4, 32, dtype=torch.bfloat16, device=DEVICE))
    refused("scale", scale=0.0)
