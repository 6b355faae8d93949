"""Addresses of the documentation's pages, which errors, warnings and findings name.

A page is named by where it stands in docs/, without ".md", and by an anchor of it, as
"failures/zero-scale" or "lint#half-head". Such a name stays when a page is rewritten.
"""

# setup.cfg has the same address among the project's links.
SITE = "https://tfamp.github.io/tfamp"


def address(page: str) -> str:
    """Returns the address of a page, or of a section of it behind "#".

    Example:
        >>> address("lint#half-head")
        'https://tfamp.github.io/tfamp/lint.html#half-head'
    """
    path, mark, anchor = page.partition("#")
    return f"{SITE}/{path}.html{mark}{anchor}"


def see(page: str) -> str:
    """Returns what a message ends with: no full stop, so that it can be clicked.

    Example:
        >>> see("failures/zero-scale")
        'See https://tfamp.github.io/tfamp/failures/zero-scale.html'
    """
    return f"See {address(page)}"
