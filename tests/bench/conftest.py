import pytest

from tests.bench.fixtures import quicken


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
