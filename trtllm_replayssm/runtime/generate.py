"""Generation over a Session: continuous batching, stop rules, speculation with verify and commit.

Contract: a row's tokens do not depend on which rows run beside it, nor (up to rounding of the logits) on whether drafts
are used: a draft stays only where it is the token that the row's sampler chooses from the verified logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import require
from ..spec import require_int
from .drafts import NgramDrafter
from .sampling import GREEDY, Sampler, SamplingParams, choose
from .session import Session

EOS = "eos"
LENGTH = "length"
POSITIONS = "positions"

#: Called with (prompt index, new tokens) whenever a row has got tokens.
TokenCallback = Callable[[int, list[int]], None]
#: Called with (prompt index, its completion) when a row is done.
DoneCallback = Callable[[int, "Completion"], None]


@dataclass
class Completion:
    """What one prompt got.

    Attributes:
        tokens: new tokens, without the end token that stopped the row.
        finish_reason: ``eos``, ``length`` (max_new_tokens) or ``positions`` (the session's position limit).
        launches: decode steps that the row took part in (the prefill is not counted).
        drafted, accepted: draft tokens proposed and kept.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    launches: int = 0
    drafted: int = 0
    accepted: int = 0


class _Row:
    """One sequence on its way."""

    def __init__(self, index: int, prompt: Sequence[int], sampling: SamplingParams, limit: int, drafts: int) -> None:
        self.index = index
        self.prompt = prompt
        self.limit = limit
        self.sampler = Sampler(sampling)
        self.done = Completion()
        self.seq = -1
        self.last = -1  # chosen, not yet fed to the model
        self.drafter = NgramDrafter() if drafts else None
        if self.drafter:
            self.drafter.extend(prompt)

    def take(self, tokens: Sequence[int], eos: frozenset[int], max_new: int) -> list[int]:
        """Add chosen tokens up to a stop; returns those that were added."""
        new: list[int] = []
        for token in tokens:
            if token in eos:
                self.done.finish_reason = EOS
                break
            new.append(token)
            if len(self.done.tokens) + len(new) == self.limit:
                self.done.finish_reason = LENGTH if self.limit == max_new else POSITIONS
                break
        self.done.tokens += new
        self.last = tokens[-1]
        if self.drafter:
            self.drafter.extend(new)
        return new

    def drafts(self, most: int) -> list[int]:
        """Up to ``most`` drafts, leaving one place of the row's limit for the token behind them."""
        count = min(most, self.limit - len(self.done.tokens) - 1)
        return self.drafter.propose(count) if self.drafter and count > 0 else []


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    eos_ids: Sequence[int] = (),
    draft_tokens: int = 0,
    on_tokens: TokenCallback | None = None,
    on_done: DoneCallback | None = None,
) -> list[Completion]:
    """Continue every prompt until an end token, ``max_new_tokens`` or the position limit.

    Args:
        session: with at least one free slot; prompts beyond its free slots wait until rows finish.
        prompts: token ids, any lengths below the session's position limit.
        max_new_tokens: at least 1.
        sampling: one for all rows (row i then draws from seed + i), or one per prompt.
        eos_ids: tokens that end a row.
        draft_tokens: most drafts per step, 0..session.spec_len - 1.
        on_tokens, on_done: told about progress, in the order in which it happens.

    Returns:
        One Completion per prompt, in their order.

    Raises:
        ReplayError: bad arguments, or logits that are not finite. Every sequence is released, also then.
    """
    require_int("max_new_tokens", max_new_tokens, 1, 1 << 24)
    require_int("draft_tokens", draft_tokens, 0, session.spec_len - 1, " (the session's spec_len - 1)")
    require(session.free_slots > 0, "the session has no free slot; release a sequence first")
    params = row_sampling(sampling, len(prompts))
    limits = [min(max_new_tokens, room) for room in room_behind(prompts, session.max_positions)]
    rows = [_Row(i, prompts[i], params[i], limit, draft_tokens) for i, limit in enumerate(limits)]
    waiting, active = list(rows), list[_Row]()
    loop = _Loop(session, frozenset(eos_ids), max_new_tokens, draft_tokens, on_tokens, on_done)
    try:
        while waiting or active:
            count = min(session.free_slots, len(waiting))
            if count:
                admitted, waiting = waiting[:count], waiting[count:]
                active += loop.admit(admitted)
            else:
                active = loop.advance(active)
    finally:
        session.release([row.seq for row in rows if row.seq >= 0])
    return [row.done for row in rows]


def room_behind(prompts: Sequence[Sequence[int]], positions: int) -> list[int]:
    """Tokens that each prompt leaves room for. Raises ReplayError for no prompts, an empty one, or one without room."""
    require(len(prompts) > 0, "prompts is empty; there must be at least one")
    for i, prompt in enumerate(prompts):
        require(len(prompt) > 0, f"prompt {i} is empty; it must have at least one token")
        require(
            len(prompt) < positions,
            f"prompt {i} has {len(prompt)} tokens; the position limit is {positions}, of which one must be left",
        )
    return [positions - len(prompt) for prompt in prompts]


def filled(last: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows [n, T] of a verify: the token to feed, its drafts, then filling that is never accepted."""
    width = max(len(d) for d in drafts)
    return [[token, *d, *[token] * (width - len(d))] for token, d in zip(last, drafts, strict=True)]


def row_sampling(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters of ``count`` rows: those given, or one set whose seed is raised by the row's number."""
    if isinstance(sampling, SamplingParams):
        s = sampling
        return [SamplingParams(s.temperature, s.top_k, s.top_p, (s.seed + i) % (1 << 63)) for i in range(count)]
    require(len(sampling) == count, f"there are {len(sampling)} sampling parameters for {count} prompts")
    return list(sampling)


@dataclass
class _Loop:
    """The two moves of generation over a fixed session: admit prompts, advance rows by one launch."""

    session: Session
    eos: frozenset[int]
    max_new: int
    draft_tokens: int
    on_tokens: TokenCallback | None
    on_done: DoneCallback | None

    def admit(self, rows: list[_Row]) -> list[_Row]:
        """Prefill ``rows`` and choose their first tokens; returns the rows that go on."""
        seqs, logits = self.session.prefill([row.prompt for row in rows])
        for row, seq in zip(rows, seqs, strict=True):
            row.seq = seq
        chosen = choose(logits, [row.sampler for row in rows]).tolist()
        return self._settle(rows, [[token] for token in chosen])

    def advance(self, rows: list[_Row]) -> list[_Row]:
        """One step, or one verify where any row has drafts; returns the rows that go on."""
        drafts = self._drafts(rows)
        tokens = filled([row.last for row in rows], drafts)
        seqs = [row.seq for row in rows]
        for row in rows:
            row.done.launches += 1
        if len(tokens[0]) == 1:
            logits = self.session.step(seqs, [row.last for row in rows])
            chosen = choose(logits, [row.sampler for row in rows]).tolist()
            return self._settle(rows, [[token] for token in chosen])
        logits = self.session.verify(seqs, tokens)
        picked = choose(logits, [row.sampler for row in rows]).tolist()
        kept = [matching(d, p) for d, p in zip(drafts, picked, strict=True)]
        self.session.commit(seqs, [1 + k for k in kept])
        for row, d, k in zip(rows, drafts, kept, strict=True):
            row.done.drafted += len(d)
            row.done.accepted += k
        return self._settle(rows, [p[: 1 + k] for p, k in zip(picked, kept, strict=True)])

    def _drafts(self, rows: list[_Row]) -> list[list[int]]:
        """Drafts per row: none that would pass the row's limit, and one T for all rows within the position limit."""
        room = min(self.session.max_positions - self.session.length(row.seq) for row in rows)
        most = min(self.draft_tokens, room - 1)
        return [row.drafts(most) for row in rows]

    def _settle(self, rows: list[_Row], chosen: list[list[int]]) -> list[_Row]:
        """Give every row its tokens; release and report the rows that are done."""
        going = []
        for row, tokens in zip(rows, chosen, strict=True):
            row.sampler.advance(len(tokens))
            new = row.take(tokens, self.eos, self.max_new)
            if new and self.on_tokens:
                self.on_tokens(row.index, new)
            if row.done.finish_reason:
                self.session.release([row.seq])
                row.seq = -1
                if self.on_done:
                    self.on_done(row.index, row.done)
            else:
                going.append(row)
        return going


def matching(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts are the tokens that were chosen at their places."""
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count
