"""The GDN and KDA benchmark without a GPU: modes, the check of peers, what peers refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import bench_gated_delta as bench
from benchmarks.peers.delta_base import (
    O_LIMIT,
    PEERS,
    DeltaLayer,
    DeltaPeer,
    PeerScan,
    blocks_of,
    check_scan,
    check_step,
    peer,
)
from trtllm_replayssm import RecurrenceSpec
from trtllm_replayssm.errors import ReplayError

Tokens = dict[str, torch.Tensor]


class Honest(DeltaPeer):
    """Conventional decoding by the float64 recurrence, rounded as kernels round; ``twist`` spoils it."""

    kinds = ("gated_delta", "kimi_delta")
    most_tokens = 8
    scans = True
    twist = 1.0

    def step(self, layer: DeltaLayer, state: torch.Tensor, slots: torch.Tensor, tokens: Tokens) -> Callable[[], object]:
        blocks = blocks_of(slots, tokens["q"].shape[1]).long()

        def run() -> object:
            before, outputs = state[blocks[:, 0]].clone(), []
            for t in range(blocks.shape[1]):
                o, after = layer.recur(before, {name: value[:, : t + 1] for name, value in tokens.items()})
                state[blocks[:, t]] = (after * (self.twist if t == blocks.shape[1] - 1 else 1.0)).to(state.dtype)
                outputs.append(o[:, -1])
            return torch.stack(outputs, dim=1).bfloat16()

        return run

    def scan(self, layer: DeltaLayer, tokens: Tokens) -> PeerScan:
        s, rows = layer.spec, len(tokens["q"])
        start = torch.zeros(rows, s.nheads, s.headdim, s.dstate, dtype=torch.float64)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            o, state = layer.recur(start, tokens)
            return (o * self.twist).bfloat16(), state.float()

        return PeerScan(run)


class Twisted(Honest):
    twist = 1.1


def layer_and_tokens(kind: str, *lead: int) -> tuple[DeltaLayer, Tokens]:
    spec = RecurrenceSpec(kind, 4, 2, 16, 16)
    gates = (4, 16) if kind == "kimi_delta" else (4,)

    def act(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape).bfloat16()

    tokens = {"q": act(2, 16), "k": act(2, 16), "v": act(4, 16), "a": act(*gates), "b": act(4)}
    return DeltaLayer(spec, torch.zeros(4), torch.zeros(gates)), tokens


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_the_check_passes_what_is_right_and_stops_what_is_not(kind: str) -> None:
    for count in (1, 4):
        layer, tokens = layer_and_tokens(kind, 3, count)
        assert check_step(Honest(), layer, tokens) < O_LIMIT["float32"]
        assert check_step(Twisted(), layer, tokens) > O_LIMIT["float32"]
    layer, tokens = layer_and_tokens(kind, 3, 20)
    assert check_scan(Honest(), layer, tokens) < O_LIMIT["float32"]
    assert check_scan(Twisted(), layer, tokens) > O_LIMIT["float32"]


def test_modes() -> None:
    assert bench.parse_mode("mixed", 8) == bench.Mode(1, -1, 8, "keep")
    assert bench.parse_mode("append", 8).committed == "4" and bench.parse_mode("flush", 8).committed == "8"
    assert bench.parse_mode("conventional", 16).window == 1
    assert bench.parse_mode("verify8_5", 16) == bench.Mode(8, 5, 16, "keep")
    assert bench.parse_mode("verify4", 16) == bench.Mode(4, 0, 16, "uniform")


def test_peers_are_found_and_say_what_they_refuse() -> None:
    for name in PEERS:
        made = peer(name)
        for kind in ("gated_delta", "kimi_delta"):
            reason = made.refuses(layer_and_tokens(kind, 1, 1)[0], "step", 16)
            assert reason != "", name  # absent here, or more tokens than it takes
    with pytest.raises(ReplayError, match="peer is 'nobody'"):
        peer("nobody")
