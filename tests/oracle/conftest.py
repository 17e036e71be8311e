"""Prints at the end of the run what the oracle tests measured."""

import pytest

from tests.oracle.harness import LEDGER, MARGIN, NOTES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEDGER:
        terminalreporter.section("transformers as the oracle, fp32")
        terminalreporter.write_line(
            f"{'kind':<14}{'texts':>7}{'rows':>9}{'worst, prefill':>16}{'worst, cached':>15}   margin > {MARGIN:g}"
        )
        for kind, one in LEDGER.items():
            terminalreporter.write_line(
                f"{kind:<14}{one.texts:>7}{one.rows:>9}{one.prefill:>16.1e}{one.decode:>15.1e}"
                f"{one.qualified / one.picks:>12.2%}"
            )
        picks = sum(one.picks for one in LEDGER.values())
        share = sum(one.qualified for one in LEDGER.values()) / picks
        terminalreporter.write_line(f"{picks} greedy tokens compared, of which {share:.2%} qualify")
    if NOTES:
        terminalreporter.section("transformers as the oracle, further figures")
        for note in NOTES:
            terminalreporter.write_line(note)
