"""Integrations with other software. They use the public API, and nothing in the core imports them."""

if __name__ != "hostring.integrations":
    raise ImportError(
        "import hostring.integrations, not integrations: a second copy of the module would have its own state"
    )
