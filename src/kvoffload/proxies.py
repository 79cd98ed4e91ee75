# SPDX-License-Identifier: Apache-2.0
"""The HTTP proxies that environment variables name."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit


def through_proxy(url: str) -> str:
    """Name the proxy that the environment puts between this command and the server, for an error message."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    scheme, _, place = proxy.rpartition("://")
    shown = f"{scheme or 'http'}://{place.rpartition('@')[2]}"  # without a password
    return f" through the proxy {shown} ({parts.scheme.upper()}_PROXY; NO_PROXY excludes a server)"
