"""A run as a file for other programs: the page's trace, and a Chrome trace."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from tokenwright.serve.explorer.explorer import HIDDEN, Explorer
from tokenwright.serve.http.reply_text import dumps_in_parts
from tokenwright.trace.chrome_trace import chrome_trace


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""

    @app.get("/runs/{identity}/trace.json", **HIDDEN)
    def trace(identity: str) -> Response:
        return _file(explorer.trace(explorer.player(identity)), f"trace-{identity}.json")

    @app.get("/runs/{identity}/perfetto.json", **HIDDEN)
    def perfetto(identity: str) -> Response:
        player = explorer.player(identity)
        return _file(chrome_trace(player.card, list(player.run.frames)), f"perfetto-{identity}.json")


def _file(content: dict[str, Any], name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(dumps_in_parts(content), media_type="application/json", headers=headers)
