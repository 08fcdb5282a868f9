"""The one error that means "the user can fix this": printed as one line, exit code 2, no traceback."""


class UserError(Exception):
    """A wrong setting, file, model or reward function. The message names it, its value and what is allowed."""
