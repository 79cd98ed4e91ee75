# SPDX-License-Identifier: Apache-2.0
"""Other users of the host, for tests of who may do what. They need root."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

NOBODY, SOMEBODY = 65534, 65533
GROUP = 65532

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def as_user(uid: int, work: Callable[[], Any], *, gid: int | None = None, umask: int = 0o022) -> Any:
    """Run ``work`` as user ``uid``, who has only the group ``gid`` (default: its own group), and return its result.

    Its exceptions are raised here.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            os.umask(umask)
            outcome = (True, work())
        except BaseException as exc:  # noqa: BLE001 - raised again in the parent
            outcome = (False, exc)
        with os.fdopen(writer, "wb") as pipe:
            try:
                pipe.write(pickle.dumps(outcome))
            except Exception:  # noqa: BLE001 - objects that cannot be pickled
                pipe.write(pickle.dumps((False, RuntimeError(repr(outcome)))))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        is_good, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if not is_good:
        raise value
    return value
