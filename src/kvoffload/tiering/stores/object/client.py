# SPDX-License-Identifier: Apache-2.0
"""obstore's client for a bucket. Settings are checked here first, because obstore's own errors show their values."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvoffload.errors import ConfigError, MissingExtraError, reason_of
from kvoffload.files import read_file
from kvoffload.proxies import through_proxy
from kvoffload.tiering.stores.secrets import Secret, read_secret
from kvoffload.units import printable

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Prefixes of the environment variables that obstore reads, by the scheme of the URL."""
_ENDPOINTS = ("endpoint", "endpoint_url_s3", "base_url")
_CREDENTIAL_FILES = ("service_account", "service_account_path", "application_credentials")
"""Settings that name a file which obstore reads once. It reads other files, such as token files, again by itself."""

_LEAST_OBSTORE = 0, 11
"""Oldest supported version of obstore. Older versions lack ``root_certificate``."""


class Deadlines(NamedTuple):
    connect_s: float = 1.0
    request_s: float = 5.0
    """Seconds for one request, including its body. It is retried once if it fails sooner."""


def check_url(url: str) -> str:
    """Return ``url`` in a form that may be shown. Raises ``ConfigError`` for a URL that cannot belong to an object
    store."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in _PREFIXES and parts.netloc != ""
    except ValueError:
        is_known = False
    if not is_known:
        raise ConfigError(
            "url of the 'object' tier must be s3://bucket/prefix, gs://bucket/prefix or az://container/..."
        )
    if "@" in parts.netloc or ":" in parts.netloc or parts.query:
        raise ConfigError("url of the 'object' tier has no credentials or settings: give them in its 'config'.")
    if "#" in url:
        raise ConfigError("url of the 'object' tier has a '#', which would end its prefix: choose another prefix.")
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def require_obstore() -> Any:
    """Raise ``MissingExtraError`` if obstore is not installed, or is too old."""
    try:
        import obstore

        if tuple(map(int, obstore.__version__.split(".")[:2])) < _LEAST_OBSTORE:
            raise ImportError(f"obstore {obstore.__version__} is too old")
    except ImportError as exc:
        raise MissingExtraError(
            f"The 'object' tier needs kvoffload's extra 'object': pip install 'obstore>=0.11' ({exc})."
        ) from exc
    return obstore


class Client:
    """obstore's client for ``url``, opened again with new credentials when their files have changed. Any thread may use
    it."""

    def __init__(self, url: str, config: Mapping[str, Secret], deadlines: Deadlines, tls_ca: str | None) -> None:
        self._url, self._config, self._deadlines, self._tls_ca = url, config, deadlines, tls_ca
        self._lock = threading.Lock()
        self._read = self._sources()
        self.obstore, self.bucket = self._open()

    def renew(self, failed_bucket: Any) -> bool:
        """Read the credentials again, and return whether ``bucket`` now uses other credentials than ``failed_bucket``,
        whose request failed. If reading fails, the old credentials stay."""
        with self._lock:
            if self.bucket is not failed_bucket:
                return True
            try:
                read = self._sources()
                if read == self._read:
                    return False
                self.bucket = self._open()[1]
            except (ConfigError, OSError):
                return False
            self._read = read
            return True

    def _open(self) -> tuple[Any, Any]:
        return open_client(self._url, self._settings(), self._deadlines, self._tls_ca)

    def _settings(self) -> dict[str, str]:
        return {name: read_secret(value, f"{name} of the 'object' tier") for name, value in self._config.items()}

    def _sources(self) -> list[object]:
        """Return everything that obstore reads, or that is read for it, when a client is opened."""
        settings = self._settings()
        used = _environment(self._url.partition(":")[0]) | settings
        paths = [value for name, value in used.items() if _bare(name) in _CREDENTIAL_FILES]
        return [settings, *(_content(path) for path in (*paths, self._tls_ca) if path is not None)]


def _content(path: str) -> bytes | None:
    try:
        return read_file(path)
    except (OSError, ValueError):
        return None


def open_client(url: str, config: Mapping[str, str], deadlines: Deadlines, tls_ca: str | None) -> tuple[Any, Any]:
    """Return obstore and its store for ``url``, which ``check_url`` accepted. The only I/O is reading ``tls_ca`` and
    the file of a service account."""
    obstore = require_obstore()
    from obstore.store import from_url

    for name, value in config.items():
        if not isinstance(value, str):
            raise ConfigError(f"config of the 'object' tier: {name} must be text, not {type(value).__name__}.")
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=deadlines.request_s),
        "connect_timeout": timedelta(seconds=deadlines.connect_s),
        "allow_http": _may_be_http(config, _environment(url.partition(":")[0])),
    }
    # It is one of the client's options above, which obstore does not accept as a setting of the service.
    settings: dict[str, Any] = {name: value for name, value in config.items() if _bare(name) != "allow_http"}
    if tls_ca is not None:
        try:
            options["root_certificate"] = read_file(tls_ca)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"tls_ca of the 'object' tier is {tls_ca}, which cannot be read: {reason_of(exc)}."
            ) from exc
    if url.startswith("s3:") and "unsigned_payload" not in map(_bare, settings):
        settings["unsigned_payload"] = True  # TLS and our seal protect the payload instead
    retries = {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=deadlines.request_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=200),
            "base": 2,
        },
    }
    try:
        return obstore, from_url(url, config=settings, client_options=options, retry_config=retries)  # type: ignore[call-overload]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # noqa: BLE001 - a panic of obstore's is not an Exception
        # Its cause must not be shown, because the message may contain a setting's value.
        raise ConfigError(
            f"obstore rejects the config of the 'object' tier ({type(exc).__name__}), which contains "
            f"{sorted(settings)}."
        ) from None


def _may_be_http(config: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Return whether the user allowed HTTP, or gave an ``http://`` endpoint."""
    given = {_bare(name): value.lower() for name, value in config.items()}
    used = {_bare(name): value.lower() for name, value in environment.items()} | given
    is_http = any(used.get(name, "").startswith("http://") for name in _ENDPOINTS)
    allowed = given.get("allow_http", "true")
    if allowed not in ("true", "false"):
        raise ConfigError("allow_http of the 'object' tier must be 'true' or 'false'.")
    if allowed == "false" and is_http:
        raise ConfigError("allow_http of the 'object' tier is false, but its endpoint begins with http://.")
    return is_http or used.get("allow_http") == "true"


def _environment(scheme: str) -> dict[str, str]:
    """Return the environment variables that obstore reads. For Google, the variable of a service account may lack the
    prefix."""
    alone = ("SERVICE_ACCOUNT",) if scheme == "gs" else ()
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES[scheme]) or name in alone}


def _bare(name: str) -> str:
    """Return the common form of all spellings of ``name``: ``AWS_ENDPOINT_URL`` and ``endpoint`` are one setting."""
    bare = re.sub("^(aws|google|azure_storage|azure)_", "", name.lower())
    return "endpoint" if bare == "endpoint_url" else bare


_SECRET = re.compile(r"(https?://)\S*@|\?\S*")
"""Parts of a URL that may be credentials: a user and password, or a query."""
_STATUS = re.compile(r"status code: [0-9]{3}[^:<{\n]*")
_CODES = (
    re.compile("<Code>([A-Za-z0-9._-]{1,64})</Code>"),
    re.compile('"(?:status|error)": ?"([A-Za-z0-9._-]{1,64})"'),
)
"""The code of an error in the body of an answer, as S3, Azure and Google write it."""


def in_words(error: BaseException) -> str:
    """Return obstore's message in one line, without credentials in a URL, and with the service's own code of the error,
    such as ``ExpiredToken``. The rest of the answer's body is omitted, because services repeat tokens and names of keys
    in it."""
    line = _SECRET.sub(r"\1", str(error).strip().split("\n", 1)[0])
    if status := _STATUS.search(line):
        line = line[: status.end()]
    else:
        line = line.strip().rstrip(".") + _through_proxy(line)
    code = code_of(error)
    return printable(f"{line.strip().rstrip('.')}{f' ({code})' if code else ''}")


def _through_proxy(line: str) -> str:
    """Name the proxy of the environment that a request in an error used."""
    address = re.search(r"https?://[^\s/]+", line)
    return through_proxy(address[0]) if address else ""


def code_of(error: BaseException) -> str | None:
    """Return the service's own code of an error, if the body of the answer contains one."""
    text = str(error)
    return next((found[1] for found in (code.search(text) for code in _CODES) if found), None)


def asks_to_slow_down(error: BaseException) -> bool:
    """Return whether a service answered that it receives too many requests."""
    status = _STATUS.search(str(error))
    return status is not None and any(number in status[0] for number in ("429", "503"))


def is_without_reason(error: BaseException) -> bool:
    """Return whether the service answered with an error and no body, as it must to a HEAD request."""
    return _STATUS.search(str(error)) is not None and code_of(error) is None
