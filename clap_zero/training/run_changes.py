"""What differs between two starts of one run: what matters is told, what may differ is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clap_zero.config.deepspeed import BATCH_KEYS
from clap_zero.config.ds_paths import lookup
from clap_zero.config.load import diff_configs
from clap_zero.data.public import public_config

VOLATILE_KEYS = (
    *("resume", "force", "run_dir", "ds_config", "wandb", "log", "checkpoint", "evaluate", "distributed"),
    *("data.workers", "data.log_keys", "data.val", "data.cache_dir", "data.cache_bytes"),
    *("data.remote_timeout_s", "data.remote_retries", "data.allow_pipe", "data.missing_shards"),
)
"""What may differ between two starts of one run: none of it changes what is learnt. A section stands for its keys."""

MICRO, ACCUMULATION, WHOLE = BATCH_KEYS
LAYOUT_KEYS = ("zero_optimization", MICRO, ACCUMULATION)
"""What of the DeepSpeed configuration follows the number of ranks and the ZeRO stage; the global batch does not.

Stage 0 has a `data_types` of its own, too."""
QUANTIZED = "zero_quantized_"
"""In front of the keys of `zero_optimization` that round weights or gradients."""

UNRECORDED_OBJECTIVE = {
    "negatives": "micro",
    "loss": "softmax",
    "positives": "off",
    "label_smoothing": 0.0,
    "hard_negative_beta": 0.0,
    "mlp": "auto",
}
"""What runs minimised that were recorded before it was a setting; they go on with these flags.

Weights with LAION's heads were refused then."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, world_size: int) -> list[str]:
    """Lines `key: old -> new` for what changes what is learnt.

    Other ranks and another ZeRO stage do not, nor what follows from them, as long as the global batch stays.

    Args:
        before: `run`, `ds` and `data` as they were recorded: the run config, the resolved DeepSpeed configuration, and
            fingerprints and sizes of the data.
        now: The same of this start.
        world_size: Ranks of this start.
    """
    old_run = before["run"]
    if "objective" in now["run"]:
        recorded = old_run.get("objective", UNRECORDED_OBJECTIVE)
        old_run = old_run | {"objective": {"mlp": UNRECORDED_OBJECTIVE["mlp"]} | recorded}
    ranks = _ranks(before["ds"])
    stages = [lookup(config["ds"], "zero_optimization.stage") for config in (before, now)]
    relaid = ranks not in (None, world_size) or stages[0] != stages[1]
    free = (*VOLATILE_KEYS, "train.micro_batch_size") if relaid else VOLATILE_KEYS
    lines = diff_configs(public_config(old_run), public_config(now["run"]), ignore=free)
    layout = (*LAYOUT_KEYS, "data_types") if 0 in stages else LAYOUT_KEYS
    lines += [f"ds.{line}" for line in diff_configs(before["ds"], now["ds"], ignore=layout if relaid else ())]
    if relaid and stages[0] == stages[1]:
        lines += [f"ds.{line}" for line in diff_configs(_quantized(before["ds"]), _quantized(now["ds"]), ignore=())]
    if ranks not in (None, world_size) and before["ds"][WHOLE] != now["ds"].get(WHOLE):
        way_out = f'with {MICRO} or {ACCUMULATION} "auto" the global batch stays as it was'
        lines.append(f"(ranks: {ranks} -> {world_size}; {way_out})")
    elif relaid and ranks and (kind := lookup(now["run"], "objective.negatives")) in ("micro", "local"):
        candidates = [_candidates(before["ds"], kind, ranks), _candidates(now["ds"], kind, world_size)]
        if candidates[0] != candidates[1]:
            lines.append(f"pairs that a clip is compared with (negatives {kind}): {candidates[0]} -> {candidates[1]}")
    lines += [f"data on disk: {line}" for line in diff_configs(before["data"], now["data"], ignore=("val",))]
    return lines


def _quantized(ds: Mapping[str, Any]) -> dict[str, Any]:
    zero = ds.get("zero_optimization", {})
    return {f"zero_optimization.{key}": value for key, value in zero.items() if key.startswith(QUANTIZED) and value}


def _candidates(ds: Mapping[str, Any], negatives: str, ranks: int) -> int:
    return ds[MICRO] * (ranks if negatives == "micro" else 1)


def _ranks(ds: Mapping[str, Any]) -> int | None:
    """Ranks of a run by its recorded batch numbers, None without them."""
    micro, accumulation, whole = (ds.get(key) for key in BATCH_KEYS)
    return whole // (micro * accumulation) if micro and accumulation and whole else None
