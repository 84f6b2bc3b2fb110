"""Conventional and ReplaySSM decoding side by side: tokens, logits at every step, final recurrent states.

Contract: both sessions see the same tokens, those that conventional decoding chooses. Where replay would have chosen
another one, that is recorded and the comparison goes on with the conventional token (teacher-forced), so that every
position is compared whatever happens at one of them. Free-running texts are identical exactly when no choice differs.

What rounding can explain is bounded beforehand from the dtypes (`Rounding`); a result is never judged by its own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..errors import require
from ..spec import READ_COPIES, require_choice, require_int
from .drafts import NgramDrafter
from .generate import EOS, LENGTH, POSITIONS, TokenCallback, filled, room_behind, row_sampling
from .sampling import GREEDY, Sampler, SamplingParams, choose
from .session import Session

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
#: Half a step of the copy's format; of fp8, whose steps are wide, what is left after a read has summed dstate values.
_COPY_EPS = {"none": 0.0, "bf16": 2.0**-8, "int8": 2.0**-8, "fp8_e4m3": 2.0**-6}
#: How many eps the difference may be. Sums in another order, over all layers, come to about ten in fp32; values that
#: are stored in 16 or 8 bits are off by one or two, and their sums add nothing to that.
_FINE_UNITS = 128.0
_COARSE_UNITS = 8.0


@dataclass(frozen=True)
class Rounding:
    """Largest differences that rounding explains.

    Attributes:
        logits: of logits, over the largest |logit| of the position (at least 1). states: of states, over their norm.
    """

    logits: float
    states: float

    @classmethod
    def of(cls, dtype: str, state_dtype: str, read_copy: str = "none") -> Rounding:
        """The bounds for activations of ``dtype``, states of ``state_dtype`` and a read copy.

        Raises:
            ReplayError: a name that is not one of those in spec.py.
        """
        require_choice("dtype", dtype, tuple(_EPS))
        require_choice("state_dtype", state_dtype, tuple(_EPS))
        require_choice("read_copy", read_copy, READ_COPIES)
        eps = max(_EPS[dtype], _EPS[state_dtype], _COPY_EPS[read_copy])
        bound = eps * (_FINE_UNITS if eps <= _EPS["float32"] else _COARSE_UNITS)
        return cls(logits=bound, states=bound)


@dataclass(frozen=True)
class Difference:
    """The first position of a row where the two choices differ.

    Attributes:
        position: index among the new tokens, from 0.
        conventional, replay: the tokens chosen.
        conventional_logits, replay_logits: logits of these two tokens, in this order, in either decoding.
        gap: how far the conventional choice leads in the conventional logits.
        logit_difference: largest difference between the two decodings' logits at this position.
        allowed: the difference that rounding explains here.
    """

    position: int
    conventional: int
    replay: int
    conventional_logits: tuple[float, float]
    replay_logits: tuple[float, float]
    gap: float
    logit_difference: float
    allowed: float


@dataclass
class RowComparison:
    """One prompt.

    Attributes:
        tokens: new tokens that conventional decoding chose, without the end token. finish_reason: as in generate.py.
        compared: positions compared. differing: positions where the choices differ. first: the first of these.
        logit_difference: largest |conventional - replay| over all positions and tokens.
        logit_difference_agreeing: the same over the positions up to the first difference.
        logit_difference_relative: largest over the positions of difference / largest |logit| there (at least 1).
        state_difference: largest over the layers of |S_conventional - S_replay| / |S_conventional| (norms), at the end.
        drafted, accepted: draft tokens on the replay side.
        greedy: chosen without random numbers.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    compared: int = 0
    differing: int = 0
    first: Difference | None = None
    logit_difference: float = 0.0
    logit_difference_agreeing: float = 0.0
    logit_difference_relative: float = 0.0
    state_difference: float = 0.0
    drafted: int = 0
    accepted: int = 0
    greedy: bool = True

    @property
    def identical(self) -> bool:
        """True where every choice is the same."""
        return self.first is None

    def within(self, rounding: Rounding) -> bool:
        """True where rounding explains everything that differs."""
        first = self.first
        explained = first is None or not self.greedy or first.gap <= first.allowed
        close = self.logit_difference_relative <= rounding.logits and self.state_difference <= rounding.states
        return explained and close


@dataclass
class Comparison:
    """All rows, with the bounds that they are judged by."""

    rows: list[RowComparison]
    rounding: Rounding

    @property
    def identical(self) -> bool:
        """True where all texts are identical."""
        return all(row.identical for row in self.rows)

    @property
    def ok(self) -> bool:
        """True where rounding explains every difference of every row."""
        return all(row.within(self.rounding) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of JSON values, with the verdicts."""
        rows = [asdict(r) | {"identical": r.identical, "within_rounding": r.within(self.rounding)} for r in self.rows]
        return {"ok": self.ok, "identical": self.identical, "rounding": asdict(self.rounding), "rows": rows}


class _Pair:
    """One prompt in both sessions."""

    def __init__(self, index: int, sampling: SamplingParams, limit: int) -> None:
        self.index = index
        self.limit = limit
        self.samplers = (Sampler(sampling), Sampler(sampling))
        self.result = RowComparison(greedy=sampling.greedy)
        self.seqs = (-1, -1)
        self.last = -1
        self.fed = 0  # tokens that the current launch of the replay session may keep
        self.drafter = NgramDrafter()


def compare(
    conventional: Session,
    replay: Session,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rounding: Rounding,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    eos_ids: Sequence[int] = (),
    draft_tokens: int = 0,
    on_tokens: TokenCallback | None = None,
) -> Comparison:
    """Decode ``prompts`` in both sessions and compare; arguments as in :func:`generate`.

    Drafts are used on the replay side only. More prompts than the sessions hold are taken in turn.

    Raises:
        ReplayError: bad arguments, or logits that are not finite. Every sequence is released, also then.
    """
    require_int("max_new_tokens", max_new_tokens, 1, 1 << 24)
    require_int("draft_tokens", draft_tokens, 0, replay.spec_len - 1, " (the session's spec_len - 1)")
    positions = min(conventional.max_positions, replay.max_positions)
    params = row_sampling(sampling, len(prompts))
    width = min(conventional.free_slots, replay.free_slots)
    require(width > 0, "a session has no free slot; release a sequence first")
    rooms = room_behind(prompts, positions)
    pairs = [_Pair(i, params[i], min(max_new_tokens, room)) for i, room in enumerate(rooms)]
    loop = _Lockstep((conventional, replay), rounding, frozenset(eos_ids), max_new_tokens, draft_tokens, on_tokens)
    for start in range(0, len(pairs), width):
        loop.run(pairs[start : start + width], prompts[start : start + width])
    return Comparison([pair.result for pair in pairs], rounding)


@dataclass
class _Lockstep:
    """Both sessions, conventional first."""

    sessions: tuple[Session, Session]
    rounding: Rounding
    eos: frozenset[int]
    max_new: int
    draft_tokens: int
    on_tokens: TokenCallback | None

    def run(self, pairs: list[_Pair], prompts: Sequence[Sequence[int]]) -> None:
        """Decode ``pairs`` to their ends."""
        live: list[list[int]] = [[], []]
        try:
            logits = []
            for side, session in enumerate(self.sessions):
                live[side], out = session.prefill(prompts)
                logits.append(out)
            for i, (pair, prompt) in enumerate(zip(pairs, prompts, strict=True)):
                pair.seqs = (live[0][i], live[1][i])
                pair.drafter.extend(prompt)
            self._settle(pairs, logits[0], logits[1])
            while active := [p for p in pairs if not p.result.finish_reason]:
                self._launch(active)
            self._states(pairs)
        finally:
            for side, session in enumerate(self.sessions):
                session.release(live[side])

    def _launch(self, pairs: list[_Pair]) -> None:
        """One launch of the replay session, and as many conventional steps as it has right tokens."""
        conventional, replay = self.sessions
        room = min(replay.max_positions - replay.length(p.seqs[1]) for p in pairs)
        most = min(self.draft_tokens, room - 1)
        counts = [min(most, p.limit - len(p.result.tokens) - 1) for p in pairs]
        drafts = [p.drafter.propose(n) if n > 0 else [] for p, n in zip(pairs, counts, strict=True)]
        fill = filled([p.last for p in pairs], drafts)
        width = len(fill[0])
        seqs = [p.seqs[1] for p in pairs]
        if width == 1:
            logits = replay.step(seqs, [row[0] for row in fill])[:, None]
        else:
            logits = replay.verify(seqs, fill)
        matched = list(range(len(pairs)))
        for pair in pairs:
            pair.fed = 0
        for t in range(width):
            rows = [pairs[i] for i in matched]
            reference = conventional.step([p.seqs[0] for p in rows], [p.last for p in rows])
            self._settle(rows, reference, logits[matched, t])
            for pair in rows:
                pair.fed += 1
            matched = [i for i in matched if self._goes_on(pairs[i], drafts[i], t)]
            if not matched:
                break
        if width > 1:
            replay.commit(seqs, [p.fed for p in pairs])
        for pair, d in zip(pairs, drafts, strict=True):
            pair.result.drafted += len(d)
            pair.result.accepted += pair.fed - 1

    @staticmethod
    def _goes_on(pair: _Pair, drafts: list[int], t: int) -> bool:
        return not pair.result.finish_reason and t < len(drafts) and drafts[t] == pair.last

    def _settle(self, pairs: list[_Pair], reference: torch.Tensor, replayed: torch.Tensor) -> None:
        """Compare one position of every pair (logits [n, vocab] each) and go on with the conventional choice."""
        reference, replayed = reference.float().cpu(), replayed.float().cpu()
        chosen = choose(reference, [p.samplers[0] for p in pairs]).tolist()
        other = choose(replayed, [p.samplers[1] for p in pairs]).tolist()
        distance = (reference - replayed).abs().amax(dim=-1).tolist()
        scale = reference.abs().amax(dim=-1).clamp(min=1.0).tolist()
        for i, pair in enumerate(pairs):
            row, c, r = pair.result, chosen[i], other[i]
            for sampler in pair.samplers:
                sampler.advance(1)
            row.logit_difference = max(row.logit_difference, distance[i])
            row.logit_difference_relative = max(row.logit_difference_relative, distance[i] / scale[i])
            if row.first is None:
                row.logit_difference_agreeing = max(row.logit_difference_agreeing, distance[i])
            if c != r:
                row.differing += 1
                if row.first is None:
                    ours = (float(reference[i, c]), float(reference[i, r]))
                    theirs = (float(replayed[i, c]), float(replayed[i, r]))
                    allowed = self.rounding.logits * scale[i]
                    row.first = Difference(row.compared, c, r, ours, theirs, ours[0] - ours[1], distance[i], allowed)
            row.compared += 1
            self._take(pair, c)

    def _take(self, pair: _Pair, token: int) -> None:
        row = pair.result
        pair.last = token
        if token in self.eos:
            row.finish_reason = EOS
            return
        row.tokens.append(token)
        pair.drafter.extend([token])
        if len(row.tokens) == pair.limit:
            row.finish_reason = LENGTH if pair.limit == self.max_new else POSITIONS
        if self.on_tokens:
            self.on_tokens(pair.index, [token])

    def _states(self, pairs: list[_Pair]) -> None:
        conventional, replay = self.sessions
        for pair in pairs:
            first, second = conventional.recurrent_state(pair.seqs[0]), replay.recurrent_state(pair.seqs[1])
            require(first.keys() == second.keys(), "the sessions have different recurrent layers; give both one model")
            for layer, state in first.items():
                distance = relative_difference(state, second[layer])
                pair.result.state_difference = max(pair.result.state_difference, distance)


def relative_difference(reference: torch.Tensor, other: torch.Tensor) -> float:
    """|reference - other| / |reference| (Euclidean norms in float64); infinite where either is not finite."""
    a, b = reference.double(), other.double()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    norm, distance = float(a.norm()), float((a - b).norm())
    return distance / norm if norm > 0 else (0.0 if distance == 0 else float("inf"))
