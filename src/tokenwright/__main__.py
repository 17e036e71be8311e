"""`python -m tokenwright` runs the command `tokenwright`."""

from tokenwright.cli import main

if __name__ == "__main__":
    main()
