"""Requests to a server that may take an hour to answer, and may die meanwhile without closing the connection."""

import http.client
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from urllib.parse import urlsplit

LOOK_SECONDS = 10.0  # between two looks at a server that has not answered yet
HEADERS = {"Content-Type": "application/json"}


def read(url: str, body: bytes | None, timeout: float, alive: Callable[[], object] = bool) -> tuple[int, str]:
    """Status and text that a server answers, by GET or, with a body, by POST.

    Args:
        timeout: seconds without a byte after which it is given up.
        alive: called every LOOK_SECONDS while nothing comes; what it raises ends the wait.

    Raises:
        OSError: nobody answers there, or not in time.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout)
    try:
        connection.request("POST" if body is not None else "GET", parts.path or "/", body, HEADERS)
        waited = 0.0
        with DefaultSelector() as selector:  # select() knows no file beyond the 1,024th
            selector.register(connection.sock, EVENT_READ)
            while not selector.select(LOOK_SECONDS):
                waited += LOOK_SECONDS
                if waited >= timeout:
                    raise TimeoutError(f"no answer in {timeout:g} s")
                alive()
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
