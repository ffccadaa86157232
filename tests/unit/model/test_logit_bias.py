"""What a run says where the weights that it starts from and its objective do not agree about the sigmoid's bias."""

from __future__ import annotations

import pytest
from transformers import ClapConfig

from clap_zero.model.logit_bias import CONFIG_KEY, told_bias


@pytest.mark.parametrize(
    ("stored", "wanted", "said"),
    [
        (None, False, None),
        (-8.5, True, None),
        (None, True, "the weights have no bias of it, so it starts at -10"),
        (-8.5, False, "warning: the weights hold a bias of -8.5 that was learned with objective.loss sigmoid"),
    ],
)
def test_a_bias_is_not_dropped_or_made_without_a_word(stored: float | None, wanted: bool, said: str | None) -> None:
    config = ClapConfig.from_dict({} if stored is None else {CONFIG_KEY: stored})
    line = told_bias(config, wanted=wanted)
    assert line is None if said is None else line is not None and said in line and "\n" not in line
