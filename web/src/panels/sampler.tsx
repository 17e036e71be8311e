// The sampler on the logits that a step was chosen from: the engine's own sampler is applied to them again whenever a
// dial moves. The model computes nothing for it; the server holds the logits of the last steps.

import { useEffect } from "preact/hooks";
import { computed, signal } from "@preact/signals";
import * as api from "../visit/api";
import * as branches from "../run/branches";
import { count, percent, pointed, sentence } from "../ui/format";
import { asking, frame, last, live, run } from "../visit/store";
import { marked, quoted } from "../ui/text";
import { SAMPLER_VIEW, type Ranked, type SamplerView } from "../schema/sampler";
import { Lead } from "../ui/Lead";
import { Told } from "../ui/Stat";
import { runIt } from "./usable";
import "../style/panels/sampler.css";

const PAUSE = 60; // ms without a move of a dial before the server is asked
const LISTED = 12;

/** What the dials say; null: as the run has it. */
const dials = {
  temperature: signal<number | null>(null),
  top_k: signal<number | null>(null),
  top_p: signal<number | null>(null),
  min_p: signal<number | null>(null),
  repetition_penalty: signal<number | null>(null),
};
const moved = computed<Partial<api.Settings>>(() =>
  Object.fromEntries(Object.entries(dials).flatMap(([name, { value }]) => (value === null ? [] : [[name, value]]))),
);
const view = signal<SamplerView | null>(null);
const failure = signal("");

export default function Sampler() {
  const step = frame.value?.token == null ? null : frame.value.step;
  const id = run.value?.id.value;
  const settings = moved.value;
  useEffect(() => {
    if (!live.value || id === undefined || step === null) return;
    let wanted = true;
    const timer = setTimeout(async () => {
      try {
        const found = await api.sampled(id, step, settings);
        if (!wanted) return;
        view.value = found;
        failure.value = "";
      } catch (error) {
        if (!wanted) return;
        view.value = null; // that of another step, or of other settings
        failure.value = sentence(error instanceof Error ? error.message : String(error));
      }
    }, PAUSE);
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [id, step, settings]);
  return (
    <>
      <Lead result={live.value && step !== null && view.value !== null ? result(view.value) : ""}>
        The model gives every token a number, its logit. The sampler makes probabilities of them and draws one token.
        Move a dial: the sampler runs again on the logits of this step, and the model computes nothing.
      </Lead>
      {!live.value || step === null ? (
        <p class="sentence">
          {live.value ? "No token was chosen at this step." : `This is a recording, without logits.${runIt()}`}
        </p>
      ) : (
        <>
          <Dials />
          {failure.value !== "" && <p class="panel-problem">{failure.value}</p>}
          {view.value !== null && <Found view={view.value} />}
        </>
      )}
    </>
  );
}

function Dials() {
  const card = run.value?.card;
  if (!card) return null;
  const changed = Object.keys(moved.value).length > 0;
  return (
    <div class="sampler-dials">
      <Dial name="temperature" of="temperature" least={0} most={2} by={0.05} own={card.temperature} />
      <Dial name="top-k" of="top_k" least={0} most={100} by={1} own={card.top_k} off={0} />
      <Dial name="top-p" of="top_p" least={0.05} most={1} by={0.01} own={card.top_p} />
      <Dial name="min-p" of="min_p" least={0} most={0.5} by={0.005} own={card.min_p} off={0} />
      <Dial
        name="repetition penalty"
        of="repetition_penalty"
        least={1}
        most={2}
        by={0.05}
        own={card.repetition_penalty}
        off={1}
        title="Logits of tokens that are in the text are divided by it, or multiplied where they are negative"
      />
      <div class="sampler-buttons">
        <button type="button" disabled={!changed} onClick={reset}>
          As in the run
        </button>
        <button
          type="button"
          disabled={!changed || asking.value}
          title="Continue from the last step with these settings, in a branch on the same pages of the KV cache"
          onClick={() => void use()}
        >
          Use from the next step
        </button>
      </div>
    </div>
  );
}

function reset(): void {
  for (const dial of Object.values(dials)) dial.value = null;
}

/** A branch at the last step: the same text and pages, with these settings from there on. */
async function use(): Promise<void> {
  const newest = run.value?.frames[last.value];
  if (newest === undefined) return;
  await branches.fork(newest.step, null, moved.value);
  reset();
}

interface DialProps {
  name: string;
  of: keyof typeof dials;
  least: number;
  most: number;
  by: number;
  own: number; // the run's
  off?: number; // the value that changes nothing
  title?: string;
}

function Dial({ name, of, least, most, by, own, off, title = "" }: DialProps) {
  const value = dials[of].value ?? own;
  const words = value === off ? "off" : of === "temperature" && value === 0 ? "0: greedy" : short(value);
  return (
    <label class="sampler-dial" data-moved={dials[of].value !== null} title={title}>
      <span>{name}</span>
      <input
        type="range"
        min={least}
        max={most}
        step={by}
        value={Math.min(most, value)}
        aria-valuetext={words}
        onInput={(event) => (dials[of].value = Number(event.currentTarget.value))}
      />
      <output>{words}</output>
    </label>
  );
}

const short = (value: number): string => String(Number(value.toFixed(3)));

function Found({ view: found }: { view: SamplerView }) {
  const told = (name: keyof typeof SAMPLER_VIEW & keyof SamplerView & string, value: number | null) => (
    <Told name={`sampler_${name}`} value={value} about={SAMPLER_VIEW[name]} />
  );
  const current = run.value;
  return (
    <>
      <Ranks view={found} />
      <dl class="pairs sampler-figures">
        <div>
          <dt>kept</dt>
          <dd>
            {told("kept", found.kept)} of {count(found.vocab)} ids
          </dd>
        </div>
        <div>
          <dt>their share</dt>
          <dd>
            <span data-stat="sampler_kept_mass" data-value={found.kept_mass} data-src="read">
              {percent(found.kept_mass)}
            </span>{" "}
            of the model’s
          </dd>
        </div>
        <div>
          <dt>left by top-k</dt>
          <dd>{told("after_top_k", found.after_top_k)}</dd>
        </div>
        <div>
          <dt>and by top-p</dt>
          <dd>{told("after_top_p", found.after_top_p)}</dd>
        </div>
        <div>
          <dt>entropy before</dt>
          <dd>{told("entropy", found.entropy)}</dd>
        </div>
        <div>
          <dt>entropy after</dt>
          <dd>{told("sampled_entropy", found.sampled_entropy)}</dd>
        </div>
      </dl>
      <DrawLine view={found} />
      <p class="sampler-outcome" role="status" data-drawn={found.drawn ?? ""}>
        {outcome(found, current?.named(found.token).text ?? "")}
      </p>
      <List top={found.top.slice(0, LISTED)} drawn={found.drawn} />
    </>
  );
}

function result(found: SamplerView): string {
  const kept = `${count(found.kept)} of ${count(found.vocab)} tokens can be drawn`;
  return found.drawn_card === null ? `${kept}.` : `${kept}; ${quoted(found.drawn_card.text)} is.`;
}

function outcome(found: SamplerView, written: string): string {
  if (found.drawn_card === null) return "The run was greedy and has no random number; these settings would need one.";
  const how =
    found.uniform === null ? "Greedy: the highest logit" : `u = ${pointed(found.uniform.toFixed(4))} falls on`;
  const text = quoted(found.drawn_card.text);
  if (found.drawn === found.token) return `${how}${found.uniform === null ? " is" : ""} ${text}, as in the run.`;
  return `${how}${found.uniform === null ? " is" : ""} ${text}; the run wrote ${quoted(written)}.`;
}

const WIDTH = 300;
const HEIGHT = 120;
const FLOOR = 1e-6; // the smallest probability in the picture

/** Every rank of the vocabulary on logarithmic scales: the model's probability, and the sampler's with its cut. */
function Ranks({ view: found }: { view: SamplerView }) {
  const x = (rank: number) => (Math.log(rank) / Math.log(Math.max(2, found.vocab))) * WIDTH;
  const y = (p: number) => HEIGHT - (1 - Math.log(Math.max(p, FLOOR)) / Math.log(FLOOR)) * HEIGHT;
  const model = found.ranks.map((rank, i) => `${x(rank).toFixed(1)} ${y(found.p[i] ?? 0).toFixed(1)}`);
  const kept = found.ranks.flatMap((rank, i) => {
    const p = found.sampled[i] ?? 0;
    return p > 0 ? [`${x(rank).toFixed(1)} ${y(p).toFixed(1)}`] : [];
  });
  const end = x(Math.min(found.kept + 0.5, found.vocab));
  return (
    <figure class="chart sampler-ranks">
      <figcaption>
        Probability by rank{found.repetition_penalty === 1 ? "" : " after the penalty"}, all {count(found.vocab)} ids
        <span class="chart-most">both scales logarithmic</span>
      </figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`The sampler keeps the first ${count(found.kept)} of ${count(found.vocab)} ids`}
      >
        <rect class="sampler-kept" x="0" y="0" width={end} height={HEIGHT} />
        <polyline class="sampler-model" points={model.join(" ")} />
        <polyline class="sampler-after" points={kept.join(" ")} />
        <line class="sampler-cut" x1={end} x2={end} y1="0" y2={HEIGHT} />
      </svg>
      <p class="chart-key">
        <span>
          <i aria-hidden="true" class="sampler-model" /> model
        </span>
        <span>
          <i aria-hidden="true" class="sampler-after" /> after the sampler
        </span>
        <span>
          <i aria-hidden="true" class="sampler-cut" /> cut after rank {count(found.kept)}
        </span>
        <span class="chart-x">1 down to 10⁻⁶</span>
      </p>
    </figure>
  );
}

/** The draw: what the sampler left, end to end in the order of ids, and u pointing into it. */
function DrawLine({ view: found }: { view: SamplerView }) {
  return (
    <div class="sampler-draw">
      <p>
        draw u <Told name="sampler_uniform" value={found.uniform} about={{ ...about("uniform"), unit: "share" }} />
      </p>
      <div class="sampler-strip" aria-hidden="true">
        {found.top
          .filter(({ sampled }) => sampled > 0)
          .map(({ token, sampled, low }) => (
            <span
              key={token.id}
              class={token.id === found.drawn ? "chosen" : ""}
              title={quoted(token.text)}
              style={{ left: `${low * 100}%`, width: `${sampled * 100}%` }}
            >
              {sampled > 0.09 ? marked(token.text) : ""}
            </span>
          ))}
        {found.uniform !== null && <i style={{ left: `${found.uniform * 100}%` }} />}
      </div>
    </div>
  );
}

function about(name: string) {
  const known = SAMPLER_VIEW[name];
  if (known === undefined) throw new Error(`no ${name}`);
  return known;
}

function List({ top, drawn }: { top: readonly Ranked[]; drawn: number | null }) {
  const most = Math.max(...top.map(({ p, sampled }) => Math.max(p, sampled)), 1e-9);
  return (
    <table class="sampler-list">
      <thead>
        <tr>
          <th scope="col">token</th>
          <td />
          <th scope="col">model</th>
          <th scope="col">sampler</th>
        </tr>
      </thead>
      <tbody>
        {top.map(({ token, p, sampled }) => (
          <tr key={token.id} class={token.id === drawn ? "chosen" : sampled === 0 ? "cut" : ""} data-token={token.id}>
            <th scope="row">{marked(token.text)}</th>
            <td class="bar-track" aria-hidden="true">
              <span class="bar-fill" style={{ width: `${(sampled / most) * 100}%` }} />
              <span class="bar-outline" style={{ width: `${(p / most) * 100}%` }} />
            </td>
            <td data-p={p}>{percent(p)}</td>
            <td data-sampled={sampled}>{sampled === 0 ? "cut" : percent(sampled)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
