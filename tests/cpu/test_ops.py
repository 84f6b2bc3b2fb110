"""TorchOps against plain formulas (float64 where rounding matters), and the seam itself: a second interpreter that
computes shapes alone runs the same decoder, without torch.

Expected errors: fp32 formulas 1e-6; bf16 results are the fp32 formula rounded once, so they must be equal.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import oracles
import pytest
import torch

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.models.config import HybridConfig
from trtllm_replayssm.models.decoder import HybridDecoder, weight_shapes
from trtllm_replayssm.ops.base import Ops
from trtllm_replayssm.ops.torch_ops import TorchOps
from trtllm_replayssm.runtime.state import Batch, ModelState

CONFIG = HybridConfig(
    family="nemotron_h",
    vocab_size=11,
    hidden_size=16,
    layers=("mamba2", "attention", "mamba2", "mlp"),
    intermediate_size=24,
    mlp_kind="relu2",
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    ssm_heads=4,
    ssm_groups=2,
    ssm_head_dim=8,
    ssm_state_size=16,
    mixer_bias=True,
    mlp_bias=True,
    attention_bias=True,
    conv_bias=True,
)


def make_ops(weights: dict[str, torch.Tensor], batch: Batch, **state: Any) -> TorchOps:
    options = {"slots": 3, "max_positions": 12, "spec_len": 4, **state}
    return TorchOps(weights, ModelState(CONFIG, **options), batch)


ROW = Batch.scan([0], [6])


def test_rms_norm_whole_grouped_and_shared() -> None:
    x, whole, shared = torch.randn(6, 24), torch.randn(24), torch.randn(8)
    ops = make_ops({"whole": whole, "shared": shared}, ROW)

    def norm(t: torch.Tensor) -> torch.Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 0.1).sqrt()

    blocks = norm(x.double().view(6, 3, 8))
    cases = [
        (ops.rms_norm(x, "whole", 0.1), norm(x.double()) * whole),
        (ops.rms_norm(x, "whole", 0.1, group_size=8), blocks.flatten(1) * whole),
        (ops.rms_norm(x, "shared", 0.1, group_size=8), (blocks * shared).flatten(1)),
    ]
    for got, want in cases:
        torch.testing.assert_close(got, want.float(), atol=1e-6, rtol=1e-6)
    gate = torch.randn(6, 24)
    sigmoid = torch.sigmoid(gate.double())
    for activation, factor in (("silu", gate.double() * sigmoid), ("sigmoid", sigmoid)):
        got = ops.rms_norm_gated(x, gate, "shared", 0.1, group_size=8, activation=activation)
        torch.testing.assert_close(got, (cases[2][1] * factor).float(), atol=1e-6, rtol=1e-6)
    with pytest.raises(ReplayError, match="activation is 'tanh'; it must be one of silu, sigmoid"):
        ops.rms_norm_gated(x, gate, "shared", 0.1, group_size=8, activation="tanh")


def test_bfloat16_results_are_rounded_once() -> None:
    x, gate = torch.randn(6, 24).bfloat16(), torch.randn(6, 24).bfloat16()
    weight = torch.rand(24) + 0.5
    ops = make_ops({"w": weight}, ROW, dtype="bfloat16")
    wide = make_ops({"w": weight}, ROW)
    f, g = x.float(), gate.float()
    pairs = [
        (ops.rms_norm(x, "w", 1e-5), wide.rms_norm(f, "w", 1e-5)),
        (ops.rms_norm_gated(x, gate, "w", 1e-5, group_size=24), wide.rms_norm_gated(f, g, "w", 1e-5, group_size=24)),
        (ops.silu_mul(gate, x), g * torch.sigmoid(g) * f),
        (ops.sigmoid_mul(gate, x), torch.sigmoid(g) * f),
        (ops.relu2(x), torch.relu(f) ** 2),
        (ops.rope(x, head_dim=8, rotary_dim=4, theta=1e4), wide.rope(f, head_dim=8, rotary_dim=4, theta=1e4)),
    ]
    for got, want in pairs:
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want.bfloat16().float(), atol=0, rtol=2**-8)
    assert ops.to_float32(x).dtype == torch.float32


def test_rope_turns_pairs_by_position() -> None:
    """As complex numbers: channel pair i of the rotated part is multiplied by exp(i * position * theta^(-2i/d))."""
    batch = Batch.scan([0], [5], starts=[3])
    x = torch.randn(5, 16)
    got = make_ops({}, batch).rope(x, head_dim=8, rotary_dim=6, theta=100.0).view(5, 2, 8)
    heads = x.double().view(5, 2, 8)
    pairs = torch.complex(heads[..., :3], heads[..., 3:6])
    angles = torch.arange(3, 8).double()[:, None] * 100.0 ** (-torch.arange(3).double() * 2 / 6)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    want = torch.cat([turned.real, turned.imag, heads[..., 6:]], dim=-1)
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=1e-6)


def test_linear_embedding_split_add() -> None:
    w, b, x = torch.randn(5, 3), torch.randn(5), torch.randn(6, 3)
    ops = make_ops({"w": w, "b": b}, ROW)
    torch.testing.assert_close(ops.linear(x, "w", "b"), x @ w.T + b)
    torch.testing.assert_close(ops.linear(x, "w"), x @ w.T)
    assert torch.equal(ops.embedding(torch.tensor([4, 0], dtype=torch.int32), "w"), w[[4, 0]])
    assert [t.shape[1] for t in ops.split(x, [1, 2])] == [1, 2]
    assert torch.equal(ops.add(x, x), 2 * x)
    with pytest.raises(ReplayError, match="weight nothing is missing"):
        ops.linear(x, "nothing")
    with pytest.raises(ReplayError, match=r"weight w is torch\.float32; the state was made for torch\.bfloat16"):
        make_ops({"w": w}, ROW, dtype="bfloat16").embedding(torch.tensor([0]), "w")


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole sequence, head by head. q [n, 4, 8], k, v [n, 2, 8]; scale 0.3."""
    out = torch.empty_like(q, dtype=torch.float64)
    for t in range(len(q)):
        for head in range(4):
            scores = k[: t + 1, head // 2].double() @ q[t, head].double() * 0.3
            out[t, head] = scores.softmax(0) @ v[: t + 1, head // 2].double()
    return out


def attend(ops: TorchOps, qkv: Sequence[torch.Tensor], span: slice) -> torch.Tensor:
    q, k, v = (t[span].flatten(1) for t in qkv)
    return ops.attention(1, q, k, v, scale=0.3)


def test_attention_phases_with_stale_entries_that_hold_nan() -> None:
    """Scan, continued scan, steps with a rolled back draft: equal to attention over the accepted tokens alone."""
    state = ModelState(CONFIG, slots=3, max_positions=12, spec_len=4)
    for cache in state.kv_storage[1]:
        cache.fill_(torch.nan)
    a, b = ([torch.randn(n, h, 8) for h in (4, 2, 2)] for n in (11, 9))
    want_a, want_b = plain_attention(*a), plain_attention(*b)

    def check(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got.double().view_as(want), want, atol=1e-6, rtol=1e-5)

    packed = [torch.cat([x[:5], y[:3]]) for x, y in zip(a, b, strict=True)]
    check(
        attend(TorchOps({}, state, Batch.scan([2, 0], [5, 3])), packed, slice(0, 8)),
        torch.cat([want_a[:5], want_b[:3]]),
    )
    check(attend(TorchOps({}, state, Batch.scan([0], [2], starts=[3])), b, slice(3, 5)), want_b[3:5])
    wrong = [
        torch.cat([torch.randn(2, *x.shape[1:]), y[5:7], torch.randn(2, *x.shape[1:])])
        for x, y in zip(a, b, strict=True)
    ]
    batch = Batch.step([-1, 0], [4, 5], 2)
    rows = attend(TorchOps({}, state, batch), wrong, slice(0, 4)).view(2, 2, 4, 8)
    assert torch.equal(rows[0], torch.zeros(2, 4, 8)), "pad row"
    check(rows[1], want_b[5:7])
    # Both tokens of slot 0 are rolled back: other ones follow at the same positions.
    c = [torch.cat([y[:5], torch.randn(4, *y.shape[1:])]) for y in b]
    want_c = plain_attention(*c)
    both = [torch.stack([y[5], x[5]]) for x, y in zip(a, c, strict=True)]
    rows = attend(TorchOps({}, state, Batch.step([0, 2], [5, 5], 1)), both, slice(0, 2))
    check(rows, torch.stack([want_c[5], want_a[5]]))
    check(attend(TorchOps({}, state, Batch.step([0], [6], 3)), c, slice(6, 9)), want_c[6:9])
    # Rows of different lengths in one step: of slot 2, positions 7 and 8 are read and hold NaN.
    both = [torch.stack([x[6], y[8]]) for x, y in zip(a, c, strict=True)]
    rows = attend(TorchOps({}, state, Batch.step([2, 0], [6, 8], 1)), both, slice(0, 2))
    check(rows, torch.stack([want_a[6], want_c[8]]))
    assert torch.isnan(state.kv[1][0][1]).all(), "no write to a slot that no row names"


LATENT = dataclasses.replace(
    CONFIG,
    num_key_value_heads=4,
    attention_bias=False,
    latent_rank=6,
    latent_shared_dim=2,
    latent_value_dim=5,
)


def plain_latent_attention(
    q: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """Keys and values of every head made in full. q [n, 4, 8], latent [n, 6], shared [n, 2], up [4, 6 + 5, 6]."""
    out = torch.empty(len(q), 4, 5, dtype=torch.float64)
    for head in range(4):
        keys = torch.cat([latent.double() @ up[head, :6].double().T, shared.double()], dim=1)
        values = latent.double() @ up[head, 6:].double().T
        for t in range(len(q)):
            scores = keys[: t + 1] @ q[t, head].double() * 0.3
            out[t, head] = scores.softmax(0) @ values[: t + 1]
    return out.flatten(1)


def test_latent_attention_phases_with_stale_entries_that_hold_nan() -> None:
    """As above: two sequences in one scan, a continued scan, a step with wrong drafts and a pad row, other tokens after
    them. What is kept per token is the latent and the shared key, nothing per head."""
    state = ModelState(LATENT, slots=3, max_positions=12, spec_len=4)
    (cache,) = state.kv_storage[1]
    cache.fill_(torch.nan)
    up = torch.randn(4, 11, 6)
    a, b = ((torch.randn(n, 4, 8), torch.randn(n, 6), torch.randn(n, 2)) for n in (11, 9))
    want_a, want_b = plain_latent_attention(*a, up), plain_latent_attention(*b, up)

    def run(batch: Batch, *parts: tuple[tuple[torch.Tensor, ...], slice]) -> torch.Tensor:
        q, latent, shared = (torch.cat([x[i][span] for x, span in parts]) for i in range(3))
        ops = TorchOps({"up": up.flatten(0, 1)}, state, batch)
        return ops.latent_attention(1, q.flatten(1), latent, shared, kv_up="up", scale=0.3).double()

    def check(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)

    packed = run(Batch.scan([2, 0], [5, 3]), (a, slice(0, 5)), (b, slice(0, 3)))
    check(packed, torch.cat([want_a[:5], want_b[:3]]))
    check(run(Batch.scan([0], [2], starts=[3]), (b, slice(3, 5))), want_b[3:5])
    rows = run(Batch.step([-1, 0], [4, 5], 2), (a, slice(0, 2)), (a, slice(7, 9)))
    assert torch.equal(rows[:2], torch.zeros(2, 20, dtype=torch.float64)), "pad row"
    rows = run(Batch.step([0, 2], [5, 5], 3), (b, slice(5, 8)), (a, slice(5, 8)))
    check(rows, torch.cat([want_b[5:8], want_a[5:8]]))
    assert torch.equal(state.kv[1][0][2, 5, 0], torch.cat([a[1][5], a[2][5]]))
    assert torch.isnan(state.kv[1][0][1]).all(), "no write to a slot that no row names"


def test_batch_that_does_not_fit_the_state() -> None:
    for batch, message in (
        (Batch.scan([0], [13]), "position 12 is over the limit: max_positions is 12"),
        (Batch.step([0], [12]), "position 12 is over the limit"),
        (Batch.step([3], [0]), "slot 3 is out of range; the state has 3 slots"),
        (Batch.step([0], [0], 5), r"tokens_per_row is 5; it must be a whole number from 1 to 4 \(spec_len\)"),
    ):
        with pytest.raises(ReplayError, match=message):
            make_ops({}, batch)


def test_another_impl_is_used() -> None:
    class Impl:
        @staticmethod
        def conv_step(
            pool: object, slots: object, x: torch.Tensor, w: object, b: object, *, accepted: object
        ) -> torch.Tensor:
            assert accepted is None and x.shape == (1, 2, 3)
            return x + 1

    state = ModelState(CONFIG, slots=1, max_positions=4, spec_len=2)
    ops = TorchOps({"w": torch.zeros(1)}, state, Batch.step([0], [0], 2), impl=Impl)
    assert torch.equal(ops.causal_conv(0, torch.zeros(2, 3), "w"), torch.ones(2, 3))


class ShapeOps(Ops["tuple[int, ...]"]):
    """Computes shapes, checks that operands fit, and records which weights are read."""

    def __init__(self, weights: dict[str, tuple[int, ...]], config: HybridConfig) -> None:
        self.weights, self.config, self.read, self.layers = weights, config, set[str](), list[tuple[str, int]]()

    def use(self, name: str) -> tuple[int, ...]:
        self.read.add(name)
        return self.weights[name]

    def same(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        assert len(set(shapes)) == 1, shapes
        return shapes[0]

    def embedding(self, ids: Any, weight: str) -> Any:
        return (*ids, self.use(weight)[1])

    def linear(self, x: Any, weight: str, bias: str | None = None) -> Any:
        rows, columns = self.use(weight)
        assert columns == x[1] and (bias is None or self.use(bias) == (rows,))
        return (x[0], rows)

    def rms_norm(self, x: Any, weight: str, eps: float, *, group_size: int | None = None) -> Any:
        (size,) = self.use(weight)
        assert size in (x[1], group_size) and x[1] % (group_size or x[1]) == 0
        latent = weight.endswith(("kv_norm.weight", "mixer.q_norm.weight")) and self.config.latent_rank
        assert eps == (self.config.latent_norm_eps if latent else self.config.norm_eps)
        return x

    def rms_norm_gated(
        self, x: Any, gate: Any, weight: str, eps: float, *, group_size: int, activation: str = "silu"
    ) -> Any:
        assert activation == ("sigmoid" if self.config.recurrent_kind == "kimi_delta" else "silu")
        return self.rms_norm(self.same(x, gate), weight, eps, group_size=group_size)

    def split(self, x: Any, sizes: Sequence[int]) -> Any:
        assert sum(sizes) == x[1]
        return [(x[0], size) for size in sizes]

    def add(self, x: Any, y: Any) -> Any:
        return self.same(x, y)

    silu_mul = sigmoid_mul = add

    def relu2(self, x: Any) -> Any:
        return x

    def rope(self, x: Any, *, head_dim: int, rotary_dim: int, theta: float) -> Any:
        assert x[1] % head_dim == 0 and 0 < rotary_dim <= head_dim and theta == self.config.rope_theta
        return x

    def causal_conv(self, layer: int, x: Any, weight: str, bias: str | None = None) -> Any:
        self.layers.append(("conv", layer))
        assert self.use(weight) == (x[1], self.config.conv_kernel) and (bias is None or self.use(bias) == (x[1],))
        return x

    def replay_mamba2(
        self, layer: int, x: Any, dt: Any, b: Any, c: Any, z: Any, *, a_log: str, d: str, dt_bias: str
    ) -> Any:
        self.layers.append(("mamba2", layer))
        assert self.same(b, c)[1] == self.config.ssm_group_size
        assert self.use(a_log) == self.use(d) == self.use(dt_bias) == (dt[1],)
        return self.same(x, z)

    def replay_gated_delta(
        self, layer: int, q: Any, k: Any, v: Any, a: Any, b: Any, *, a_log: str, dt_bias: str
    ) -> Any:
        kind = self.config.recurrent_kind
        self.layers.append((kind, layer))
        assert self.same(q, k)[1] == self.config.ssm_group_size
        assert self.use(a_log) == (b[1],)
        gates = (b[1], self.config.ssm_state_size) if kind == "kimi_delta" else (b[1],)
        assert self.use(dt_bias) == gates and a[1] == math.prod(gates)
        return v

    def attention(self, layer: int, q: Any, k: Any, v: Any, *, scale: float) -> Any:
        self.layers.append(("attention", layer))
        self.same(k, v)
        assert scale == self.config.head_dim**-0.5
        return q

    def latent_attention(self, layer: int, q: Any, latent: Any, shared: Any, *, kv_up: str, scale: float) -> Any:
        self.layers.append(("attention", layer))
        config = self.config
        heads, value = config.num_attention_heads, config.latent_value_dim
        assert (q[1], latent[1], shared[1]) == (heads * config.head_dim, config.latent_rank, config.latent_shared_dim)
        assert self.use(kv_up) == (heads * (config.head_dim - config.latent_shared_dim + value), config.latent_rank)
        assert scale == config.head_dim**-0.5
        return (q[0], heads * value)

    def select_last(self, x: Any) -> Any:
        return (2, x[1])

    def to_float32(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("kind", [*oracles.KINDS, "biases"])
@pytest.mark.parametrize("all_logits", [False, True])
def test_the_decoder_is_written_against_ops_alone(kind: str, all_logits: bool) -> None:
    config = CONFIG if kind == "biases" else oracles.make_oracle(kind).config
    shapes = weight_shapes(config)
    ops = ShapeOps(shapes, config)
    logits = HybridDecoder(config).forward(ops, (9,), all_logits=all_logits)
    assert logits == ((9, config.vocab_size) if all_logits else (2, config.vocab_size))
    assert ops.read == set(shapes)
    stateful = [(kind, layer) for kind, layer in ops.layers if kind != "conv"]
    assert stateful == [(kind, i) for i, kind in enumerate(config.stateful_layers)]
    assert [layer for kind, layer in ops.layers if kind == "conv"] == list(config.recurrent_layers)


def test_tied_config_needs_no_output_weight() -> None:
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    assert set(weight_shapes(CONFIG)) - set(weight_shapes(tied)) == {"lm_head.weight"}
    ops = ShapeOps(weight_shapes(tied), tied)
    assert HybridDecoder(tied).forward(ops, (3,)) == (2, 11)


def test_models_and_vocabulary_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import trtllm_replayssm.models.decoder, trtllm_replayssm.ops.base, trtllm_replayssm.models.hf\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
