"""What hostring is wired into. Uses the public API; nothing in the core imports from here."""

if __name__ != "hostring.integrations":
    raise ImportError(
        "import hostring.integrations, not integrations: a second copy of the module would have its own state"
    )
