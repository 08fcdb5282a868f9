"""Text from outside that is shown to a person."""

__all__ = ["escape_controls"]


def escape_controls(text: str, *, keep: str = "\n\t") -> str:
    """Escape the characters that a terminal obeys or hides, such as ESC and marks that turn the direction of text.

    Args:
        text: from outside: a server, a file, a database. What is escaped already stays as it is.
        keep: control characters that stay; without any the result is one line.
    """
    return "".join(c if c in keep or c.isprintable() else repr(c)[1:-1] for c in text)
