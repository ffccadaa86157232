"""GPUs as nvidia-smi tells them, and what CUDA_VISIBLE_DEVICES leaves of them."""

from __future__ import annotations

from clap_zero.preflight.gpus import check_gpus, choose, read_slices, read_table


def test_gpus_are_read_as_nvidia_smi_tells_them() -> None:
    text = "0, GPU-aa, NVIDIA H200, 143771, 12, 570.1\n1, GPU-bb, NVIDIA H200, 143771, 90000, 570.1\nNo devices\n"
    gpus = read_table(text)

    def chosen(visible: str | None) -> list[int]:
        found, faults = choose(gpus, [], visible)
        assert not faults
        return [gpu.index for gpu in found]

    assert chosen(None) == [0, 1]
    assert chosen("1") == [1] == chosen("GPU-bb")
    assert chosen("") == [] == chosen("-1")
    _, faults = choose(gpus, [], "1,7")
    assert [str(one) for one in faults] == ["CUDA_VISIBLE_DEVICES=1,7: this machine has no GPU '7'; it has 0 to 1"]
    found = [one.text for one in check_gpus(gpus)]
    assert len(found) == 1 and found[0].startswith("GPU 1 is busy: 94 GB of 151 GB are in use")


def test_slices_of_a_gpu_are_found_by_their_names() -> None:
    gpus = read_table("0, GPU-aa, NVIDIA H200, 143771, 12, 570.1\n1, GPU-bb, NVIDIA H200, 143771, 0, 570.1\n")
    listed = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\nGPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
        "  MIG 3g.71gb     Device  0: (UUID: MIG-cc)\n  MIG 1g.18gb     Device  1: (UUID: MIG-dd)\n"
    )
    slices = read_slices(listed, gpus)
    found, faults = choose(gpus, slices, "MIG-dd")
    assert [(gpu.index, gpu.name) for gpu in found] == [(1, "MIG 1g.18gb of NVIDIA H200")] and not faults
    found, faults = choose(gpus, slices, "MIG-dd,MIG-cc")
    assert len(found) == 1 and [one.level for one in faults] == ["warning"], "a process sees one of them"
    assert [one.level for one in choose(gpus, slices, "MIG-ee")[1]] == ["error"]
