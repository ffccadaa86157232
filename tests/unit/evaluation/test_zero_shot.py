"""Zero-shot accuracy against hand counts."""

from __future__ import annotations

import pytest
import torch

from clap_zero.errors import ConfigError, DataError
from clap_zero.evaluation.zero_shot import class_embeddings, class_prompts, zero_shot_accuracy


def test_prompts_are_templates_by_labels() -> None:
    assert class_prompts(["dog", "sea_waves"]) == ["This is a sound of dog.", "This is a sound of sea waves."]
    assert class_prompts(["a", "b"], ["{label}!", "one {label}"]) == ["a!", "b!", "one a", "one b"]
    with pytest.raises(ConfigError, match="a sound"):
        class_prompts(["dog"], ["a sound"])
    with pytest.raises(ConfigError):
        class_prompts(["dog"], [])


def test_class_embeddings_average_their_own_templates() -> None:
    prompts = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]])  # 2 templates x 2 classes
    classes = class_embeddings(prompts, 2)
    assert torch.allclose(classes, torch.tensor([[0.5**0.5, 0, 0.5**0.5], [0, 1, 0]]))


def test_hand_count() -> None:
    classes = torch.eye(3)
    audio = torch.tensor([[0.9, 0.1, 0], [0.1, 0.9, 0], [0, 0.5, 0.4], [0, 0, 1]])
    assert zero_shot_accuracy(audio, classes, torch.tensor([0, 1, 2, 2])) == 3 / 4


def test_constant_embeddings_score_chance() -> None:
    audio = torch.tensor([[1.0, 0]]).repeat(8, 1)
    assert zero_shot_accuracy(audio, audio[:4], torch.arange(8) % 4) == 1 / 4


def test_no_clips_is_an_error() -> None:
    with pytest.raises(DataError):
        zero_shot_accuracy(torch.empty(0, 2), torch.eye(2), torch.empty(0, dtype=torch.int64))
