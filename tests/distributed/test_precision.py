"""Every precision at every stage: it trains, its scale is bounded, and evaluation of one tower works in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc

LOCAL = 3


def train(stage: int, precision: str, weights: Path, silent: bool = False) -> dict[str, Any]:
    """Some steps with an evaluation of each tower between them."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    # DeepSpeed refuses fp16 on CPUs without units for it; torch computes it all the same, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    rank, world = rank_and_size()
    config = zc.ds_config(stage, micro_batch=LOCAL, world=world, precision=precision)
    # Large enough to be seen in the bf16 weights: at stage 0 DeepSpeed shows no others.
    config["optimizer"]["params"]["lr"] = 1e-2
    model = zc.build(config, fused=True, weights=weights)
    engine = zc.initialise(model, config)

    def masters() -> dict[str, torch.Tensor]:
        found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        missing = [n for n, value in found.items() if value is None]
        plain = dict(engine.module.named_parameters())
        return {n: (plain[n] if n in missing else found[n]).detach().float().clone() for n in found}

    before, losses, scales = masters(), [], []
    for step in range(6):
        pairs = zc.make_pairs(LOCAL * world, fused=True, long_rows=(0,) if step % 2 else (), seed=step)
        mine = pairs.rows(LOCAL * rank, LOCAL * (rank + 1))
        if silent:
            mine = mine._replace(input_features=torch.full_like(mine.input_features, -100))
        output = engine(**mine._asdict())
        loss = zc.loss_of(output)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        scales.append(output.logit_scale.item())
        engine.eval()
        with torch.no_grad():
            audio = engine(input_features=mine.input_features, is_longer=mine.is_longer).audio_embeds
            text = engine(input_ids=mine.input_ids, attention_mask=mine.attention_mask).text_embeds
        engine.train()
        assert audio.shape == text.shape == (LOCAL, 16)
    after = masters()
    result = {
        "losses": losses,
        "scales": scales,
        "moved": [n for n in before if not torch.equal(before[n], after[n])],
        "finite": all(torch.isfinite(value).all() for value in after.values()),
        "names": list(before),
        "statistics": {str(b.dtype) for n, b in engine.module.named_buffers() if "running" in n},
    }
    zc.finish(engine)
    return result


@pytest.fixture(scope="module")
def at_the_cap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh weights with both raw logit scales at 100, where exp overflows."""
    model = zc.build({}, fused=True)
    model.logit_scale_a.data.fill_(100.0)
    model.logit_scale_t.data.fill_(100.0)
    return zc.save_weights(model, tmp_path_factory.mktemp("cap"))


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(0 < loss < 50 for loss in result["losses"]), result["losses"]
        assert all(1 <= scale <= 100 for scale in result["scales"])
        assert result["finite"]
        assert result["statistics"] == {"torch.float32"}
        # Zero in theory: what shifts all scores alike, and biases before a BatchNorm; never used: logit_scale_t.
        still = set(result["names"]) - set(result["moved"])
        assert all("bias" in name or name == "logit_scale_t" for name in still), still


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int, precision: str, at_the_cap: Path) -> None:
    check(run_distributed(train, 2, stage, precision, at_the_cap))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks(stage: int, precision: str, at_the_cap: Path) -> None:
    check(run_distributed(train, 4, stage, precision, at_the_cap))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a11_nothing_but_silence(precision: str, at_the_cap: Path) -> None:
    """Embeddings are exactly 0 and fp16 gradients overflow: a skipped step, not ruined weights."""
    for result in run_distributed(train, 2, 2, precision, at_the_cap, True):
        assert result["finite"] and all(torch.isfinite(torch.tensor(result["losses"])))
