"""Ops: the operations that models are written in. A model calls nothing else, so it is written once.

An interpreter takes and returns its own kind of tensor (torch.Tensor in TorchOps; a network builder would use its
network's tensors). Activations are packed ``[tokens, features]`` in both phases: the prompts of a scan one behind the
other, the rows of a step with T tokens each. Only the stateful operations know about rows, slots and phases.

Weights are named, not passed: an interpreter may load, convert or register each of them in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

TensorT = TypeVar("TensorT")


class Ops(ABC, Generic[TensorT]):
    """The vocabulary. Axis sizes: n = tokens in the batch, F = features.

    ``layer`` counts the stateful layers (models/config.py).

    Rounding: normalisations, activations and the rotation compute in fp32 and round once to the activation dtype
    (float64 activations compute in float64).
    """

    @abstractmethod
    def embedding(self, ids: TensorT, weight: str) -> TensorT:
        """Rows of ``weight`` [vocab, F] at ``ids`` [n] (integers in [0, vocab)): [n, F]."""

    @abstractmethod
    def linear(self, x: TensorT, weight: str, bias: str | None = None) -> TensorT:
        """x [n, F_in] times ``weight`` [F_out, F_in] transposed, plus ``bias`` [F_out]: [n, F_out]."""

    @abstractmethod
    def rms_norm(self, x: TensorT, weight: str, eps: float, *, group_size: int | None = None) -> TensorT:
        """x / sqrt(mean x^2 + eps) * weight over every ``group_size`` consecutive features (default: all F).

        ``weight`` has F elements, or ``group_size`` when the groups share it (one head's norm for all heads).
        """

    @abstractmethod
    def rms_norm_gated(
        self, x: TensorT, gate: TensorT, weight: str, eps: float, *, group_size: int, activation: str = "silu"
    ) -> TensorT:
        """rms_norm(x) * silu(gate), rounded once; sigmoid(gate) with ``activation`` "sigmoid". x, gate [n, F]."""

    @abstractmethod
    def split(self, x: TensorT, sizes: Sequence[int]) -> list[TensorT]:
        """Cut the features of x [n, F] into consecutive pieces of ``sizes``, which add up to F."""

    @abstractmethod
    def add(self, x: TensorT, y: TensorT) -> TensorT:
        """x + y, same shape."""

    @abstractmethod
    def silu_mul(self, gate: TensorT, x: TensorT) -> TensorT:
        """silu(gate) * x, rounded once."""

    @abstractmethod
    def sigmoid_mul(self, gate: TensorT, x: TensorT) -> TensorT:
        """sigmoid(gate) * x, rounded once."""

    @abstractmethod
    def relu2(self, x: TensorT) -> TensorT:
        """max(x, 0)^2."""

    @abstractmethod
    def rope(self, x: TensorT, *, head_dim: int, rotary_dim: int, theta: float) -> TensorT:
        """Rotate the first ``rotary_dim`` channels of every head of x [n, heads * head_dim] by the tokens' positions.

        Channel i pairs with i + rotary_dim/2 and turns by position * theta^(-2i / rotary_dim).
        """

    @abstractmethod
    def causal_conv(self, layer: int, x: TensorT, weight: str, bias: str | None = None) -> TensorT:
        """silu(depthwise causal convolution) of x [n, C] with ``weight`` [C, taps]; the history is kept per slot."""

    @abstractmethod
    def replay_mamba2(
        self,
        layer: int,
        x: TensorT,
        dt: TensorT,
        b: TensorT,
        c: TensorT,
        z: TensorT | None,
        *,
        a_log: str,
        d: str,
        dt_bias: str,
    ) -> TensorT:
        """Mamba-2 with ReplaySSM memory. x, z [n, H*P], dt [n, H] raw, b, c [n, G*N]; weights [H]: y [n, H*P].

        Includes dt's bias and softplus, the D skip, and ``* silu(z)`` when z is given.
        """

    @abstractmethod
    def replay_gated_delta(
        self, layer: int, q: TensorT, k: TensorT, v: TensorT, a: TensorT, b: TensorT, *, a_log: str, dt_bias: str
    ) -> TensorT:
        """GDN or KDA with ReplaySSM memory. q, k [n, HK*K] before normalisation, v [n, HV*V], b [n, HV] raw.

        Gated DeltaNet: a [n, HV] raw, dt_bias [HV]. Kimi Delta Attention: a [n, HV*K] raw, dt_bias [HV, K], and the
        form of the gate as in the layer's RecurrenceSpec. A_log is [HV] in both.
        Includes q, k normalisation, q's scale K^-0.5, the gate and beta = sigmoid(b): o [n, HV*V].
        """

    @abstractmethod
    def attention(self, layer: int, q: TensorT, k: TensorT, v: TensorT, *, scale: float) -> TensorT:
        """Causal attention over the sequence so far, softmax in fp32; k, v of the batch's tokens are kept per slot.

        q [n, heads * head_dim], k, v [n, kv_heads * head_dim]: [n, heads * head_dim].
        """

    @abstractmethod
    def latent_attention(
        self, layer: int, q: TensorT, latent: TensorT, shared: TensorT, *, kv_up: str, scale: float
    ) -> TensorT:
        """Causal attention whose keys and values are made of one latent vector per token (MLA), without positions.

        q [n, heads * (D + S)], latent [n, R], shared [n, S]; weight ``kv_up`` [heads * (D + V), R] holds D rows U and V
        rows W per head. A head's key of a token is [U latent | shared], its value W latent: [n, heads * V].
        Softmax in fp32; ``latent`` and ``shared`` of the batch's tokens are kept per slot, keys and values are not.
        """

    @abstractmethod
    def select_last(self, x: TensorT) -> TensorT:
        """Scan: the last token of every row, [rows, F]. Step: x as it is."""

    @abstractmethod
    def to_float32(self, x: TensorT) -> TensorT:
        """x in fp32 (float64 stays)."""
