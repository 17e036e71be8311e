// The end of a run: on the stage the work of its text both ways with the one ratio, and what can be done next; and in the
// drawer what the text costs with the cache and without, in computing and in time. The figures are the engine's; the bars are as long as they say.

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import * as actions from "../../visit/actions";
import * as api from "../../visit/api";
import { count, plural } from "../../ui/format";
import { lanes } from "../../stage/lanes";
import * as player from "../play/player";
import * as session from "../../visit/session";
import { SUMMARY, type StepFrame, type Summary } from "../../schema";
import { RUN_TIMES, type RunTimes } from "../../schema/times";
import { live, result, resultClosed, run, summary } from "../../visit/store";
import { ending, title } from "../../visit/messages";
import { Icon } from "../../ui/icons";
import { shareOpen } from "../../ui/Share";
import { Figure, Told } from "../../ui/Stat";

/** The times of a run's text, both ways, by the run's id; null: nothing could be measured. */
const found = signal<ReadonlyMap<string, RunTimes | null>>(new Map());

/** Asks for the times at the end of a run, until they are there. When another run is shown, the engine stops measuring. */
function measure(id: string): () => void {
  const gone = new AbortController();
  void api
    .times(id, gone.signal)
    .catch(() => null)
    .then((times) => {
      if (!gone.signal.aborted) found.value = new Map([...found.value, [id, times]]);
    });
  return () => gone.abort();
}

/** On the stage, in place of the wall: the work of the whole text with the cache and without, and how many times it is. */
export function Result() {
  const sum = result.value;
  const current = run.value;
  if (sum === null || current === null || lanes.value !== null) return null;
  const end = ending(current.state.value);
  const uncached = sum.layer_tokens >= sum.naive;
  return (
    <section class="result" aria-labelledby="result-name">
      <Areas steps={current.frames} />
      <div class="result-told">
        <p class="result-end-line">
          <span id="result-name" class="result-name">
            {title(current, sum.written)}
          </span>
          {end !== null && <span class={end.cut ? "result-end cut" : "result-end"}>{end.text}</span>}
        </p>
        <p class="result-times">
          <Exact of={sum} name="times" class={uncached ? "huge more" : "huge"} />
          <span class="result-lead">{uncached ? "the cells, without the cache" : "fewer cells, with the cache"}</span>
        </p>
        <dl class="result-totals">
          <Total of={sum} name="cached" words="with the cache" role="kept" />
          <Total of={sum} name="naive" words="without" role="recomputed" />
          <div>
            <dt>computing time</dt>
            <dd>
              <Exact of={sum} name="engine_us" />
            </dd>
          </div>
        </dl>
        <div class="card-actions">
          {current.both.size > 0 && (
            <button type="button" class="bright" onClick={() => replay(uncached)}>
              {uncached ? "Play it with the cache" : "Play it without the cache"}
            </button>
          )}
          {live.value && (
            <>
              <button type="button" class="bright" onClick={() => compare(uncached)}>
                {uncached ? "Run it with the cache" : "Run it without the cache"}
              </button>
              <button type="button" onClick={() => void session.start()}>
                <Icon name="again" /> Run it again
              </button>
            </>
          )}
          <button type="button" class="share-run" onClick={() => (shareOpen.value = true)}>
            Share this run
          </button>
        </div>
      </div>
      <button
        type="button"
        class="result-close quiet"
        onClick={() => (resultClosed.value = true)}
        title="Back to the wall (Esc)"
        aria-label="Close the result"
      >
        <Icon name="close" />
      </button>
    </section>
  );
}

/** The cells of the run both ways: those of its own way are counted, the others a formula's. */
function Total({ of, name, words, role }: { of: Summary; name: "cached" | "naive"; words: string; role: string }) {
  return (
    <div>
      <dt>
        <span class={`swatch ${role}`} aria-hidden="true" /> {words}
      </dt>
      <dd>
        <Exact of={of} name={of.layer_tokens === of[name] ? "layer_tokens" : name} unit="" /> cells
      </dd>
    </div>
  );
}

const [WIDE, HIGH] = [400, 100]; // of the picture's own units: it is stretched to its place

/** The work of each step as an area: a ramp without the cache, flat with it. */
function Areas({ steps }: { steps: readonly StepFrame[] }) {
  // With the cache no step computes earlier tokens again, so those are left out of its area.
  const each = steps.map(({ layer_tokens, length }) => Number(layer_tokens) / Math.max(1, length));
  const cached = steps.map(({ length, recomputed }, at) => (each[at] ?? 0) * (length - recomputed));
  const uncached = steps.map(({ start, length }, at) => (each[at] ?? 0) * (start + length));
  const most = Math.max(1, ...uncached);
  const area = (values: readonly number[]): string => {
    const x = (at: number) => ((at * WIDE) / values.length).toFixed(2);
    const tops = values.map((value, at) => {
      const y = (HIGH * (1 - value / most)).toFixed(2);
      return `L${x(at)} ${y}L${x(at + 1)} ${y}`;
    });
    return `M0 ${HIGH}${tops.join("")}L${WIDE} ${HIGH}Z`;
  };
  const words = `Cells computed in each of ${plural(steps.length, "step")}: without the cache up to ${count(most)}, with it ${count(cached.at(-1) ?? 0)} in the last one.`;
  return (
    <figure class="result-areas">
      <svg viewBox={`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" role="img" aria-label={words}>
        <path class="without" d={area(uncached)} />
        <path class="with" d={area(cached)} />
      </svg>
      <figcaption>
        <span class="without">without the cache</span>
        <span class="with">with it</span>
        <span class="axis">cells computed, step by step →</span>
      </figcaption>
    </figure>
  );
}

/** In the drawer: what the text of the run costs both ways, in computing and in time. */
export function Sums() {
  const sum = summary.value;
  const current = run.value;
  const asked = live.value && sum !== null && sum.written > 1 ? (current?.id.value ?? "") : "";
  useEffect(() => (asked === "" || found.peek().has(asked) ? undefined : measure(asked)), [asked]);
  if (sum === null || current === null) return null;
  const times = found.value.get(asked) ?? null;
  return (
    <section class="instrument sums-of-run" aria-labelledby="sums-name">
      <header>
        <h2 id="sums-name">The whole run</h2>
        <span class="hint">both ways</span>
      </header>
      <Bars sum={sum} times={times} timed={asked !== ""} waiting={asked !== "" && !found.value.has(asked)} />
      {times?.slower != null && (
        <p class="result-why">
          In time the difference is{" "}
          <Told name="times_slower" value={times.slower} about={RUN_TIMES.slower} class="result-slower" />
          {times.slower < sum.times &&
            ", less than in computing: each step reads all the weights, for one token or for many."}
        </p>
      )}
      <dl class="result-facts">
        <Fact of={sum} name="tokens_per_s" />
        <Fact of={sum} name="ttft_us" />
        {sum.prefix > 0 && <Fact of={sum} name="prefix" />}
      </dl>
    </section>
  );
}

/** The same text the other way. */
function compare(cache: boolean): void {
  actions.setCache(cache);
  void session.again();
}

/** The same recorded text from its beginning, the other way. */
function replay(cache: boolean): void {
  actions.setCache(cache);
  player.again(null);
}

interface BarsProps {
  sum: Summary;
  times: RunTimes | null;
  timed: boolean; // whether there is a time to compare
  waiting: boolean; // for the times
}

/** Layer-tokens and time of this text with the cache at each step and at none; and of this run, if it did both. The time of
 * the run's own way is the run's; that of the other follows from it by a measured ratio, so that both are of one scale. */
function Bars({ sum, times, timed, waiting }: BarsProps) {
  const own = [sum.cached, sum.naive].includes(sum.layer_tokens);
  // The work of this run is counted; the other way of doing it is a formula.
  const work = (name: "cached" | "naive") => (sum.layer_tokens === sum[name] ? "layer_tokens" : name);
  const most = Math.max(sum.naive, sum.layer_tokens, 1);
  const slower = times?.slower ?? null;
  const other =
    slower === null ? null : sum.layer_tokens === sum.cached ? sum.engine_us * slower : sum.engine_us / slower;
  const longest = Math.max(sum.engine_us, other ?? 0, 1);
  const time = (name: "cached" | "naive", role: string) => {
    const ownWay = sum.layer_tokens === sum[name];
    if (!ownWay && !own) return "–";
    if (!ownWay && other === null)
      return waiting ? "measuring" : times === null ? "not measured" : "too long to measure";
    return (
      <Bar role={role} share={(ownWay ? sum.engine_us : (other ?? 0)) / longest}>
        {ownWay ? (
          <Exact of={sum} name="engine_us" />
        ) : (
          <Figure
            name="summary_other_us"
            value={other}
            source="derived"
            unit="us"
            meaning="time of this run, times the ratio of both ways, from a few steps that were measured without drawing"
          />
        )}
      </Bar>
    );
  };
  const line = (name: keyof Summary, role: string, words: string, ms: ComponentChildren) => (
    <tr>
      <th scope="row">{words}</th>
      <td>
        <Bar role={role} share={Number(sum[name]) / most}>
          <Exact of={sum} name={name} unit="" />
        </Bar>
      </td>
      {timed && <td class="result-seconds">{ms}</td>}
    </tr>
  );
  return (
    <table class="result-bars" aria-busy={waiting}>
      <thead>
        <tr>
          <td />
          <th scope="col">
            computing <span class="under">one token through one layer is a layer-token</span>
          </th>
          {timed && (
            <th scope="col" class="result-seconds">
              time{" "}
              {times !== null && (
                <span class="under">of this run; the other way by a ratio from {plural(times.measured, "step")}</span>
              )}
            </th>
          )}
        </tr>
      </thead>
      <tbody>
        {line(work("cached"), "kept", "with the cache", time("cached", "kept"))}
        {line(work("naive"), "recomputed", "without", time("naive", "recomputed"))}
        {!own && line("layer_tokens", "mixed", "this run, mixed", <Exact of={sum} name="engine_us" />)}
      </tbody>
    </table>
  );
}

function Bar({ role, share, children }: { role: string; share: number; children: ComponentChildren }) {
  return (
    <span class="result-measure">
      <span class={`result-bar ${role}`} aria-hidden="true">
        <span style={{ width: `${share * 100}%` }} />
      </span>
      {children}
    </span>
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
