// The position of a token, as its key has it: each pair of numbers is a point, which is turned about the middle. The
// pairs of the query are turned as well.

import { figures, numbered } from "../../ui/format";
import type { WayView } from "../../schema/block";
import * as flight from "./flight";

const SMALL = 16; // pairs that have a dial of their own
const ROUND = 2 * Math.PI;

/** A pair's place before its turn and after it, on a circle of radius 1. */
function pairOf(view: WayView, at: number): { before: [number, number]; after: [number, number]; angle: number } {
  const half = view.angles.length;
  const on = (values: readonly number[]): [number, number] => {
    const [x, y] = [values[at] ?? 0, values[at + half] ?? 0];
    const long = Math.hypot(x, y) || 1;
    return [x / long, -y / long];
  };
  return { before: on(view.plain), after: on(view.key), angle: view.angles[at] ?? 0 };
}

export function Turn({ view }: { view: WayView }) {
  const half = view.angles.length;
  const at = Math.max(0, flight.number.value) % half;
  const { before, after, angle } = pairOf(view, at);
  const turns = Math.floor(angle / ROUND);
  const plain = [view.plain[at] ?? 0, view.plain[at + half] ?? 0];
  const key = [view.key[at] ?? 0, view.key[at + half] ?? 0];
  const said = (pair: number[]): string => `(${pair.map((one) => one.toPrecision(3)).join(", ")})`;
  return (
    <div class="way-turn">
      <svg viewBox="-1.25 -1.25 2.5 2.5" role="img" aria-label={`A pair turned by ${figures(angle)} radians`}>
        <circle r="1" class="rim" />
        <path d="M-1.2 0H1.2M0 -1.2V1.2" class="axes" />
        <path d={arc(before, after, angle % ROUND)} class="turned" />
        <path d={`M0 0L${before.join(" ")}`} class="before" />
        <path d={`M0 0L${after.join(" ")}`} class="after" />
        <circle cx={before[0]} cy={before[1]} r="0.06" class="before" />
        <circle cx={after[0]} cy={after[1]} r="0.08" class="after" />
      </svg>
      <dl class="way-sums">
        <dt>
          k{numbered(at)} and k{numbered(at + half)}
        </dt>
        <dd data-plain={plain.join()}>{said(plain)}</dd>
        <dt>position, from 0</dt>
        <dd>{view.position}</dd>
        <dt>turned by</dt>
        <dd data-angle={angle}>
          {figures(angle)} rad{turns > 0 && `, ${turns} whole ${turns === 1 ? "turn" : "turns"} and more`}
        </dd>
        <dt>in the cache</dt>
        <dd data-turned={key.join()}>{said(key)}</dd>
      </dl>
      <div class="way-dials" role="group" aria-label="Pairs of numbers: the first turn fast, the last slowly">
        {view.angles.slice(0, SMALL).map((each, i) => (
          <button
            type="button"
            key={i}
            aria-pressed={i === at}
            aria-label={`numbers ${i + 1} and ${i + 1 + half}: ${figures(each)} radians`}
            title={`numbers ${i + 1} and ${i + 1 + half}: ${figures(each)} radians`}
            onClick={() => flight.choose(i)}
          >
            <svg viewBox="-1.25 -1.25 2.5 2.5" aria-hidden="true">
              <circle r="1" class="rim" />
              <path d={`M0 0L${pairOf(view, i).after.join(" ")}`} class="after" />
            </svg>
          </button>
        ))}
      </div>
    </div>
  );
}

/** From one place of a circle of half the size to the other, counterclockwise. */
function arc([x0, y0]: [number, number], [x1, y1]: [number, number], angle: number): string {
  return `M${x0 / 2} ${y0 / 2}A0.5 0.5 0 ${angle > Math.PI ? 1 : 0} 0 ${x1 / 2} ${y1 / 2}`;
}
