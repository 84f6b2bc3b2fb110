"""Sessions. Oracle of the logits: transformers' full forward pass of the same tokens (oracles.py); of the states: a
fresh prefill of the same tokens. The books (slots, lengths, commits) are tested without a model, on HistorySession."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from history_session import HistorySession, table_logits
from oracles import TOLERANCE, Oracle, gap, make_oracle, sequence

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.torch_session import TorchSession, find_device, pieces

STATE_TOLERANCE = 2e-6  # fp32 sums of one layer in another order, states of size about 1


@pytest.fixture(params=["nemotron_h", "qwen3_5"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return make_oracle(request.param)


def session_of(oracle: Oracle, **options: Any) -> TorchSession:
    return TorchSession((oracle.config, oracle.weights), **{"max_batch": 4, "max_positions": 96, **options})


def last(oracle: Oracle, *rows: list[int]) -> torch.Tensor:
    """Logits [n, vocab] after the last token of each row."""
    return torch.stack([oracle.full(row)[-1] for row in rows])


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 16}, {"window": 3, "prefill_tokens": 4}], ids=str)
def test_prompts_of_different_lengths_then_steps(oracle: Oracle, options: dict[str, int]) -> None:
    session = session_of(oracle, **options)
    rows = [sequence(n, seed=n) for n in (1, 9, 20)]
    seqs, logits = session.prefill(rows)
    assert logits.dtype == torch.float32
    assert gap(logits, last(oracle, *rows)) < TOLERANCE
    for i in range(12):
        order = [(i + j) % 3 for j in range(3 if i % 3 else 2)]  # rows change places and take turns
        tokens = [(7 * i + r) % 97 for r in order]
        for r, token in zip(order, tokens, strict=True):
            rows[r] = [*rows[r], token]
        logits = session.step([seqs[r] for r in order], tokens)
        assert gap(logits, last(oracle, *(rows[r] for r in order))) < TOLERANCE
    assert [session.length(s) for s in seqs] == [len(r) for r in rows]


def test_long_prompts_in_pieces_are_like_whole_ones(oracle: Oracle) -> None:
    rows = [sequence(n, seed=n) for n in (50, 3, 31)]
    whole, cut = session_of(oracle), session_of(oracle, prefill_tokens=8)
    (a, first), (b, second) = whole.prefill(rows), cut.prefill(rows)
    assert gap(first, second) < TOLERANCE
    for x, y in zip(a, b, strict=True):
        for layer, state in whole.recurrent_state(x).items():
            assert gap(cut.recurrent_state(y)[layer], state) < STATE_TOLERANCE


def test_pieces_cover_every_token_in_order() -> None:
    for lengths in ([5], [4, 4], [1, 9, 3, 2], [17, 1]):
        for most in (1, 2, 4, 5, 100):
            scans = pieces(lengths, most)
            assert all(0 < sum(n for _, _, n in scan) <= most for scan in scans)
            assert all(len({row for row, _, _ in scan}) == len(scan) for scan in scans)
            tokens = [(row, start + i) for scan in scans for row, start, n in scan for i in range(n)]
            assert tokens == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    assert pieces([5, 3], 4) == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)]]


@pytest.mark.parametrize("window", [1, 5])
def test_verify_and_commit_are_single_steps(oracle: Oracle, window: int) -> None:
    session = session_of(oracle, window=window, spec_len=4)
    rows = [sequence(6, seed=1), sequence(11, seed=2)]
    seqs, _ = session.prefill(rows)
    for i in range(10):
        width, kept = 1 + i % 4, [(i + r) % (2 + i % 4) for r in range(2)]
        tokens = [[(5 * i + 3 * t + r) % 97 for t in range(width)] for r in range(2)]
        logits = session.verify(seqs, tokens)
        want = torch.stack([oracle.full(row + new)[-width:] for row, new in zip(rows, tokens, strict=True)])
        assert gap(logits, want) < TOLERANCE
        session.commit(seqs, kept)
        rows = [row + new[:k] for row, new, k in zip(rows, tokens, kept, strict=True)]
        if i == 6:  # one row alone in between
            assert gap(session.step(seqs[:1], [9]), last(oracle, [*rows[0], 9])) < TOLERANCE
            rows[0] = [*rows[0], 9]
    for seq, row in zip(seqs, rows, strict=True):
        assert session.length(seq) == len(row)
        fresh = session_of(oracle)
        (other,), _ = fresh.prefill([row])
        for layer, state in fresh.recurrent_state(other).items():
            assert gap(session.recurrent_state(seq)[layer], state) < STATE_TOLERANCE


def test_steps_behind_a_verify_that_was_rejected_whole(oracle: Oracle) -> None:
    """The acceptance of a verify counts for one launch: what single steps append afterwards stays."""
    session = session_of(oracle, window=6, spec_len=3)
    row = sequence(8, seed=6)
    (seq,), _ = session.prefill([row])
    session.verify([seq], [[3, 4, 5]])
    session.commit([seq], [0])
    for token in (11, 12, 13):
        row = [*row, token]
        assert gap(session.step([seq], [token]), last(oracle, row)) < TOLERANCE


def test_reading_the_state_changes_nothing(oracle: Oracle) -> None:
    read, unread = session_of(oracle, spec_len=3), session_of(oracle, spec_len=3)
    prompt = sequence(7, seed=4)
    results = []
    for session in (read, unread):
        (seq,), _ = session.prefill([prompt])
        session.verify([seq], [[1, 2, 3]])
        session.commit([seq], [2])
        if session is read:
            states = session.recurrent_state(seq)
            assert sorted(states) == list(oracle.config.recurrent_layers)
            for state in states.values():
                state.fill_(float("nan"))  # copies
        results.append(session.step([seq], [5]))
    assert torch.equal(*results)


def test_recycled_slots_hold_nothing_of_the_old_sequence(oracle: Oracle) -> None:
    session = session_of(oracle, max_batch=2, spec_len=2)
    clean = session_of(oracle, max_batch=2, spec_len=2)
    seqs, _ = session.prefill([sequence(30, seed=1), sequence(40, seed=2)])
    session.step(seqs, [1, 2])
    session.verify(seqs, [[3, 4], [5, 6]])
    session.release(seqs[::-1])  # with a verify that was never committed; slot 0 is next
    for pool in session.state.recurrent.values():
        pool["state"].fill_(float("nan"))
    for keys, values in session.state.kv.values():
        keys.fill_(1e4), values.fill_(1e4)
    prompt = sequence(5, seed=3)
    (old,), first = session.prefill([prompt])
    (new,), second = clean.prefill([prompt])
    assert old == new  # staggered windows depend on the slot
    assert torch.equal(first, second)
    for token in range(20):
        assert torch.equal(session.step([old], [token]), clean.step([new], [token]))


def test_half_precision_and_casting(oracle: Oracle) -> None:
    half = session_of(oracle, dtype="bfloat16", state_dtype="bfloat16")
    assert half.state.dtype == "bfloat16" and half.state.spec.state_dtype == "bfloat16"
    _, logits = half.prefill([sequence(9, seed=1)])
    assert logits.dtype == torch.float32
    assert gap(logits, last(oracle, sequence(9, seed=1))) < 0.15  # bf16 keeps 8 bits; logits are about 3
    double = session_of(oracle, dtype="float64", state_dtype="float64")
    assert gap(double.prefill([sequence(9, seed=1)])[1].float(), last(oracle, sequence(9, seed=1))) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 65}, "window is 65"),
        ({"spec_len": 17}, "spec_len is 17"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_positions": 0}, "max_positions is 0"),
        ({"max_positions": 1 << 20}, "max_positions is 1048576"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'"),
        ({"read_copy": "fp4"}, "read_copy is 'fp4'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu, cuda or cuda:N$"),
        ({"device": "mps"}, "device is 'mps'"),
        ({"device": "cpu:1"}, "device is 'cpu:1'; there is one cpu"),
        ({"device": "cuda:99"}, "device is 'cuda:99'; torch finds"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        session_of(make_oracle("nemotron_h"), **options)


def test_weights_without_embedding_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"weight embedding\.weight is missing"):
        TorchSession((make_oracle("nemotron_h").config, {}))


def test_auto_device_is_one_that_is_there() -> None:
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device(torch.device("cpu")) == find_device("cpu")


def test_slots_are_handed_out_and_recycled() -> None:
    session = HistorySession(max_batch=3)
    seqs, logits = session.prefill([[1], [2, 3]])
    assert session.free_slots == 1 and seqs == [0, 1]
    assert torch.equal(logits, torch.stack([table_logits([1], 11), table_logits([2, 3], 11)]))
    session.release([0])
    assert session.free_slots == 2
    assert session.prefill([[4]])[0] == [0]
    with pytest.raises(ReplayError, match="2 prompts for 1 free slots of 3"):
        session.prefill([[1], [1]])
    assert session.prefill([[5]])[0] == [2]
    assert (session.vocab_size, session.max_positions, session.spec_len, session.free_slots) == (11, 64, 1, 0)


def test_a_failed_prefill_gives_its_slots_back() -> None:
    class Failing(HistorySession):
        def _prefill(self, slots: list[int], prompts: Any) -> torch.Tensor:
            raise RuntimeError("no memory")

    session = Failing(max_batch=2)
    with pytest.raises(RuntimeError, match="no memory"):
        session.prefill([[1], [2]])
    assert session.free_slots == 2 and session._free == [1, 0]


def started() -> HistorySession:
    """Sequences 0 (3 tokens), 1 (60 of 64) and 2 (with a verify of 3 tokens)."""
    session = HistorySession(spec_len=4)
    session.prefill([[1, 2, 3], [1] * 60, [5]])
    session.verify([2], [[6, 7, 8]])
    return session


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.prefill([]), "prompts is empty"),
        (lambda s: s.prefill([[1], []]), "prompt 1 is empty"),
        (lambda s: s.prefill([[1] * 65]), "prompt 0 has 65 tokens; the position limit is 64"),
        (lambda s: s.prefill([[1, 11]]), "prompt 0 has token id 11; ids must be from 0 to 10"),
        (lambda s: s.prefill([[-1]]), "prompt 0 has token id -1"),
        (lambda s: s.prefill([[0.5]]), "token ids must be whole numbers"),
        (lambda s: s.step([], []), "seqs is empty"),
        (lambda s: s.step([0], [1, 2]), "tokens has 2 rows for 1 sequences"),
        (lambda s: s.step([0], [[1]]), r"tokens has shape \(1, 1\)"),
        (lambda s: s.step([0], [11]), "tokens has token id 11"),
        (lambda s: s.step([0, 0], [1, 1]), "may appear only once"),
        (lambda s: s.step([3], [1]), "sequence 3 is not live"),
        (lambda s: s.step([2], [1]), "sequence 2 has a verify that waits for its commit"),
        (lambda s: s.verify([0], [1]), r"tokens has shape \(1,\)"),
        (lambda s: s.verify([0], [[1] * 5]), "tokens has 5 per row; spec_len allows 1 to 4"),
        (lambda s: s.verify([0], torch.zeros(1, 0)), "tokens has 0 per row"),
        (lambda s: s.verify([2], [[1]]), "waits for its commit"),
        (lambda s: s.verify([0, 1], [[1] * 4, [1, 1, 1, 11]]), "token id 11"),
        (lambda s: s.verify([0, 1], [[1, 2], [3]]), "tokens is no tensor: "),
        (lambda s: s.step([0], ["one"]), "tokens is no tensor: "),
        (lambda s: s.prefill([[1, [2]]]), "prompt 0 is no tensor: "),
        (lambda s: s.commit([2], None), "accepted is no tensor: "),
        (lambda s: s.commit([0], [0]), "sequence 0 has no verify to commit"),
        (lambda s: s.commit([2], [1.9]), "accepted is torch.float32; counts must be whole numbers"),
        (lambda s: s.commit([2], [4]), "accepted of sequence 2 is 4; it must be a whole number from 0 to 3"),
        (lambda s: s.commit([2], [-1]), "accepted of sequence 2 is -1"),
        (lambda s: s.commit([2], [1, 1]), "accepted has 2 entries for 1 sequences"),
        (lambda s: s.commit([2, 2], [1, 1]), "may appear only once"),
        (lambda s: s.commit([2, 9], [1, 1]), "sequence 9 is not live"),
        (lambda s: s.release([0, 9]), "sequence 9 is not live"),
        (lambda s: s.release([0, 0]), "may appear only once"),
        (lambda s: s.recurrent_state(2), "waits for its commit"),
        (lambda s: s.recurrent_state(7), "sequence 7 is not live"),
        (lambda s: s.length(7), "sequence 7 is not live"),
        (lambda s: (s.verify([1], [[1] * 4]), s.commit([1], [4]), s.step([1], [1])), "pass the position limit 64"),
        (lambda s: (s.release([0]), s.step([0], [1])), "sequence 0 is not live"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(call: Any, message: str) -> None:
    session = started()
    with pytest.raises(ReplayError, match=message):
        call(session)
    session.commit([2], [2])
    assert session.length(2) == 3
    session.step([2], [1])
    assert session.history[2] == [5, 6, 7]


def test_the_interface_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Session(vocab_size=1, max_batch=1, max_positions=1)  # type: ignore[abstract]
