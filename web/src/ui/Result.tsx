// The card at the end of a run: what it cost with the cache, and what the same text costs without. The figures are the
// engine's summary; the bars are as long as the figures say.

import * as actions from "../actions";
import * as session from "../session";
import { SUMMARY, type Summary } from "../schema";
import { live, resultClosed, run, summary } from "../store";
import { ending } from "../words";
import { Icon } from "./icons";
import { Figure } from "./Stat";

export function Result() {
  const sum = summary.value;
  const current = run.value;
  if (sum === null || current === null || resultClosed.value) return null;
  const end = ending(current.state.value);
  return (
    <section class="result" aria-labelledby="result-name">
      <header>
        <h2 id="result-name">The text is finished</h2>
        <span class={end?.cut ? "result-end cut" : "result-end"}>{end?.text}</span>
        <button type="button" class="quiet" onClick={() => (resultClosed.value = true)} aria-label="Close the result">
          <Icon name="close" />
        </button>
      </header>
      <p class="result-times">
        <Exact of={sum} name="times" class="huge" />
        <span class="result-lead">the work, if nothing were kept and every step began from the first token again</span>
      </p>
      <Bars sum={sum} />
      <dl class="result-facts">
        <Fact of={sum} name="written" />
        <Fact of={sum} name="tokens_per_s" />
        <Fact of={sum} name="ttft_us" />
        <Fact of={sum} name="reused" unit="layer-tokens" />
        {sum.prefix > 0 && <Fact of={sum} name="prefix" />}
      </dl>
      {live.value && (
        <div class="card-actions">
          <button type="button" onClick={() => again(sum.layer_tokens >= sum.naive)}>
            {sum.layer_tokens >= sum.naive ? "Run it with the cache" : "Run it without the cache"}
          </button>
          <button type="button" onClick={() => void session.start()}>
            <Icon name="again" /> Run it again
          </button>
        </div>
      )}
    </section>
  );
}

function again(cache: boolean): void {
  actions.setCache(cache);
  void session.start();
}

/** Layer-tokens of this run, and of the same text with the cache at every step and at none. */
function Bars({ sum }: { sum: Summary }) {
  const rows: [keyof Summary, string, string][] = [
    ["cached", "kept", "with the cache"],
    ["naive", "recomputed", "without"],
  ];
  // What this run did is counted; the other way of doing it is a formula.
  if (sum.layer_tokens === sum.cached) rows[0] = ["layer_tokens", "kept", "with the cache"];
  else if (sum.layer_tokens === sum.naive) rows[1] = ["layer_tokens", "recomputed", "without"];
  else rows.unshift(["layer_tokens", "mixed", "this run"]);
  const most = Math.max(sum.naive, sum.layer_tokens, 1);
  return (
    <dl class="result-bars">
      {rows.map(([name, role, words]) => (
        <div key={role}>
          <dt>{words}</dt>
          <dd>
            <span class={`result-bar ${role}`} aria-hidden="true">
              <span style={{ width: `${(Number(sum[name]) / most) * 100}%` }} />
            </span>
            <Exact of={sum} name={name} unit="layer-tokens" />
          </dd>
        </div>
      ))}
    </dl>
  );
}

interface NumberProps {
  of: Summary;
  name: keyof Summary;
  unit?: string;
  class?: string;
}

function Exact({ of, name, unit, class: look = "" }: NumberProps) {
  const about = SUMMARY[name];
  if (!about) return null;
  return (
    <Figure
      name={`summary_${name}`}
      value={of[name]}
      source={about.source}
      unit={unit ?? about.unit}
      meaning={about.meaning}
      class={look}
    />
  );
}

function Fact(props: NumberProps) {
  return (
    <div>
      <dt>{SUMMARY[props.name]?.label}</dt>
      <dd>
        <Exact {...props} />
      </dd>
    </div>
  );
}
