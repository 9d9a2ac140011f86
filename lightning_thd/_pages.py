"""A section of the documentation -> how a message names it: by address if that is known, else by title."""

from __future__ import annotations

_TITLE = "Error messages"  # the page that has a section for each kind of message


def see(section: str) -> str:
    """Return the sentence with which a message ends, which leads to a section of the page of error messages.

    A package that was built without its repository's address gives ``See 'Error messages'
    (reference/messages.md#steps) in the documentation.``
    """
    address = _address()
    if address is None:
        return f"See '{_TITLE}' (reference/messages.md#{section}) in the documentation."
    return f"See {address}/reference/messages.md#{section}."


def _address() -> str | None:
    """Return the address of the documentation, which the package's metadata holds once it is published."""
    from importlib.metadata import PackageNotFoundError, metadata  # not needed without an error

    try:
        lines = metadata("lightning_thd").get_all("Project-URL") or []
    except PackageNotFoundError:  # a clone that is not installed
        return None
    addresses = dict(line.split(", ", 1) for line in lines)
    return addresses.get("Documentation")
