// The race: one text by two lanes, with the KV cache and without it. The uncached lane gets the cached lane's tokens and
// really computes all of them at every step. Every number is the server's; the page draws them as they come.

import { computed, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import * as api from "../visit/api";
import * as nextRun from "../run/next-run";
import * as lanes from "../stage/lanes";
import * as player from "../run/play/player";
import { count, flop, joined, micros, numbered, plural, pointed, sentence } from "../ui/format";
import type { SceneToken } from "../stage/renderers/renderer";
import { model, site } from "../visit/store";
import type { TokenCard } from "../schema";
import { quoted } from "../ui/text";
import { RACE_STEP, RACE_SUMS, type RaceCard, type RaceEnd, type RaceStep } from "../schema/race";
import { Lead } from "../ui/Lead";
import { Told } from "../ui/Stat";
import { Chart } from "../ui/Chart";
import "../style/panels/race.css";

const card = signal<RaceCard | null>(null);
const steps = signal<readonly RaceStep[]>([]);
const end = signal<RaceEnd | null>(null);
const failure = signal("");
let prompt: readonly SceneToken[] = []; // of the race, as the stage shows it
const SELDOM = 500; // ms
const tokens = signal(160);
const every = signal(1);
const budget = signal(20);

const last = computed(() => steps.value.at(-1) ?? null);
/** The newest step that both lanes computed. */
const compared = computed(() => steps.value.findLast((step) => step.uncached_us !== null) ?? null);

const result = computed(() => {
  const sums = end.value === null ? null : last.value?.sums;
  if (!sums || sums.times === null) return "";
  const work = pointed((sums.uncached_tokens / Math.max(1, sums.cached_tokens)).toPrecision(3));
  return `Without the cache the same ${plural(sums.compared, "step")} took ${pointed(sums.times.toPrecision(3))} times as long, for ${work} times the tokens computed.`;
});

export default function Race() {
  useEffect(() => {
    stage("end"); // a race that was run before is there again with its panel
    return lanes.hide;
  }, []);
  return (
    <>
      <Lead result={result.value}>
        Two lanes write the same text. One keeps the keys and values of every token; the other computes the whole text
        again for each new token. The engine computes both, taking turns; then the stage shows them from one start, each
        at its own measured speed.
      </Lead>
      <Controls />
      {failure.value !== "" && <p class="panel-problem">{failure.value}</p>}
      {card.value !== null && (
        <>
          <Status />
          <Lanes />
          <Charts />
          <Sums />
          <AgreementMeter />
        </>
      )}
    </>
  );
}

async function start(): Promise<void> {
  const control = new AbortController();
  player.pause(); // two runs at once would slow each other
  lanes.racing.value = control;
  arrived.length = 0;
  steps.value = [];
  card.value = end.value = null;
  failure.value = "";
  if (site.value !== null) return replay();
  const { temperature, top_k, top_p, min_p, seed, prompt: text } = nextRun.request(true, 0, 0);
  const wanted = { prompt: text, temperature, top_k, top_p, ...(min_p && { min_p }), seed, max_tokens: tokens.value };
  try {
    prompt = lanes.looksOf(text, await api.tokenize(text));
    await api.race({ ...wanted, every: every.value, budget_s: budget.value }, control.signal, (message) => {
      if (lanes.racing.value === control) take(message); // what was on its way when the race ended is too late
    });
    if (end.value === null) failure.value = "The connection ended before the race did. Is the engine still running?";
  } catch (error) {
    if (!control.signal.aborted) failure.value = sentence(error instanceof Error ? error.message : String(error));
  } finally {
    if (lanes.racing.value === control) lanes.racing.value = null;
  }
}

/** The race that the site has recorded. */
async function replay(): Promise<void> {
  try {
    const found = await api.call<Recording>("race.json");
    prompt = lanes.looksOf(found.prompt, found.tokens);
    found.messages.forEach(take);
  } catch (error) {
    failure.value = sentence(error instanceof Error ? error.message : String(error));
  }
  lanes.racing.value = null;
}

interface Recording {
  prompt: string;
  tokens: TokenCard[];
  messages: (RaceCard | RaceStep | RaceEnd)[];
}

const arrived: RaceStep[] = [];

/** Steps are shown at the end, and now and then before it: a page that draws slows the engine on the same machine. */
function take(message: RaceCard | RaceStep | RaceEnd): void {
  if (message.kind === "race") {
    arrived.length = 0;
    card.value = message;
  } else if (message.kind === "step") {
    arrived.push(message);
    if (performance.now() - told > SELDOM) tellSteps();
  } else {
    tellSteps();
    end.value = message;
    stage("start");
  }
}

let told = 0;

function tellSteps(): void {
  told = performance.now();
  steps.value = [...arrived];
}

/** Brings the stage in view: on a narrow screen it is above the panel. */
function look(): void {
  requestAnimationFrame(() => document.querySelector(".stage")?.scrollIntoView({ block: "nearest" }));
}

function stage(from: "start" | "end"): void {
  if (card.value === null) return;
  lanes.show(card.value, prompt, steps.value, from);
  if (from === "start") look();
}

function Controls() {
  const busy = lanes.racing.value !== null;
  return (
    <form
      class="race-controls"
      onSubmit={(event) => {
        event.preventDefault();
        if (busy) {
          lanes.stop();
          tellSteps();
          stage("start"); // as far as it came
        } else void start();
      }}
    >
      {site.value === null && <Dials />}
      <button
        type="submit"
        class="bright"
        disabled={site.value === null && (model.value === null || nextRun.prompt.value === "")}
      >
        {busy ? "Stop" : "Race"}
      </button>
      {end.value !== null && (
        <>
          <button type="button" onClick={() => stage("start")}>
            Show it again
          </button>
          <button
            type="button"
            onClick={() => {
              lanes.finish();
              look();
            }}
          >
            Show its end
          </button>
        </>
      )}
    </form>
  );
}

function Dials() {
  return (
    <>
      <Whole name="tokens" state={tokens} most={4096} />
      <label>
        <span>uncached lane</span>
        <select value={every.value} onChange={(event) => (every.value = Number(event.currentTarget.value))}>
          <option value={1}>every step</option>
          <option value={2}>every 2nd step</option>
          <option value={4}>every 4th step</option>
          <option value={8}>every 8th step</option>
          <option value={16}>every 16th step</option>
        </select>
      </label>
      <Whole name="budget, s" state={budget} most={120} />
    </>
  );
}

function Whole({ name, state, most }: { name: string; state: { value: number }; most: number }) {
  return (
    <label>
      <span>{name}</span>
      <input
        type="number"
        min={1}
        max={most}
        value={state.value}
        onChange={(event) => {
          const value = Math.round(Number(event.currentTarget.value));
          state.value = Math.min(most, Math.max(1, value || 1));
          event.currentTarget.value = String(state.value);
        }}
      />
    </label>
  );
}

function Status() {
  const about = card.value;
  if (about === null) return null;
  const sampled = about.every === 1 ? "every step in both lanes" : `uncached lane sampled 1/${about.every}`;
  return (
    <p class="race-status" role="status" data-race={end.value?.reason ?? (lanes.racing.value ? "running" : "stopped")}>
      <strong>{outcome()}</strong> <span class="under">{sampled}</span>
    </p>
  );
}

function outcome(): string {
  const step = last.value;
  const at = step === null ? "" : ` at t = ${count(step.context)}`;
  if (end.value === null)
    return lanes.racing.value
      ? `The engine computes step ${count(steps.value.length + 1)} of ${count(card.value?.max_tokens ?? 0)}`
      : `Stopped${at}.`;
  switch (end.value.reason) {
    case "budget":
      return `Stopped${at}: the budget of ${card.value?.budget_s ?? 0} s is spent.`;
    case "failed":
      return `${sentence(end.value.message)} It ended${at}.`;
    case "closed":
      return `Stopped${at}.`;
    default:
      return `Finished${at}.`;
  }
}

/** What each lane sent through the layers at its newest step: one token, or the whole text. */
function Lanes() {
  const step = compared.value;
  const about = card.value;
  if (about === null) return null;
  const most = about.prompt_tokens + about.max_tokens;
  const share = (value: number) => `${(value / most) * 100}%`;
  const [cached, uncached] = [step?.cached_tokens ?? 0, step?.uncached_tokens ?? 0];
  const again = Math.round(uncached * (step?.recomputed ?? 0));
  return (
    <dl class="race-lanes">
      <div>
        <dt>with the cache</dt>
        <dd>
          <span class="race-cells" aria-hidden="true">
            <i class="fresh" style={{ width: share(cached) }} />
          </span>
          <Told name="race_cached_tokens" value={step?.cached_tokens ?? null} about={RACE_STEP.cached_tokens} />
        </dd>
      </div>
      <div>
        <dt>without</dt>
        <dd>
          <span class="race-cells" aria-hidden="true">
            <i key={step?.step} class="again" style={{ width: share(again) }} />
            <i class="fresh" style={{ width: share(uncached - again) }} />
          </span>
          <Told name="race_uncached_tokens" value={step?.uncached_tokens ?? null} about={RACE_STEP.uncached_tokens} />
        </dd>
      </div>
      <div>
        <dt>computed again</dt>
        <dd class="race-again">
          <Told name="race_recomputed" value={step?.recomputed ?? null} about={RACE_STEP.recomputed} />
          <span class="under">of the uncached step’s tokens: (t − 1) / t</span>
        </dd>
      </div>
    </dl>
  );
}

function Charts() {
  const both = steps.value;
  const points = (of: (step: RaceStep) => number | null) =>
    both.flatMap((step) => {
      const y = of(step);
      return y === null ? [] : [{ x: step.context, y }];
    });
  return (
    <>
      <Chart
        name="Time of each step"
        format={(value) => joined(micros(value))}
        lines={[
          { name: "without", role: "recomputed", points: points((step) => step.uncached_us) },
          { name: "with the cache", role: "kept", points: points((step) => step.cached_us) },
        ]}
      />
      <Chart
        name="FLOPs of each step"
        format={(value) => joined(flop(value))}
        lines={[
          { name: "without", role: "recomputed", points: points((step) => step.uncached_flops) },
          { name: "with the cache", role: "kept", points: points((step) => step.cached_flops) },
        ]}
      />
    </>
  );
}

function Sums() {
  const sums = last.value?.sums;
  const cell = (name: keyof typeof RACE_SUMS & string, value: number | null | undefined) => (
    <td>
      <Told name={`race_sum_${name}`} value={value ?? null} about={RACE_SUMS[name]} />
    </td>
  );
  return (
    <table class="sums race-sums">
      <caption>
        Sums over the <Told name="race_sum_compared" value={sums?.compared ?? null} about={RACE_SUMS.compared} /> steps
        that both lanes computed
      </caption>
      <thead>
        <tr>
          <td />
          <th scope="col">with the cache</th>
          <th scope="col">without</th>
        </tr>
      </thead>
      <tbody>
        <tr>
          <th scope="row">time</th>
          {cell("cached_us", sums?.cached_us)}
          {cell("uncached_us", sums?.uncached_us)}
        </tr>
        <tr>
          <th scope="row">FLOPs</th>
          {cell("cached_flops", sums?.cached_flops)}
          {cell("uncached_flops", sums?.uncached_flops)}
        </tr>
        <tr>
          <th scope="row">tokens</th>
          {cell("cached_tokens", sums?.cached_tokens)}
          {cell("uncached_tokens", sums?.uncached_tokens)}
        </tr>
        <tr>
          <th scope="row">time without / with</th>
          <td />
          {cell("times", sums?.times)}
        </tr>
      </tbody>
    </table>
  );
}

function AgreementMeter() {
  const sums = last.value?.sums;
  const about = card.value;
  if (sums === undefined || about === null || sums.compared === 0) return null;
  const agrees = sums.divergent === null;
  const apart = steps.value.find((step) => step.equal === false);
  return (
    <section class="race-agreement" data-agrees={agrees}>
      <h3>
        AGREEMENT{" "}
        <span>
          {agrees ? "✓ both lanes prefer the same token at every step" : "✗ the lanes prefer different tokens"}
        </span>
      </h3>
      <div
        class="race-meter"
        role="meter"
        aria-label="steps at which both lanes have the same most probable token"
        aria-valuemin={0}
        aria-valuemax={sums.compared}
        aria-valuenow={sums.equal}
      >
        <span style={{ width: `${(sums.equal / sums.compared) * 100}%` }} />
      </div>
      <dl class="pairs">
        <div>
          <dt title="argmax: the most probable token">same argmax</dt>
          <dd>
            <Told name="race_equal" value={sums.equal} about={RACE_SUMS.equal} /> of {count(sums.compared)}
          </dd>
        </div>
        <div>
          <dt title="the largest difference of any logit at any step">largest Δ of a logit</dt>
          <dd>
            <Small name="race_max_delta" value={sums.max_delta} />
          </dd>
        </div>
        <div>
          <dt title="Kullback-Leibler divergence of the two distributions: 0 where they are equal">KL, mean</dt>
          <dd>
            <Small name="race_kl" value={sums.kl} /> nat
          </dd>
        </div>
        <div>
          <dt>computed in</dt>
          <dd>
            {about.dtype}
            {about.weights === about.dtype ? "" : `, ${about.weights} weights`}
          </dd>
        </div>
        <div>
          <dt>first step that differs</dt>
          <dd>
            {apart ? `${numbered(apart.step)}, ${quoted(apart.token.text)}` : <span class="none">none</span>}
            <span class="sr" data-stat="race_divergent" data-value={sums.divergent ?? ""} data-src="counted" />
          </dd>
        </div>
      </dl>
      <p class="sentence-note">
        {about.dtype === "float32"
          ? "Both lanes compute the same sums, so in fp32 they should agree to a few millionths."
          : "In 16 bits two logits can lie so close that the order of additions decides; that is rounding, not a fault of the cache."}
      </p>
    </section>
  );
}

/** A number that is often 0 or a few millionths. */
function Small({ name, value }: { name: "race_max_delta" | "race_kl"; value: number | null }) {
  const about = name === "race_kl" ? RACE_SUMS.kl : RACE_SUMS.max_delta;
  const text = value === null ? "–" : value === 0 ? "0" : value.toExponential(1);
  return (
    <span class="figure">
      <span class="value" title={about?.meaning} data-stat={name} data-value={value ?? ""} data-src={about?.source}>
        {text}
      </span>
    </span>
  );
}
