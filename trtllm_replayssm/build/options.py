"""BuildOptions: what an engine is built for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import require
from ..models.config import MODEL_DTYPES, HybridConfig
from ..spec import MAX_SPEC_LEN, MAX_WINDOW, require_bool, require_choice, require_int

#: Python modules that build engines.
MODULES = ("tensorrt", "tensorrt_rtx")
TENSORRT_MODULES = ("auto", *MODULES)
#: plugin: the replay layers are plugins. io: their operands are outputs and their results inputs of the network.
PLUGIN, IO = "plugin", "io"
NETWORKS = (PLUGIN, IO)
#: What layers ask for where networks are not strongly typed (TensorRT 8.6) and fp16: binding, or a wish.
OBEY, PREFER = "obey", "prefer"
PRECISIONS = (OBEY, PREFER)
MAX_BATCH = 4096
MAX_LEVEL = 5
_SIZE_LIMIT = 1 << 24


@dataclass(frozen=True)
class BuildOptions:
    """One engine build.

    Attributes:
        dtype: of activations, matrices and KV cache: bfloat16, float16, float32; None takes the checkpoint's.
        state_dtype: of the recurrent state; None takes the model's.
        window: ReplaySSM window L, 1..64; 1 is conventional decoding. draft_tokens: drafts of one verify, 0..15.
        stagger: shorten first windows, so that rows admitted together do not all flush in one step.
        max_batch: sequences that live at once, and rows of a call. max_input_len: prompt tokens of a row and call;
            longer prompts run in pieces. Their product, the tokens of a call, is at most plugins.MAX_CONTEXT_TOKENS.
            max_positions: tokens per sequence; None takes the model's limit.
        workspace_gib: scratch memory that a layer may have; None sets no limit.
        timing_cache: file of measured kernel times, read where it is there and written after the build, or None.
        optimization_level: TensorRT's builder optimization level 0..5, or None for its default.
        precision: for TensorRT 8.6 with fp16; build_engine refuses it elsewhere. ``obey``: layers compute in the dtypes
            that they ask for, or the build fails. ``prefer``: in others where TensorRT has no such kernel. None obeys,
            and prefers where that fails.
        tensorrt: module to build with; auto is ``tensorrt``. network: plugin or io (see NETWORKS).
        exact_scan: prompts token by token, so that the state has the bits that steps would leave.
        float32_matmul: matrix products of an fp16 or bf16 engine in fp32.

    Raises:
        ReplayError: a field out of range, or TensorRT-RTX with plugins.
    """

    dtype: str | None = None
    state_dtype: str | None = None
    window: int = 16
    draft_tokens: int = 0
    stagger: bool = True
    max_batch: int = 8
    max_input_len: int = 1024
    max_positions: int | None = None
    workspace_gib: float | None = None
    timing_cache: Path | None = None
    optimization_level: int | None = None
    precision: str | None = None
    tensorrt: str = "auto"
    network: str = "plugin"
    exact_scan: bool = False
    float32_matmul: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) is not None:
                require_choice(name, getattr(self, name), MODEL_DTYPES)
        require_int("window", self.window, 1, MAX_WINDOW, " (1 is conventional decoding)")
        why = f" (a step carries the token itself and its drafts, {MAX_SPEC_LEN} at most)"
        require_int("draft_tokens", self.draft_tokens, 0, MAX_SPEC_LEN - 1, why)
        require_int("max_batch", self.max_batch, 1, MAX_BATCH)
        require_int("max_input_len", self.max_input_len, 1, _SIZE_LIMIT)
        if self.max_positions is not None:
            require_int("max_positions", self.max_positions, 1, _SIZE_LIMIT)
        if self.workspace_gib is not None:
            number = isinstance(self.workspace_gib, (int, float)) and not isinstance(self.workspace_gib, bool)
            ok = number and 0 < self.workspace_gib <= 4096
            require(ok, f"workspace is {self.workspace_gib!r}; it must be above 0 and at most 4096 GiB")
        if self.optimization_level is not None:
            require_int("optimization_level", self.optimization_level, 0, MAX_LEVEL)
        if self.precision is not None:
            require_choice("precision", self.precision, PRECISIONS)
        require_choice("tensorrt", self.tensorrt, TENSORRT_MODULES)
        require_choice("network", self.network, NETWORKS)
        for name in ("stagger", "exact_scan", "float32_matmul"):
            require_bool(name, getattr(self, name))
        require(
            self.tensorrt != "tensorrt_rtx" or self.network == "io",
            "tensorrt is tensorrt_rtx with network plugin; TensorRT-RTX takes no plugins. It builds network io "
            "(--network io), whose replay operations are inputs and outputs: that checks the network and cannot "
            "generate text",
        )

    @property
    def spec_len(self) -> int:
        """T: most tokens of one step."""
        return 1 + self.draft_tokens

    @property
    def workspace_bytes(self) -> int | None:
        """workspace_gib in bytes."""
        return None if self.workspace_gib is None else int(self.workspace_gib * (1 << 30))

    def positions(self, config: HybridConfig) -> int:
        """Tokens per sequence, within the model's limit. Raises ReplayError for more."""
        if self.max_positions is None:
            return config.max_positions
        require_int("max_positions", self.max_positions, 1, config.max_positions, " (the model's position limit)")
        return self.max_positions

    def network_options(self, config: HybridConfig) -> Any:
        """The NetworkOptions (ops/tensorrt_network.py) of this build."""
        from ..ops.tensorrt_network import NetworkOptions

        return NetworkOptions(
            dtype=self.dtype or config.dtype,
            replay=self.network,
            max_positions=self.positions(config),
            window=self.window,
            spec_len=self.spec_len,
            stagger=self.stagger,
            state_dtype=self.state_dtype or config.state_dtype,
            exact_scan=self.exact_scan,
            float32_matmul=self.float32_matmul,
        )

    def profile_limits(self, config: HybridConfig) -> Any:
        """The ProfileLimits (ops/tensorrt_network.py) of this build.

        Raises:
            ReplayError: more tokens in one call than the plugins take.
        """
        from ..ops.tensorrt_network import ProfileLimits
        from ..plugins import MAX_CONTEXT_TOKENS

        positions = self.positions(config)
        length = min(self.max_input_len, positions)
        require(
            self.network == IO or self.max_batch * length <= MAX_CONTEXT_TOKENS,
            f"max_batch is {self.max_batch} with max_input_len {length}: {self.max_batch * length:,} prompt tokens in "
            f"one call; ReplayCausalConv takes at most {MAX_CONTEXT_TOKENS:,}: give max_input_len "
            f"{MAX_CONTEXT_TOKENS // self.max_batch} or less (longer prompts run in pieces) or a smaller max_batch",
        )
        return ProfileLimits(
            max_batch=self.max_batch,
            max_input_len=length,
            max_positions=positions,
            slots=self.max_batch,
            spec_len=self.spec_len,
        )
