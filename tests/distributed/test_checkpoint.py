"""Saving and resuming on real ranks: bit-equal continuation, whole masters, and errors that reach every rank."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from clap_zero.checkpoint import store as store_module
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.errors import CheckpointError
from clap_zero.testing import run_distributed

STEPS = 3


class Configuration:
    """As much of a Hugging Face config as a checkpoint needs."""

    def to_json_string(self, use_diff: bool) -> str:
        assert use_diff
        return json.dumps({"model_type": "clap"})


class Toy(nn.Module):
    """Small, but with everything that is awkward: a 1-element parameter, odd sizes, BatchNorm, dropout, a frozen part,
    a parameter above and many below stage 3's persistence threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Configuration()
        self.logit_scale_a = nn.Parameter(torch.tensor([1.5]))
        self.embedding = nn.Embedding(4099, 29)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(29, affine=False)
        self.register_buffer("index", torch.arange(5), persistent=True)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(29, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.norm(x.float()).to(x.dtype)
        scale = self.logit_scale_a.clamp(0, 4).exp()
        return (self.head(self.dropout(x)) * scale + self.frozen.sum()).float().square().mean()


def make_engine(stage: int, precision: str, threshold: int = 100_000, **changes: Any) -> Any:
    import deepspeed

    if precision == "fp16":
        # DeepSpeed refuses fp16 where the processor has no instructions for it; torch computes it all the same.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = Toy()
    if precision != "fp32":
        norm = model.norm
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold},
        "steps_per_print": 10**9,
        **changes,
    }
    if precision != "fp32":
        config.setdefault(precision, {"enabled": True} | ({"initial_scale_power": 6} if precision == "fp16" else {}))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if precision != "fp32":
        assert norm is engine.module.norm
        for buffer in (norm.running_mean, norm.running_var):
            buffer.data = buffer.data.float()
    return engine


def train(engine: Any, start: int, steps: int) -> list[float]:
    losses = []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for step in range(start, start + steps):
        ids = torch.randint(4099, (4,), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: Any) -> dict[str, Tensor]:
    """The slow, public way: DeepSpeed's own gathering, one parameter at a time.

    It knows no masters of frozen parameters, and none at stage 0 in half precision: then the parameter itself.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is None:
            value = getattr(parameter, "ds_tensor", parameter).detach()
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    value = parameter.detach().clone()
        found[name] = value.detach().clone().reshape(getattr(parameter, "ds_shape", parameter.shape))
    return found


def state_at(step: int, stage: int) -> Any:
    from clap_zero.checkpoint.state import TrainState
    from clap_zero.distributed.collectives import rank_and_size

    return TrainState(
        step=step, epoch=1, offset=7, samples=8 * step, world_size=rank_and_size()[1], stage=stage, attempt=2
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(path / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    return tensors


def save_and_resume(root: str, stage: int, precision: str, threshold: int) -> dict[str, Any]:
    from clap_zero.checkpoint.buffers import persistent_buffers
    from clap_zero.checkpoint.state import load, save

    store = CheckpointStore(Path(root) / "checkpoints")
    engine = make_engine(stage, precision, threshold)
    train(engine, 0, STEPS)
    path = save(engine, store, state_at(STEPS, stage))
    at_save = masters(engine)
    buffers = {name: value.clone() for name, value in persistent_buffers(engine.module).items()}
    straight = train(engine, STEPS, STEPS)
    end = masters(engine)
    skipped = engine.skipped_steps

    fresh = make_engine(stage, precision, threshold)
    with torch.no_grad():
        for value in persistent_buffers(fresh.module).values():
            value.fill_(9)
    train(fresh, 50, 2) if stage < 3 else None  # stage 3 can only load into a fresh engine
    torch.manual_seed(987)
    state = load(fresh, path)
    return {
        "path": str(path),
        "at_save": at_save,
        "buffers": buffers,
        "restored": {name: value.clone() for name, value in persistent_buffers(fresh.module).items()},
        "straight": straight,
        "resumed": train(fresh, STEPS, STEPS),
        "end": end,
        "resumed_end": masters(fresh),
        "state": state,
        "skipped": (skipped, fresh.skipped_steps),
        "learning_rate": (engine.get_lr(), fresh.get_lr()),
        "loss_scale": (getattr(engine.optimizer, "cur_scale", None), getattr(fresh.optimizer, "cur_scale", None)),
    }


CASES = [(stage, "fp32", 100_000) for stage in (0, 1, 2, 3)] + [(3, "fp32", 0)]
LONG_CASES = [(stage, precision, 0) for precision in ("bf16", "fp16") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("case", CASES + [pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES], ids=str)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, case: tuple[int, str, int]) -> None:
    results = run_distributed(save_and_resume, 2, str(tmp_path), *case)
    path = Path(results[0]["path"])
    weights = read_weights(path)
    assert weights["logit_scale_a"].shape == ()
    assert "scratch" not in weights and torch.equal(weights["index"], torch.arange(5))
    if case[1] != "fp32":
        rounded = weights["embedding.weight"].to({"bf16": torch.bfloat16, "fp16": torch.float16}[case[1]])
        assert not torch.equal(rounded.float(), weights["embedding.weight"]), "parameters were saved for masters"
    for rank, result in enumerate(results):
        for name, value in result["at_save"].items():
            assert weights[name].dtype == torch.float32
            assert torch.equal(weights[name].reshape(value.shape).to(value.dtype), value), name
        for name, value in result["buffers"].items():
            assert torch.equal(result["restored"][name], value), (rank, name)
        assert result["resumed"] == pytest.approx(result["straight"], rel=1e-6)
        for name, value in result["end"].items():
            assert torch.equal(result["resumed_end"][name], value), (rank, name)
        assert result["state"].step == STEPS and result["state"].attempt == 2
        for kept in ("skipped", "learning_rate", "loss_scale"):
            assert result[kept][0] == result[kept][1]
    means = [result["buffers"]["norm.running_mean"].float() for result in results]
    assert not torch.equal(*means), "the ranks saw different data, so their own statistics must differ"
    assert torch.allclose(weights["norm.running_mean"], (means[0] + means[1]) / 2, atol=1e-7)


def skip_a_step(root: str) -> dict[str, Any]:
    from clap_zero.checkpoint.state import load, save

    changes = {"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}}
    engine = make_engine(2, "fp16", 0, **changes)
    train(engine, 0, 8)
    path = save(engine, CheckpointStore(Path(root)), state_at(8, 2))
    fresh = make_engine(2, "fp16", 0, **changes)
    first = fresh.optimizer.cur_scale
    load(fresh, path)
    result = {
        "skipped": (engine.skipped_steps, fresh.skipped_steps),
        "scale": (engine.optimizer.cur_scale, fresh.optimizer.cur_scale),
        "first": first,
        "rate": (engine.get_lr(), fresh.get_lr()),
    }
    random_state = torch.get_rng_state()
    losses = [train(fresh, 8, 2)]
    torch.set_rng_state(random_state)
    losses.append(train(engine, 8, 2))
    return result | {"losses": losses}


@pytest.mark.long
def test_fp16_keeps_its_loss_scale_and_its_skipped_steps(tmp_path: Path) -> None:
    for result in run_distributed(skip_a_step, 2, str(tmp_path)):
        assert 8 > result["skipped"][0] == result["skipped"][1] > 0
        assert result["scale"][0] == result["scale"][1] < result["first"]
        assert result["rate"][0] == result["rate"][1]
        assert result["losses"][0] == result["losses"][1]


def save_once(root: str, stage: int) -> str:
    from clap_zero.checkpoint.state import save

    engine = make_engine(stage, "fp32")
    train(engine, 0, 1)
    return str(save(engine, CheckpointStore(root), state_at(1, stage)))


def try_to_load(path: str, stage: int, precision: str = "fp32") -> str:
    from clap_zero.checkpoint.state import load

    try:
        load(make_engine(stage, precision), Path(path))
    except CheckpointError as error:
        return str(error)
    return ""


def test_another_number_of_ranks_stage_or_precision_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = run_distributed(save_once, 2, str(tmp_path / "run" / "checkpoints"), 2)[0]
    (one,) = run_distributed(try_to_load, 1, path, 2)
    assert "ranks 2 there, 1 here" in one
    for message in run_distributed(try_to_load, 2, path, 3):
        assert "ZeRO stage 2 there, 3 here" in message
        assert f"`clap-zero export {tmp_path / 'run'} DIR`" in message and "--model.pretrained DIR" in message
    assert all("precision fp32 there, bf16 here" in text for text in run_distributed(try_to_load, 2, path, 2, "bf16"))


@pytest.mark.parametrize("victim", ["*optim_states.pt", "rank-00001.safetensors", "model-00001*"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(tmp_path: Path, victim: str) -> None:
    path = Path(run_distributed(save_once, 2, str(tmp_path), 1)[0])
    file = next(path.rglob(victim))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    messages = run_distributed(try_to_load, 2, str(path), 1)
    assert messages[0] == messages[1] and "another checksum" in messages[0] and file.name in messages[0]


def fail_on_a_rank(root: str, stage: int, full_rank: int, max_bytes: int) -> tuple[str, list[str], str]:
    """A file size limit on one rank stands in for its full disk: writes fail there half-way through a file."""
    from clap_zero.checkpoint.state import save
    from clap_zero.distributed.collectives import rank_and_size

    engine = make_engine(stage, "fp32")
    store = CheckpointStore(root)
    train(engine, 0, 1)
    save(engine, store, state_at(1, stage))
    train(engine, 1, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    message = ""
    try:
        if rank_and_size()[0] == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
        save(engine, store, state_at(2, stage))
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    torch.distributed.barrier()
    left = sorted(entry.name for entry in Path(root).iterdir())
    torch.distributed.barrier()
    train(engine, 2, 1)
    return message, left, str(save(engine, store, state_at(3, stage)))


@pytest.mark.parametrize("stage, full_rank, max_bytes", [(2, 1, 100_000), (3, 0, 2000), (3, 0, 600_000), (0, 1, 500)])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, stage: int, full_rank: int, max_bytes: int) -> None:
    results = run_distributed(fail_on_a_rank, 2, str(tmp_path), stage, full_rank, max_bytes)
    for message, left, later in results:
        assert f"rank {full_rank}:" in message and "step 2" in message and "too large" in message
        assert left == ["latest", "step-00000001"]
        assert Path(later).name == "step-00000003"
    store = CheckpointStore(tmp_path)
    assert store.newest_complete() == Path(results[0][2]) and not store.rejected


def save_the_same_step_twice(root: str) -> list[str]:
    from clap_zero.checkpoint.state import save

    engine = make_engine(1, "fp32")
    store = CheckpointStore(root)
    train(engine, 0, 1)
    save(engine, store, state_at(1, 1))
    train(engine, 1, 1)
    save(engine, store, state_at(1, 1))
    return [name for name, value in masters(engine).items() if not torch.equal(value, _saved(root, name, value))]


def _saved(root: str, name: str, like: Tensor) -> Tensor:
    return read_weights(Path(root) / store_module.step_name(1))[name].reshape(like.shape)


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    assert run_distributed(save_the_same_step_twice, 2, str(tmp_path)) == [[], []]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000001"]


def stream_in_small_buckets(root: str) -> bool:
    from clap_zero.checkpoint.masters import stream_masters
    from clap_zero.checkpoint.weights import write_weights

    engine = make_engine(3, "fp32", 0)
    train(engine, 0, 1)
    expected = masters(engine)
    same = all(torch.equal(value, expected[name]) for name, value in stream_masters(engine, bucket_elements=40))
    write_weights(engine, Path(root), max_file_bytes=1000)
    return same


def test_buckets_and_files_may_be_small(tmp_path: Path) -> None:
    assert all(run_distributed(stream_in_small_buckets, 2, str(tmp_path)))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert set(read_weights(tmp_path)) >= {"embedding.weight", "head.bias", "norm.running_var"}
