"""A checkpoint as a Hugging Face directory. One process, no DeepSpeed engine, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from clap_zero.checkpoint.files import (
    SafetensorsWriter,
    TensorSpec,
    fsync_directory,
    model_file_name,
    save_tensors,
    split_into_files,
    write_json,
)
from clap_zero.checkpoint.source import TOKENIZER_FILES, ModelSource, find_model
from clap_zero.checkpoint.weights import INDEX
from clap_zero.data.text import EMBEDDED_TOKENIZER
from clap_zero.errors import CheckpointError
from clap_zero.model import mlp_heads
from clap_zero.model.pretrained import read_config, read_model_config

MAX_FILE_BYTES = 2_000_000_000


def export_run(
    run_dir: str | Path, out_dir: str | Path, *, step: str | int = "latest", overwrite: bool = False
) -> Path:
    """Writes a directory that `ClapModel.from_pretrained` and `ClapProcessor.from_pretrained` load offline.

    LAION's MLP heads, where they were trained, stand beside them in a file that Hugging Face's classes do not open.

    Weights are the fp32 masters of the checkpoint; under local BatchNorm the statistics are merged over ranks. The
    directory is renamed into place after everything in it was read back and compared; with `overwrite` the old one is
    renamed away just before.

    Args:
        run_dir: A run, or a checkpoint in it.
        out_dir: Where to; it must not exist or be empty.
        step: `latest`, `best` or a step.
        overwrite: Replace what is in out_dir.

    Returns:
        out_dir.

    Raises:
        CheckpointError: No usable checkpoint, an empty or missing tensor, out_dir in use, or it cannot be written.
    """
    source = find_model(run_dir, step=step)
    if source.run_dir is None:
        raise CheckpointError(f"{run_dir} is a model's directory already, not a run")
    out = Path(out_dir).expanduser()
    _check_target(out, source.run_dir, overwrite=overwrite)
    temporary = out.resolve().parent / f".{out.resolve().name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        sums = _write_weights(source.weights, temporary)
        _copy_heads(source.weights, temporary)
        write_json(temporary / "config.json", read_model_config(source.weights))
        write_json(temporary / "preprocessor_config.json", source.features.to_preprocessor())
        _write_tokenizer(source, temporary)
        _verify(temporary, sums)
        fsync_directory(temporary)
        _replace(temporary, out.resolve())
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


EXPORTED = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab)\.json|merges\.txt|(model(-\d+-of-\d+)?|mlp_heads)\.safetensors|model\.safetensors\.index\.json"
)
"""Names of the files that an export consists of; --overwrite replaces a directory of these and nothing else."""


def _check_target(out: Path, run_dir: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file, not a directory")
    target, run = out.resolve(), run_dir.resolve()
    inside = any(target.is_relative_to(run / name) for name in ("checkpoints", "eval"))
    if target == run or target in run.parents or inside:
        raise CheckpointError(f"{out} holds the run {run_dir} itself: export to another directory")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{out} is not empty: give another directory, or --overwrite to replace an earlier export"
        )
    foreign = [] if not out.is_dir() else sorted(p.name for p in out.iterdir() if not EXPORTED.fullmatch(p.name))
    if foreign:
        raise CheckpointError(
            f"{out} holds {foreign[0]}, which no export wrote, and --overwrite would delete it: give another directory"
        )


def _expected_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a ClapModel with this configuration, without making its weights."""
    from transformers import ClapModel

    with torch.device("meta"):
        model = ClapModel(read_config(directory))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _stored(directory: Path) -> tuple[dict[str, Path], list[TensorSpec]]:
    """The file of each tensor of a checkpoint, and all of them as they will be written, in a fixed order."""
    try:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {name: directory / file for name, file in weight_map.items()}
        specs = []
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as opened:
                for name in sorted(opened.keys()):
                    part = opened.get_tensor(name)
                    specs.append(TensorSpec(name, tuple(part.shape), part.dtype))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the weights of checkpoint {directory} cannot be read ({error})") from error
    return files, specs


def _write_weights(checkpoint: Path, out: Path) -> dict[str, int]:
    """Copies the weights into as few files as the limit allows; returns the checksum of each tensor.

    Raises:
        CheckpointError: A tensor is empty, missing, left over or of another shape than the configuration says.
    """
    paths, specs = _stored(checkpoint)
    expected = _expected_shapes(checkpoint)
    empty = [spec.name for spec in specs if spec.num_elements == 0]
    if empty:
        raise CheckpointError(f"checkpoint {checkpoint} holds empty tensors ({', '.join(empty[:3])}...): not exported")
    found = {spec.name: spec.shape for spec in specs}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        details = ", ".join(f"{name}: {found.get(name)} instead of {expected.get(name)}" for name in wrong[:3])
        raise CheckpointError(
            f"checkpoint {checkpoint} does not fit its config.json in {len(wrong)} tensors ({details})"
        )
    files = split_into_files(specs, MAX_FILE_BYTES)
    names = ["model.safetensors"] if len(files) == 1 else [model_file_name(i, len(files)) for i in range(len(files))]
    sums: dict[str, int] = {}
    for name, parts in zip(names, files, strict=True):
        with SafetensorsWriter(out / name, parts) as file:
            for spec in parts:
                with safe_open(paths[spec.name], framework="pt") as opened:
                    tensor = opened.get_tensor(spec.name)
                sums[spec.name] = _checksum(tensor)
                file.add(spec.name, tensor)
    if len(files) > 1:
        weight_map = {spec.name: name for name, parts in zip(names, files, strict=True) for spec in parts}
        total = sum(spec.size_bytes for spec in specs)
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return sums


def _copy_heads(checkpoint: Path, out: Path) -> None:
    """LAION's MLP heads of a checkpoint, if it has any; what was written is read back.

    Raises:
        CheckpointError: They are not complete, or the file was not written as it should.
    """
    origin, target = checkpoint / mlp_heads.FILE, out / mlp_heads.FILE
    if not origin.is_file():
        return
    try:
        heads = load_file(origin)
        mlp_heads.holds_heads(heads, where=origin)
        save_tensors(target, heads)
        written = load_file(target)
    except SafetensorError as error:
        raise CheckpointError(f"{origin} cannot be read ({error}): is it complete?") from error
    if written.keys() != heads.keys() or any(not torch.equal(written[name], heads[name]) for name in heads):
        raise CheckpointError(f"{target} does not hold what was written to it: is the disk in order?")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_tokenizer(source: ModelSource, out: Path) -> None:
    origin = source.tokenizer or EMBEDDED_TOKENIZER
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, out / name)
    special = {
        **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
        **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
    settings = {
        **special,
        "tokenizer_class": "RobertaTokenizer",
        "processor_class": "ClapProcessor",
        "add_prefix_space": False,
        "trim_offsets": True,
        "errors": "replace",
        "model_max_length": source.max_caption_tokens,
    }
    write_json(out / "tokenizer_config.json", settings)


def _verify(directory: Path, sums: Mapping[str, int]) -> None:
    """Loads what was written as a user would, and compares every value.

    Raises:
        CheckpointError: Hugging Face's classes do not load it, or a value differs.
    """
    from transformers import ClapModel, ClapProcessor
    from transformers.utils import logging as hf_logging

    bars_wanted = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model, report = ClapModel.from_pretrained(directory, output_loading_info=True, local_files_only=True)
        processor = ClapProcessor.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the exported directory does not load ({' '.join(str(error).split())})") from error
    finally:
        if bars_wanted:
            hf_logging.enable_progress_bar()
    problems = {kind: sorted(names) for kind, names in report.items() if names}
    differing = [name for name, tensor in model.state_dict().items() if _checksum(tensor) != sums.get(name)]
    if problems or differing:
        raise CheckpointError(f"the exported directory does not load as written: {problems or differing[:3]}")
    vocabulary, embeddings = len(processor.tokenizer), model.config.text_config.vocab_size
    if vocabulary > embeddings:
        raise CheckpointError(f"the tokenizer has {vocabulary} tokens, but the text tower only {embeddings}")


def _replace(temporary: Path, out: Path) -> None:
    """Puts the directory in place; what was there (nothing, or what --overwrite gave up) goes afterwards."""
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    fsync_directory(out.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)
