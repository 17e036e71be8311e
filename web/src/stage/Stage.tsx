// The frame around the stage: the sentence, the one number with its two bars, the switch that is the lesson, the legend.
// The picture itself is stage.ts.

import { useEffect, useRef } from "preact/hooks";
import * as actions from "../visit/actions";
import { share } from "../visit/address";
import { lanes } from "./lanes";
import { percent } from "../ui/format";
import type { Role } from "./renderers/roles";
import { hideFirst, row } from "../run/answers/attention-row";
import { WEIGHTS } from "./scene";
import * as stage from "./stage";
import { cache, clustered, embedded, frame, live, panel, result, run, shown, summary, switched } from "../visit/store";
import { tour } from "../visit/tour";
import * as flight from "./flight/flight";
import { CellHint } from "./CellHint";
import { Banners, Centre } from "../ui/Overlay";
import { Result } from "../run/text/Result";
import { Story } from "../run/text/Story";
import { usable } from "../panels/usable";
import { Cameras } from "./View";
import { RaceWork } from "./RaceWork";
import { Flight, FlightWords } from "./flight/Flight";
import { Work } from "./Work";

export function Stage() {
  return (
    <main class={flight.stop.value === null ? "stage" : "stage flying"} aria-label="Stage">
      {(run.value !== null || lanes.value !== null) && (
        <div class="stage-head">
          {flight.stop.value === null ? <Story /> : <FlightWords />}
          {lanes.value !== null ? <RaceWork /> : result.value === null && <Work />}
        </div>
      )}
      <Banners />
      <View />
      <div class="stage-foot">
        <Legend />
        {lanes.value === null && <CacheSwitch />}
        <div class="foot-side">
          <Next />
          <Hint />
          {run.value !== null && lanes.value === null && (
            <button
              type="button"
              class="fly-in"
              aria-pressed={flight.stop.value !== null}
              title="Fly into the model: from a word to the next one (I)"
              onClick={() => (flight.stop.value === null ? flight.begin() : flight.go(null))}
            >
              Fly in
            </button>
          )}
          {usable().some(({ id }) => id === "code") && run.value !== null && lanes.value === null && (
            <button
              type="button"
              class="see-code"
              aria-pressed={panel.value === "code"}
              title="The code of this step, beside the stage"
              onClick={() => (panel.value = panel.value === "code" ? null : "code")}
            >
              In code
            </button>
          )}
          {embedded.value && (
            <>
              <Cameras />
              <a class="open-whole" href={share()} target="_blank" rel="noopener" title="Open this run in the explorer">
                Tokenwright
              </a>
            </>
          )}
        </div>
      </div>
    </main>
  );
}

function View() {
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => (host.current ? stage.mount(host.current) : undefined), []);
  return (
    <div class={flight.stop.value === null ? "view" : "view inside"}>
      <div class={run.value === null && lanes.value === null ? "canvas blank" : "canvas"} ref={host} />
      <Centre />
      <CellHint />
      <Flight />
      <Result />
    </div>
  );
}

const PATIENCE = 6; // steps before the lesson is offered

/** Whether the next step will be made another way than the shown one. */
function Next() {
  const over = run.value?.ended === true;
  const own = frame.value?.cache;
  if (!live.value || own === undefined || own === cache.value || lanes.value !== null) return null;
  return (
    <span class="next-mode">
      {over ? "next run" : "next"}: {cache.value ? "KV cache" : "no cache"}
    </span>
  );
}

/** What the switch can be used for next, until it has been used once; and the way back from it. */
function Hint() {
  const switches = live.value || (run.value?.both.size ?? 0) > 0;
  if (!switches || lanes.value !== null || summary.value !== null) return null;
  if (tour.value !== "none" && tour.value !== "over") return null; // it does it itself
  if (frame.value?.cache === false && !(live.value && cache.value))
    return <Offer text="Cache back on" class="hint-next back" />;
  if (switched.value || frame.value?.cache === false || shown.value < PATIENCE) return null;
  if (tour.value === "over") return <Offer text="Your turn: switch the cache off" class="hint-next invite" />;
  return <Offer text="Cache off:" class="hint-next" />;
}

function Offer({ text, class: look }: { text: string; class: string }) {
  return (
    <p class={look}>
      {text} <kbd>N</kbd>
    </p>
  );
}

/** Which way the shown step was made. */
function CacheSwitch() {
  const current = run.value;
  const replay = current !== null && current.origin !== "live";
  const fixed = replay ? current.both.size === 0 : clustered.value;
  const over = current?.ended === true;
  const on = frame.value?.cache ?? cache.value;
  const title = replay
    ? fixed
      ? "This recording has one way only; Share, Page saves both"
      : "This recording has each step both ways (N)"
    : fixed
      ? "Replicas write with the cache"
      : `Takes effect with the next ${over ? "run" : "step"} (N)`;
  return (
    <div class="cache-switch" role="group" aria-label="KV cache" title={title}>
      <button type="button" class="on" aria-pressed={on} disabled={fixed} onClick={() => actions.setCache(true)}>
        KV cache <small>saves the work</small>
      </button>
      <button type="button" class="off" aria-pressed={!on} disabled={fixed} onClick={() => actions.setCache(false)}>
        No cache <small>does it all again</small>
      </button>
    </div>
  );
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
  if (role === "fresh") return scratch() ? "new, thrown away" : "computed now";
  const first = row.value?.codes[0];
  if (role !== "beam" || !hideFirst.value || first === undefined) return role === "beam" ? "attention" : role;
  return `attention, without ${percent(WEIGHTS[first] ?? 0)} on the first token`;
}
