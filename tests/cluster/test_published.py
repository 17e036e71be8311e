"""`tokenwright serve --kv-events`: what is refused, and that nothing is published unasked."""

import time
from types import SimpleNamespace

import pytest

from tests.cluster.test_kv_events import free_ports as free_ports
from tokenwright.cli.commands.serve import models_of, published, serve_many
from tokenwright.cluster.publisher import KEPT, KVPublisher
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


def test_a_slow_reader_gets_a_whole_replay(free_ports):
    zmq = pytest.importorskip("zmq")
    batches = [(at, bytes(8000)) for at in range(KEPT)]  # more than what the sockets and TCP take in between
    log = SimpleNamespace(begin=lambda: (0, b""), replay=lambda start: batches)
    publisher = KVPublisher(SimpleNamespace(inspect=lambda _: log), f"tcp://127.0.0.1:{free_ports}")
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.connect(f"tcp://127.0.0.1:{free_ports + 1}")
        reader.send_multipart((b"", bytes(8)))
        time.sleep(1)
        found = [int.from_bytes(reader.recv_multipart()[1], "big", signed=True) for _ in range(KEPT + 1)]
        assert found == [*range(KEPT), -1]
    publisher.close()
