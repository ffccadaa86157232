"""The pipelines that `loader.py` compares. Each is a generator without end: the number of pairs of every batch.

What "plain" stands for is written as users write it: webdataset, soundfile, and transformers' ClapProcessor in the
collate function. open_clip and LAION-CLAP are called in their own checkouts, through the functions that their training
calls; what is set for them here is said beside it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

MAX_TOKENS = 77


@dataclass(frozen=True)
class Setting:
    """What a contender reads.

    Attributes:
        split: directory of the FLAC shards.
        logmel_split: directory of the same clips as stored log-mels.
        workers: loader processes.
        micro_batch: pairs of a batch.
        checkout: the peer's source, where there is a peer.
        scratch: directory for what a peer wants to find in its working directory.
    """

    split: Path
    logmel_split: Path
    workers: int
    micro_batch: int
    checkout: Path | None
    scratch: Path

    @property
    def tars(self) -> list[str]:
        """Paths of the FLAC shards."""
        return [str(path) for path in sorted(self.split.glob("*.tar"))]


def bare(setting: Setting, *, dtype: str = "int16") -> Iterator[int]:
    """soundfile decodes the bytes, which lie in memory."""
    from loader_data import encoded_clips

    clips = encoded_clips(setting.split, ".flac")
    while True:
        for first in range(0, len(clips), setting.micro_batch):
            part = clips[first : first + setting.micro_batch]
            for data in part:
                soundfile.read(io.BytesIO(data), dtype=dtype)
            yield len(part)


def ours(setting: Setting, *, features: bool, logmel: bool) -> Iterator[int]:
    """clap-zero's loader, to int16 (or stored mels) and tokens, or through to features."""
    from clap_zero.audio.features import ClapFeatures, FeatureConfig
    from clap_zero.data.batch import LoaderPlan
    from clap_zero.data.index import load_index
    from clap_zero.data.loader import train_batches

    cfg = FeatureConfig(truncation="rand_trunc")
    plan = LoaderPlan(
        rank=0,
        world_size=1,
        micro_batch=setting.micro_batch,
        features=cfg,
        workers=setting.workers,
        max_caption_tokens=77,
    )
    compute = ClapFeatures(cfg, device="cpu")
    index = load_index([str(setting.logmel_split if logmel else setting.split)])
    for batch in train_batches(index, plan=plan):
        if features:
            compute(batch.clips)
        yield len(batch)


def _decode_plain(sample: tuple[bytes, bytes]) -> tuple[np.ndarray, str]:
    audio, rate_hz = soundfile.read(io.BytesIO(sample[0]), dtype="float32")
    assert rate_hz == 48_000 and audio.ndim == 1
    return audio, random.choice(json.loads(sample[1])["text"])


def _collate_plain(samples: list[tuple[np.ndarray, str]], *, processor: Any) -> dict[str, torch.Tensor]:
    audio, texts = zip(*samples, strict=True)
    return processor(text=list(texts), audio=list(audio), sampling_rate=48_000, return_tensors="pt", padding=True)


def plain(setting: Setting) -> Iterator[int]:
    """webdataset, soundfile and ClapProcessor in the collate function of a DataLoader."""
    import webdataset as wds
    from transformers import ClapFeatureExtractor, ClapProcessor, RobertaTokenizer

    from clap_zero.data.text import EMBEDDED_TOKENIZER

    processor = ClapProcessor(
        ClapFeatureExtractor(truncation="rand_trunc"), RobertaTokenizer.from_pretrained(str(EMBEDDED_TOKENIZER))
    )
    data = wds.WebDataset(setting.tars, shardshuffle=16, nodesplitter=None).repeat().shuffle(128)
    data = data.to_tuple("flac", "json").map(_decode_plain)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=setting.micro_batch,
        num_workers=setting.workers,
        collate_fn=partial(_collate_plain, processor=processor),
    )
    for batch in loader:
        yield len(batch["input_features"])


def open_clip(setting: Setting) -> Iterator[int]:
    """open_clip's `get_wds_audio_dataset`, rand_trunc, with replacement; it ends at float32 waveforms and tokens.

    Its model computes the log-mel itself. Buffers of its shuffling are set small, as the data are.
    """
    assert setting.checkout is not None
    os.environ |= {f"OPENCLIP_WDS_SAMPLE_SHUFFLE_{name}": "128" for name in ("SIZE", "INITIAL")}
    sys.path.insert(0, str(setting.checkout / "src"))
    get = importlib.import_module("open_clip_train.audio_data").get_wds_audio_dataset
    transform = importlib.import_module("open_clip.audio.transform").audio_transform_v2
    tokenizer = importlib.import_module("open_clip.tokenizer").HFTokenizer(
        str(_tokenizer_directory(setting.scratch / "roberta-base")), context_length=MAX_TOKENS
    )
    path = setting.checkout / "src/open_clip/model_configs/CLAP-HTSAT-tiny-Roberta-base.json"
    args = argparse.Namespace(
        train_data="::".join(setting.tars),
        train_num_samples=10_000_000,
        train_data_upsampling_factors=None,
        dataset_resampled=True,
        workers=setting.workers,
        world_size=1,
        batch_size=setting.micro_batch,
        seed=0,
        audio_ext="flac",
    )
    info = get(args, transform(json.loads(path.read_text())["audio_cfg"], is_train=True), True, tokenizer=tokenizer)
    for batch in info.dataloader:
        yield len(batch["text"])


def laion_clap(setting: Setting) -> Iterator[int]:
    """LAION-CLAP's `get_wds_dataset`, rand_trunc, RoBERTa; it ends at float32 waveforms and tokens.

    Its model computes the log-mel itself. Its module loads three tokenizers by name: directories of these names are put
    into the working directory (the one of BERT, which nothing uses, holds a few words). Shards are named many times
    over so that an epoch does not end, the buffers of its shuffling are set small, and it prefetches two batches.
    """
    assert setting.checkout is not None
    _tokenizer_directory(setting.scratch / "roberta-base")
    _tokenizer_directory(setting.scratch / "facebook" / "bart-base")
    (setting.scratch / "bert-base-uncased").mkdir(exist_ok=True)
    (setting.scratch / "bert-base-uncased" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    os.chdir(setting.scratch)
    sys.path.insert(0, str(setting.checkout / "src" / "laion_clap"))
    data = importlib.import_module("training.data")
    data._SAMPLE_SHUFFLE_SIZE = data._SAMPLE_SHUFFLE_INITIAL = 128
    config = json.loads((setting.checkout / "src/laion_clap/clap_module/model_configs/HTSAT-tiny.json").read_text())
    args = argparse.Namespace(
        train_data=setting.tars * 500,
        remotedata=False,
        parallel_eval=False,
        seed=0,
        batch_size=setting.micro_batch,
        world_size=1,
        workers=setting.workers,
        horovod=False,
        prefetch_factor=2,
        class_index_dict=None,
        data_filling="repeatpad",
        data_truncating="rand_trunc",
        text_augment_selection=None,
        tmodel="roberta",
    )
    for batch in data.get_wds_dataset(args, config, is_train=True).dataloader:
        yield len(batch["waveform"])


def _tokenizer_directory(path: Path) -> Path:
    """RoBERTa's vocabulary as transformers and the peers look for it."""
    from clap_zero.data.text import EMBEDDED_TOKENIZER

    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(EMBEDDED_TOKENIZER, path)
        (path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    return path


CONTENDERS: dict[str, Callable[[Setting], Iterator[int]]] = {
    "bare": bare,
    "bare-float32": partial(bare, dtype="float32"),
    "ours": partial(ours, features=False, logmel=False),
    "ours+features": partial(ours, features=True, logmel=False),
    "ours-logmel": partial(ours, features=False, logmel=True),
    "ours-logmel+features": partial(ours, features=True, logmel=True),
    "plain": plain,
    "open_clip": open_clip,
    "laion_clap": laion_clap,
}
