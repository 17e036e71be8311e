"""The explorer is tested over the server's tiny model, as a page meets it."""

import pytest

from tests.engines import settled
from tests.serve.conftest import served, server, talker, tiny

__all__ = ["server", "talker", "tiny"]


@pytest.fixture(scope="package")
def door(tiny):
    """One for all requests that leave nothing behind."""
    with served(tiny, pages=64) as (client, explorer):
        yield client, explorer
        assert settled(explorer.llm).pool.available == 64
