"""A finished run in a directory, made without an engine: checkpoint, configuration, held-out shards."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch

from clap_zero.checkpoint.files import checksum_file, save_tensors, write_json
from clap_zero.checkpoint.state import TRAINER_STATE, TrainState
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.checkpoint.weights import write_weights
from clap_zero.config.load import dump_run_config
from clap_zero.config.schema import RunConfig
from clap_zero.model.clap import ClapForContrast, build_model

RATE_HZ = 48_000


def geometry(*, fusion: bool) -> dict[str, Any]:
    """A ClapModel with every kind of part, 0.5 M parameters without the token table."""
    audio = {
        "patch_size": 8,
        "patch_stride": [8, 8],
        "patch_embeds_hidden_size": 16,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "enable_fusion": fusion,
    }
    if fusion:
        audio |= {"fusion_type": "aff_2d", "aff_block_r": 4}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return {"audio_config": audio, "text_config": text, "projection_dim": 24}


def make_model(*, fusion: bool, seed: int = 0) -> ClapForContrast:
    """The model with statistics and scales that an untrained one does not have."""
    model = build_model(
        geometry=geometry(fusion=fusion),
        pretrained=None,
        batch_norm="local",
        dropout=None,
        seed=seed,
        ds_config={},
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        model.logit_scale_a.fill_(3.25)
        generator = torch.Generator().manual_seed(seed)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1 - 20 * ("batch_norm" in name))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 20)
    return model.eval()


def make_run(
    run_dir: Path,
    model: ClapForContrast,
    *,
    step: int = 7,
    val: tuple[str, ...] = (),
    companions: Mapping[str, bytes] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a run with one checkpoint of the model; `changes` are sections of its configuration."""
    store = CheckpointStore(run_dir / "checkpoints")
    temporary = store.begin(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    engine = SimpleNamespace(
        module=model, optimizer=optimizer, device=torch.device("cpu"), zero_optimization_stage=lambda: 0
    )
    records, error = write_weights(engine, temporary, max_file_bytes=1_000_000)  # type: ignore[arg-type]
    assert error is None
    state = TrainState(step=step, epoch=0, offset=0, samples=0, world_size=1, stage=2)
    records[TRAINER_STATE] = write_json(temporary / TRAINER_STATE, asdict(state))
    records["rank-00000.safetensors"] = save_tensors(temporary / "rank-00000.safetensors", {"x": torch.ones(1)})
    for name, content in (companions or {}).items():
        (temporary / name).write_bytes(content)
        records[name] = checksum_file(temporary / name)
    store.commit(temporary, step, records)
    run = RunConfig.model_validate(
        {
            "model": {"preset": "tiny"},
            "data": {"train": ["unused"], "val": list(val)},
            "train": {"max_steps": 10, "learning_rate": 1e-3, "weight_decay": 0.0, "warmup_steps": 1},
            "evaluate": {"batch_size": 2},
            "checkpoint": {"every_steps": 5},
            "ds_config": "zero2.json",
            **(changes or {}),
        }
    )
    (run_dir / "config.yaml").write_text(dump_run_config(run))
    return run_dir


def sound(number: int, seconds: float) -> np.ndarray:
    """(samples,) float32: a few partials and some noise, another for each number."""
    rng = np.random.default_rng(number)
    time_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    partials = sum(np.sin(2 * np.pi * f * time_s + p) for f, p in rng.uniform(100, 4000, (3, 2)))
    return (0.15 * partials + 0.02 * rng.standard_normal(time_s.size)).astype(np.float32)


def encoded(samples: np.ndarray) -> bytes:
    """FLAC bytes of a waveform."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE_HZ, format="FLAC")
    return buffer.getvalue()


def make_shards(folder: Path, *, num_clips: int, captions: int = 1) -> Path:
    """Two tar shards of short clips, each with its captions, and sizes.json."""
    folder.mkdir(parents=True)
    sizes = {}
    for shard, numbers in enumerate(np.array_split(np.arange(num_clips), 2)):
        name = f"{shard}.tar"
        sizes[name] = len(numbers)
        with tarfile.open(folder / name, "w") as tar:
            for number in numbers.tolist():
                text = json.dumps({"text": [f"sound {number} caption {i}" for i in range(captions)]}).encode()
                for suffix, data in (("flac", encoded(sound(number, 0.3 + 0.1 * number))), ("json", text)):
                    member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return folder
