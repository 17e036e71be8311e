// The card at the end of a run: what it cost with the cache, and what the same text costs without. The figures are the
// engine's summary; the bars are as long as the figures say.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import * as actions from "../actions";
import * as api from "../api";
import { plural } from "../format";
import * as session from "../session";
import { SUMMARY, type Summary } from "../schema";
import { RUN_TIMES, type RunTimes } from "../schema/times";
import { live, result, resultClosed, run } from "../store";
import { ending, title } from "../words";
import { Icon } from "./icons";
import { Figure, LAYER_TOKEN, Told } from "./Stat";

/** The times of a run the other way; null: nothing could be measured. */
const found = signal<{ run: string; times: RunTimes | null } | null>(null);

/** Asks once for each run, when its card appears. */
async function measure(id: string): Promise<void> {
  const times = await api.times(id).catch(() => null);
  found.value = { run: id, times };
}

export function Result() {
  const sum = result.value;
  const current = run.value;
  const asked = live.value && sum !== null && sum.written > 1 ? (current?.id.value ?? "") : "";
  useEffect(() => {
    if (asked !== "" && found.peek()?.run !== asked) void measure(asked);
  }, [asked]);
  if (sum === null || current === null) return null;
  const end = ending(current.state.value);
  const uncached = sum.layer_tokens >= sum.naive;
  const mixed = !uncached && sum.layer_tokens !== sum.cached;
  const times = found.value?.run === asked ? found.value.times : null;
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
        <span class="result-lead">Without the cache it {uncached ? "took" : "would take"}</span>
        <Exact of={sum} name="times" class="huge" />
        <span class="result-lead">the computing</span>
        {times?.slower != null && (
          <>
            <Told name="times_slower" value={times.slower} about={RUN_TIMES.slower} class="result-slower" />
            <span class="result-lead">the time</span>
          </>
        )}
      </p>
      <p class="result-note">
        {times?.slower != null && times.slower < sum.times && (
          <span class="result-why">The time grows less: a step reads all weights once, for one token or for many.</span>
        )}
        <span>{LAYER_TOKEN}</span>
        <span>
          {mixed ? "calculated; this run had the cache off for a part" : "calculated, not run"}
          {times !== null && `; its time from ${plural(times.measured, "measured step")}`}
        </span>
      </p>
      <Bars sum={sum} times={times} waiting={asked !== "" && found.value?.run !== asked} />
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

interface BarsProps {
  sum: Summary;
  times: RunTimes | null;
  waiting: boolean; // for the times
}

/** Layer-tokens and time of this run, and of the same text with the cache at every step and at none. */
function Bars({ sum, times, waiting }: BarsProps) {
  const rows: [keyof Summary, string, string][] = [
    ["cached", "kept", "with the cache"],
    ["naive", "recomputed", "without"],
  ];
  // What this run did is counted and measured; the other way of doing it is a formula.
  if (sum.layer_tokens === sum.cached) rows[0] = ["layer_tokens", "kept", "with the cache"];
  else if (sum.layer_tokens === sum.naive) rows[1] = ["layer_tokens", "recomputed", "without"];
  else rows.unshift(["layer_tokens", "mixed", "this run, mixed"]);
  const most = Math.max(sum.naive, sum.layer_tokens, 1);
  const time = (name: keyof Summary) => {
    if (name === "layer_tokens") return <Exact of={sum} name="engine_us" />;
    const other = name === "cached" ? "cached_us" : "naive_us";
    const value = times?.[other] ?? null;
    if (value === null) return waiting ? "measuring" : null;
    return <Told name={`times_${other}`} value={value} about={RUN_TIMES[other]} />;
  };
  return (
    <dl class="result-bars" aria-busy={waiting}>
      {rows.map(([name, role, words]) => (
        <div key={role}>
          <dt>{words}</dt>
          <dd>
            <span class={`result-bar ${role}`} aria-hidden="true">
              <span style={{ width: `${(Number(sum[name]) / most) * 100}%` }} />
            </span>
            <Exact of={sum} name={name} unit="layer-tokens" />
            <span class="result-seconds">{time(name)}</span>
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
