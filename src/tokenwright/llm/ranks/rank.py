"""A process that computes one part of a model on rank 0's orders: `python -m tokenwright.llm.ranks.rank FD`."""

import signal
import sys
from contextlib import suppress
from socket import socket

from tokenwright.backends.layout import Weights
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.rank_messages import receive
from tokenwright.backends.native.ranks import Gathering, rank_state
from tokenwright.checkpoints.packing.shared_weights import load_shared
from tokenwright.errors import WorkerError
from tokenwright.llm.ranks.tensor_parallel import RankOptions


def serve(connection: socket) -> None:
    options: RankOptions = receive(connection)
    kernels = find_kernels("native", options.isa)
    assert kernels is not None, "rank 0 has them"
    place = (options.rank, options.ranks, options.parent, options.spins)
    gathering = Gathering(options.gathering, *place)
    mine = rank_state(options.graph, kernels, load_shared(options.weights, _missing), gathering)
    while True:
        receive(connection).run(mine)


def _missing() -> Weights:
    raise AssertionError("rank 0 has written them")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionResetError, WorkerError):  # rank 0 or the team has ended
        serve(socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
