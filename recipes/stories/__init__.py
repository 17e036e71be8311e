"""The recipe of `stories`, the small model that ships inside Tokenwright: `python -m recipes.stories --help`."""
