"""`python -m hostring.bench`, as which the ranks are started."""

from hostring.bench import main

if __name__ == "__main__":
    main()
