"""Log-mel on one thread beside Hugging Face's ClapFeatureExtractor and beside the bare Fourier transform.

    python benchmarks/features.py                # 20 rounds, about 20 s
    python benchmarks/features.py --rounds 50

All contenders take turns in one process, in CPU time of its one thread, so that other work on the machine slows all
alike; figures are medians over the rounds, and beside them the fastest. The bare transform is `torch.fft.rfft` over and
over the same block of frames, which stays in the cache, as often as the clip has frames.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from clap_zero.audio.clips import ClipBatch, FeatureConfig, plan_crop
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import decode_logmel, encode_logmel
from clap_zero.audio.waveform import from_int16, to_int16

TRANSFORM_BLOCK_FRAMES = 160  # fastest of 16 to 256 in float32: their frames and spectra are 1.3 MB


@dataclass(frozen=True)
class Time:
    """CPU seconds of one call."""

    median_s: float
    fastest_s: float


def take_turns(contenders: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Time]:
    """Times contenders in turn; of two calls in a row the second counts."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            run()
            start = time.thread_time()
            run()
            times[name].append(time.thread_time() - start)
    return {name: Time(statistics.median(values), min(values)) for name, values in times.items()}


def _bare_transform(clip: np.ndarray, cfg: FeatureConfig, dtype: torch.dtype) -> Callable[[], None]:
    padded = np.pad(clip, cfg.n_fft // 2, mode="reflect")
    frames = torch.from_numpy(padded).to(dtype).unfold(0, cfg.n_fft, cfg.hop) * torch.hann_window(cfg.n_fft).to(dtype)
    # One block over and over: it is in the cache whatever ran before.
    block = frames[:TRANSFORM_BLOCK_FRAMES].contiguous()
    whole, rest = divmod(frames.shape[0], TRANSFORM_BLOCK_FRAMES)

    def run() -> None:
        for _ in range(whole):
            torch.fft.rfft(block)
        torch.fft.rfft(block[:rest])

    return run


def contenders(truncation: str, seconds: float) -> dict[str, Callable[[], object]]:
    """What is compared for noise of a length, as calls without arguments.

    ClapFeatureExtractor gets float32 as it asks for, ours the 16-bit numbers that the loader sends.
    """
    from transformers import ClapFeatureExtractor

    cfg = FeatureConfig("fusion" if truncation == "fusion" else "rand_trunc")
    extractor = ClapFeatureExtractor(frequency_min=50, frequency_max=14_000, truncation=truncation)
    noise = np.random.default_rng(0).standard_normal(round(seconds * cfg.sample_rate_hz)) * 0.1
    pcm = to_int16(noise.astype(np.float32))
    clip = from_int16(pcm)
    plan = plan_crop(pcm.size, cfg, None)
    part = pcm[plan.start_sample : plan.start_sample + plan.num_samples]
    batch = ClipBatch.from_parts([part], [plan.chunk_starts])
    ours, reference = (ClapFeatures(cfg, device="cpu", dtype=dtype) for dtype in (torch.float32, torch.float64))
    stored = encode_logmel(pcm, ours)

    def from_stored() -> object:
        frames, starts = decode_logmel(stored, cfg).part(cfg, None)
        return ours(ClipBatch.from_parts([frames], [starts]))

    return {
        "ClapFeatureExtractor": partial(extractor, clip, sampling_rate=cfg.sample_rate_hz, return_tensors="pt"),
        "ours": partial(ours, batch),
        "ours, float64": partial(reference, batch),
        "ours, bytes of a stored log-mel": from_stored,
        "rfft float32": _bare_transform(clip, cfg, torch.float32),
        "rfft float64": _bare_transform(clip, cfg, torch.float64),
    }


def measure(truncation: str, seconds: float, *, rounds: int) -> dict[str, Time]:
    """Times of each contender on one thread. NumPy's threads are as many as OMP_NUM_THREADS said at the start."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return take_turns(contenders(truncation, seconds), rounds=rounds)
    finally:
        torch.set_num_threads(num_threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each contender")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # Read when NumPy's and torch's libraries are loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    print(f"torch {torch.__version__}, one thread, CPU time, medians of {args.rounds} rounds (fastest)")
    for truncation, seconds in (("rand_trunc", 10.0), ("fusion", 10.0), ("fusion", 30.0)):
        times = measure(truncation, seconds, rounds=args.rounds)
        ours = times["ours"]
        print(f"\n{truncation}, {seconds:g} s: time, and how often ours goes into it")
        for name, value in times.items():
            print(
                f"  {name:32} {1e3 * value.median_s:6.2f} ms ({1e3 * value.fastest_s:6.2f})"
                f"   {value.median_s / ours.median_s:6.2f} x ({value.fastest_s / ours.fastest_s:6.2f})"
            )
        for name in ("rfft float32", "rfft float64"):
            ratio = ours.median_s / times[name].median_s
            print(f"  ours / {name}: {ratio:.2f} ({ours.fastest_s / times[name].fastest_s:.2f})")


if __name__ == "__main__":
    main()
