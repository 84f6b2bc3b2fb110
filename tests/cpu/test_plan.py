"""The planner: sizes of published models, the closed-form traffic table, the slot's own traffic, the command.

Oracles: published sizes and the published traffic bounds, as data below; a counting simulation of the flush rule;
SlotLayout itself for memory. Sizes must match to the byte, ratios to the digits that were published.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import pytest
from published_configs import KIMI_48B, NANO, QWEN_35B, SUPER

from trtllm_replayssm.errors import ReplayError
from trtllm_replayssm.layout import SlotLayout
from trtllm_replayssm.plan import Workload, add_arguments, main, predict, traffic
from trtllm_replayssm.plan.command import find_model
from trtllm_replayssm.plan.from_config import shape_from_path
from trtllm_replayssm.plan.plot import curves, write_plot
from trtllm_replayssm.plan.presets import ALIASES, GPUS, MODELS, device_class, gpu_preset, model_preset
from trtllm_replayssm.plan.shapes import Experts
from trtllm_replayssm.spec import ConvSpec, RecurrenceSpec

DOCS = Path(__file__).resolve().parents[2] / "docs"
MIB = 1 << 20

#: model: state B/layer/sequence, conv B, ring B/token, model state MiB/sequence, ring MiB at L = 16 and its digits.
PUBLISHED = {
    "nemotron-3-nano-4b": (3_932_160, 58_368, 17_792, 78.8, 5.7, 1),
    "nemotron-3-nano-30b": (2_097_152, 36_864, 10_496, 46.0, 3.7, 1),
    "nemotron-3-super": (4_194_304, 61_440, 18_944, 160, 11.6, 1),
    "nemotron-3-ultra": (8_388_608, 110_592, 35_840, 384, 26.3, 1),
    "nemotron-nano-9b-v2": (5_242_880, 73_728, 23_040, 135, 9.5, 1),
    "nemotron-h-56b": (16_777_216, 122_880, 37_888, 864, 31, 0),
    "qwen3-next-80b": (2_097_152, 49_152, 12_416, 72, 6.8, 1),
    "qwen3.5-4b": (2_097_152, 49_152, 12_416, 48, 4.6, 1),
    "qwen3.5-27b": (3_145_728, 61_440, 16_576, 144, 12.1, 1),
    "qwen3.5-35b": (2_097_152, 49_152, 12_416, 60, 5.7, 1),
    "qwen3.5-122b": (4_194_304, 73_728, 20_736, 144, 11.4, 1),
    "qwen3.5-397b": (4_194_304, 73_728, 20_736, 180, 14.2, 1),
    "kimi-linear-48b": (2_097_152, 73_728, 32_768, 40, 10, 0),
    "kimi-k3": (6_291_456, 221_184, 98_304, 414, 103.5, 1),
    "glm-5.3-flash": (4_194_304, 147_456, 65_536, 136, 34, 0),
    "ling-3.0-flash": (2_097_152, 73_728, 32_768, 70, 17.5, 1),
}
#: Parameters that a token uses, in billions, as the names of the models say.
ACTIVE = {"nemotron-3-nano-30b": 3, "nemotron-3-super": 12, "nemotron-3-ultra": 55, "qwen3-next-80b": 3,
          "qwen3.5-35b": 3, "qwen3.5-122b": 10, "qwen3.5-397b": 17, "kimi-linear-48b": 3}  # fmt: skip

#: state bytes, ring row bytes, L*, {window: bound}: one head; 8-bit states with one fp32 scale per row.
MAMBA, GDN, KDA = 148, 324, 1024
CLOSED_FORM = [
    (32 * 1024, MAMBA, 21, {4: 1.59, 8: 1.75, 16: 1.82, 32: 1.81}),
    (16 * 1024, MAMBA, 15, {4: 1.57, 8: 1.72, 16: 1.76, 32: 1.69}),
    (64 * 128 + 64 * 4, MAMBA, 11, {4: 1.55, 8: 1.66, 16: 1.65, 32: 1.52}),
    (64 * 1024, GDN, 20, {16: 1.81}),
    (32 * 1024, GDN, 14, {16: 1.75}),
    (128 * 128 + 128 * 4, GDN, 10, {16: 1.63}),
    (64 * 1024, KDA, 11, {8: 1.68, 16: 1.67}),
    (32 * 1024, KDA, 8, {8: 1.59, 16: 1.51}),
    (128 * 128 + 128 * 4, KDA, 6, {8: 1.44, 16: 1.27, 32: 0.99}),
]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(words))


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(parse(*words, "--json")) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("key", MODELS)
def test_published_sizes(key: str) -> None:
    state, conv, ring, state_mib, ring_mib, digits = PUBLISHED[key]
    plan = predict(MODELS[key], GPUS["h200"], Workload(window=16))
    memory = plan["memory"]
    assert memory["state_bytes_per_layer"] == state
    assert memory["conv_bytes_per_layer"] == conv
    assert memory["ring_bytes_per_token"] == ring
    assert round(memory["state_bytes"] / MIB, 1) == state_mib
    # Published to one digit or none; some were rounded up.
    assert memory["ring_bytes"] / MIB == pytest.approx(ring_mib, abs=0.06 if digits else 0.5)


def test_presets_are_complete() -> None:
    assert set(PUBLISHED) == set(MODELS)
    assert {model_preset(alias).name for alias in ALIASES} <= {m.name for m in MODELS.values()}
    assert model_preset(" Qwen3.6-27B ") is MODELS["qwen3.5-27b"]
    for name, billions in ACTIVE.items():
        # Lookups (the input embedding) do not count here; names round, and some count them.
        assert MODELS[name].active_params / 1e9 == pytest.approx(billions, rel=0.22)
    assert gpu_preset("H200").bandwidth == 4.27e12


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40", ""),
    ],
)
def test_device_class(name: str, key: str) -> None:
    assert device_class(name) == key


@pytest.mark.parametrize(("state", "row", "best", "bounds"), CLOSED_FORM)
def test_closed_form_table(state: int, row: int, best: int, bounds: dict[int, float]) -> None:
    assert round(traffic.ideal_best_window(state, row)) == best
    for window, bound in bounds.items():
        # Published to two digits, some rounded to even.
        assert 2 * state / traffic.ideal_replay(state, row, window) == pytest.approx(bound, abs=0.0051)


@pytest.mark.parametrize(
    ("state", "row", "first", "second"),
    [(32 * 1024, MAMBA, 3.92, 5.6), (64 * 1024, GDN, 3.89, 5.6), (64 * 1024, KDA, 3.41, 4.8)],
)
def test_closed_form_of_verification(state: int, row: int, first: float, second: float) -> None:
    ratio = traffic.ideal_native(state, 4) / traffic.ideal_verify(state, row, 16, 4, 3)
    assert ratio == pytest.approx(first, abs=0.0051)
    ratio = traffic.ideal_native(state, 8) / traffic.ideal_verify(state, row, 16, 8, 5)
    assert ratio == pytest.approx(second, abs=0.051)


def test_closed_form_rows_are_those_of_the_specs() -> None:
    """The per-head row sizes above are one head's share of published_row_bytes."""
    shapes = {"mamba2": (MAMBA, 128, 8, 64), "gated_delta": (GDN, 64, 16, 128), "kimi_delta": (KDA, 32, 32, 128)}
    for kind, (row, heads, groups, headdim) in shapes.items():
        spec = RecurrenceSpec(kind, heads, groups, headdim, 128)
        assert traffic.published_row_bytes(spec) == row * heads


@pytest.mark.parametrize("spec_len", [1, 4])
def test_conventional_and_native_steps_are_the_closed_form(spec_len: int) -> None:
    spec = RecurrenceSpec("mamba2", 8, 2, 64, 128, spec_len=spec_len)
    conv = ConvSpec(spec.conv_channels, spec_len=spec_len)
    state, column = 8 * 64 * 128 * 4, spec.conv_channels * 2
    native, plain = traffic.native_step(spec, conv), traffic.conventional_step(spec, conv)
    assert native.recurrence == traffic.ideal_native(state, spec_len) == (1 + spec_len) * state
    assert native.total - native.recurrence == (3 + 2 + spec_len) * column  # 3 read, T - 1 more than 3 written
    assert plain.recurrence == 2 * state and plain.total - plain.recurrence == 6 * column


def test_math_document_shows_the_same_table() -> None:
    """Rows of docs/math.md section 9.1 against the functions."""
    text = (DOCS / "math.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+\| ([\d,]+) \| ([\d,]+) \| (\d+) \| ([^|]+) \|$", text, re.M)
    assert len(rows) == 4
    for state_text, row_text, best, bounds in rows:
        state, row = (int(cell.replace(",", "")) for cell in (state_text, row_text))
        assert round(traffic.ideal_best_window(state, row)) == int(best)
        named = re.findall(r"L = (\d+): ([\d.]+)", bounds)
        pairs = named or zip(("4", "8", "16", "32"), bounds.split(" / "), strict=True)
        for window, bound in pairs:
            ratio = 2 * state / traffic.ideal_replay(state, row, int(window))
            assert ratio == pytest.approx(float(bound), abs=0.0051)


def test_planning_document_shows_what_plan_says() -> None:
    """The comparison with published measurements in docs/planning.md, recomputed."""
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    keys = {"Nemotron-3-Nano-4B": "nemotron-3-nano-4b", "Qwen3.5-4B": "qwen3.5-4b",
            "Nemotron-3-Super": "nemotron-3-super", "Qwen3.5-122B": "qwen3.5-122b"}  # fmt: skip
    rows = re.findall(r"^\| (\S+), (\w+), (\w+) \| ([\d /]+) \| ([\d. /]+) \| ([\d. /]+) \| ([\d. /]+) \|$", text, re.M)
    assert len(rows) == len(keys)
    for name, gpu, weights, batches, published, *planned in rows:
        for context, cell in zip((512, 2048), planned, strict=True):
            pairs = zip(batches.split(" / "), cell.split(" / "), published.split(" / "), strict=True)
            for batch, shown, measured in pairs:
                work = Workload(batch=int(batch), context=context, window=16, weights_dtype=weights)
                speedup = predict(MODELS[keys[name]], GPUS[gpu.lower()], work)["modes"]["replay"]["speedup"]
                assert f"{speedup:.2f}" == shown
                assert int(batch) == 1 or abs(speedup / float(measured) - 1) < 0.2


@pytest.mark.parametrize(
    ("window", "spec_len", "acceptance"),
    [(1, 1, 1), (2, 1, 1), (16, 1, 1), (16, 4, 3), (16, 4, 1), (16, 8, 5), (3, 8, 5), (17, 16, 16), (16, 4, 2.5)],
)
def test_flush_cycle_against_simulation(window: int, spec_len: int, acceptance: float) -> None:
    """The rule of docs/contracts.md, stepped 60,000 times with random acceptance, against the computed means."""
    draw = random.Random(1)
    low, chance = int(acceptance), acceptance - int(acceptance)
    steps, history, flushes, live, folded = 60_000, 0, 0, 0, 0
    for _ in range(steps):
        committed = live + low + (draw.random() < chance)
        if committed > 0 and committed + spec_len > window:
            flushes, folded, live = flushes + 1, folded + committed, 0
        else:
            live = committed
        history += live
    cycle = traffic.flush_cycle(window, spec_len, acceptance)
    assert cycle.steps == pytest.approx(steps / flushes, rel=0.01)
    assert cycle.history == pytest.approx(history / steps, rel=0.01, abs=0.01)
    assert cycle.folded == pytest.approx(folded / steps, rel=0.01)
    assert cycle.folded == pytest.approx(acceptance)


def test_slot_traffic_counts_every_region() -> None:
    """A GDN slot by hand: HK 2, HV 4, V 16, K 32, bf16; window 3, two tokens per step, both kept: a fold every step."""
    spec = RecurrenceSpec("gated_delta", 4, 2, 16, 32, window=3, spec_len=2)
    conv = ConvSpec(4 * 16 + 2 * 2 * 32, spec_len=2)
    step = traffic.replay_step(spec, conv, 2)
    state = 4 * 16 * 32 * 4
    k, norm, v, gate = 2 * 32 * 2, 2 * 4, 4 * 16 * 2, 4 * 4
    assert traffic.flush_cycle(3, 2, 2).steps == 1
    assert (step.state_read, step.state_write, step.ring_read) == (state, state, 0)
    assert step.fold_read == 2 * (k + norm + v + gate + gate)
    assert step.ring_append == 2 * (k + norm + 2 * v + gate + gate)
    # and scales: one copy read, all written by the fold of every step
    assert step.cursors == 2 * 4 * 4 * 8 + (1 + 4) * 4 * 8
    conv_cursor = 32  # three blocks of four int16 words, padded to 16 bytes
    assert step.conv_read == 3 * 192 * 2 + conv_cursor
    assert step.conv_write == 5 * 192 * 2 + conv_cursor
    assert step.total == pytest.approx(step.recurrence + step.conv_read + step.conv_write)
    assert traffic.ring_row_bytes(SlotLayout(spec))[0] == k + norm + v + gate


def test_read_copy_traffic() -> None:
    """fp8 copy: read except on folds, written on folds; the state is touched on folds alone."""
    spec = RecurrenceSpec("mamba2", 8, 1, 64, 128, window=16, read_copy="fp8_e4m3")
    step = traffic.replay_step(spec, ConvSpec(8 * 64 + 256))
    state, copy = 8 * 64 * 128 * 4, 8 * 64 * 128 + 8 * 64 * 4
    assert step.state_read == step.state_write == state / 16
    assert step.copy_read == copy * 15 / 16
    assert step.copy_write == copy / 16


@pytest.mark.parametrize("key", ["nemotron-3-super", "qwen3.5-122b", "qwen3.5-4b", "kimi-linear-48b"])
def test_slot_and_closed_form_agree(key: str) -> None:
    """docs/math.md 9.2: at most 2 % apart at window 16; the best windows differ by one at most."""
    plan = predict(MODELS[key], GPUS["h200"], Workload(window=16))
    assert 1.0 < plan["speedup"]["ideal"] / plan["speedup"]["recurrence"] < 1.0201
    assert abs(plan["best_window"]["slot"] - plan["best_window"]["ideal"]) < 1


def test_best_window_is_the_best() -> None:
    plan = predict(MODELS["qwen3.5-27b"], GPUS["h200"], Workload(draft_tokens=3, acceptance=3.0))
    best = plan["best_window"]["slot"]
    assert plan["workload"]["window"] == best
    layers = {row["window"]: row["layer"] for row in plan["windows"]}
    assert max(layers.values()) == layers[best]
    assert plan["speedup"]["layer"] == layers[best]


def test_memory_is_that_of_the_layouts() -> None:
    work = Workload(window=16, draft_tokens=3, read_copy="int8", context=1000)
    plan = predict(MODELS["qwen3.5-4b"], GPUS["h200"], work)
    spec = MODELS["qwen3.5-4b"].recurrent.spec(window=16, spec_len=4, read_copy="int8")
    memory, modes = plan["memory"], plan["modes"]
    assert memory["slot_bytes"] == SlotLayout(spec).slot_bytes
    kv = 8 * 2 * 4 * 256 * 2 * 1000
    assert memory["kv_bytes"] == kv
    assert modes["replay"]["sequence_bytes"] == 24 * (memory["slot_bytes"] + memory["conv_slot_bytes"]) + kv
    assert modes["conventional"]["sequence_bytes"] == 24 * (2_097_152 + 49_152) + kv
    assert modes["native_speculative"]["sequence_bytes"] == 24 * (4 * 2_097_152 + 6 * 8192 * 2) + kv
    free = 141e9 * 0.9 - 4_206_000_000 * 2
    assert modes["replay"]["sequences_fit"] == int(free // modes["replay"]["sequence_bytes"])


def test_step_time_by_hand() -> None:
    """Every term of one mode, from its bytes; the arithmetic bound takes over at a large batch."""
    gpu, model = GPUS["h100"], MODELS["qwen3.5-4b"]
    mode = predict(model, gpu, Workload(batch=8, window=16, context=100))["modes"]["conventional"]
    weights, kv = 4_206_000_000 * 2, 8 * 8 * 2 * 4 * 256 * 2 * 101
    recurrent, conv = 8 * 24 * 2 * 2_097_152, 8 * 24 * 2 * 49_152
    assert mode["weights_bound"] == "memory"
    assert mode["step_s"] == pytest.approx((weights + kv + recurrent + conv) / 3.35e12)
    assert mode["tokens_per_s"] == pytest.approx(8 / mode["step_s"])
    large = predict(model, gpu, Workload(batch=4096, window=16))["modes"]["conventional"]
    assert large["weights_bound"] == "arithmetic"
    assert large["weights_s"] == pytest.approx(2 * 4_206_000_000 * 4096 / 989e12)


def test_experts_read() -> None:
    experts = Experts(layers=1, count=64, top_k=4, params=10)
    assert experts.distinct(1) == pytest.approx(4)
    assert experts.distinct(10_000) == pytest.approx(64)
    draw, trials = random.Random(2), 2000
    seen = sum(len({e for _ in range(20) for e in draw.sample(range(64), 4)}) for _ in range(trials)) / trials
    assert experts.distinct(20) == pytest.approx(seen, rel=0.01)
    model = MODELS["nemotron-3-super"]
    assert model.read_params(1) < model.read_params(16) < model.read_params(4096) < model.params


def test_tensor_parallel_divides_heads_and_repeats_groups() -> None:
    model, gpu = MODELS["nemotron-3-super"], GPUS["h200"]
    one, many = (predict(model, gpu, Workload(tp=tp, window=16, batch=16)) for tp in (1, 16))
    assert many["traffic"]["replay"]["state_read"] * 16 == one["traffic"]["replay"]["state_read"]
    assert many["memory"] == one["memory"]
    sharded = model.recurrent.shard(16)
    assert (sharded.nheads, sharded.ngroups) == (8, 1)
    assert many["modes"]["replay"]["weights_bytes"] * 16 == one["modes"]["replay"]["weights_bytes"]
    # Two KV heads are repeated on 16 ranks.
    assert many["modes"]["replay"]["kv_bytes"] * 2 == one["modes"]["replay"]["kv_bytes"]
    with pytest.raises(ReplayError, match="tp is 3; it must divide the 128 heads"):
        predict(model, gpu, Workload(tp=3))
    with pytest.raises(ReplayError, match="the 8 groups"):
        MODELS["nemotron-3-nano-4b"].recurrent.shard(12)


def test_acceptance_command_shows_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(parse("nemotron-3-super", "--batch", "256", "--window", "16")) == 0
    lines = {line.strip().split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "4,194,304" in lines["state B/layer/seq"]
    assert "61,440" in lines["conv B/layer/seq"]
    assert "18,944" in lines["ring B/token/layer"]
    assert "160 MiB" in lines["model state"]
    assert "+11.6 MiB" in lines["+ ring"]
    speed = next(line for line in lines.values() if "predicted speed-up" in line)
    assert "1.81x (closed form 1.82x)" in speed
    assert any("use --tp 2 or more" in line for line in lines.values())


def test_report_of_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kimi-linear-48b", "--draft-tokens", "3", "--read-copy", "fp8_e4m3", "--tp", "2", "--batch", "4000"]
    assert main(parse(*words)) == 0
    text = capsys.readouterr().out
    for expected in ("native spec.", "total per kept token", "against native speculation", "on one GPU of 2",
                     "without a read copy", "acceptance assumed: 3.00", "batch 4000 does not fit",
                     "bound by arithmetic"):  # fmt: skip
        assert expected in text


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "speed.svg"
    plan = run_json(capsys, "qwen3.5-35b", "--draft-tokens", "3", "--plot", str(target))
    assert plan["plot"] == str(target)
    assert target.is_file()
    assert set(plan["modes"]) == {"conventional", "native_speculative", "replay"}
    assert plan["modes"]["conventional"]["speedup"] == 1.0
    listed = run_json(capsys, "--list")
    assert set(listed["models"]) == set(MODELS)
    assert set(listed["gpus"]) == set(GPUS)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(parse("--list")) == 0
    text = capsys.readouterr().out
    assert all(key in text for key in (*MODELS, *GPUS))
    with pytest.raises(ReplayError, match=r"a model \(kimi-k3\) is given with --list"):
        main(parse("kimi-k3", "--list"))


def test_gpu_options(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, "qwen3.5-4b", "--bandwidth", "2", "--memory", "48", "--tflops", "100")
    assert plan["gpu"] == {"name": "GPU", "bandwidth": 2e12, "memory": 48e9, "flops": 1e14, "source": "given"}
    plan = run_json(capsys, "qwen3.5-4b", "--gpu", "b200", "--memory", "48")
    assert (plan["gpu"]["name"], plan["gpu"]["bandwidth"], plan["gpu"]["source"]) == ("B200", 8e12, "datasheet")


def test_weights_options(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, "qwen3.5-27b", "--weights-dtype", "fp4")
    assert plan["model"]["weights_bytes"] == 26.9e9 * 0.5625
    plan = run_json(capsys, "qwen3.5-27b", "--weights-bytes", "1e10")
    assert (plan["model"]["weights_bytes"], plan["model"]["weights_from"]) == (1e10, "given")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "model is missing"),
        (["gpt-5"], "model is 'gpt-5'; it must be a path"),
        (["./nowhere"], "it must be a config.json"),
        (["./nowhere/config.json"], "cannot be read"),
        (["qwen3.5-4b", "--gpu", "v100"], "gpu is 'v100'"),
        (["qwen3.5-4b", "--window", "0"], "window is 0"),
        (["qwen3.5-4b", "--window", "65"], "window is 65"),
        (["qwen3.5-4b", "--window", "many"], "window is 'many'"),
        (["qwen3.5-4b", "--batch", "0"], "batch is 0"),
        (["qwen3.5-4b", "--context", "-1"], "context is -1"),
        (["qwen3.5-4b", "--tp", "0"], "tp is 0"),
        (["qwen3.5-4b", "--draft-tokens", "16"], "draft_tokens is 16"),
        (["qwen3.5-4b", "--draft-tokens", "3", "--acceptance", "4.5"], "acceptance is 4.5"),
        (["qwen3.5-4b", "--draft-tokens", "3", "--acceptance", "nan"], "acceptance is nan"),
        (["qwen3.5-4b", "--acceptance", "2"], "it must be from 1 to 1"),
        (["qwen3.5-4b", "--state-dtype", "float64"], "state_dtype is 'float64'"),
        (["qwen3.5-4b", "--act-dtype", "int8"], "act_dtype is 'int8'"),
        (["qwen3.5-4b", "--read-copy", "fp4"], "read_copy is 'fp4'"),
        (["qwen3.5-4b", "--state-dtype", "bfloat16", "--read-copy", "bf16"], "saves nothing"),
        (["qwen3.5-4b", "--weights-dtype", "int3"], "weights_dtype is 'int3'"),
        (["qwen3.5-4b", "--weights-bytes", "0"], "weights_bytes is 0"),
        (["qwen3.5-4b", "--bandwidth", "inf"], "bandwidth is inf"),
        (["qwen3.5-4b", "--memory", "-5"], "memory is -5"),
        (["qwen3.5-4b", "--reserve", "1"], "reserve is 1"),
        (["qwen3.5-4b", "--plot", "speed.gif"], "plot is 'speed.gif'"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(message)):
        main(parse(*words))


@pytest.mark.parametrize(
    ("config", "key", "params"),
    [
        (NANO, "nemotron-3-nano-4b", 3_973_556_832),
        (SUPER, "nemotron-3-super", 120_670_000_000),
        (QWEN_35B, "qwen3.5-35b", 34_660_000_000),
        (KIMI_48B, "kimi-linear-48b", 49_120_000_000),
    ],
    ids=["nano-4b", "super", "qwen-35b", "kimi-48b"],
)
def test_config_files_give_the_presets(config: dict, key: str, params: int, tmp_path: Path) -> None:
    """A published config.json leads to the same shape as the preset, and to the published parameter count."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape, preset = find_model(str(tmp_path)), MODELS[key]
    assert (shape.recurrent, shape.attention, shape.experts) == (preset.recurrent, preset.attention, preset.experts)
    assert shape.lookup_params == preset.lookup_params
    assert shape.ffn == preset.ffn
    if preset.experts is None:
        assert shape.params == params
    else:
        assert shape.params == pytest.approx(params, rel=2e-4)
    assert shape_from_path(str(tmp_path / "config.json")).params == shape.params


def test_weight_files_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NANO), encoding="utf-8")
    for name, size in (("model-1.safetensors", 3000), ("model-2.safetensors", 5000), ("notes.txt", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    plan = run_json(capsys, str(tmp_path))
    assert (plan["model"]["weights_bytes"], plan["model"]["weights_from"]) == (8000, "files")
    plan = run_json(capsys, str(tmp_path), "--weights-dtype", "fp8")
    assert (plan["model"]["weights_bytes"], plan["model"]["weights_from"]) == (
        plan["model"]["params"],
        "parameters in fp8",
    )


def test_ranks_that_are_advised_are_ranks_that_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """1,099 GB ask for nine H200s, which cannot share the heads evenly."""
    words = ["nemotron-3-ultra"]
    (note,) = [line for line in run_json(capsys, *words)["notes"] if "weights need" in line]
    assert note.endswith("use --tp 16 or more, or a smaller --weights-dtype")
    notes = run_json(capsys, *words, "--tp", "16")["notes"]
    assert not any("weights need" in line for line in notes)


@pytest.mark.parametrize("config", [NANO, {**KIMI_48B, "num_experts": None}], ids=["nano-4b", "kimi, dense"])
def test_converted_checkpoint(config: dict, tmp_path: Path) -> None:
    """The config.json that convert writes gives the same model as the published one that it came from."""
    from trtllm_replayssm.models.checkpoint import trtllm_config
    from trtllm_replayssm.models.hf import read_hf_config

    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before = shape_from_path(str(tmp_path))
    written = trtllm_config(read_hf_config(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    assert shape_from_path(str(tmp_path)) == before


def test_bad_expert_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SUPER, "num_experts_per_tok": 513}), encoding="utf-8")
    with pytest.raises(ReplayError, match="num_experts_per_tok is 513"):
        shape_from_path(str(tmp_path))


def test_plot_curves_and_files(tmp_path: Path) -> None:
    model, work = MODELS["nemotron-3-super"], Workload(window=16)
    drawn = {curve["label"]: curve for curve in curves(model, work)}
    assert drawn["float32 state"]["best_window"] == 21
    assert drawn["float32 state"]["speedup"][15] == pytest.approx(1.8051, abs=1e-3)
    assert drawn["bfloat16 state"]["conventional"] == 2.0
    assert drawn["bfloat16 state"]["best_window"] == 15
    for name, magic in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml"), ("c.PDF", b"%PDF")):
        write_plot(str(tmp_path / name), model, work)
        assert (tmp_path / name).read_bytes().startswith(magic)
    write_plot(str(tmp_path / "d.svg"), model, Workload(draft_tokens=3, acceptance=3.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.svg", "c.PDF", "d.svg"]


def test_plot_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="cannot be written"):
        write_plot(str(tmp_path / "missing" / "a.png"), MODELS["qwen3.5-4b"], Workload())
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ReplayError, match="plot needs matplotlib"):
        write_plot(str(tmp_path / "a.png"), MODELS["qwen3.5-4b"], Workload())


def test_amounts_of_small_models_are_in_millions() -> None:
    from trtllm_replayssm.plan.report import _amount

    assert _amount(120_671_000_000, "B", "M") == "120.7 B"
    assert _amount(5_678_480, "B", "M") == "5.7 M"
