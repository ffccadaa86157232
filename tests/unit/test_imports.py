"""The order of the layers, and who may use what, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clap_zero"

LAYERS = (
    ("errors", "figures_file", "assets", "oom", "phases", "launching", "precision", "process_memory", ""),
    ("distributed", "config"),
    ("audio", "launching.guard", "launching.start"),
    ("model", "data", "objective"),
    ("evaluation", "checkpoint", "inference", "preflight"),
    (
        *("training.engine", "training.schedule", "training.say", "training.seeding", "training.own_time"),
        *("training.metrics", "training.objective", "training.last_words", "training.start_up"),
    ),
    ("training.step", "training.passes"),
    ("training.loop", "training.hooks", "training.run_changes", "training.run_directory"),
    ("hooks",),
    ("training.setup", "training.prepare", "training.story"),
    ("planning",),
    ("cli", "train"),
)
"""Bottom first. A module imports from its own layer and those below; "" is the package itself."""

OWNERS = {
    "torch.distributed": ("distributed",),
    "deepspeed": ("training.engine", "distributed.world", "checkpoint", "model"),
    "wandb": ("hooks.wandb",),
    "webdataset": ("data",),
}
"""Third-party modules and the only parts of the package that may import or reach them."""

ENVIRONMENT_OWNERS = (
    "distributed.world",
    "launching",
    "preflight.machine",
    "cli",
    "distributed.elastic",
    "distributed.place",
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if not name.startswith("testing"):
            yield name, ast.parse(path.read_text(), str(path))


def within(name: str, part: str) -> bool:
    return name == part or (part != "" and name.startswith(part + "."))


def layer(name: str) -> int | None:
    """The layer of the longest entry that holds this module; None for a bare package such as `training`."""
    found = [(len(part), level) for level, parts in enumerate(LAYERS) for part in parts if within(name, part)]
    return max(found)[1] if found else None


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, at the top or inside a function, and every `a.b` that is reached by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def is_type_only(name: str, tree: ast.Module) -> set[str]:
    """Imports under `if TYPE_CHECKING:`, which bind nothing at run time."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {module for block in blocks for module in imports(ast.Module(body=block.body, type_ignores=[]))}


def test_imports_point_one_way() -> None:
    wrong = []
    for name, tree in sources():
        level = layer(name)
        for module in set(imports(tree)) - is_type_only(name, tree):
            target = module.removeprefix("clap_zero.")
            if not module.startswith("clap_zero.") or level is None or within(target, "testing"):
                wrong += [f"{name} imports {module}"] if within(target, "testing") else []
                continue
            target_level = layer(target)
            if target_level is not None and target_level > level:
                wrong.append(f"{name} imports {module} from a layer above")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_layer() -> None:
    bare = {"training"}
    assert not [name for name, _ in sources() if layer(name) is None and name not in bare]


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_libraries_are_used_by_their_owners_only(library: str) -> None:
    wrong = {
        f"{name} uses {module}"
        for name, tree in sources()
        for module in imports(tree)
        if within(module, library) and not any(within(name, owner) for owner in OWNERS[library])
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_the_environment_is_read_in_three_places() -> None:
    """RANK, WORLD_SIZE, our own variables: whoever wants to know asks distributed.world."""
    wrong = [
        f"{name} uses {module}"
        for name, tree in sources()
        for module in imports(tree)
        if module in ("os.environ", "os.getenv") and not any(within(name, owner) for owner in ENVIRONMENT_OWNERS)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_layer_names_modules_that_exist() -> None:
    names = [name for name, _ in sources()]
    parts = [part for level in LAYERS for part in level if part not in ("", "assets")]
    assert not [part for part in parts if not any(within(name, part) for name in names)]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import clap_zero", ("torch", "deepspeed", "transformers", "numpy")),
        ("import clap_zero.train", ("torch", "deepspeed", "transformers")),
        ("import clap_zero.cli", ("torch", "deepspeed", "transformers")),
        ("import clap_zero.preflight.node, clap_zero.preflight.doctor", ("torch", "deepspeed", "numpy", "pydantic")),
        ("import clap_zero.errors, clap_zero.config.schema", ("torch", "deepspeed", "transformers")),
        ("import clap_zero.audio.features, clap_zero.data.loader", ("deepspeed", "transformers", "wandb")),
    ],
)
def test_light_imports_stay_light(statement: str, absent: tuple[str, ...]) -> None:
    """In a process of its own, as a launcher or a loader's worker would import them."""
    program = f"import sys\n{statement}\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
