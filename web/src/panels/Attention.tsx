// The tokens that one head of one layer read to choose the newest token, by position. The first token often takes most of it: a
// place to leave attention that has nothing else to look at, not a sign that it matters.

import { useSignal } from "@preact/signals";
import { percent, pointed } from "../ui/format";
import * as heads from "../run/answers/heads";
import { MEASURES, type Measure, masses, measure } from "../run/answers/heads";
import {
  hideFirst,
  keepsState,
  obtainable,
  refusal,
  row,
  select,
  selected,
  unasked,
} from "../run/answers/attention-row";
import { WEIGHTS, strongest } from "../stage/scene";
import { card, frame, hovered, run } from "../visit/store";
import type { AttentionRow } from "../schema";
import { Instrument } from "./Instruments";
import { Selectors } from "../stage/View";
import { shower } from "../run/patches";

const COLUMNS = 320; // of the plot; more positions share a column, which shows the largest

const SCALES = ["linear", "root", "log"] as const;
type Scale = (typeof SCALES)[number];
const LEAST = Math.log(255 ** 2); // of a logarithmic scale: the smallest weight that a row can tell from none

export function Attention() {
  const scale = useSignal<Scale>("root");
  const found = row.value;
  const HeatMaps = shower.value?.HeatMaps;
  return (
    <Instrument name="Attention" id="attention" hint="what one head read in this step">
      <Selectors />
      <Grid />
      {found && HeatMaps && <HeatMaps row={found} />}
      {found ? <Plot row={found} scale={scale.value} /> : <Missing />}
      <div class="attention-foot">
        <span class="under">weight by position</span>
        <div class="scales" role="group" aria-label="Scale of the weights">
          {SCALES.map((name) => (
            <button type="button" key={name} aria-pressed={scale.value === name} onClick={() => (scale.value = name)}>
              {name}
            </button>
          ))}
        </div>
        <button
          type="button"
          class="quiet"
          aria-pressed={hideFirst.value}
          title="Many heads leave their weight on the first token. Hidden, the others are seen; their figures stay (S)"
          onClick={() => (hideFirst.value = !hideFirst.value)}
        >
          {hideFirst.value && found ? `first token hidden: ${percent(weight(found, 0))}` : "hide the first token"}
        </button>
      </div>
      <dl class="pairs">
        <div>
          <dt>read most</dt>
          <dd class="word">{found ? run.value?.called(found.argmax) : "–"}</dd>
        </div>
        <div>
          <dt>its weight</dt>
          <dd>{found ? percent(weight(found, found.argmax)) : "–"}</dd>
        </div>
        <div>
          <dt title="the share of the first token: where attention goes that has nothing else to read">first token</dt>
          <dd>{found ? percent(weight(found, 0)) : "–"}</dd>
        </div>
        <div>
          <dt title="the share of the last eight positions in this step">last eight</dt>
          <dd>{found ? percent(tail(found, 8)) : "–"}</dd>
        </div>
      </dl>
    </Instrument>
  );
}

const weight = (found: AttentionRow, position: number): number => WEIGHTS[found.codes[position] ?? 0] ?? 0;

function tail(found: AttentionRow, count: number): number {
  return found.codes.subarray(-count).reduce((sum, code) => sum + (WEIGHTS[code] ?? 0), 0);
}

function Missing() {
  return <div class="plot missing">{reason()}</div>;
}

function reason(): string {
  if (frame.value === null) return "No step yet.";
  if (keepsState(selected.value.layer))
    return "This layer attends to no token: it keeps one state of the text, which each token rewrites.";
  if (unasked.value !== "") return unasked.value;
  if (refusal.value !== "") return refusal.value;
  return obtainable.value
    ? "Asking the engine for this row."
    : "This row was not recorded, and there is no engine to ask.";
}

function Plot({ row: found, scale }: { row: AttentionRow; scale: Scale }) {
  const size = found.codes.length;
  const count = Math.min(COLUMNS, size);
  const argmax = strongest(found, hideFirst.value);
  const most = weight(found, argmax) || 1;
  const height = (code: number): number => {
    const share = (WEIGHTS[code] ?? 0) / most;
    if (scale === "linear") return share * 100;
    if (scale === "root") return Math.sqrt(share) * 100;
    return share > 0 ? Math.max(0, 1 + Math.log(share) / LEAST) * 100 : 0;
  };
  let path = "";
  for (let column = 0; column < count; column++) {
    const from = Math.floor((column * size) / count);
    const to = Math.max(from + 1, Math.floor(((column + 1) * size) / count));
    let code = 0;
    for (let i = Math.max(from, hideFirst.value ? 1 : 0); i < to; i++) code = Math.max(code, found.codes[i] ?? 0);
    const high = Math.min(100, height(code));
    if (high > 0.4) path += `M${column + 0.06} 100V${(100 - high).toFixed(2)}h0.88V100z`;
  }
  const place = (position: number) => Math.floor((position * count) / size);
  const pick = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    hovered.value = Math.min(size - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * size)));
  };
  const over = hovered.value;
  return (
    <svg
      class="plot"
      viewBox={`0 0 ${count} 100`}
      preserveAspectRatio="none"
      role="img"
      aria-label={`Weights of layer ${found.layer}, head ${found.head} over ${size} positions`}
      onPointerMove={pick}
      onPointerLeave={() => (hovered.value = null)}
    >
      {over !== null && over < size && <rect class="plot-over" x={place(over)} y="0" width="1" height="100" />}
      <path class="plot-bars" d={path} />
      <rect class="plot-most" x={place(argmax)} y="97" width="1" height="3" />
    </svg>
  );
}

const MEANING: Record<Measure, string> = {
  sink: "share on the first token, where attention goes that has nothing else to read",
  local: "share on the last eight tokens",
  entropy: "how even the weights are: 0 one token, 1 all alike",
};

/** Why the grid is empty. */
const waiting = (): string => unasked.value || heads.refusal.value || "shown when paused";

/** All heads of all layers at a glance, filled by what they did at this step; a click watches one. Keys have the steppers. */
function Grid() {
  const model = card.value;
  if (!model || !heads.gridded.value) return null;
  const { layer, head } = selected.value;
  const values = masses.value?.[measure.value];
  return (
    <>
      <div class="measures" role="group" aria-label="What fills the grid of heads">
        {MEASURES.map((name) => (
          <button
            type="button"
            key={name}
            aria-pressed={measure.value === name}
            title={MEANING[name]}
            onClick={() => (measure.value = name)}
          >
            {name}
          </button>
        ))}
        <span class="under">{values ? "layers down, heads across" : waiting()}</span>
      </div>
      <div class="grid" aria-hidden="true" style={{ gridTemplateColumns: `repeat(${model.heads}, 1fr)` }}>
        {Array.from({ length: model.layers * model.heads }, (_, i) => {
          const l = Math.floor(i / model.heads);
          const h = i % model.heads;
          const value = values?.[i];
          const words = value === undefined ? "" : `: ${measure.value} ${pointed(value.toFixed(2))}`;
          return (
            <span
              key={i}
              class={l === layer && h === head ? "now" : ""}
              title={`layer ${l}, head ${h}${words}`}
              data-mass={value ?? ""}
              style={{ "--w": `${(value ?? 0) * 100}%` }}
              onClick={() => select(l, h)}
            />
          );
        })}
      </div>
    </>
  );
}
