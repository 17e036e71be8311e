// The pictures of the stops of a drill-down. Every number is the engine's; the page computes only the length of bars.

import { useEffect, useRef } from "preact/hooks";
import { figures, numbered, percent, plural } from "../ui/format";
import type { StepFrame } from "../schema";
import type { BlockStage } from "../schema/block";
import type { WayView } from "../schema/way";
import { WAY_VIEW } from "../schema/way";
import { selected } from "../run/answers/attention-row";
import { card, length, run } from "../visit/store";
import { quoted } from "../ui/text";
import * as drillDown from "./drill-down";
import { Told } from "../ui/Stat";
import { boxIn } from "./DrillDown";

/** On the way to the element that was clicked. */
const into = (event: Event, to: drillDown.Stop): void => {
  const target = event.currentTarget as HTMLElement;
  const place = target.closest(".way");
  drillDown.go(to, place && boxIn(place, target));
};

/** The column, a row for each layer; one layer, a row for each KV head. */
export function Layers({ stop }: { stop: "column" | "cell" }) {
  const model = card.value;
  if (model === null) return null;
  const { layer } = drillDown.cell.value;
  const group = Math.floor((selected.value.head * model.kv_heads) / model.heads);
  const whole = stop === "column";
  const rows = whole ? model.layers : model.kv_heads;
  const chosen = whole ? layer : group;
  return (
    <ol class={`way-rows ${whole ? "of-layers" : "of-heads"}`}>
      {Array.from({ length: rows }, (_, i) => (
        <li key={i}>
          <button
            type="button"
            {...(i === chosen && { "data-into": "" })}
            aria-current={i === chosen ? "true" : undefined}
            disabled={!whole && (i !== chosen || !drillDown.stops.value.includes("head"))}
            onClick={(event) => {
              if (whole) drillDown.cell.value = { ...drillDown.cell.value, layer: i };
              into(event, whole ? "cell" : "head");
            }}
          >
            <span>{whole ? `layer ${i}` : `KV head ${i}`}</span>
            <i class="half k">K{whole ? "" : ` ${model.head_size}`}</i>
            <i class="half v">V{whole ? "" : ` ${model.head_size}`}</i>
          </button>
        </li>
      ))}
    </ol>
  );
}

interface VectorProps {
  name: string;
  role: string;
  values: readonly number[];
  choose?: boolean; // whether a number leads to its product
}

/** Arrows go from number to number. */
function walk(event: KeyboardEvent): void {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = by === undefined ? null : (event.currentTarget as HTMLElement).children[drillDown.number.value + by];
  if (!(next instanceof HTMLElement) || by === undefined) return;
  event.preventDefault();
  drillDown.choose(drillDown.number.value + by);
  next.focus();
}

/** A vector as bars up and down from a line, each with its number under the pointer. */
export function Vector({ name, role, values, choose = false }: VectorProps) {
  const most = Math.max(...values.map(Math.abs), 1e-9);
  return (
    <figure class="way-vector">
      <figcaption>{name}</figcaption>
      <div
        class={`way-bars ${role}`}
        role={choose ? "group" : "img"}
        aria-label={`${name}: ${values.map(figures).join(", ")}`}
        {...(choose && { onKeyDown: walk })}
      >
        {values.map((value, i) => {
          const bar = (
            <i
              style={{ height: `${(Math.abs(value) / most) * 50}%`, [value < 0 ? "top" : "bottom"]: "50%" }}
              class={value < 0 ? "below" : ""}
            />
          );
          const title = `${name} ${numbered(i)}: ${value.toPrecision(4)}`;
          if (!choose)
            return (
              <span key={i} title={title} data-number={value}>
                {bar}
              </span>
            );
          return (
            <button
              type="button"
              key={i}
              tabIndex={i === drillDown.number.value ? 0 : -1}
              title={title}
              aria-label={title}
              data-number={value}
              {...(i === drillDown.number.value && { "data-into": "" })}
              onClick={(event) => {
                drillDown.choose(i);
                into(event, "product");
              }}
            >
              {bar}
            </button>
          );
        })}
      </div>
    </figure>
  );
}

/** One product, their sum, and the score. */
export function Product({ view, at }: { view: WayView; at: number }) {
  const [q, k, product] = [view.query[at] ?? 0, view.key[at] ?? 0, view.products[at] ?? 0];
  return (
    <dl class="way-sums">
      <dt title="one number of the query times the same one of the key">
        q{numbered(at)} × k{numbered(at)}
      </dt>
      <dd>
        {q.toPrecision(4)} × {k.toPrecision(4)} = <b data-number={product}>{product.toPrecision(4)}</b>
      </dd>
      <dt>q · k, all {view.products.length} of them</dt>
      <dd>
        <Told name="way_dot" value={view.dot} about={WAY_VIEW.dot} />
      </dd>
      <dt>scale</dt>
      <dd>
        <Told name="way_scale" value={view.scale} about={WAY_VIEW.scale} />
      </dd>
      <dt>score</dt>
      <dd data-into="">
        <Told name="way_score" value={view.score} about={WAY_VIEW.score} />
      </dd>
    </dl>
  );
}

/** The positions that are read most, with their scores and weights. */
export function Reads({ view }: { view: WayView }) {
  const most = Math.max(...view.reads.map(({ weight }) => weight), 1e-9);
  const others = length.value - 1 - view.reads.length;
  const held = 1 - view.reads.reduce((sum, { weight }) => sum + weight, 0);
  const table = useRef<HTMLTableElement>(null);
  useEffect(() => table.current?.querySelector(".now")?.scrollIntoView({ block: "nearest" }), [view]);
  return (
    <table class="way-reads" ref={table}>
      <thead>
        <tr>
          <th scope="col">token</th>
          <th scope="col">score</th>
          <th scope="col" colSpan={2} title={WAY_VIEW.weight?.meaning}>
            weight = e^score / Σ e^score
          </th>
        </tr>
      </thead>
      <tbody>
        {view.reads.map(({ position, score, weight }) => (
          <tr key={position} {...(position === view.position && { "data-into": "", class: "now" })}>
            <th scope="row">{quoted(run.value?.tokens[position]?.text ?? "")}</th>
            <td data-score={score}>{figures(score)}</td>
            <td class="way-bar">
              <i style={{ width: `${(100 * weight) / most}%` }} />
            </td>
            <td data-weight={weight}>{percent(weight)}</td>
          </tr>
        ))}
      </tbody>
      {others > 0 && (
        <tfoot>
          <tr>
            <th scope="row" colSpan={3}>
              the {plural(others, "other token")} together
            </th>
            <td>{percent(Math.max(0, held))}</td>
          </tr>
        </tfoot>
      )}
    </table>
  );
}

const STAGES: Record<string, string> = {
  input: "stream, before the layer",
  attention: "what all heads have read",
  output: "+ attention",
  residual: "stream, with attention",
  hidden: "inside the MLP",
  mlp_output: "+ MLP",
  result: "stream, after the layer",
};

/** The stream of the token through the layer, by the lengths of its vectors. */
export function Stages({ stages }: { stages: readonly BlockStage[] }) {
  const shown = stages.filter(({ name }) => name in STAGES);
  const most = Math.max(...shown.map(({ norm }) => norm), 1e-9);
  return (
    <table class="way-reads">
      <tbody>
        {shown.map(({ name, shape, norm }) => (
          <tr key={name} {...(name === "result" && { "data-into": "", class: "now" })}>
            <th scope="row">{STAGES[name]}</th>
            <td>{shape.join(" × ")}</td>
            <td class="way-bar">
              <i style={{ width: `${(100 * norm) / most}%` }} />
            </td>
            <td data-norm={norm}>{figures(norm)} long</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The most probable tokens of the step, and the one that was drawn. */
export function Candidates({ step }: { step: StepFrame }) {
  const shown = step.candidates.slice(0, 10).map(({ token, logprob }) => ({ token, p: Math.exp(logprob) }));
  return (
    <table class="way-reads">
      <tbody>
        {shown.map(({ token, p }) => (
          <tr key={token} class={token === step.token ? "now" : ""}>
            <th scope="row">{quoted(run.value?.named(token).text ?? "")}</th>
            <td />
            <td class="way-bar">
              <i style={{ width: `${100 * p}%` }} />
            </td>
            <td data-p={p}>{percent(p)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
