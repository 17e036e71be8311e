"""The web page and the server behind it."""
