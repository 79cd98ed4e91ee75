# SPDX-License-Identifier: Apache-2.0
"""Test the output of ``make dist``: the contents of the wheel and the sdist, and the wheel in its own environment."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvoffload

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvoffload"
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PIP_")
} | {"PIP_CONFIG_FILE": os.devnull}
"""Without this checkout's sources, and without places that pip could take packages from."""


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``make dist`` fills. It builds the wheel from the sdist, not from the checkout."""
    folder = tmp_path_factory.mktemp("dist") / "dist"
    run(sys.executable, ROOT / "scripts" / "dist", folder, cwd=folder.parent)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("kvoffload-*-py3-none-any.whl")
    return found


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names} - {"kvoffload"}
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("kvoffload/")} == sources
    assert "kvoffload/py.typed" in names
    assert not [name for name in names if "tests" in name.split("/")]
    assert license_text == (ROOT / "LICENSE").read_text()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == kvoffload.__version__
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "console_scripts": {"kvoffload": "kvoffload.cli:main"},
        "vllm.general_plugins": {"kvoffload": "kvoffload.engines.vllm:register"},
        "sglang.srt.plugins": {"kvoffload": "kvoffload.engines.sglang.updates:watch"},
    }


def test_the_sdist_is_the_checkout_without_what_was_built_in_it(dist: Path) -> None:
    (found,) = dist.glob("kvoffload-*.tar.gz")
    with tarfile.open(found) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    assert {
        "LICENSE",
        "Makefile",
        "README.md",
        "docs/vllm.md",
        "mkdocs.yml",
        "scripts/bootstrap",
        "tests/test_dist.py",
    } <= names
    assert {name.split("/")[0] for name in names} <= {
        *("src", "tests", "bench", "deploy", "docs", "examples", "scripts", "Makefile", "pyproject.toml", "PKG-INFO"),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "mkdocs.yml", "hatch_build.py"),
        ".gitignore",
    }
    assert not [name for name in names if name.endswith(".pyc")]


def test_one_setting_adds_all_addresses(dist: Path, tmp_path: Path) -> None:
    """Links of the README lead to the repository then, because a package index has no other file of it."""
    (sdist,) = dist.glob("kvoffload-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    project = (source / "pyproject.toml").read_text()
    address = "https://forge.invalid/kvoffload"
    (source / "pyproject.toml").write_text(project.replace('repository = ""', f'repository = "{address}"'))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls["Repository"] == address
    links = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert len(links) > 10
    paths = [url.removeprefix(address).split("#")[0] for url in [*urls.values(), *links]]
    assert {path.split("/")[1] for path in paths if path} == {"raw", "blob", "issues"}
    assert not [path for path in paths if path not in ("", "/issues") and not (ROOT / path.split("/", 3)[3]).exists()]


def test_the_list_of_dependencies_is_complete(dist: Path, wheel: Path) -> None:
    (file,) = dist.glob("*.cdx.json")
    listed = json.loads(file.read_text())
    components = {each["bom-ref"]: each for each in listed["components"]}
    for extra in ("demo", "object", "encryption", "otel"):
        named = {
            name
            for name, each in components.items()
            if {prop["value"] for prop in each["properties"]} & {extra, "always"}
        }
        assert named == closure(wheel, extra).keys()
    needs = {each["ref"]: set(each["dependsOn"]) for each in listed["dependencies"]}
    assert needs.keys() - components.keys() == {f"kvoffload@{kvoffload.__version__}"}
    assert set().union(*needs.values()) == components.keys()
    assert not {"pytest", "mypy", "zensical"} & components.keys()
    for name, each in components.items():
        assert name == "mooncake-transfer-engine" or (
            each["licenses"] and each["version"] == distribution(name).version
        )


def closure(wheel: Path, extra: str) -> dict[str, Distribution]:
    """Return, by name, exactly the installed distributions that ``pip install 'WHEEL[extra]'`` would install."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    found: dict[str, Distribution] = {}

    def add(requires: list[str], extras: set[str]) -> None:
        for requirement in map(Requirement, requires):
            marker, name = requirement.marker, canonicalize_name(requirement.name)
            if marker is not None and not any(marker.evaluate({"extra": each}) for each in extras or {""}):
                continue
            if name not in found:
                found[name] = distribution(name)
                add(found[name].requires or [], requirement.extras)

    add(metadata.get_all("Requires-Dist", []), {extra})
    return found


def environment_with(distributions: dict[str, Distribution], folder: Path) -> Path:
    """Make a virtual environment that contains only these distributions, as links, because torch is large.

    Returns its ``bin``.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in distributions.values():
        for top in {file.parts[0] for file in each.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(each.locate_file(top))))
    return folder / "bin"


@pytest.mark.long
def test_the_demo_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    distributions = closure(wheel, "demo")
    assert {"torch", "transformers", "typer"} <= set(distributions)
    assert not {"kvoffload", "pytest", "matplotlib"} & set(distributions)
    bin_ = environment_with(distributions, tmp_path / "environment")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bin_ / "python")
    run(*pip, "install", "--no-index", f"{wheel}[demo]", cwd=tmp_path)

    where = run(bin_ / "python", "-c", "import kvoffload; print(kvoffload.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    options = (
        *(
            "--conversations",
            "5",
            "--turns",
            "3",
            "--system-tokens",
            "16",
            "--document-tokens",
            "0",
            "--message-tokens",
            "40",
        ),
        *("--reply-tokens", "8", "--device-tokens", "320", "--layers", "2", "--hidden", "128", "--threads", "1"),
    )
    out = run(bin_ / "kvoffload", "demo", *options, "--out", "figures.json", cwd=tmp_path)
    assert "Identical: all 3 ways generated the same tokens." in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ways"][-1]["offloaded_hit_tokens"] > 0
