"""What a rank needs of memory, part by part, before a machine is asked for. Pure arithmetic, no torch.

Weights, gradients and optimizer states follow the ZeRO paper (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", sections 3 and 5): what a stage partitions is divided by the ranks. Its
buffers are those that DeepSpeed's settings ask for. Activations come from the table of the preset (config/batch.py says
how it was counted). docs/configuration.md says how far the sum was off where it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clap_zero.config.batch import PROCESS_BYTES, activation_bytes
from clap_zero.config.deepspeed import ResolvedDeepSpeed
from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_ranges import DTYPE_OF
from clap_zero.config.preset import Preset
from clap_zero.objective.chunk import default_chunk

STATES = {"adagrad": 1, "lion": 1, "muon": 1, "musgd": 1, "sgd": 1, "rmsprop": 1, "asgd": 1, "adafactor": 0}
"""Numbers that an optimizer keeps for each parameter beside its fp32 copy, lower-case type -> count (0: far fewer);
others keep Adam's two. SGD and RMSprop have one only with momentum: an upper bound."""
ADAM_STATES = 2

ACCURACY = "an estimate: 1 to 17 % off where it was measured, on CPUs"
NO_ACCURACY = "an estimate, not measured for"
"""What the sum and its parts were held against: see docs/configuration.md."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a rank that grow with the number of parameters.

    Attributes:
        weights: as they are used in forward and backward; at stage 3 the rank's part.
        gradients: between backward and update.
        optimizer: fp32 copy of the weights, where there is one, and the optimizer's own numbers.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.weights + self.gradients + self.optimizer


def model_states(
    num_parameters: int,
    *,
    stage: int,
    world_size: int,
    weight_bytes: int,
    gradient_bytes: int,
    num_states: int = ADAM_STATES,
    state_bytes: int = 4,
) -> ModelStates:
    """ZeRO's arithmetic.

    Args:
        num_parameters: of the model.
        stage: 0 to 3; 1 partitions the optimizer, 2 the gradients too, 3 the weights too.
        world_size: ranks that share what is partitioned.
        weight_bytes: of a weight, 2 or 4.
        gradient_bytes: of a gradient as it is accumulated, 2 or 4.
        num_states: numbers that the optimizer keeps for each parameter.
        state_bytes: of each of them, and of the master copy.
    """
    has_masters = stage > 0 or weight_bytes < 4  # DeepSpeed clones the partition even where the weights are fp32
    optimizer = num_parameters * state_bytes * (num_states + has_masters)
    weights, gradients = num_parameters * weight_bytes, num_parameters * gradient_bytes
    return ModelStates(
        weights=_part(weights, world_size if stage == 3 else 1),
        gradients=_part(gradients, world_size if stage >= 2 else 1),
        optimizer=_part(optimizer, world_size if stage >= 1 else 1),
    )


def _part(whole: int, ranks: int) -> int:
    return -(-whole // ranks)


@dataclass(frozen=True)
class MemoryEstimate:
    """What a rank needs, part -> bytes.

    Attributes:
        device: memory of the device that computes; on a CPU run the process's own.
        host: memory of the machine beside it, by offloading.
        disk: on the NVMe disk.
        checkpoint: one checkpoint of the whole run, all ranks' files.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    checkpoint: int

    @property
    def device_bytes(self) -> int:
        """Of all parts on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Of all parts on the host."""
        return sum(self.host.values())


def estimate_memory(
    resolved: ResolvedDeepSpeed, *, preset: Preset, world_size: int, device_type: str
) -> MemoryEstimate:
    """A rank's memory at its peak, in the backward of a micro batch.

    Args:
        resolved: the run.
        preset: of its model.
        world_size: ranks.
        device_type: "cpu" or "cuda".
    """
    config, stage = resolved.config, resolved.stage
    weight_bytes = 4 if resolved.precision == "fp32" else 2
    low_masters = any(
        lookup(config, path) for path in ("bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads")
    )
    states = model_states(
        preset.num_parameters,
        stage=stage,
        world_size=world_size,
        weight_bytes=weight_bytes,
        gradient_bytes=_gradient_bytes(config, default=weight_bytes),
        num_states=STATES.get(str(config["optimizer"]["type"]).lower(), ADAM_STATES),
        state_bytes=2 if low_masters else 4,
    )
    device = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "buffers": _buffer_bytes(
            resolved, preset, world_size=world_size, weight_bytes=weight_bytes, device_type=device_type
        ),
        "activations": activation_bytes(
            preset,
            num_pairs=resolved.micro_batch,
            checkpointing=resolved.activation_checkpointing,
            low_precision=weight_bytes < 4 or bool(lookup(config, "torch_autocast.enabled")),
        ),
        "log-mels": resolved.held_bytes,
        "contrast": _contrast_bytes(resolved, preset, device_type=device_type),
        "process": PROCESS_BYTES,
    }
    host: dict[str, int] = {}
    disk: dict[str, int] = {}
    for part, name in (("optimizer", "offload_optimizer"), ("weights", "offload_param")):
        place = lookup(config, f"zero_optimization.{name}.device")
        if place not in (None, "none"):
            share = lookup(config, f"zero_optimization.{name}.ratio")
            moved = int(device[part] * (1.0 if share is None else share))
            device[part] -= moved
            (disk if place == "nvme" else host)[part] = moved
            if part == "optimizer":
                host["gradients"] = device.pop("gradients")  # the update runs on the CPU
    return MemoryEstimate(device, host, disk, _checkpoint_bytes(states, preset, stage=stage, world_size=world_size))


def told_accuracy(resolved: ResolvedDeepSpeed, *, device_type: str) -> str:
    """How far the estimate is to be trusted: docs/configuration.md has what was measured."""
    zero = resolved.config.get("zero_optimization", {})
    offloads = any(
        (zero.get(f"offload_{part}") or {}).get("device", "none") != "none" for part in ("optimizer", "param")
    )
    if device_type != "cpu":
        return f"{NO_ACCURACY} GPUs"
    if offloads:
        return f"{NO_ACCURACY} offloading"
    return ACCURACY if resolved.stage == 2 else f"{NO_ACCURACY} stage {resolved.stage}"


def _gradient_bytes(config: Mapping[str, Any], *, default: int) -> int:
    kind = lookup(config, "data_types.grad_accum_dtype")
    return default if kind is None else 4 if DTYPE_OF.get(kind) == "fp32" else 2


def _buffer_bytes(
    resolved: ResolvedDeepSpeed, preset: Preset, *, world_size: int, weight_bytes: int, device_type: str
) -> int:
    """Buckets of the reduction, and at stage 3 the weights that are gathered at one time."""
    config, stage = resolved.config, resolved.stage
    if world_size == 1 and stage == 0:
        return 0
    sent = config.get("communication_data_type")
    sent_bytes = weight_bytes if sent is None else 4 if sent == "fp32" else 2
    if stage == 0:
        return preset.num_parameters * sent_bytes  # one bucket of up to 500 M elements: all gradients, flat
    zero = config["zero_optimization"]
    num_buckets = 2 if stage < 3 and zero.get("overlap_comm") else 1  # stage3.py has one, whatever overlaps
    size = zero.get("reduce_bucket_size", 500_000_000)
    if device_type == "cpu":
        size = min(size, preset.num_parameters)  # pages that nobody writes are not taken
    bucket = num_buckets * size * sent_bytes
    if stage < 3:
        return bucket
    live = zero.get("stage3_max_live_parameters", zero.get("max_live_parameters", 1_000_000_000))
    return bucket + min(live, preset.num_parameters) * weight_bytes


def _contrast_bytes(resolved: ResolvedDeepSpeed, preset: Preset, *, device_type: str) -> int:
    """Embeddings of the pairs that are compared, gathered and sent, their gradients, and two blocks of logits."""
    whole = resolved.global_batch
    negatives = resolved.run.objective.negatives
    own = resolved.micro_batch * (resolved.accumulation if negatives == "global" else 1)
    if negatives == "local":
        whole = own
    elif negatives == "micro":
        whole //= resolved.accumulation
    edge = default_chunk(device_type)
    rows = 2 * (2 * whole + 2 * own) * preset.embedding_dim * 4
    return rows + 2 * min(edge, own) * min(edge, whole) * 4


def _checkpoint_bytes(states: ModelStates, preset: Preset, *, stage: int, world_size: int) -> int:
    """fp32 weights for export, DeepSpeed's own (at stage 3 only in the fp32 copy), and all ranks' optimizer."""
    optimizer = states.optimizer * (world_size if stage >= 1 else 1)
    return 4 * preset.num_parameters + optimizer + (0 if stage == 3 else states.weights)
