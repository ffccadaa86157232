"""LAION's extra heads in a run: trained at every stage, in checkpoints and exports, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ClapModel

import clap_zero
from clap_zero.checkpoint.export import export_run
from clap_zero.checkpoint.source import find_model
from clap_zero.errors import CheckpointError
from clap_zero.evaluation.runner import _forward
from clap_zero.model.clap import ClapForContrast, Parts, build_model
from clap_zero.model.mlp_heads import FILE, PARAMETERS
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.testing import run_distributed
from clap_zero.training.objective import RunObjective
from tests.distributed import zero_cases as zc
from tests.distributed.test_checkpoint_clap import inputs
from tests.unit.checkpoint.small_run import make_model, make_run

CPU = torch.device("cpu")
WIDTH = 24
TRAINED = {*PARAMETERS, "logit_scale_a", "logit_scale_t"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with the heads beside the weights."""
    directory = zc.save_weights(make_model(fusion=True), tmp_path_factory.mktemp("laion"))
    save_file(zc.new_heads(width=WIDTH), directory / FILE)
    return directory


def build(directory: Path, *, mlp: Any = "auto", ds_config: dict[str, Any] | None = None) -> ClapForContrast:
    return build_model(
        geometry=None,
        pretrained=str(directory),
        batch_norm="sync",
        dropout=0.0,
        seed=3,
        ds_config=ds_config or {},
        device=CPU,
        parts=Parts(mlp=mlp),
    )


def make_engine(weights: Path, stage: int, *, mlp: str = "auto") -> Any:
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    return deepspeed.initialize(model=build(weights, mlp=mlp, ds_config=settings), config=settings)[0]


def heads_of(engine: Any) -> dict[str, Tensor]:
    from clap_zero.checkpoint.masters import stream_masters

    return {name: value.clone() for name, value in stream_masters(engine) if name in TRAINED}


def train_and_save(run_dir: str, weights: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The heads and scales after a step, and those in an engine that loaded the checkpoint."""
    from clap_zero.checkpoint.state import TrainState, load, save
    from clap_zero.checkpoint.store import CheckpointStore
    from clap_zero.distributed.collectives import rank_and_size

    engine = make_engine(weights, stage)
    objective = RunObjective(ObjectiveConfig(positives="off"))
    loss, _ = objective.share(engine(**inputs(0, rank_and_size()[0])), torch.arange(2))
    engine.backward(loss)
    engine.step()
    state = TrainState(step=1, epoch=0, offset=4, samples=4, world_size=2, stage=stage)
    path = save(engine, CheckpointStore(Path(run_dir) / "checkpoints"), state)
    fresh = make_engine(weights, stage)
    load(fresh, path)
    with pytest.raises(CheckpointError, match="LAION's MLP heads trained there, - here"):
        load(make_engine(weights, stage, mlp="off"), path)
    return heads_of(engine), heads_of(fresh)


def check_export(run_dir: Path, out: Path, trained: dict[str, Tensor]) -> None:
    """An export loads in Hugging Face's class without a word, and here with the heads as they were trained."""
    export_run(run_dir, out)
    model, report = ClapModel.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert model.logit_scale_t == trained["logit_scale_t"].reshape(())
    heads = {name: value for name, value in trained.items() if name in PARAMETERS}
    for where in (out, find_model(run_dir).weights):
        stored = load_file(where / FILE)
        assert stored.keys() == heads.keys() and all(torch.equal(stored[n], heads[n]) for n in heads)
    again = build(out).state_dict()
    assert all(torch.equal(again[name], value.reshape(again[name].shape)) for name, value in trained.items())
    # Embeddings are those of before the heads, as with LAION's own inference.
    assert clap_zero.load(out).embed_text("a dog").shape == (1, WIDTH)
    assert not build(out, mlp="off").has_heads
    export_run(run_dir, out, overwrite=True)
    assert (out / FILE).is_file()


def test_checkpoint_and_export(weights: Path, tmp_path: Path) -> None:
    model = build(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in PARAMETERS or name == "logit_scale_t":
                parameter.add_(0.01)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if name in TRAINED}
    check_export(make_run(tmp_path / "run", model), tmp_path / "out", trained)
    # A run without the heads leaves them out of what it writes, also over an export with them.
    make_run(tmp_path / "plain", build(weights, mlp="off"))
    export_run(tmp_path / "plain", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_heads_outlive_the_run(stage: int, weights: Path, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    (trained, resumed), _ = run_distributed(train_and_save, 2, str(run_dir), weights, stage, fresh=True)
    before = build(weights).state_dict()
    assert trained.keys() == TRAINED
    for name, value in trained.items():
        assert torch.equal(value, resumed[name]) and value.isfinite().all()
        assert not torch.equal(value.reshape(before[name].shape), before[name]), f"{name} was not trained"
    check_export(run_dir, out, trained)


def test_a_damaged_file_of_heads_is_not_exported(weights: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", build(weights))
    checkpoint = find_model(run_dir).weights
    export_run(run_dir, tmp_path / "whole")
    assert (tmp_path / "whole" / FILE).is_file()
    (checkpoint / FILE).write_bytes((checkpoint / FILE).read_bytes()[:-8])
    with pytest.raises(CheckpointError):
        export_run(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_retrieval_ranks_as_laion_does(weights: Path) -> None:
    """Rows of audio times rows of text are the mean of both comparisons, each by its scale."""
    model = build(weights).eval()
    given = {**inputs(0, 0), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}

    class Batch:
        input_ids, attention_mask = given["input_ids"], given["attention_mask"]

        def __len__(self) -> int:
            return 2

    with torch.no_grad():
        audio, text = _forward(model, given["input_features"], given["is_longer"], Batch())  # type: ignore[arg-type]
        output = model(**given)
    first = output.logit_scale * output.audio_embeds @ output.text_mlp.t()
    second = output.logit_scale_t * output.audio_mlp @ output.text_embeds.t()
    torch.testing.assert_close(audio @ text.t(), (first + second) / 2)
