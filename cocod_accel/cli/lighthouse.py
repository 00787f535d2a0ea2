"""``cocod lighthouse``: knows which workers are there, where workers come and go."""

from __future__ import annotations

import argparse
import os
import signal
import threading

from cocod_accel.cli.common import Commands

_DEFAULT = "127.0.0.1:29510"


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("lighthouse", help="run a torchft lighthouse, for workers that come and go")
    parser.add_argument("--bind", default=_DEFAULT, metavar="HOST:PORT", help=f"where to listen; default: {_DEFAULT}")
    parser.add_argument(
        "--heartbeat", type=float, default=2.0, metavar="SECONDS", help="a worker that is silent for so long is gone"
    )
    parser.add_argument(
        "--patience", type=float, default=10.0, metavar="SECONDS", help="how long a round waits for a slow worker"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.comm.regroup import split_address
    from cocod_accel.extras import missing

    absent = missing("torchft", "elastic")
    if absent is not None:
        raise ValueError(absent)
    try:
        host, _ = split_address(options.bind)
    except ValueError as error:
        raise ValueError(f"--bind={options.bind}: must be HOST:PORT; use e.g. {_DEFAULT}") from error
    for name, least in (("heartbeat", 0.5), ("patience", 0.1)):
        if not least <= getattr(options, name) <= 3600:
            raise ValueError(f"--{name}={getattr(options, name):g}: must be from {least:g} to 3600 seconds")
    os.environ.setdefault("RUST_LOG", "error")  # else it reports every question
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=options.bind,
            min_replicas=1,
            join_timeout_ms=round(1000 * options.patience),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=round(1000 * options.heartbeat),
        )
    except RuntimeError as error:
        raise ValueError(f"--bind={options.bind}: {str(error).splitlines()[0]}") from error
    port = server.address().rsplit(":", 1)[1]
    print(f"lighthouse: {host}:{port}", flush=True)
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    ends.wait()
    server.shutdown()
    return 0
