"""`clap-zero eval RUN`: one process, from the consolidated weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clap_zero.audio.features import ClapFeatures
from clap_zero.checkpoint.source import find_model
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.index import index_of, policy_of
from clap_zero.data.loader import eval_batches
from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.evaluation.runner import EvalResult, evaluate, format_result, write_result


def eval_run(
    run_dir: str | Path,
    *,
    step: str | int = "latest",
    val: Sequence[str] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
) -> EvalResult:
    """Retrieval of a checkpoint on the held-out pairs of its run; prints a table and writes RUN/eval/step-N.json.

    Args:
        run_dir: The run, or a checkpoint in it.
        step: `latest`, `best` or a step.
        val: Other shards than the run's `data.val`; then no file is written.
        batch_size: Clips at once; the run's by default.
        device: Where to compute; a GPU if there is one.

    Raises:
        CheckpointError: There is no usable checkpoint, or no run configuration.
        ConfigError: Nothing is held out.
        DataError: The held-out shards are missing or unusable.
    """
    source = find_model(run_dir, step=step)
    run = source.run
    if run is None or source.run_dir is None or source.step is None:
        raise CheckpointError(f"{run_dir} is not a run with checkpoints and config.yaml")
    patterns = tuple(val) if val is not None else run.data.val
    if not patterns:
        raise ConfigError(f"the run {run_dir} has no data.val, so nothing is held out to evaluate on")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = LoaderPlan(
        rank=0,
        world_size=1,
        micro_batch=batch_size or run.evaluate.batch_size,
        features=source.features,
        seed=run.train.seed,
        tokenizer_path=None if source.tokenizer is None else str(source.tokenizer),
        max_caption_tokens=run.data.max_caption_tokens,
        max_seconds=run.data.max_seconds,
        max_bad_fraction=run.data.max_bad_fraction,
        policy=policy_of(run.data),
    )
    index = index_of(patterns, run.data)
    model = source.build(where)
    features = ClapFeatures(source.features, device=where)
    result = evaluate(model, eval_batches(index, plan=plan), features, device=where)
    print(format_result(result, title=f"{run_dir}, step {source.step}, on {', '.join(one.name for one in index.sets)}"))
    if val is None:
        print(f"written to {write_result(source.run_dir, source.step, result)}")
    return result
