"""Tools that run on a company's servers: they are left out of a request, and its reply says so."""

from collections.abc import Collection, Sequence

from tokenwright.serve.http.api import About, RefusedRequest
from tokenwright.serve.http.fields import one_edit
from tokenwright.serve.service.types import Problem


def leave_out(about: About, types: Sequence[str], own: Collection[str]) -> None:
    """Note the tools of other types than one's `own` as ignored.

    Raises RefusedRequest if no tool is left, because the answer would be another one, and for a typing error.
    """
    others = [one for one in types if one not in own]
    for at, one in enumerate(types):
        if one not in own and (near := next((name for name in own if one_edit(one, name)), "")):
            why = f"tools.{at}.type: there is no type {one[:100]!r}; did you mean {near}?"
            raise RefusedRequest(Problem(400, "invalid", why, f"tools.{at}.type"))
    if others and len(others) == len(types):
        named = ", ".join(sorted({one[:100] for one in others}))
        why = f"tools: all are hosted ones ({named}), and this server runs none; give functions, or no tools"
        raise RefusedRequest(Problem(400, "invalid", why, "tools"))
    about.ignored += [f"tools.{one[:100]}" for one in others]
