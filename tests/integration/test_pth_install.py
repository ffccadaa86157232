"""The .pth comes with an installation, works there through the real `deepspeed` program, and goes away with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PTH = "clap_zero_deepspeed_m.pth"

pytestmark = pytest.mark.integration

BUILD = """
import os, sys
os.chdir({root!r})
import hatchling.build
name = getattr(hatchling.build, {function!r})({out!r})
print(name)
"""


def build(function: str, root: Path, out: Path) -> Path:
    """A wheel of the checkout, through the build backend, without a build environment."""
    program = BUILD.format(root=str(root), function=function, out=str(out))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A bare environment that sees this one's packages, DeepSpeed among them, and has DeepSpeed's program."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    (site / "outer.pth").write_text(str(Path(spec.origin).parents[1]) + "\n")
    script = folder / "bin" / "deepspeed"
    script.write_text(f"#!{folder}/bin/python\nfrom deepspeed.launcher.runner import main\nmain()\n")
    script.chmod(0o755)
    return folder


def pip(environment: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def launch(environment: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """One rank of a module that says what it was given."""
    command = [str(environment / "bin" / "deepspeed"), "--num_gpus", "1", "-m", "shown", "-m", "a b"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=120)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_use_and_uninstall(environment: Path, tmp_path: Path, root: Path, kind: str) -> None:
    (tmp_path / "shown.py").write_text("import sys\nprint('given', sys.argv[1:])\n")
    pth = next(environment.glob("lib/python3*/site-packages")) / PTH
    script = (environment / "bin" / "deepspeed").read_bytes()

    refused = launch(environment, tmp_path)
    assert refused.returncode == 2
    assert "unrecognized arguments: -m" in refused.stderr

    function = "build_wheel" if kind == "wheel" else "build_editable"
    pip(environment, "install", "--no-deps", "--no-index", str(build(function, root, tmp_path)))
    assert pth.is_file()
    accepted = launch(environment, tmp_path)
    assert accepted.returncode == 0, accepted.stderr
    assert "given ['--local_rank=0', '-m', 'a b']" in accepted.stdout

    assets = pth.parent / "clap_zero" / "assets"
    assert (assets / "sounds").is_dir() == (kind == "wheel"), "an editable install finds them in the checkout"
    if kind == "wheel":
        assert (assets / "roberta" / "vocab.json").is_file()
        assert any((assets / "sounds").iterdir())
        assert (pth.parent / "clap_zero" / "config" / "presets" / "tiny.yaml").is_file()

    pip(environment, "uninstall", "-y", "clap-zero")
    assert not pth.exists()
    assert (environment / "bin" / "deepspeed").read_bytes() == script
