"""Prints at the end of the run how large the matrix was."""

import pytest

from tests.equality.harness import FORMATS, KINDS, LEDGER, SAMPLINGS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not LEDGER:
        return
    terminalreporter.section("the cache against the naive loop")
    terminalreporter.write_line(f"{'way of running':<42}{'texts':>7}{'rows':>9}{'equal to the bit':>18}{'worst':>10}")
    for name, one in LEDGER.items():
        terminalreporter.write_line(
            f"{name:<42}{one.texts:>7}{one.rows:>9}{one.equal / one.rows:>18.2%}{one.worst:>10.1e}"
        )
    texts, rows = sum(one.texts for one in LEDGER.values()), sum(one.rows for one in LEDGER.values())
    terminalreporter.write_line(
        f"{texts} texts and {rows} rows of logits, over {len(KINDS)} kinds x {len(FORMATS) + 1} formats x "
        f"{len(SAMPLINGS)} samplings x {len(LEDGER)} ways"
    )
