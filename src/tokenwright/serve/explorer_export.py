"""A run as a file for other programs: the page's trace, and a Chrome trace."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from tokenwright.serve.explorer import HIDDEN, Explorer
from tokenwright.trace.perfetto import chrome_trace


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes."""

    @app.get("/runs/{identity}/trace.json", **HIDDEN)
    def trace(identity: str) -> JSONResponse:
        return _file(explorer.trace(explorer.player(identity)), f"trace-{identity}.json")

    @app.get("/runs/{identity}/perfetto.json", **HIDDEN)
    def perfetto(identity: str) -> JSONResponse:
        player = explorer.player(identity)
        return _file(chrome_trace(player.card, list(player.run.frames)), f"perfetto-{identity}.json")


def _file(content: dict[str, Any], name: str) -> JSONResponse:
    return JSONResponse(content, headers={"content-disposition": f'attachment; filename="{name}"'})
