// The frame around the stage: the switch that is the lesson, the story, the cameras, the legend, and which layer and
// head are looked at. The picture itself is stage.ts.

import { useEffect, useRef } from "preact/hooks";
import * as actions from "../actions";
import { share } from "../address";
import { lanes } from "../lanes";
import { numbered, percent } from "../format";
import { CAMERAS, type Camera, camerasOf } from "../renderers/renderer";
import type { Role } from "../renderers/roles";
import { hideFirst, row, selected } from "../rows";
import { WEIGHTS } from "../scene";
import { NUMBERS } from "../schema";
import * as stage from "../stage";
import { cache, camera, card, embedded, frame, live, pictureTime, renderer, run, shown, summary, switched, totals } from "../store";
import { Icon } from "./icons";
import { Banners, Centre } from "./Overlay";
import { Total } from "./Instruments";
import { Minimap } from "./Minimap";
import { Result } from "./Result";
import { Figure, LayerTokens, Stat, Told } from "./Stat";
import { Story } from "./Story";

const NAMES: Record<Camera, string> = { iso: "Iso", top: "Top", side: "Side", head: "Head", follow: "Follow" };

export function Stage() {
  return (
    <main class="stage" aria-label="Stage">
      <div class="stage-bar">
        <CacheSwitch />
        <Hint />
        <span class="fill" />
        <Cameras />
        {embedded.value && (
          <a class="open-whole" href={share()} target="_blank" rel="noopener" title="Open this run in the explorer">
            Tokenwright
          </a>
        )}
      </div>
      {(run.value !== null || lanes.value !== null) && <Story />}
      <Versus />
      {run.value !== null && <Figures />}
      <Banners />
      {lanes.value === null && <Result />}
      <View />
      {run.value !== null && lanes.value === null && <Minimap />}
      <div class="stage-foot">
        <Legend />
        {lanes.value === null && <Selectors />}
      </div>
    </main>
  );
}

/** On a narrow screen, where the instruments are on a tab of their own: the work of the step and of the run. */
function Figures() {
  return (
    <p class="figures">
      <Stat name="layer_tokens" class="figures-big" />
      {frame.value ? <LayerTokens of={frame.value.length} layers={card.value?.layers ?? 0} /> : "layer-tokens"}
      <span class="figures-sum">
        <Total name="layer_tokens" value={totals.value?.layer_tokens} unit="" /> so far
      </span>
    </p>
  );
}

function View() {
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => (host.current ? stage.mount(host.current) : undefined), []);
  return (
    <div class="view">
      <div class={run.value === null && lanes.value === null ? "canvas blank" : "canvas"} ref={host} />
      <Centre />
    </div>
  );
}

/** Above the picture: the work and the time of a step without the cache, and the work of the same step with it. The time
 * with the cache is that of the run's last such step, if it has one of as many tokens. */
function Versus() {
  const step = frame.value;
  const layers = card.value?.layers ?? 0;
  if (step === null || lanes.value !== null || step.cache || step.recomputed === 0 || summary.value !== null) return null;
  const first = step.length - step.recomputed;
  const alike = run.value?.frames.findLast((one) => one.step < step.step && one.cache && one.length === first) ?? null;
  const bar = (share: number, role: string) => (
    <span class={`result-bar ${role}`} aria-hidden="true">
      <span style={{ width: `${share * 100}%` }} />
    </span>
  );
  return (
    <dl class="versus" aria-label="The work of this step">
      <dt>
        <span class="for-room">this step, </span>without the cache
      </dt>
      {bar(1, "recomputed")}
      <dd>
        <Stat name="layer_tokens" /> <LayerTokens of={step.length} layers={layers} />
        <span class="versus-time">
          <Stat name="step_us" />
        </span>
      </dd>
      <dt>with the cache</dt>
      {bar(first / step.length, "kept")}
      <dd>
        <Figure
          name="with_cache"
          value={layers * first}
          source="derived"
          unit=""
          meaning="layers x (tokens of the step - those computed before)"
        />{" "}
        <LayerTokens of={first} layers={layers} />
        {alike !== null && (
          <span class="versus-time">
            <Told name="with_cache_us" value={alike.step_us} about={NUMBERS.step_us} /> in step {numbered(alike.step)}
          </span>
        )}
      </dd>
    </dl>
  );
}

const PATIENCE = 6; // steps before the lesson is offered

/** The next thing to do, until it has been done once; and the way back from it. */
function Hint() {
  if (!live.value || lanes.value !== null || summary.value !== null) return null;
  if (!cache.value && frame.value?.cache === false)
    return (
      <button type="button" class="hint-next back" onClick={() => actions.setCache(true)}>
        <span class="for-keys">
          Turn the cache back on <kbd>N</kbd>
        </span>
        <span class="for-touch">Turn the cache back on</span>
      </button>
    );
  if (switched.value || !cache.value || shown.value < PATIENCE) return null;
  return (
    <button type="button" class="hint-next" onClick={() => actions.setCache(false)}>
      <span class="for-keys">
        Now press <kbd>N</kbd> to switch the cache off
      </span>
      <span class="for-touch">Now switch the cache off</span>
    </button>
  );
}

/** Which way the shown step was made; and, where that differs, how the next one will be. */
function CacheSwitch() {
  const replay = run.value !== null && run.value.origin !== "live";
  const over = run.value?.ended === true;
  const on = frame.value?.cache ?? cache.value;
  const title = replay
    ? "This is a recording: what it did is shown, and cannot be changed"
    : `Takes effect with the next ${over ? "run" : "step"} (N)`;
  const differs = !replay && on !== cache.value;
  return (
    <>
      <div class="cache-switch" role="group" aria-label="KV cache" title={title}>
        <button type="button" class="on" aria-pressed={on} disabled={replay} onClick={() => actions.setCache(true)}>
          KV cache
        </button>
        <button type="button" class="off" aria-pressed={!on} disabled={replay} onClick={() => actions.setCache(false)}>
          No cache
        </button>
      </div>
      {differs && <span class="next-mode">{over ? "next run" : "next"}: {cache.value ? "KV cache" : "no cache"}</span>}
    </>
  );
}

function Cameras() {
  return (
    <div class="cameras" role="group" aria-label="View">
      {camerasOf(renderer.value).map((name) => (
        <button
          type="button"
          key={name}
          aria-pressed={camera.value.name === name}
          onClick={() => actions.setCamera(name)}
          title={`${MEANINGS[name]} (${CAMERAS.indexOf(name) + 1})`}
        >
          {NAMES[name]}
        </button>
      ))}
      <span class="divider" aria-hidden="true" />
      {(["3d", "2d"] as const).map((kind) => (
        <button
          type="button"
          key={kind}
          aria-pressed={renderer.value === kind}
          onClick={() => actions.setRenderer(kind)}
          title={kind === "2d" ? "Draw in 2-D (V)" : `Draw in 3-D (V)${slowness()}`}
        >
          {kind === "3d" ? "3-D" : "2-D"}
        </button>
      ))}
    </div>
  );
}

const MEANINGS: Record<Camera, string> = {
  iso: "The beams and the wall",
  top: "The beams alone, from above",
  side: "The wall of the cache, from the front",
  head: "Along the row, from the write head",
  follow: "The newest tokens",
};

/** A machine without graphics hardware was found to be too slow for 3-D before the first picture. */
function slowness(): string {
  return pictureTime.value === null ? "" : `; without graphics hardware ${Math.round(pictureTime.value)} ms a picture here`;
}

/** What is in the picture at this moment; what comes later in the step has its place kept. */
function Legend() {
  return (
    <ul class="legend" aria-label="Legend">
      {stage.legend.value.map(({ role, drawn }) => (
        <li key={role} class={drawn ? "" : "later"}>
          <span class={`swatch ${role} ${role === "fresh" && scratch() ? "scratch" : ""}`} aria-hidden="true" />
          {nameOf(role)}
        </li>
      ))}
    </ul>
  );
}

/** Whether the shown step threw away all that it computed. */
const scratch = (): boolean => lanes.value === null && frame.value?.cache === false;

function nameOf(role: Role): string {
  if (role === "kept") return "in the cache";
  if (role === "shared") return "pages shared with a branch";
  if (role === "recomputed") return `computed again, ${scratch() || lanes.value !== null ? "thrown away" : "now kept"}`;
  if (role === "fresh") return scratch() ? "new, thrown away" : "computed in this step";
  const first = row.value?.codes[0];
  if (role !== "beam" || !hideFirst.value || first === undefined) return role === "beam" ? "attention" : role;
  return `attention, without ${percent(WEIGHTS[first] ?? 0)} on the first token`;
}

export function Selectors() {
  const { layer, head } = selected.value;
  const fixed = run.value !== null && run.value.origin !== "live";
  const title = fixed ? "A recording has the rows of one layer and head only" : undefined;
  return (
    <div class="selectors" {...(title ? { title } : {})}>
      <Stepper
        name="layer"
        value={layer}
        of={card.value?.layers ?? 0}
        keys="[ ]"
        disabled={fixed}
        change={actions.changeLayer}
      />
      <Stepper
        name="head"
        value={head}
        of={card.value?.heads ?? 0}
        keys="{ }"
        disabled={fixed}
        change={actions.changeHead}
      />
    </div>
  );
}

interface StepperProps {
  name: string;
  value: number;
  of: number;
  keys: string;
  disabled: boolean;
  change(by: number): void;
}

function Stepper({ name, value, of, keys, disabled, change }: StepperProps) {
  return (
    <div class="stepper" role="group" aria-label={name}>
      <span class="stepper-name">{name}</span>
      <button
        type="button"
        aria-label={`${name} before`}
        title={`${name} (${keys})`}
        disabled={disabled}
        onClick={() => change(-1)}
      >
        <Icon name="minus" />
      </button>
      <output class="stepper-value">
        {of > 0 ? value : "–"}
        <span class="of"> of 0–{of > 0 ? of - 1 : "–"}</span>
      </output>
      <button
        type="button"
        aria-label={`${name} after`}
        title={`${name} (${keys})`}
        disabled={disabled}
        onClick={() => change(1)}
      >
        <Icon name="plus" />
      </button>
    </div>
  );
}
