// During a race, in place of the step's number: what both lanes have done so far, in bars of one scale, and their clocks.

import { lanes, type Lane } from "./lanes";
import { Figure } from "../ui/Stat";

export function RaceWork() {
  const race = lanes.value;
  if (race === null) return null;
  const most = race.layers * race.all;
  return (
    <div class="work">
      <dl class="versus of-race" aria-label="The work of both lanes so far">
        <dt>with cache</dt>
        <Bar name="cached" role="kept" lane={race.cached} layers={race.layers} most={most} />
        <dt>without</dt>
        <Bar name="uncached" role="recomputed" lane={race.uncached} layers={race.layers} most={most} />
      </dl>
    </div>
  );
}

interface BarProps {
  name: "cached" | "uncached";
  role: string;
  lane: Lane;
  layers: number;
  most: number; // layer-tokens that the bar's whole length stands for
}

function Bar({ name, role, lane, layers, most }: BarProps) {
  const work = layers * lane.tokens;
  return (
    <>
      <dd class={`result-bar ${role}`} aria-hidden="true">
        <span style={{ width: `${(100 * work) / Math.max(1, most)}%` }} />
      </dd>
      <dd>
        <Figure
          name={`lane_${name}_work`}
          value={work}
          source="counted"
          unit=""
          meaning="layer-tokens so far: layers x tokens sent through them"
        />{" "}
        cells
      </dd>
      <dd>
        <Figure
          name={`lane_${name}_us`}
          value={lane.ended}
          source="measured"
          unit="us"
          meaning="the measured times of the lane's steps so far"
        />
      </dd>
    </>
  );
}
