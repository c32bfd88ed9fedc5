"""Set-up: pins, ranges, make targets, and what an installed package must contain."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mila_kernels.paths import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIRECT = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
DEV = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"]["dev"]]
TARGETS = "setup reproduce test lab static figures sanitize profile lint strip clean help".split()

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def make(*words: str) -> str:
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "DEVICE", "VENV")
    }
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_every_requirement_is_pinned_once() -> None:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(pins())
    assert all(re.fullmatch(r"==[\w.+]+", str(pin.specifier)) for pin in pins().values())


def test_pins_lie_in_the_ranges() -> None:
    for wanted in (*DIRECT, *DEV):
        pin = pins()[canonicalize_name(wanted.name)]
        (version,) = (part.version for part in pin.specifier)
        assert wanted.specifier.contains(version), f"{pin} is outside {wanted}"


def test_pins_are_complete_and_agree_with_each_other() -> None:
    """Every requirement of every pinned package is pinned, within what that package asks for."""
    for name, pin in pins().items():
        if pin.marker and not pin.marker.evaluate():
            continue
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: this environment was not made from the pins")
        for needed in map(Requirement, asked):
            extras = {*pin.extras, ""}
            if needed.marker and not any(needed.marker.evaluate(default_environment() | {"extra": e}) for e in extras):
                continue
            if name == "torch" and canonicalize_name(needed.name) not in pins():
                continue  # a CUDA build of torch pins its own CUDA packages
            (version,) = (part.version for part in pins()[canonicalize_name(needed.name)].specifier)
            assert needed.specifier.contains(version), f"{name} needs {needed}, pinned is {version}"


def test_pythons() -> None:
    python = SpecifierSet(PROJECT["project"]["requires-python"])
    assert "3.11" in python and "3.12" in python and "3.10" not in python


def test_conda_installs_the_same_package() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert re.search(r"^\s+- -e \.\[dev\]$", text, re.MULTILINE)
    assert re.search(r"python>=3\.11,<3\.13", text)


def test_what_the_code_imports_is_declared() -> None:
    peers = map(Requirement, PROJECT["project"]["optional-dependencies"]["peers"])
    declared = {canonicalize_name(wanted.name) for wanted in (*DIRECT, *peers)}
    names = {
        "flashinfer": "flashinfer-python",
        "humming": "humming-kernels",
        "pynvml": "nvidia-ml-py",
        "triton": "torch",
    }
    for file in sorted(PACKAGE.rglob("*.py")):
        for module in re.findall(r"^\s*(?:import|from) ([a-zA-Z]\w*)", file.read_text(), re.MULTILINE):
            known = module in sys.stdlib_module_names or module == "mila_kernels"
            assert known or canonicalize_name(names.get(module, module)) in declared, f"{file.name} imports {module}"


def test_every_source_of_a_kernel_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["mila_kernels"]
    packaged = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    sources = {file for kind in ("cu", "cuh", "h", "cpp") for file in PACKAGE.rglob(f"*.{kind}")}
    assert sources and sources <= packaged


def test_the_console_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["mila-kernels"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


@needs_make
def test_make_alone_prints_every_target() -> None:
    text = make()
    assert re.findall(r"^  make (\w+)", text, re.MULTILINE) == [
        "help",
        *(t for t in sorted(TARGETS, key=text.find) if t != "help"),
    ]
    assert set(re.findall(r"^  make (\w+)", text, re.MULTILINE)) == set(TARGETS)


@needs_make
def test_make_hands_its_variables_on() -> None:
    python = f"PYTHON={sys.executable}"
    assert "MILA_TEST_DEVICE=cuda" in make("-n", "test", "DEVICE=cuda", python, "VENV=")
    assert "reproduce --device auto --gpu h200 --preset full" in make("-n", "reproduce", "PRESET=full", python, "VENV=")
    assert '"elsewhere/bin/python" -m pytest' in make("-n", "test", "VENV=elsewhere", python)
    home = Path.home().as_posix()
    assert f'"{home}/env/bin/python" -m pytest' in make("-n", "test", "VENV=~/env", python)


@needs_make
def test_another_python_than_the_environments_is_refused(tmp_path: Path) -> None:
    def python(path: Path, version: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
        return path

    venv = python(tmp_path / "venv/bin/python", "3.11").parents[1]
    newer, same = python(tmp_path / "python3.12", "3.12"), python(tmp_path / "python3.11", "3.11")
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    for target in ("test", "setup", "interpreter"):
        command = ["make", target, f"VENV={venv}", f"PYTHON={newer}"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 2, done.stdout
        assert f"{venv} has Python 3.11, and PYTHON={newer} is 3.12: remove {venv}, or give another VENV" in done.stderr
    # The same; none asked for; no environment yet.
    for words in ([f"VENV={venv}", f"PYTHON={same}"], [f"VENV={venv}"], [f"VENV={tmp_path}/new", f"PYTHON={newer}"]):
        subprocess.run(["make", "interpreter", *words], cwd=ROOT, env=env, check=True, capture_output=True)


@needs_make
def test_profile_without_a_step_says_what_to_type(tmp_path: Path) -> None:
    stamp = ROOT / "build" / "setup"
    command = ["make", "profile", f"PYTHON={sys.executable}", "VENV=", "-o", "requirements.txt", "-o", "pyproject.toml"]
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "STEP")}
    name = re.sub(r"[^A-Za-z0-9.]", "_", sys.executable)
    fresh = not (stamp / name).exists()
    if fresh:
        stamp.mkdir(parents=True, exist_ok=True)
        (stamp / name).touch()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    finally:
        if fresh:
            (stamp / name).unlink()
    assert done.returncode == 2
    assert "make profile STEP=op/NN_name" in done.stdout


def test_ci_is_a_script_that_bash_can_read() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().splitlines()[-1].startswith("make test"), "pytest's closing line must be the last"
