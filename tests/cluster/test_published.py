"""`tokenwright serve --kv-events`: what is refused, and that nothing is published unasked."""

import pytest

from tests.cluster.test_kv_events import free_ports as free_ports
from tokenwright.cli.commands.serve import models_of, serve_many
from tokenwright.cli.options.replicas import published
from tokenwright.errors import RequestError
from tokenwright.serve.settings import Settings


def test_a_setting_that_is_no_address_is_refused_before_the_model_is_loaded():
    with pytest.raises(RequestError, match="tcp://"):
        published(lambda report: pytest.fail("it was loaded"), Settings(kv_events="5557"))


def test_nothing_is_published_unasked():
    def load(report):
        raise AssertionError

    assert published(load, Settings()) is load


def test_several_models_publish_nothing():
    with pytest.raises(RequestError, match="--kv-events belongs to one model"):
        serve_many(models_of(["a", "b"], []), {}, Settings(kv_events="tcp://*:5557"))
    with pytest.raises(RequestError, match="--draft belongs to one model"):
        serve_many(models_of(["a", "b"], []), {"draft": "c"}, Settings())
