"""`python -m hostring` is `hostring`."""

from hostring.cli import main

main()
