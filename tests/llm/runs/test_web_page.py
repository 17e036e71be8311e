"""Where the page is found, and what is said where there is none."""

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
from fastapi.testclient import TestClient

from tokenwright.errors import RequestError
from tokenwright.llm.web_page import build_notes, page_folder
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost


def built(folder: Path, age: float = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    os.utime(folder / "index.html", (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The package's sources as they lie in a checkout."""
    folder = tmp_path / "checkout" / "src" / "tokenwright"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What an installation puts beside the sources (editable) or has them in (not editable)."""
    folder = tmp_path / "lib" / "site-packages" / "tokenwright"
    folder.mkdir(parents=True)
    return folder


def test_the_page_of_an_installation(checkout: Path, installed: Path) -> None:
    page = built(installed / "web")
    assert page_folder([str(installed)]) == page
    assert page_folder([str(checkout), str(installed)]) == page


def test_the_page_that_a_developer_built(checkout: Path, installed: Path) -> None:
    page = built(checkout.parents[1] / "web" / "dist")
    assert page_folder([str(checkout)]) == page
    assert page_folder([str(checkout), str(installed)]) == page


@pytest.mark.parametrize("own_age", [0, 120])
def test_of_two_pages_the_newer(checkout: Path, installed: Path, own_age: float) -> None:
    own = built(checkout.parents[1] / "web" / "dist", own_age)
    page = built(installed / "web", age=60)
    assert page_folder([str(checkout), str(installed)]) == (own if own_age == 0 else page)


def test_sources_of_the_page_are_no_page(checkout: Path) -> None:
    (checkout.parents[1] / "web").mkdir()
    (checkout.parents[1] / "web" / "index.html").touch()
    with pytest.raises(RequestError, match="it was not built, or was taken away; install Tokenwright again, or run"):
        page_folder([str(checkout)])


def test_without_a_page_the_build_says_why(checkout: Path, installed: Path) -> None:
    notes = {"cxx": "", "web": "", "web_missing": "Node was not found; install it"}
    (installed / "_build.json").write_text(json.dumps(notes))
    with pytest.raises(RequestError, match="no web page in this installation: Node was not found; install it"):
        page_folder([str(checkout), str(installed)])
    assert build_notes([str(checkout), str(installed)]) == notes


def test_a_page_that_was_taken_away(installed: Path) -> None:
    (installed / "_build.json").write_text(json.dumps({"cxx": "", "web": "9 files, built with Node v20.19.0"}))
    (installed / "web").mkdir()
    with pytest.raises(RequestError, match="it was not built, or was taken away"):
        page_folder([str(installed)])


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/", 200, "the page"),
        ("GET", "/nothing.js", 404, "there is no /nothing.js here"),
        ("GET", "/api/blobs", 404, "there is no /api/blobs here"),
        ("PUT", "/", 405, "Method Not Allowed"),
        ("GET", "/v1/completions", 405, "/v1/completions answers POST, not GET"),
        ("DELETE", "/api/chat", 405, "/api/chat answers POST, not DELETE"),
        ("POST", "/v1/images/generations", 404, "there is no /v1/images/generations here"),
    ],
)
def test_the_page_hides_no_route(tmp_path: Path, method: str, path: str, status: int, said: str) -> None:
    """The page is at all other paths. It must not answer for a route that has another method, or for an unknown one."""
    (tmp_path / "index.html").write_text("the page")

    def load(report: object) -> NoReturn:
        raise RequestError("no model is needed")

    app = make_app(ModelHost("none", load), ["testserver"], tmp_path)
    answer = TestClient(app).request(method, path)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert (answer.headers.get("allow") == "POST") is (status == 405 and path != "/")
