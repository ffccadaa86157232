"""Which code of this package runs here: a hash of its files, and the commit where it is a checkout."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

_SUFFIXES = {".py", ".yaml", ".json", ".txt"}


def code_hash(package: Path = PACKAGE) -> str:
    """A hash over the names and contents of the package's files: equal where the same code would run."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def commit(checkout: Path = PACKAGE.parent) -> str:
    """The first 12 digits of the commit that is checked out; empty outside a checkout. Without running git."""
    git = checkout / ".git"
    try:
        if git.is_file():  # a work tree or a submodule: the file names the real directory
            git = checkout / git.read_text().partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text().strip()
        name = head.partition("ref:")[2].strip()
        return (head if not name else _resolve(git, name))[:12]
    except OSError:
        return ""


def _resolve(git: Path, name: str) -> str:
    """The commit of a branch; those of a work tree lie in the main checkout, old ones in one packed file."""
    common = git / "commondir"
    places = [git, git / common.read_text().strip()] if common.exists() else [git]
    for place in places:
        if (place / name).exists():
            return (place / name).read_text().strip()
    for place in places:
        packed = place / "packed-refs"
        lines = packed.read_text().splitlines() if packed.exists() else []
        for line in lines:
            digits, _, ref = line.partition(" ")
            if ref == name:
                return digits
    return ""
