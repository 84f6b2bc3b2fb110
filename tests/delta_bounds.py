"""How far an element of a GDN or KDA step's output may be from a float64 recurrence, by the rounding points alone.

With u half of eps(act_dtype), Wk[t, j] = (exp(g_{j+1} + ... + g_t) o kn_j) . kn_t, Wq the same with qn_t, and d_t =
beta_t (v_t - held_t) as in docs/math.md, what a step returns for token t differs from exact arithmetic by three things:

- a ring row of an earlier step is read as d rounded to act_dtype; a row of the step itself is read before rounding. So
      |error of d_t| <= beta_t sum_{j < t} |Wk[t, j]| r_j,    r_j = |error of d_j| + u (|d_j| + |error of d_j|)
  over the ring rows j of token t's step and, without the term in u, the step's own rows; an error of d_j that a token
  meets is that of the step which computed it. Rows that a step folded are exact: the fold starts from raw k and v;
- o_t takes these errors with the weights Wq, and d_t's own with Wq[t, t];
- o_t is rounded once: u |o_t|.

Sums in fp32 come on top: OPERATIONS roundings of 2^-24, relative to the sum of the terms' sizes. Nothing here is tuned:
every term is the largest that it can be, so one element past the bound is an error of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from replay_cases import RELATIVE_BOUND, Inputs, assert_close, oracle, relative_error

from trtllm_replayssm import reference
from trtllm_replayssm.pool import torch_dtype

#: Roundings behind one fp32 sum: a dot product over K <= 128, the rows of a window of 16 and 16 tokens, norms, gates.
OPERATIONS = 192


def output_bounds(inputs: Inputs, first: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Largest allowed |o - float64 o|, float64 [rows, length, HV, V], of a decode from a zero state.

    Args:
        first: int [rows, length]: the oldest token whose ring row token t's step reads; older ones are in the state.
        own: int [rows, length]: the first token of token t's step.
    """
    spec, u = inputs.spec, torch.finfo(torch_dtype(inputs.spec.act_dtype)).eps / 2
    fp32 = OPERATIONS * 2.0**-24
    exact = {name: value.double() for name, value in inputs.tokens.items()}
    params = {name: value.double() for name, value in inputs.params.items()}
    g, beta = reference.delta_gates(
        exact["a"], exact["b"], params["A_log"], params["dt_bias"], gate=spec.gate, lower_bound=spec.gate_lower_bound
    )
    g = g if g.dim() == 4 else g[..., None]
    kn, qn = (_normalised(exact[name], spec.heads_per_group) for name in "kq")
    qn = qn * spec.dstate**-0.5
    state = torch.zeros(inputs.rows, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64, device=g.device)
    d, error, out = torch.zeros_like(exact["v"]), torch.zeros_like(exact["v"]), torch.zeros_like(exact["v"])
    since = torch.zeros_like(g)  # [rows, j, HV, K']: log-decay from just behind row j up to the token at hand
    for t in range(inputs.length):
        since[:, :t] += g[:, t, None]
        keys = torch.exp(since[:, : t + 1]) * kn[:, : t + 1]
        state = torch.exp(g[:, t])[:, :, None, :] * state
        d[:, t] = beta[:, t, :, None] * (exact["v"][:, t] - (state @ kn[:, t, :, :, None])[..., 0])
        state = state + d[:, t, :, :, None] * kn[:, t, :, None, :]
        # r_j of the rows that this token's step reads, zero for the others.
        row = torch.arange(t, device=g.device)
        read = (row >= first[:, t, None])[:, :, None, None] * error[:, :t]
        read = read + ((row >= first[:, t, None]) & (row < own[:, t, None]))[:, :, None, None] * u * (
            d[:, :t].abs() + error[:, :t]
        )
        by_key, by_query = ((keys * x[:, t, None]).sum(-1).abs()[..., None] for x in (kn, qn))
        held, got = ((keys.abs() * x[:, t, None].abs()).sum(-1)[..., None] * d[:, : t + 1].abs() for x in (kn, qn))
        slack = fp32 * (exact["v"][:, t].abs() + held[:, :t].sum(1))
        error[:, t] = beta[:, t, :, None] * ((by_key[:, :t] * read).sum(1) + slack)
        o = (state @ qn[:, t, :, :, None])[..., 0]
        wrong = (by_query[:, :t] * read).sum(1) + by_query[:, t] * error[:, t] + fp32 * got.sum(1)
        out[:, t] = wrong + u * (o.abs() + wrong)
    return out


def _normalised(x: torch.Tensor, heads_per_group: int) -> torch.Tensor:
    """q or k [rows, length, HK, K] to unit rows of every value head, [rows, length, HV, K]."""
    x = x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads_per_group, 2)


class ReadRows:
    """Which rows the steps of a decode read, for output_bounds, from the pools' cursors after each step."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.own: list[torch.Tensor] = []

    def record(self, cursors: torch.Tensor, start: int, tokens: int) -> None:
        """After a step over tokens start .. start + tokens - 1; cursors: int [rows, words] (docs/contracts.md)."""
        for _ in range(tokens):
            self.first.append(start - cursors[:, 1].long())
            self.own.append(torch.full_like(self.first[-1], start))

    def bounds(self, inputs: Inputs) -> torch.Tensor:
        """output_bounds of what was recorded."""
        return output_bounds(inputs, torch.stack(self.first, 1), torch.stack(self.own, 1))


#: Decodes all tokens of the inputs in steps of so many; outputs [rows, length, HV, V] and what its steps read.
Decode = Callable[[int], "tuple[torch.Tensor, ReadRows]"]


def assert_verify_equals_single_steps(decode: Decode, inputs: Inputs, tokens: int) -> None:
    """Outputs of steps of ``tokens`` tokens and of single steps: each within its bound of float64, near each other.

    Both are the same function of the same inputs, but not the same roundings: a step reads d of its own tokens before
    rounding, single steps read it rounded from the ring. So no bound on their difference in eps of one output alone can
    hold, however correct both are; the sum of their two bounds does, and follows from the first check. The norm of the
    difference is checked beside it: roundings add up like a random walk, errors of the arithmetic do not.
    """
    spec = inputs.spec
    zero = torch.zeros(
        inputs.rows, spec.nheads, spec.headdim, spec.dstate, dtype=torch.float64, device=inputs.tokens["v"].device
    )
    want = oracle(inputs, state=zero)[0]
    outputs = []
    for count in (tokens, 1):
        o, read = decode(count)
        assert_close(o, want, spec.act_dtype, what=f"{count} tokens a step")
        excess = float(((o.double() - want).abs() / read.bounds(inputs)).max())
        assert excess <= 1.0, f"{count} tokens a step: an element has {excess:.3f} times its largest error"
        outputs.append(o)
    eps = torch.finfo(torch_dtype(spec.act_dtype)).eps
    apart = relative_error(outputs[0], outputs[1].double())
    assert apart <= RELATIVE_BOUND[spec.act_dtype] * eps, f"{apart / eps:.3f} eps apart"
