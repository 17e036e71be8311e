// The transport: play, one step back and on (Home and End go to the ends), the scrubber, and how fast the run goes on.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as actions from "../../visit/actions";
import * as player from "./player";
import { numbered, plural } from "../../ui/format";
import { lanes } from "../../stage/lanes";
import { clustered, frame, last, live, model, pace, pageState, playing, run, shown } from "../../visit/store";
import type { Run } from "../run";
import { activity } from "../../visit/messages";
import { Icon } from "../../ui/icons";
import { Scrubber } from "./Scrubber";

export function Transport() {
  const current = run.value;
  const none = last.value < 0;
  const over = current !== null && shown.value >= last.value && (current.origin !== "live" || current.ended);
  const canStep = current !== null && (shown.value < last.value || (current.origin === "live" && !current.ended));
  const playName = playing.value ? "Pause" : over && live.value ? "Run again" : "Play";
  return (
    <section class="transport" aria-label="Transport">
      <div class="transport-row">
        <div class="buttons" role="group" aria-label="Steps">
          <button
            type="button"
            aria-label="One step back"
            title="One step back (←)"
            disabled={shown.value <= 0}
            onClick={() => actions.step(-1)}
          >
            <Icon name="back" />
          </button>
          <button
            type="button"
            class="play"
            aria-label={playName}
            title={`${playName} (Space)`}
            disabled={current === null && (model.value === null || clustered.value)}
            onClick={actions.toggle}
          >
            <Icon name={playing.value ? "pause" : over && live.value ? "again" : "play"} />
          </button>
          <button
            type="button"
            aria-label="One step on"
            title={shown.value < last.value ? "One step on (→)" : "Let the engine take one step (→)"}
            disabled={!canStep}
            onClick={() => actions.step(1)}
          >
            <Icon name="forward" />
          </button>
        </div>
        <div class="progress-words">
          {lanes.value === null ? (
            <>
              <p class="counter">
                step <b>{frame.value ? numbered(frame.value.step) : "–"}</b>
                <span class="of">{none || current === null ? "" : among(current)}</span>
              </p>
              <p class={`activity ${activity.value.cut ? "cut" : ""}`}>
                <span>{activity.value.text}</span>
                <Lease />
              </p>
            </>
          ) : (
            <>
              <p class="counter">
                race: step <b>{lanes.value.cached.place.done}</b>
              </p>
              <p class="activity">without: {plural(lanes.value.uncached.place.done, "step")}</p>
            </>
          )}
        </div>
      </div>
      <Scrubber />
      <Pace />
    </section>
  );
}

/** Beside the number of a step: how many there are, which while a run goes on is no end. */
function among(current: Run): string {
  const newest = numbered(last.value + current.card.first_step);
  if (current.ended) return ` of ${newest}`;
  return shown.value < last.value ? ` of ${newest} so far` : "";
}

const SLOWEST = 0.25;
const FASTEST = 60;
const NOTCHES = 40; // of the slider; one more is engine speed

const toPace = (notch: number): number | null =>
  notch > NOTCHES ? null : Number((SLOWEST * (FASTEST / SLOWEST) ** (notch / NOTCHES)).toPrecision(2));

const toNotch = (value: number | null): number =>
  value === null ? NOTCHES + 1 : Math.round((Math.log(value / SLOWEST) / Math.log(FASTEST / SLOWEST)) * NOTCHES);

function Pace() {
  const words = pace.value === null ? "engine speed" : `${pace.value} tok/s`;
  return (
    <label class="pace">
      <span class="pace-name">speed</span>
      <input
        type="range"
        aria-label="speed"
        min={0}
        max={NOTCHES + 1}
        step={1}
        value={toNotch(pace.value)}
        aria-valuetext={words}
        onInput={(event) => player.setPace(toPace(Number(event.currentTarget.value)))}
      />
      <output>{words}</output>
    </label>
  );
}

const TELL_FROM = 300; // seconds

/** How long the engine still keeps the pages of a paused run, once that is not long. */
function Lease() {
  const state = run.value?.state.value;
  const lease = live.value && pageState.value === "paused" ? (state?.lease_s ?? null) : null;
  const left = useSignal<number | null>(null);
  useEffect(() => {
    if (lease === null) {
      left.value = null;
      return undefined;
    }
    const ends = performance.now() + lease * 1000;
    const tell = () => (left.value = Math.max(0, (ends - performance.now()) / 1000));
    tell();
    const timer = setInterval(tell, 5000);
    return () => clearInterval(timer);
  }, [lease, state]);
  if (left.value === null || left.value > TELL_FROM) return null;
  const words = left.value > 90 ? `${Math.round(left.value / 60)} min` : `${Math.round(left.value)} s`;
  return (
    <span class="lease" title="The engine keeps the pages of a paused run, and frees them when nobody continues it">
      {" "}
      · pages kept for {words}
    </span>
  );
}
