"""What tests of the operations share: random inputs, their float64 oracle, a decoder with drafts, poison, comparators.

One code serves Mamba-2, GDN and KDA: token tensors and parameters are dicts keyed by the operations' argument names.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_replayssm import ConvLayout, RecurrenceSpec, SlotLayout, reference
from trtllm_replayssm.pool import StatePool, torch_dtype

KINDS = ("mamba2", "gated_delta", "kimi_delta")
REGIMES = ("plain", "trained", "weak", "strong")

#: Bound of ||out - ref|| / ||ref|| against float64, in units of eps(activation dtype). fp32 and float64: 20 to 100
#: operations behind every output, each rounding by eps/2, adding up like a random walk. 16-bit: one rounding of y (a
#: uniform error of at most eps/2 has an rms of 0.2 eps) and, for GDN and KDA, as much again from the 16-bit d rows.
RELATIVE_BOUND = {"float64": 8.0, "float32": 8.0, "bfloat16": 0.5, "float16": 0.5}
#: Bound of one element's error, in eps times (its own size + the rms of its head's outputs): sums cancel, so a small
#: output carries the error of the large terms behind it.
ELEMENT_BOUND = {"float64": 32.0, "float32": 32.0, "bfloat16": 2.0, "float16": 2.0}


def small_spec(kind: str, **options: Any) -> RecurrenceSpec:
    """A spec of few numbers with two heads per group; ``options`` as in RecurrenceSpec."""
    sizes = {"nheads": 4, "ngroups": 2, "headdim": 16, "dstate": 8, "act_dtype": "float32", **options}
    return RecurrenceSpec(kind, **sizes)


@dataclass
class Inputs:
    """Token tensors [rows, length, ...] and parameters of one layer, named as the operations name them."""

    spec: RecurrenceSpec
    tokens: dict[str, torch.Tensor]
    params: dict[str, Any]

    @property
    def rows(self) -> int:
        return int(next(iter(self.tokens.values())).shape[0])

    @property
    def length(self) -> int:
        return int(next(iter(self.tokens.values())).shape[1])

    def at(self, rows: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token tensors [n, T, ...] at ``positions`` [n, T] of the sequences ``rows`` [n]."""
        return {name: value[rows[:, None], positions] for name, value in self.tokens.items()}

    def span(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """Token tensors of tokens first .. last-1 of all sequences."""
        return {name: value[:, first:last] for name, value in self.tokens.items()}

    def packed(self, spans: list[tuple[int, int, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Packed token tensors of (row, first, last) spans, and cu_seqlens."""
        tokens = {n: torch.cat([v[row, a:b] for row, a, b in spans]) for n, v in self.tokens.items()}
        ends = torch.tensor([0] + [b - a for _, a, b in spans]).cumsum(0)
        return tokens, ends.to(torch.int32)


def make_inputs(spec: RecurrenceSpec, rows: int, length: int, *, seed: int = 0, regime: str = "plain") -> Inputs:
    """Random inputs with decays of a regime.

    plain: unit normal everywhere; trained: decays as models are initialised; weak: a log-decay of about -1e-6 a token;
    strong: one token erases the state (KDA bounded: g is the bound, -5, at every token).
    """
    rng = torch.Generator().manual_seed(seed)
    act = torch_dtype(spec.act_dtype)
    H, G, P, N = spec.nheads, spec.ngroups, spec.headdim, spec.dstate

    def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64) * spread

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=rng, dtype=torch.float64)

    exact = torch.float64 if spec.act_dtype == "float64" else torch.float32
    channels = (H, N) if spec.kind == "kimi_delta" else (H,)
    step = torch.exp(uniform(-6.9, -2.3, *channels))  # 0.001 .. 0.1
    bias = {
        "plain": normal(*channels),
        "trained": torch.log(torch.expm1(step)),
        "weak": torch.full(channels, -14.0, dtype=torch.float64),
        "strong": torch.full(channels, 30.0, dtype=torch.float64),
    }[regime].to(exact)
    rate = {"plain": uniform(0.3, 2.0, H), "trained": uniform(1, 16, H), "weak": uniform(0.5, 1.5, H)}
    rate["strong"] = uniform(2.0, 20.0, H)
    gate_in = normal(rows, length, *channels, spread=1.0 if regime == "plain" else 0.3).to(exact)
    if spec.kind == "mamba2":
        tokens = {name: normal(rows, length, G, N).to(act) for name in ("B", "C")}
        tokens |= {"x": normal(rows, length, H, P).to(act), "dt": gate_in}
        params: dict[str, Any] = {"A": -rate[regime].to(exact), "dt_bias": bias}
        if regime == "plain":
            tokens["z"] = normal(rows, length, H, P).to(act)
            params["D"] = normal(H).to(exact)
        return Inputs(spec, tokens, params)
    tokens = {name: normal(rows, length, G, N).to(act) for name in ("q", "k")}
    tokens |= {"v": normal(rows, length, H, P).to(act), "a": gate_in, "b": normal(rows, length, H).to(exact)}
    return Inputs(spec, tokens, {"A_log": torch.log(rate[regime]).to(exact), "dt_bias": bias})


def oracle(
    inputs: Inputs,
    first: int = 0,
    last: int | None = None,
    state: torch.Tensor | None = None,
    rows: slice = slice(None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 outputs [rows, T, heads, ...] of tokens first .. last-1 from ``state`` (zero), and the final state."""
    spec = inputs.spec
    t = {name: value[rows, first:last].double() for name, value in inputs.tokens.items()}
    p = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in inputs.params.items()}
    count = next(iter(t.values())).shape[0]
    if state is None:
        state = torch.zeros(count, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64)
    if spec.kind == "mamba2":
        limits = {"dt_softplus": spec.dt_softplus, "dt_min": spec.dt_min, "dt_max": spec.dt_max}
        return reference.mamba2_recurrence(state, **t, **p, **limits)
    g, beta = reference.delta_gates(
        t["a"], t["b"], p["A_log"], p["dt_bias"], gate=spec.gate, lower_bound=spec.gate_lower_bound
    )
    return reference.gated_delta_recurrence(
        state, t["q"], t["k"], t["v"], g, beta, scale=p.get("scale"), qk_l2norm=spec.qk_l2norm
    )


def run_step(
    pool: StatePool, slots: torch.Tensor, inputs: Inputs, tokens: dict[str, torch.Tensor], accepted: Any = None
) -> torch.Tensor:
    """The step operation of the inputs' kind."""
    step = reference.mamba2_step if inputs.spec.kind == "mamba2" else reference.gated_delta_step
    if isinstance(accepted, list):
        accepted = torch.tensor(accepted, dtype=torch.int32)
    return step(pool, slots, **tokens, **inputs.params, accepted=accepted)


def run_scan(
    pool: StatePool, slots: list[int], inputs: Inputs, spans: list[tuple[int, int, int]], resume: bool | None = None
) -> torch.Tensor:
    """The scan operation over (row, first, last) spans; ``resume``: has_initial of all of them."""
    scan = reference.mamba2_scan if inputs.spec.kind == "mamba2" else reference.gated_delta_scan
    tokens, bounds = inputs.packed(spans)
    flags = None if resume is None else torch.full((len(slots),), resume)
    return scan(pool, torch.tensor(slots), **tokens, **inputs.params, cu_seqlens=bounds, has_initial=flags)


def state_after(pool: StatePool, slot: int, inputs: Inputs, count: int = -1, spare: int = -1) -> torch.Tensor:
    """The checkpoint of ``slot`` after ``count`` ring rows, made in the pool's last slot; ``slot`` does not change."""
    extra = {"A": inputs.params["A"]} if inputs.spec.kind == "mamba2" else {}
    spare %= pool.slots
    reference.materialize(pool, torch.tensor([slot]), torch.tensor([count]), torch.tensor([spare]), **extra)
    return pool.checkpoint(torch.tensor([spare]))[0]


def raw_state(pool: StatePool, slots: torch.Tensor) -> torch.Tensor:
    """What the slots hold of their checkpoints, to the bit: [n, ...] elements, then the scales where there are any (all
    of it in the scales' dtype)."""
    chosen = slots.long()
    state = pool["state"][chosen].flatten(1)
    if "state_scale" not in pool:
        return state
    scale = pool["state_scale"][chosen].flatten(1)
    return torch.cat([state.to(scale.dtype), scale], dim=1)


def set_state(pool: StatePool, slots: torch.Tensor, value: torch.Tensor | float) -> None:
    """Make ``value`` [n, H, P, N] (or a number) the checkpoints of ``slots``."""
    chosen = slots.long()
    pool["state"][chosen] = value
    if "state_scale" in pool:
        pool["state_scale"][chosen] = 1.0


def leave_scales(pool: StatePool, slots: torch.Tensor, scale: float = 0.125) -> None:
    """Hold the checkpoints of ``slots``, whose scale is 1, as a kernel may: elements / scale, and the scale (a power of
    two, so that nothing is rounded)."""
    if "state_scale" in pool:
        chosen = slots.long()
        pool["state"][chosen] /= scale
        pool["state_scale"][chosen] = scale


class Decoder:
    """Decodes ``inputs`` in slots of its own pool; in place of tokens that will be rejected a step gets other tokens.

    The pool has one slot more than the highest of ``slots``, for state_after.
    """

    def __init__(self, inputs: Inputs, slots: list[int] | None = None, spec: RecurrenceSpec | None = None) -> None:
        self.inputs = inputs
        self.slots = torch.tensor(list(range(inputs.rows)) if slots is None else slots)
        self.pool = StatePool.allocate(SlotLayout(spec or inputs.spec), int(self.slots.max()) + 2)
        self.junk = make_inputs(inputs.spec, inputs.rows, inputs.length, seed=987)
        self.done = torch.zeros(inputs.rows, dtype=torch.int64)  # tokens decided for good
        self.kept = torch.zeros(inputs.rows, dtype=torch.int64)  # tokens of the last step that will stay
        self.before_step = lambda decoder, accepted: None

    def step(self, tokens: int, keep: torch.Tensor | list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of which row r keeps keep[r] tokens (all by default): positions [rows, T] and outputs."""
        rows = torch.arange(self.inputs.rows)
        keep = torch.full_like(self.done, tokens) if keep is None else torch.as_tensor(keep)
        start = self.done + self.kept
        positions = start[:, None] + torch.arange(tokens)
        good = torch.arange(tokens)[None, :] < keep[:, None]
        true, false = (source.at(rows, positions % self.inputs.length) for source in (self.inputs, self.junk))
        mixed = {n: torch.where(good.reshape(*good.shape, *[1] * (v.dim() - 2)), v, false[n]) for n, v in true.items()}
        accepted = self.kept.to(torch.int32)
        self.before_step(self, accepted)
        y = run_step(self.pool, self.slots, self.inputs, mixed, accepted)
        self.done, self.kept = start, keep
        return positions, y

    def run(self, tokens: int, steps: int) -> torch.Tensor:
        """``steps`` steps of which everything stays: outputs [rows, steps * tokens, ...]."""
        return torch.cat([self.step(tokens)[1] for _ in range(steps)], dim=1)

    def state(self, row: int) -> torch.Tensor:
        """The state of a row after the tokens that stay."""
        slot = int(self.slots[row])
        history = int(self.pool["cursor"][slot, 0, 0, 1])
        return state_after(self.pool, slot, self.inputs, history + int(self.kept[row]))

    def count(self, row: int) -> int:
        """Tokens behind state()."""
        return int(self.done[row] + self.kept[row])


def far_pool(layout: SlotLayout | ConvLayout, slots: int = 3, device: torch.device | str = "cpu") -> StatePool:
    """A pool whose slots are more than 2^31 bytes apart, so that slot 2 begins past 2^32. Nothing is reset.

    On the CPU only the pages that are used exist.
    """
    stride = 2**31 + 4096
    if torch.device(device).type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, slots * stride, flags=flags), dtype=torch.uint8)
        return StatePool(layout, memory.view(slots, stride))
    return StatePool(layout, torch.empty(slots, stride, dtype=torch.uint8, device=device))


def strided_views(tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as a model passes them: activations as slices of one wider row, 16-byte aligned, gates and other
    scalars as every third element; NaN between them."""
    wide = [name for name in ("x", "B", "C", "z", "q", "k", "v") if name in tokens]
    parts = [tokens[name].flatten(2) for name in wide]
    packed = torch.cat([*parts, torch.full_like(parts[0], float("nan"))], dim=2)
    out = {}
    for name, piece in zip(wide, packed.split([p.shape[2] for p in (*parts, parts[0])], dim=2), strict=False):
        out[name] = piece.unflatten(2, tokens[name].shape[2:])
    for name in tokens.keys() - out.keys():
        nan = torch.full_like(tokens[name], float("nan"))
        out[name] = torch.stack([nan, tokens[name], nan], dim=-1)[..., 1]
    return {name: out[name] for name in tokens}


def ring_regions(pool: StatePool) -> list[str]:
    """Names of the pool's ring regions."""
    return [region.name for region in pool.layout.regions if region.name.startswith("ring")]


def live_ring_rows(pool: StatePool, slot: int, accepted: int | None = None) -> list[int]:
    """Ring rows of a slot that the next step may read: committed ones and the ``accepted`` (all) pending ones."""
    origin, history, pending, _ = (int(w) for w in pool["cursor"][slot, 0, 0])
    count = history + (pending if accepted is None else min(accepted, pending))
    return [(origin + j) % pool.layout.spec.ring_rows for j in range(count)]


def poison(pool: StatePool, slots: list[int], accepted: list[int] | None = None) -> None:
    """NaN in every ring row that the next step may not read; 0xFF (NaN in every float dtype) in every other slot."""
    for slot in range(pool.slots):
        if slot not in slots:
            pool.memory[slot] = 0xFF
            continue
        live = live_ring_rows(pool, slot, None if accepted is None else accepted[slots.index(slot)])
        dead = [row for row in range(pool.layout.spec.ring_rows) if row not in live]
        for name in ring_regions(pool):
            pool[name][slot][:, dead] = float("nan")


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: str, *, scale: float = 1.0, what: str = "output") -> None:
    """Fail unless ``out`` is finite and within ``scale`` times the bounds of ``dtype`` of ``ref``."""
    assert out.shape == ref.shape, f"{what}: shape {list(out.shape)}, expected {list(ref.shape)}"
    assert torch.isfinite(out).all(), f"{what}: {int((~torch.isfinite(out)).sum())} values are not finite"
    assert torch.isfinite(ref).all(), f"{what}: the oracle is not finite"
    eps = torch.finfo(torch_dtype(dtype)).eps
    out, ref = out.double(), ref.double()
    error = relative_error(out, ref)
    bound = scale * RELATIVE_BOUND[dtype] * eps
    assert error <= bound, f"{what}: relative error {error:.3e} above {bound:.3e}"
    others = [axis for axis in range(ref.dim()) if axis != ref.dim() - 2]
    size = ref.abs() + ref.pow(2).mean(others, keepdim=True).sqrt()
    worst = ((out - ref).abs() - scale * ELEMENT_BOUND[dtype] * eps * size).max()
    assert worst <= 0, f"{what}: an element is {float(worst):.3e} past its bound"


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; infinite where ``out`` is not finite."""
    if not torch.isfinite(out).all():
        return float("inf")
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def assert_same_bits(out: torch.Tensor, ref: torch.Tensor, what: str = "state") -> None:
    """Fail unless both are finite and equal to the bit."""
    assert torch.isfinite(out).all() and torch.isfinite(ref).all(), f"{what}: not finite"
    assert out.dtype == ref.dtype and out.shape == ref.shape, f"{what}: {out.dtype} {list(out.shape)}"
    same = out.contiguous().view(torch.uint8) == ref.contiguous().view(torch.uint8)
    assert same.all(), f"{what}: {int((~same).sum())} bytes differ, largest error {float((out - ref).abs().max()):.3e}"
