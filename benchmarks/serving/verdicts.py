"""A table of findings: invariants, which must hold; targets, which a slow machine may miss; and plain figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the table. verdict: "holds", "short" (a missed target), "BROKEN" (an invariant), or "" (a figure)."""

    part: str
    what: str
    figure: str
    mark: str
    verdict: str


@dataclass
class Report:
    """The findings of one part."""

    part: str
    findings: list[Finding] = field(default_factory=list)

    def invariant(self, what: str, holds: bool, figure: object, mark: str = "") -> None:
        """A condition that must hold on any machine."""
        self._add(what, str(figure), mark, "holds" if holds else "BROKEN")

    def target(self, what: str, value: float, limit: float, unit: str) -> None:
        """A figure that is to be at most `limit`."""
        self._add(what, f"{value:,.4g} {unit}", f"<= {limit:g} {unit}", "holds" if value <= limit else "short")

    def figure(self, what: str, figure: object) -> None:
        """A figure without a mark."""
        self._add(what, str(figure), "", "")

    def _add(self, *found: str) -> None:
        self.findings.append(Finding(self.part, *found))

    @property
    def broken(self) -> list[Finding]:
        """The invariants that do not hold."""
        return [one for one in self.findings if one.verdict == "BROKEN"]

    def record(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [asdict(one) for one in self.findings]

    def table(self) -> str:
        """The findings in Markdown, with the part in the first row."""
        rows = [
            f"| {self.part if not at else ''} | {one.what} | {one.figure} | {one.mark} | {one.verdict} |"
            for at, one in enumerate(self.findings)
        ]
        return "\n".join(rows)


HEAD = "| part | what | figure | mark | verdict |\n|---|---|---:|---:|---|"
