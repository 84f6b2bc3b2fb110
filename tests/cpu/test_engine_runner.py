"""EngineRunner and EngineSession over a stand-in engine (tests/engine_standin.py): the books, the memory and the order
of the calls are real, GPU and TensorRT are not.

Oracle: TorchSession over the same weights. Expected error: fp32 sums in another order.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from engine_standin import POSITIONS, memory_at, standin_engine
from network_cases import CONFIGS

from trtllm_replayssm import ReplayError, reference
from trtllm_replayssm.pool import StatePool
from trtllm_replayssm.runtime import engine as engine_module
from trtllm_replayssm.runtime.cuda import CudaError
from trtllm_replayssm.runtime.engine import MAX_GRAPHS, Engine
from trtllm_replayssm.runtime.engine_memory import _ring_count
from trtllm_replayssm.runtime.engine_runner import EngineRunner
from trtllm_replayssm.runtime.engine_session import EngineSession
from trtllm_replayssm.runtime.generate import generate
from trtllm_replayssm.runtime.torch_session import TorchSession

TOLERANCE = 2e-5
NEMOTRON = CONFIGS["nemotron_h"]


def oracle_of(engine: Engine, **options: Any) -> TorchSession:
    """The same model in torch, with the slots, window and spec_len of the engine."""
    model: Any = engine._engine
    network = engine.config.network
    return TorchSession(
        (engine.config.model, model.model.weights),
        **{
            "max_batch": engine.config.limits.slots,
            "max_positions": POSITIONS,
            "window": network.window,
            "spec_len": network.spec_len,
            **options,
        },
    )


def close(ours: Any, theirs: torch.Tensor) -> None:
    """Finite, and within the tolerance of the oracle's values."""
    got, want = torch.as_tensor(np.asarray(ours)).float(), theirs.float()
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert float((got - want).abs().max()) <= TOLERANCE * max(1.0, float(want.abs().max()))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 37, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Both:
    """A runner and its oracle, asked the same questions."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.oracle = EngineRunner(engine), oracle_of(engine)

    def prefill(self, *prompts: list[int]) -> list[int]:
        seqs, logits = self.runner.prefill(prompts)
        theirs, want = self.oracle.prefill(prompts)
        assert seqs == theirs and logits.dtype == np.float32
        close(logits, want)
        return seqs

    def step(self, seqs: list[int], new: list[int]) -> None:
        close(self.runner.step(seqs, new), self.oracle.step(seqs, new))

    def verify(self, seqs: list[int], rows: list[list[int]], accepted: list[int]) -> None:
        close(self.runner.verify(seqs, rows), self.oracle.verify(seqs, rows))
        self.runner.commit(seqs, accepted)
        self.oracle.commit(seqs, accepted)

    def release(self, seqs: list[int]) -> None:
        self.runner.release(seqs)
        self.oracle.release(seqs)

    def states(self, seq: int) -> None:
        want = self.oracle.recurrent_state(seq)
        got = self.runner.recurrent_state(seq)
        assert list(got) == list(want)
        for layer, state in want.items():
            close(got[layer], state)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("name, version", [("nemotron_h", "8.6"), ("qwen3_5", "10"), ("kimi_linear", "10")])
def test_a_conversation_is_that_of_the_torch_session(name: str, version: str, window: int, graphs: bool) -> None:
    """Prompts in pieces, steps over flushes, drafts with rejections, rows that come and go, a reused slot.

    With window 5 the stream runs late: inputs that are staged again too early, and results that are read too early,
    show.
    """
    both = Both(standin_engine(CONFIGS[name], version=version, window=window, graphs=graphs, late=window == 5))
    a, b, c = both.prefill(tokens(13, 0), tokens(1, 1), tokens(6, 2))
    for i in range(7):
        both.step([a, b, c] if i % 3 else [c, a], tokens(3 if i % 3 else 2, 10 + i))
    both.verify([b, a], [tokens(4, 20), tokens(4, 21)], [4, 0])
    both.states(a)
    both.states(b)
    both.verify([a, c], [tokens(3, 22), tokens(3, 23)], [1, 2])
    both.states(c)
    both.release([b])
    (d,) = both.prefill(tokens(9, 3))
    assert d == b
    for i in range(4):
        both.step([d, c], tokens(2, 30 + i))
        both.verify([a, d], [tokens(2, 40 + i), tokens(2, 50 + i)], [2 * (i % 2), 1])
    for seq in (a, c, d):
        both.states(seq)
    assert [both.runner.length(s) for s in (a, c, d)] == [both.oracle.length(s) for s in (a, c, d)]


def test_steps_are_captured_once_and_replayed() -> None:
    engine = standin_engine(NEMOTRON, window=5)
    inner: Any = engine._engine
    runner = EngineRunner(engine)
    seqs, _ = runner.prefill([tokens(3, i) for i in range(3)])
    for i in range(6):
        runner.step(seqs, tokens(3, i))
    # Eager; in a context of its own padding alone, twice, and the capture; then replays only, 3 rows padded to 4.
    steps = [run for run in inner.runs if run[0] == "generation"]
    assert steps == [("generation", (4, 1), (POSITIONS,))] * 4
    assert engine.graphs == [(4, 1, POSITIONS)]
    assert inner.cuda.calls.count("cudaGraphLaunch") == 5
    assert inner.contexts == 3


def test_so_few_shapes_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps read a power of two of the cache and have a power of two of rows, within the engine's limits."""
    monkeypatch.setattr(engine_module, "_SMALLEST_BOUND", 4)
    for graphs, bounds in ((True, [4, 4, 4, 8, 8, 8, 8, 16]), (False, [2, 3, 4, 5, 6, 7, 8, 9])):
        both = Both(standin_engine(NEMOTRON, slots=3, window=3, graphs=graphs))
        inner: Any = both.runner.engine._engine
        seqs = both.prefill(tokens(2, 0), tokens(1, 1), tokens(1, 2))
        for i in range(8):
            inner.runs.clear()
            both.step(seqs, tokens(3, i))
            assert inner.runs == [("generation", (3, 1), (bounds[i],))] * len(inner.runs)
        both.release(seqs)
        seqs = both.prefill(tokens(30, 3))
        for i in range(2):
            both.step(seqs, tokens(1, i))
        assert inner.runs[-1] == ("generation", (1, 1), (POSITIONS if graphs else 31,))


def test_logits_are_the_callers() -> None:
    """A later call does not write into what an earlier one returned."""
    engine = standin_engine(NEMOTRON)
    for made in (EngineRunner(engine), EngineSession(engine)):
        seqs, first = made.prefill([tokens(3, 0)])
        kept = [(first, np.array(first))]
        for i in range(3):
            logits = made.step(seqs, tokens(1, i))
            kept.append((logits, np.array(logits)))
        states = made.recurrent_state(seqs[0])
        kept += [(state, np.array(state)) for state in states.values()]
        made.step(seqs, [5])
        made.recurrent_state(seqs[0])
        assert all(np.array_equal(np.asarray(now), then) for now, then in kept)


def test_graphs_give_the_bits_of_eager_steps() -> None:
    logits = []
    for graphs in (True, False):
        runner = EngineRunner(standin_engine(NEMOTRON, window=3, graphs=graphs))
        seqs, first = runner.prefill([tokens(4, 0), tokens(8, 1)])
        logits.append([first] + [runner.step(seqs, tokens(2, i)) for i in range(8)])
    for x, y in zip(*logits, strict=True):
        close(x, torch.from_numpy(y))


@pytest.mark.parametrize("invalidated", [False, True], ids=["refused", "refused and the capture invalidated"])
def test_a_refused_capture_falls_back(invalidated: bool) -> None:
    """Nothing is lost: every step is that of torch. It is said once, and not tried again at another shape."""
    both = Both(standin_engine(NEMOTRON, window=3))
    engine = both.runner.engine
    inner: Any = engine._engine
    inner.uncapturable = "[runner.cpp] Error Code 1: Cuda Runtime (operation not permitted when stream is capturing)"
    inner.cuda.invalidated = invalidated
    inner.log.add(1, "an older error")
    a, b, c = both.prefill(tokens(3, 0), tokens(5, 1), tokens(2, 2))
    both.step([a, b, c], tokens(3, 3))
    with pytest.warns(RuntimeWarning) as caught:
        both.step([a, b, c], tokens(3, 4))
    (said,) = caught
    assert "a step of 4 rows x 1 tokens behind 32 cached ones was not captured in a CUDA graph; steps run wi" in str(
        said
    )
    assert "Cuda Runtime (operation not permitted when stream is capturing)" in str(said)
    assert "an older error" not in str(said) and engine.graphs == [] and "not permitted" in engine.refusal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(5):
            both.step([a, b, c], tokens(3, 5 + i))
            both.step([b, a], tokens(2, 15 + i))
    both.verify([c, a], [tokens(3, 22), tokens(3, 23)], [1, 3])
    for seq in (a, b, c):
        both.states(seq)
    assert inner.cuda.calls.count("cudaStreamBeginCapture") == 1 and inner.contexts == 3
    assert inner.cuda.calls.count("cudaGetLastError") == 1 and not inner.cuda.graphs


def test_a_refusal_keeps_the_graphs_that_are_there() -> None:
    both = Both(standin_engine(NEMOTRON, window=3))
    inner: Any = both.runner.engine._engine
    seqs = both.prefill(tokens(3, 0), tokens(5, 1))
    for i in range(3):
        both.step(seqs, tokens(2, i))
    inner.uncapturable = "not this shape"
    both.step(seqs[:1], [4])
    with pytest.warns(RuntimeWarning, match="not this shape"):
        both.step(seqs[:1], [5])
    before = inner.cuda.calls.count("cudaGraphLaunch")
    both.step(seqs, tokens(2, 9))
    assert inner.cuda.calls.count("cudaGraphLaunch") == before + 1


def test_a_graph_that_cannot_be_made_falls_back() -> None:
    both = Both(standin_engine(NEMOTRON))
    inner: Any = both.runner.engine._engine
    seqs = both.prefill(tokens(3, 0))
    both.step(seqs, [1])
    inner.cuda.refuse = {"cudaGraphInstantiateWithFlags"}
    with pytest.warns(RuntimeWarning, match="cudaGraphInstantiateWithFlags failed with CUDA error 2"):
        both.step(seqs, [2])
    both.step(seqs, [3])
    assert not inner.cuda.graphs


def test_required_graphs_raise_with_the_reason() -> None:
    engine = standin_engine(NEMOTRON, graphs="require")
    inner: Any = engine._engine
    runner = EngineRunner(engine)
    seqs, _ = runner.prefill([tokens(3, 0)])
    runner.step(seqs, [1])
    inner.uncapturable = "[runner.cpp] no"
    with pytest.raises(
        RuntimeError, match=r"1 rows x 1 tokens .* was not captured in a CUDA graph: .*\[runner.cpp\] no"
    ):
        runner.step(seqs, [2])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was not captured in a CUDA graph: .*\[runner.cpp\] no"):
            runner.step(seqs, [2])
    assert runner.length(seqs[0]) == 4 and len(inner.runs) == 4  # the prompt, a step, padding alone twice
    with pytest.raises(ReplayError, match="graphs is 'maybe'; it must be True, False or 'require'"):
        standin_engine(NEMOTRON, graphs="maybe")


def test_a_refusal_that_is_an_error_moves_nothing() -> None:
    """Where warnings are errors the step raises, and may be asked for again."""
    both = Both(standin_engine(NEMOTRON, window=3))
    inner: Any = both.runner.engine._engine
    seqs = both.prefill(tokens(3, 0), tokens(5, 1))
    both.step(seqs, tokens(2, 2))
    inner.uncapturable = "not while capturing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="not while capturing"):
            both.runner.step(seqs, tokens(2, 3))
    both.step(seqs, tokens(2, 3))
    for seq in seqs:
        both.states(seq)


def test_more_shapes_than_graphs() -> None:
    """The graphs used last stay; one that went is captured again, and each gives what torch does."""
    both = Both(standin_engine(NEMOTRON, slots=8))
    engine = both.runner.engine
    inner: Any = engine._engine
    seqs = both.prefill(*[tokens(2, i) for i in range(8)])
    shapes = [(rows, steps) for steps in (1, 2, 3, 4) for rows in (1, 2, 4, 8)]
    for rows, steps in [*shapes, *shapes, *shapes, (4, 1), (8, 4)]:
        new = [tokens(steps, 7 * rows + i) for i in range(rows)]
        both.verify(seqs[:rows], new, [0] * rows)
    assert engine.graphs == [(r, t, POSITIONS) for r, t in [*shapes[:2], *shapes[3:15], (4, 1), (8, 4)]]
    engine._graphs.popitem(last=False)[1][1].close()
    assert MAX_GRAPHS == 16 and len(inner.cuda.graphs) == 15 and inner.contexts == 2 + 16
    for seq in seqs[:2]:
        both.states(seq)


def test_an_unread_step_does_not_lose_its_inputs() -> None:
    """A scan right behind a step whose logits nobody fetched: the step reads what was staged for it."""
    both = Both(standin_engine(NEMOTRON, window=3, late=True))
    seqs = both.prefill(tokens(5, 0))
    both.runner.engine.step(seqs, np.array([[7]]), [5], [-1])
    both.runner._stepped(seqs)
    both.oracle.step(seqs, [7])
    seqs += both.prefill(tokens(6, 1))
    both.step(seqs, tokens(2, 2))
    for seq in seqs:
        both.states(seq)


def test_more_sequences_than_rows_of_a_call() -> None:
    both = Both(standin_engine(NEMOTRON, slots=4, max_batch=2))
    with pytest.raises(ReplayError, match=r"3 sequences in one call; the engine takes 2 .max_batch."):
        both.runner.prefill([[1], [2], [3]])
    seqs = both.prefill([1], [2]) + both.prefill([3], [4])
    with pytest.raises(ReplayError, match=r"4 sequences in one call; the engine takes 2 .max_batch."):
        both.runner.step(seqs, [1, 2, 3, 4])
    both.step(seqs[:2], [1, 2])
    both.step(seqs[2:], [3, 4])


@pytest.mark.parametrize("kind", [EngineRunner, EngineSession])
def test_an_engine_without_drafts_rejects_no_token(kind: Any) -> None:
    """Its network does not read how many tokens were accepted."""
    engine = standin_engine(NEMOTRON, window=3, spec_len=1)
    made, oracle = kind(engine), oracle_of(engine)
    seqs, _ = made.prefill([tokens(3, 0)])
    oracle.prefill([tokens(3, 0)])
    close(made.verify(seqs, [[2]]), oracle.verify(seqs, [[2]]))
    with pytest.raises(ReplayError, match=r"accepted of sequence \d is 0; .* 1 .all of its last verify: the engine"):
        made.commit(seqs, [0])
    made.commit(seqs, [1])
    oracle.commit(seqs, [1])
    close(made.step(seqs, [4]), oracle.step(seqs, [4]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_of_a_16_bit_engine(dtype: str) -> None:
    """A session gives them in their dtype, as torch's does; a runner in one that numpy has. Expected error: a bit."""
    engine = standin_engine(NEMOTRON, window=3, state_dtype=dtype)
    oracle = oracle_of(engine, state_dtype=dtype)
    for made in (EngineRunner(engine), EngineSession(engine)):
        seqs, _ = made.prefill([tokens(6, 0)])
        theirs, _ = oracle.prefill([tokens(6, 0)])
        for i in range(4):
            made.step(seqs, [i])
            oracle.step(theirs, [i])
        for layer, want in oracle.recurrent_state(theirs[0]).items():
            got = made.recurrent_state(seqs[0])[layer]
            if isinstance(made, EngineSession):
                assert got.dtype == want.dtype == getattr(torch, dtype)
            else:
                assert got.dtype == (np.float32 if dtype == "bfloat16" else np.float16)
            error = (torch.as_tensor(got).float() - want.float()).abs().max()
            assert error <= 2 * torch.finfo(want.dtype).eps * want.float().abs().max()


def test_ring_rows_that_count() -> None:
    words = np.array([9, 9, 0, 5, 3, 0], np.int16)
    assert [_ring_count(words, 4, accepted) for accepted in (-1, 0, 2, 3, 7)] == [8, 5, 7, 8, 8]


def test_every_slot_is_reset_at_first() -> None:
    """Zeros, empty rings and first windows by slot, as the reference resets them."""
    engine = standin_engine(NEMOTRON, window=5)
    memory = engine.memory
    for layer in engine.config.model.recurrent_layers:
        for kind, layout, reset in (
            ("replay", memory.layout, reference.reset),
            ("conv", memory.conv_layout, reference.conv_reset),
        ):
            want = StatePool(layout, torch.zeros(4, layout.slot_bytes, dtype=torch.uint8))
            reset(want, torch.arange(4, dtype=torch.int32))
            got = memory_at(memory.pools[f"{kind}_state_{layer}"].address, 4 * layout.slot_bytes)
            assert np.array_equal(got, want.memory.numpy().reshape(-1)), (kind, layer)


def test_a_session_looks_at_the_engines_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = standin_engine(NEMOTRON)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine.device = 3
    assert EngineSession(engine)._gpu == 3


def test_only_so_many_graphs_are_kept() -> None:
    engine = standin_engine(NEMOTRON, slots=2)
    runner = EngineRunner(engine)
    seqs, _ = runner.prefill([tokens(2, 0), tokens(2, 1)])
    engine._graphs.update({(9, 9, i): (None, _Closable()) for i in range(MAX_GRAPHS)})  # type: ignore[misc]
    for i in range(2):
        runner.step(seqs, tokens(2, i))
    assert (
        len(engine.graphs) == MAX_GRAPHS and engine.graphs[-1] == (2, 1, POSITIONS) and (9, 9, 0) not in engine.graphs
    )


class _Closable:
    def close(self) -> None:
        pass


def test_pieces_of_a_prompt_are_as_long_as_the_engine_allows() -> None:
    engine = standin_engine(NEMOTRON, max_input_len=4)
    inner: Any = engine._engine
    EngineRunner(engine).prefill([tokens(9, 0), tokens(4, 1), tokens(2, 2)])
    assert inner.runs == [("context", (3, 4), (1,)), ("context", (1, 4), (4,)), ("context", (1, 1), (8,))]


def test_nothing_is_allocated_while_decoding() -> None:
    engine = standin_engine(NEMOTRON)
    inner: Any = engine._engine
    runner = EngineRunner(engine)
    before = inner.cuda.calls.count("cudaMalloc"), inner.cuda.calls.count("cudaHostAlloc")
    seqs, _ = runner.prefill([tokens(7, 0)])
    for i in range(5):
        runner.step(seqs, tokens(1, i))
    runner.recurrent_state(seqs[0])
    assert before == (inner.cuda.calls.count("cudaMalloc"), inner.cuda.calls.count("cudaHostAlloc"))
    blocks = set(inner.cuda.blocks)
    engine.close()
    assert blocks and not inner.cuda.blocks and not inner.cuda.graphs


@pytest.mark.parametrize("drafts", [0, 3])
def test_generation_over_an_engine_session(drafts: int) -> None:
    engine = standin_engine(NEMOTRON, window=4)
    prompts = [tokens(5, 0) * 2, tokens(3, 1), tokens(7, 2), tokens(2, 3), tokens(4, 4)]
    session = EngineSession(engine, max_batch=3)
    assert session.free_slots == 3
    done = generate(session, prompts, max_new_tokens=14, draft_tokens=drafts)
    want = generate(oracle_of(engine, max_batch=3), prompts, max_new_tokens=14, draft_tokens=drafts)
    assert [row.tokens for row in done] == [row.tokens for row in want]
    assert sum(row.launches for row in done) == sum(row.launches for row in want)
    seqs, logits = session.prefill([prompts[0]])
    assert logits.dtype == torch.float32
    for layer, state in session.recurrent_state(seqs[0]).items():
        assert state.dtype == torch.float32 and state.shape == (4, 8, 16), layer


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda r: r.prefill([]), "prompts is empty"),
        (lambda r: r.prefill([[1], []]), "prompt 1 is empty"),
        (lambda r: r.prefill([[1] * 33]), "prompt 0 has 33 tokens; the position limit is 32"),
        (lambda r: r.prefill([[37]]), "prompt 0 has token id 37; ids must be from 0 to 36"),
        (lambda r: r.prefill([[0.5]]), "prompt 0 has dtype float64; token ids must be whole numbers"),
        (lambda r: r.prefill([[1]] * 3), "3 prompts for 2 free slots of 4"),
        (lambda r: r.prefill([[[1], [2]]]), r"prompt 0 has shape \(2, 1\); it must have 1 axes"),
        (lambda r: r.step([9], [1]), "sequence 9 is not live"),
        (lambda r: r.step([0, 0], [1, 1]), "a sequence may appear only once"),
        (lambda r: r.step([0], [[1]]), r"tokens has shape \(1, 1\); it must be \[n\]"),
        (lambda r: r.step([0], [-1]), "tokens has token id -1"),
        (lambda r: r.step([], np.zeros(0, int)), "seqs is empty"),
        (lambda r: r.verify([0], [[1] * 5]), "tokens has 5 per row; spec_len allows 1 to 4"),
        (lambda r: r.verify([0], [1]), r"tokens has shape \(1,\); it must be \[n, T\]"),
        (lambda r: r.verify([0, 1], [[1, 2], [3]]), "tokens is no array: "),
        (lambda r: r.prefill([[1, [2, 3]]]), "prompt 0 is no array: "),
        (lambda r: r.commit([0], [1]), "sequence 0 has no verify to commit"),
        (lambda r: r.commit([0], [1, 2]), "accepted has 2 entries for 1 sequences"),
        (lambda r: r.verify([0], [[1, 2]]) is not None and r.commit([0], [1.9]), "accepted is float64; counts must be"),
        (lambda r: r.release([8]), "sequence 8 is not live"),
        (lambda r: r.recurrent_state(7), "sequence 7 is not live"),
        (lambda r: r.verify([0], [[1, 2]]) is not None and r.step([0], [1]), "has a verify that waits for its commit"),
        (lambda r: r.verify([1], [[1, 2]]) is not None and r.commit([1], [3]), "accepted of sequence 1 is 3"),
        (lambda r: r.step([1], [1]), "sequence 1 has 32 tokens; 1 more pass the position limit 32"),
    ],
)
def test_wrong_arguments_change_nothing(ask: Any, message: str) -> None:
    if "tokens; 1 more" in message:
        runner = EngineRunner(standin_engine(NEMOTRON))
        runner.prefill([tokens(5, 0), tokens(32, 1)])
    else:
        runner = EngineRunner(standin_engine(NEMOTRON))
        runner.prefill([tokens(5, 0), tokens(6, 1)])
    lengths = [runner.length(s) for s in (0, 1)]
    with pytest.raises(ReplayError, match=message):
        ask(runner)
    assert [runner.length(s) for s in (0, 1)] == lengths and runner.free_slots == 2


def test_a_run_that_fails_gives_the_slots_back() -> None:
    engine = standin_engine(NEMOTRON)
    inner: Any = engine._engine
    runner = EngineRunner(engine)
    inner.broken = True
    with pytest.raises(
        RuntimeError, match=r"TensorRT refused to run the engine: TensorRT: \[executionContext.cpp\] bro"
    ):
        runner.prefill([tokens(3, 0)])
    assert runner.free_slots == 4
    inner.broken = False
    seqs, _ = runner.prefill([tokens(3, 0)])
    inner.cuda.refuse = {"cudaMemcpyAsync"}
    with pytest.raises(CudaError, match="cudaMemcpyAsync failed with CUDA error 2: refused by the test"):
        runner.step(seqs, [1])
    assert runner.length(seqs[0]) == 3


def test_a_capture_that_fails_leaves_the_stream_usable() -> None:
    engine = standin_engine(NEMOTRON)
    inner: Any = engine._engine

    def fail() -> None:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        engine.stream.capture(fail)
    assert inner.cuda.recording is None and not inner.cuda.graphs
    engine.stream.synchronize()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_batch": 5}, "max_batch is 5; it must be a whole number from 1 to 4 .the engine's slots."),
        ({"max_positions": 33}, "max_positions is 33; it must be a whole number from 1 to 32 .the engine's limit."),
        ({"max_positions": 0}, "max_positions is 0"),
    ],
)
def test_limits_of_the_engine(options: dict[str, int], message: str) -> None:
    engine = standin_engine(NEMOTRON)
    for kind in (EngineRunner, EngineSession):
        with pytest.raises(ReplayError, match=message):
            kind(engine, **options)
    runner = EngineRunner(engine, max_batch=2, max_positions=10)
    assert runner.free_slots == 2 and runner.max_positions == 10


@pytest.mark.parametrize("name", ["token_index", "kv_index"])
def test_teeth_a_wrong_index_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = standin_engine(NEMOTRON)
    both = Both(engine)
    seqs = both.prefill(tokens(5, 0))
    stage = engine.memory.stage
    monkeypatch.setattr(engine.memory, "stage", lambda at, x: stage(at, x if at != name else np.zeros_like(x)))
    with pytest.raises(AssertionError):
        both.runner.engine._graphs_on = False
        both.verify(seqs, [tokens(4, 1)], [4])


def test_teeth_a_cache_that_is_not_written_shows() -> None:
    engine = standin_engine(NEMOTRON)
    both = Both(engine)
    engine.memory.append_kv = lambda rows, tokens: None  # type: ignore[method-assign]
    seqs = both.prefill(tokens(5, 0))
    with pytest.raises(AssertionError):
        both.step(seqs, tokens(1, 1))
