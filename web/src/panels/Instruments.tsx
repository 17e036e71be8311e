// In the drawer: COMPUTE, KV_CACHE and SEQ_LEN of the shown step, and all further numbers of it in a table.

import type { ComponentChildren } from "preact";
import { count, numbered, plural } from "../ui/format";
import { statesOf } from "../stage/scene";
import { NUMBERS, type ModelCard, type StepFrame } from "../schema";
import { card, frame, length, run, totals } from "../visit/store";
import { work } from "../visit/messages";
import { Figure, LayerTokens, Stat, Told } from "../ui/Stat";

type Name = keyof StepFrame;

/** Numbers with a place of their own; the table at the end has the others. */
const PLACED: readonly Name[] = [
  "layer_tokens",
  "length",
  "flops",
  "flops_derived",
  "weight_bytes",
  "kv_read",
  "step_us",
  "kv_resident",
  "kv_written",
  "kv_allocated",
  "seq_len",
  "rank",
  "logprob",
  "sampled",
  "entropy",
  "uniform",
];

export function Compute() {
  const step = frame.value;
  const sum = totals.value;
  return (
    <Instrument name="COMPUTE" id="compute" hint="the work of this step">
      <p class={`headline ${step && step.recomputed > 0 ? "again" : ""}`}>{step ? work(step) : "No step yet."}</p>
      <Passage />
      <p class="sentence">
        <Stat name="layer_tokens" class="strong" />{" "}
        {step ? <LayerTokens of={step.length} layers={card.value?.layers ?? 0} /> : "layer-tokens"}
        <span class="sentence-note">
          each is one token through one layer; <Total name="layer_tokens" value={sum?.layer_tokens} unit="" /> so far
        </span>
      </p>
      <table class="sums">
        <thead>
          <tr>
            <td />
            <th scope="col">this step</th>
            <th scope="col">so far</th>
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row">forward tokens</th>
            <td>
              <Stat name="length" bare />
            </td>
            <td>
              <Total name="forward_tokens" value={sum?.forward_tokens} unit="" />
            </td>
          </tr>
          <tr>
            <th scope="row">FLOPs</th>
            <td>
              <Stat name="flops" />
            </td>
            <td>
              <Total name="flops" value={sum?.flops} unit="FLOP" />
            </td>
          </tr>
          <tr>
            <th scope="row">… by formula</th>
            <td>
              <Stat name="flops_derived" />
            </td>
            <td>
              <Figure
                value={sum?.flops_derived ?? null}
                source="derived"
                unit="FLOP"
                meaning={`${meaning("flops_derived")}; summed`}
              />
            </td>
          </tr>
          <tr>
            <th scope="row">weights read</th>
            <td>
              <Stat name="weight_bytes" />
            </td>
            <td>
              <Figure
                value={sum?.weight_bytes ?? null}
                source="counted"
                unit="B"
                meaning={`${meaning("weight_bytes")}; summed`}
              />
            </td>
          </tr>
          <tr>
            <th scope="row">K and V read</th>
            <td>
              <Stat name="kv_read" />
            </td>
            <td>
              <Total name="kv_read" value={sum?.kv_read} unit="B" />
            </td>
          </tr>
          <tr>
            <th scope="row">time</th>
            <td>
              <Stat name="step_us" />
            </td>
            <td>
              <Total name="step_us" value={sum?.step_us} unit="us" measured />
            </td>
          </tr>
        </tbody>
      </table>
      <Alike />
      {step !== null && step.flops !== step.flops_derived && (
        <p class="sentence-note flops-note">
          More FLOPs are counted than the formula has: where several tokens go through together, attention also computes
          the half that the causal mask then hides.
        </p>
      )}
    </Instrument>
  );
}

/** Under a step without the cache: the time of the run's last step with it that computed as many new tokens. */
function Alike() {
  const step = frame.value;
  if (step === null || step.cache || step.recomputed === 0) return null;
  const first = step.length - step.recomputed;
  const alike = run.value?.frames.findLast((one) => one.step < step.step && one.cache && one.length === first);
  if (alike === undefined) return null;
  return (
    <p class="sentence">
      With the cache, step {numbered(alike.step)} took{" "}
      <Told name="with_cache_us" value={alike.step_us} about={NUMBERS.step_us} />
    </p>
  );
}

/** The text as a strip: what was kept, what was computed for the first time, what was computed again. */
function Passage() {
  const step = frame.value;
  if (step === null) return <div class="passage" />;
  const all = step.start + step.length;
  const parts = [
    ["kept", step.start],
    ["recomputed", step.recomputed],
    ["fresh", step.length - step.recomputed],
  ] as const;
  return (
    <div class="passage" aria-hidden="true">
      {parts.map(([role, share]) => share > 0 && <span key={role} class={role} style={{ flexGrow: share / all }} />)}
    </div>
  );
}

export function KvCache() {
  const step = frame.value;
  const model = card.value;
  const perToken = model?.kv_bytes_per_token ?? null;
  const pageBytes = model ? model.page_size * model.kv_bytes_per_token : 0;
  const states = model?.state_bytes ?? 0;
  const pages = step && pageBytes > 0 ? Number(step.kv_allocated) / pageBytes : null;
  const slack = step ? step.kv_allocated - step.kv_resident : null;
  const off = step !== null && !step.cache; // then the pages are scratch: filled, read and given back in the same step
  const filled = step && step.kv_allocated > 0n ? Number(step.kv_resident) / Number(step.kv_allocated) : 0;
  return (
    <Instrument name="KV_CACHE" id="kv" hint="the saved keys and values">
      <div class="main-figure">
        <Stat name="kv_resident" class="big kept-ink" />
        <span class="main-unit">
          {off
            ? "nothing is kept for the next step"
            : step
              ? `of ${plural(step.start + step.length, "token")}${states > 0 ? " and a state" : ""}, for the next step`
              : ""}
        </span>
      </div>
      <div class="gauge" aria-hidden="true">
        <span class="kept" style={{ width: `${filled * 100}%` }} />
      </div>
      <dl class="pairs">
        <Pair name="per token">
          <Figure
            name="kv_per_token"
            value={perToken}
            source="derived"
            unit="B"
            meaning={model ? perTokenFormula(model) : ""}
          />
        </Pair>
        <Pair name={off ? "discarded" : "written"}>
          <Stat name="kv_written" />
        </Pair>
        <Pair name={off ? "scratch" : "allocated"}>
          <Stat name="kv_allocated" />
        </Pair>
        {!off && (
          <Pair name="slack">
            <Figure
              value={slack}
              source="derived"
              unit="B"
              meaning="allocated minus kept: page room that holds nothing"
            />
          </Pair>
        )}
        {states > 0 ? (
          <Pair name="of it states">
            <Figure
              name="state_bytes"
              value={off ? 0 : states}
              source="derived"
              unit="B"
              meaning={stateFormula(model)}
            />
          </Pair>
        ) : (
          <Pair name={off ? "scratch pages" : "pages"}>
            <Figure
              value={pages}
              source="derived"
              unit={model ? `of ${count(model.pages)}` : ""}
              meaning={`allocated, divided by the size of a page: ${model?.page_size ?? "–"} tokens`}
            />
          </Pair>
        )}
      </dl>
    </Instrument>
  );
}

const stateFormula = (model: ModelCard | null): string =>
  `the states of ${plural(statesOf(model?.windows ?? []).length, "layer")}: each token rewrites them, so they do not grow with the text`;

function perTokenFormula({ windows, kv_heads, head_size, latent, kv_format }: ModelCard): string {
  const layers = windows.filter((window) => window !== 0).length;
  const stored = `bytes of a number in the KV format (${kv_format}), scales included`;
  if (latent) return `${layers} layers × a row of ${latent} numbers for all heads × ${stored}`;
  return `2 (K and V) × ${layers} layers × ${kv_heads} KV heads × head size ${head_size} × ${stored}`;
}

export function SeqLen() {
  const current = run.value;
  const context = card.value?.context ?? 0;
  const prompt = current?.promptTokens ?? null;
  const all = current ? length.value : 0;
  const generated = prompt === null ? null : all - prompt;
  const share = (part: number | null) => ({ width: `${context > 0 ? ((part ?? 0) / context) * 100 : 0}%` });
  return (
    <Instrument name="SEQ_LEN" id="seq" hint={context > 0 ? `of a context of ${count(context)}` : "tokens of the text"}>
      <div class="main-figure">
        <Stat name="seq_len" class="big" bare />
        <span class="main-unit sum-of">
          <span>
            = <Tokens of="prompt" value={prompt} /> prompt
          </span>
          <span>
            + <Tokens of="generated" value={generated} /> generated
          </span>
        </span>
      </div>
      <div class="gauge" aria-hidden="true">
        <span class="prompt" style={share(prompt)} />
        <span class="generated" style={share(generated)} />
      </div>
    </Instrument>
  );
}

function Tokens({ of, value }: { of: "prompt" | "generated"; value: number | null }) {
  return <Figure name={`${of}_tokens`} value={value} source="counted" unit="" meaning={`tokens, ${of}`} />;
}

/** Every number of the step that has no place of its own. */
export function Details() {
  const names = Object.keys(NUMBERS).filter((name): name is Name => !PLACED.includes(name as Name));
  return (
    <details class="instrument details" open>
      <summary>
        <h2>This step</h2>
        <span class="hint">all further numbers</span>
      </summary>
      <dl class="pairs single">
        {names.map((name) => (
          <div key={name}>
            <dt title={meaning(name)}>{NUMBERS[name]?.label}</dt>
            <dd>
              <Stat name={name} />
            </dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

interface InstrumentProps {
  name: string;
  id: string;
  hint: string;
  children: ComponentChildren;
}

export function Instrument({ name, id, hint, children }: InstrumentProps) {
  return (
    <section class={`instrument ${id}`} aria-labelledby={`${id}-name`}>
      <header>
        <h2 id={`${id}-name`}>{name}</h2>
        <span class="hint">{hint}</span>
      </header>
      {children}
    </section>
  );
}

function Pair({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

interface TotalProps {
  name: string;
  value: number | bigint | undefined;
  unit: string;
  measured?: boolean;
}

export function Total({ name, value, unit, measured = false }: TotalProps) {
  const summed = name === "forward_tokens" ? meaning("length") : meaning(name as Name);
  return (
    <Figure
      name={`total_${name}`}
      value={value ?? null}
      source={measured ? "measured" : "counted"}
      unit={unit}
      meaning={`${summed}; summed over the steps so far`}
    />
  );
}

const meaning = (name: Name): string => NUMBERS[name]?.meaning ?? "";
