"""Where a retrospective database is: a path of SQLite, or a URL that SQLAlchemy reads.

What is neither is refused without being repeated: a password may stand anywhere in it.
"""

import re
from typing import TYPE_CHECKING

from python_trainer.errors import UserError, hide_passwords

if TYPE_CHECKING:
    from sqlalchemy import URL

FORMS = "a database URL such as sqlite:///PATH or postgresql://USER@HOST/NAME"
# characters of URLs, and the keywords of libpq, which also takes `host=h user=u password=p`
NO_PLAIN_PATH = re.compile(
    r"[:@;'\"\x00-\x1f]|\b(host|hostaddr|port|dbname|user|password|passfile|service)\s*=", re.IGNORECASE
)
NOT_IN_HOSTS = re.compile(r"[/@;=]")  # colons are in those of IPv6
NOT_IN_NAMES = re.compile(r"[:/@;=]")  # of PostgreSQL's databases


def parse_database_url(text: str) -> "URL":
    """Return the URL of a path or URL.

    Raises:
        UserError: it is neither, or a URL of another kind of database.
    """
    import sqlalchemy as sa
    from sqlalchemy.exc import ArgumentError

    unreadable = UserError(f"a retrospective database is neither a path nor {FORMS}; it is not shown, for its password")
    if "://" not in text:
        if NO_PLAIN_PATH.search(text):
            raise unreadable
        url = sa.URL.create("sqlite", database=text)
    else:
        try:
            url = sa.make_url(text)
        except (ArgumentError, ValueError):  # ValueError: the port is no number
            raise unreadable from None
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql", "postgres"):
        raise UserError(f"a retrospective database is a path, sqlite:/// or postgresql://, got {kind}://")
    if kind == "sqlite":
        if url.host or url.username:
            raise unreadable
        if url.database in (None, "", ":memory:"):
            raise UserError("a retrospective database needs a file: a path or sqlite:///PATH")
    elif re.search(r"\s", text) or NOT_IN_HOSTS.search(url.host or "") or NOT_IN_NAMES.search(url.database or ""):
        # a password that holds such a character has been taken apart
        raise UserError(
            "the URL of a retrospective database must be postgresql://USER:PASSWORD@HOST/NAME, with the characters "
            "space : / @ ; = in a user or password written as %20 %3A %2F %40 %3B %3D"
        )
    return url


def show_database_url(url: "URL") -> str:
    """Return a URL without its passwords."""
    return hide_passwords(url.render_as_string(hide_password=True))
