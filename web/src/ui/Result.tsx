// The card at the end of a run: what it cost with the cache, and what the same text costs without. The figures are the
// engine's summary; the bars are as long as the figures say.

import * as actions from "../actions";
import * as session from "../session";
import { SUMMARY, type Summary } from "../schema";
import { live, result, resultClosed, run } from "../store";
import { ending, title } from "../words";
import { Icon } from "./icons";
import { Figure, LAYER_TOKEN } from "./Stat";

export function Result() {
  const sum = result.value;
  const current = run.value;
  if (sum === null || current === null) return null;
  const end = ending(current.state.value);
  const uncached = sum.layer_tokens >= sum.naive;
  const mixed = !uncached && sum.layer_tokens !== sum.cached;
  return (
    <section class="result" aria-labelledby="result-name">
      <header>
        <h2 id="result-name">{title(current.state.value, sum.written)}</h2>
        <span class={end?.cut ? "result-end cut" : "result-end"}>{end?.text}</span>
        <button type="button" class="quiet" onClick={() => (resultClosed.value = true)} aria-label="Close the result">
          <Icon name="close" />
        </button>
      </header>
      <p class="result-times">
        <span class="result-lead">Without the cache this text {uncached ? "took" : "would take"}</span>
        <Exact of={sum} name="times" class="huge" />
        <span class="result-lead">as much computing as with it</span>
        <span class="result-how">{mixed ? "calculated; this run had the cache off for a part" : "calculated, not run"}</span>
      </p>
      <p class="result-note">{LAYER_TOKEN}</p>
      <Bars sum={sum} />
      <dl class="result-facts">
        <Fact of={sum} name="written" />
        <Fact of={sum} name="tokens_per_s" />
        <Fact of={sum} name="ttft_us" />
        {sum.prefix > 0 && <Fact of={sum} name="prefix" />}
      </dl>
      {live.value && (
        <div class="card-actions">
          <button type="button" class="bright" onClick={() => again(uncached)}>
            {uncached ? "Run it with the cache" : "Run it without the cache"}
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
  else rows.unshift(["layer_tokens", "mixed", "this run, mixed"]);
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
