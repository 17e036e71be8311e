"""The explorer is tested over the server's tiny model, as a page meets it."""

from tests.serve.conftest import server, talker, tiny

__all__ = ["server", "talker", "tiny"]
