"""The torch backend: the oracle of every test, and what runs where nothing was compiled."""
