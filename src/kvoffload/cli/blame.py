# SPDX-License-Identifier: Apache-2.0
"""Decides whether vLLM's error is a reason of the setup, or only of this environment.

Importing this module loads neither vLLM nor torch.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.errors import causes, text_of

_LENGTH = 600
"""Characters of vLLM's text. Some errors list all models."""

_IMPORT_ERROR = re.compile(r"^(?:ModuleNotFoundError|ImportError): (.+)$|(No module named '.+)$", re.MULTILINE)
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_INSTALL = re.compile(r"pip install ([\w.\[\]=<>~-]+)")
_PACKAGES = {"PIL": "pillow", "cv2": "opencv-python-headless", "cutlass": "nvidia-cutlass-dsl"}
"""Packages whose name differs from the name of their module."""

_NO_FILE = re.compile(
    r"(?:\S+ does not appear to have .*\bnamed|[Cc]an't load .* for '|Couldn't instantiate the backend tokenizer).*"
)
"""Texts of transformers if a folder lacks files. vLLM itself says so of config.json, which is the user's mistake."""
_NO_REPOSITORY = re.compile(r"Invalid repository ID or local directory specified: '([\w.-]+/[\w.-]+)'")
"""vLLM's text if it cannot read a name on the Hub, for any reason."""
_NOT_INSPECTED = "failed to be inspected"
"""Part of vLLM's error if the process that imports a model's code fails for any reason."""

_PLATFORM = re.compile(r"\b(?:CPUs?|GPUs?|CUDA|ROCm|platform|Model Runner V\d)\b")
"""Words in vLLM's errors about the platform."""

_HEADING = re.compile(r"\d+ validation errors? for .+\n")
_LINK = re.compile(r"\n\s*For further information visit \S+")
_INPUT = re.compile(r" \[type=\w+, input_value=.*\]$", re.MULTILINE)
_LOCATION = re.compile(r"^(\S.*)\n  (?=\S)", re.MULTILINE)
_LOADS = re.compile(r"cannot be converted to <function loads at \w+>")


def logged_errors() -> list[BaseException]:
    """Return a list of the exceptions that vLLM logs from now on, because it does not raise all of them. For example,
    it imports a model's code in another process, logs the error of that process, and raises one without the reason.

    A handler would not see them all, because vLLM configures its log several times, which removes handlers.
    """
    errors: list[BaseException] = []
    make_record = logging.getLogRecordFactory()

    def make(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        if record.levelno >= logging.ERROR:
            values = record.args if isinstance(record.args, tuple) else ()
            told = [*values, record.exc_info[1] if record.exc_info else None]
            errors.extend(each for each in told if isinstance(each, BaseException))
        return record

    logging.setLogRecordFactory(make)
    return errors


def cause_here(errors: Sequence[BaseException]) -> str:
    """Return a clause that names the cause of ``errors`` in this environment, and the remedy. Return ``""`` if a server
    would also fail in another environment."""
    return _missing_package(errors) or _missing_file(errors) or _unreachable_hub(errors) or _platform(errors)


def sentence_of(error: BaseException) -> str:
    """Return the text of ``error`` (see ``in_one_line``)."""
    text = text_of(error)
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return in_one_line(text)


def in_one_line(text: str) -> str:
    """Return vLLM's ``text`` in one line of limited length, without pydantic's details and without a full stop."""
    text = _INPUT.sub("", _LINK.sub("", text))
    if _HEADING.search(text):  # pydantic's own, with a line for the name of each field
        text = _HEADING.sub("", text)
        text = _LOCATION.sub(r"; \1: ", text).removeprefix("; ")
    text = _LOADS.sub("is not JSON", text.replace("Value error, ", ""))
    return textwrap.shorten(text, _LENGTH, placeholder=" and more").rstrip(".: ")


def _missing_package(errors: Sequence[BaseException]) -> str:
    is_inspection = _NOT_INSPECTED in text_of(errors[-1])  # the log contains the reason
    texts = ["".join(traceback.format_exception(error)) for error in (errors if is_inspection else errors[-1:])]
    found = [reason for text in texts for reasons in _IMPORT_ERROR.findall(text) for reason in reasons if reason]
    if not found:
        return f"its code fails in this environment: {_last_line(texts)}" if is_inspection else ""
    missing = _NO_MODULE.search(found[-1])
    module = missing[1].partition(".")[0] if missing else ""
    if not module or importlib.util.find_spec(module) is not None:
        return (
            "this environment lacks a Python package that vLLM needs for it, or has it in another version: "
            f"{found[-1].rstrip('.')}"
        )
    advice = _INSTALL.search(found[-1])
    package = advice[1] if advice else _PACKAGES.get(module, module)
    return (
        f"vLLM needs the Python package {package!r} for it, which this environment lacks: install the package, for "
        f"example with `pip install {package}`"
    )


def _last_line(texts: Sequence[str]) -> str:
    lines = [line.strip() for text in texts for line in text.splitlines() if _NOT_INSPECTED not in line]
    return lines[-1].rstrip(".") if lines else "unknown"


def _missing_file(errors: Sequence[BaseException]) -> str:
    found = _NO_FILE.search(text_of(errors[-1]))
    if found is None:
        return ""
    told = re.split(r"\. | from one of", found[0])[0].rstrip(".")
    return f"vLLM needs more files of it ({told}): give the folder of the model with all files except the weights"


def _unreachable_hub(errors: Sequence[BaseException]) -> str:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    named = _NO_REPOSITORY.search(text_of(errors[-1]))
    if named and Path(named[1]).exists():
        return ""
    found = [each for error in (errors if named else errors[-1:]) for each in causes(error)]
    if any(isinstance(each, hub.GatedRepoError) for each in found):
        return "the Hub does not let this user read it: accept its terms on the Hub, and set HF_TOKEN"
    is_answer = any(isinstance(each, hub.RepositoryNotFoundError) for each in found)
    if is_answer or not (named or any(isinstance(each, hub.LocalEntryNotFoundError) for each in found)):
        return ""
    name = f" {named[1]}" if named else ""
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached from here"
    return (
        f"files of the model{name} are not in the Hub's cache on this machine, and {why}: give a folder with its files"
    )


def _platform(errors: Sequence[BaseException]) -> str:
    from vllm.platforms import current_platform

    sentence = sentence_of(errors[-1])
    if not current_platform.is_cpu() or not _PLATFORM.search(sentence.partition(". ")[0]):
        return ""
    return f"this vLLM is a build for CPUs, and rejects it: {sentence}. Use a vLLM for your server's GPUs to judge it"
