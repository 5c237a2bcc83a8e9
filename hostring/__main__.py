"""`python -m hostring` is `hostring`."""

from hostring.commands.cli import main

main()
