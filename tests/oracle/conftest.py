"""Prints at the end of the run what the oracle tests measured."""

import pytest

from tests.oracle.harness import LEDGER, MARGIN, ROUNDING, TALLIES


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
    if ROUNDING:
        terminalreporter.section("transformers in fp32 as the oracle, worst of all kinds")
        for dtype, kinds in ROUNDING.items():
            ones = list(kinds.values())
            terminalreporter.write_line(
                f"{dtype:<9} {len(ones)} kinds: largest {max(one.largest for one in ones):.3f}, rms "
                f"{max(one.rms for one in ones):.4f} of the logits' deviation (rms at most "
                f"{max(one.rms / one.their_rms for one in ones):.2f} of transformers' own in {dtype}), "
                f"highest logit agrees in {min(one.agree for one in ones):.0%}"
            )
    if TALLIES:
        terminalreporter.section("transformers' beam search as the oracle")
        for kind, tally in TALLIES.items():
            terminalreporter.write_line(
                f"{kind:<14}{tally.cases:>5} cases, {tally.qualified / tally.cases:.1%} qualify; {tally.hypotheses} "
                f"texts, {tally.early / tally.hypotheses:.1%} ended early; scores differ by {tally.worst:.1e} at most"
            )
