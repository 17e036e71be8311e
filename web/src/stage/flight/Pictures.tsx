// The pictures of the stops of a flight. Every number is the engine's; the page computes only the length of bars.

import { figures, numbered, pointed } from "../../ui/format";
import type { BlockStage } from "../../schema/block";
import type { WayView } from "../../schema/block";
import { WAY_VIEW } from "../../schema/block";
import { frame, run } from "../../visit/store";
import { marked } from "../../ui/text";
import * as flight from "./flight";
import { Told } from "../../ui/Stat";
import { Turn } from "./Turn";
import { Candidates, Draw, Layers, Reads } from "./Tables";

export function Flown({ stop }: { stop: flight.Stop }) {
  const view = flight.view.value;
  switch (stop) {
    case "word":
      return <Word />;
    case "embedding":
      return <Vectors names={["input"]} />;
    case "norm":
      return <Vectors names={["input", "norm"]} even />;
    case "mlp":
      return <Vectors names={["mlp_norm", "hidden", "mlp_output"]} />;
    case "residual":
      return <Vectors names={["input", "output", "mlp_output", "result"]} even />;
    case "next":
      return <Layers />;
    case "logits":
      return frame.value && <Candidates step={frame.value} />;
    case "draw":
      return frame.value && <Draw step={frame.value} view={flight.draw.value} />;
  }
  if (view === null) return null;
  switch (stop) {
    case "position":
      return view.angles.length > 0 ? <Turn view={view} /> : <Vector name="k" role="kept" values={view.key} />;
    case "qkv":
      return <Made view={view} />;
    case "score":
      return (
        <>
          <Vector name="q" role="generated" values={view.query} />
          <Vector name="k" role="kept" values={view.key} />
          <Vector name="q × k" role="beam" values={view.products} choose />
          <Product view={view} at={flight.number.value} />
        </>
      );
    case "mask":
      return <Reads view={view} weights={false} />;
    case "softmax":
      return <Reads view={view} weights />;
    case "value":
      return (
        <>
          <Vector name="v" role="kept" values={view.value} most={most(view.value, view.mixed)} />
          <p class="way-formula">
            × <Told name="way_weight" value={view.weight} about={WAY_VIEW.weight} />, + the others, each times its
            weight
          </p>
          <Vector name="o = Σ w v" role="beam" values={view.mixed} most={most(view.value, view.mixed)} />
        </>
      );
  }
}

/** The highest bar of vectors in one scale. */
const most = (...vectors: (readonly number[])[]): number => Math.max(...vectors.flat().map(Math.abs), 1e-9);

/** A token as the model has it: its text, and its id. */
function Word() {
  const token = run.value?.tokens[flight.cell.value.position];
  return (
    <p class="way-token">
      <b>“{marked(token?.text ?? "")}”</b>
      <span aria-hidden="true">→</span>
      <b data-token={token?.id}>id {token?.id}</b>
    </p>
  );
}

const STAGES: Record<string, readonly [name: string, role: string]> = {
  input: ["residual stream", "ink"],
  norm: ["after the norm", "ink"],
  output: ["+ what attention has read, times W_O", "beam"],
  mlp_norm: ["residual stream with attention, after the norm", "ink"],
  hidden: ["inside the MLP", "fresh"],
  mlp_output: ["+ what the MLP has made", "fresh"],
  result: ["= residual stream, for the next layer", "ink"],
};

/** Vectors of the layer, of which the engine gives the first numbers; `even`: all in one scale. */
function Vectors({ names, even = false }: { names: readonly string[]; even?: boolean }) {
  const view = flight.block.value;
  if (view === null) return null;
  const stages = names.flatMap((name) => view.stages.find((stage) => stage.name === name) ?? []);
  const highest = even ? most(...stages.map(({ numbers }) => numbers)) : undefined;
  return (
    <>
      {stages.map((stage) => (
        <Vector
          key={stage.name}
          name={nameOf(stage)}
          role={STAGES[stage.name]?.[1] ?? "ink"}
          values={stage.numbers}
          most={highest}
          of={stage.shape.reduce((product, side) => product * side, 1)}
          norm={stage.norm}
        />
      ))}
    </>
  );
}

function nameOf({ name }: BlockStage): string {
  if (flight.stop.value === "embedding") return `row ${run.value?.tokens[flight.cell.value.position]?.id} of the table`;
  const told = STAGES[name]?.[0] ?? name;
  return name === "hidden" && flight.gated.value ? `${told}, gate × up` : told;
}

interface VectorProps {
  name: string;
  role: string;
  values: readonly number[];
  choose?: boolean; // whether a number leads to its product
  most?: number | undefined; // what the highest bar stands for
  of?: number; // numbers that the vector has; these are the first
  norm?: number;
}

/** Arrows go from number to number. */
function walk(event: KeyboardEvent): void {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = by === undefined ? null : (event.currentTarget as HTMLElement).children[flight.number.value + by];
  if (!(next instanceof HTMLElement) || by === undefined) return;
  event.preventDefault();
  flight.choose(flight.number.value + by);
  next.focus();
}

/** A vector as bars up and down from a line, each with its number under the pointer. */
export function Vector({ name, role, values, choose = false, most: given, of = values.length, norm }: VectorProps) {
  const highest = given ?? most(values);
  return (
    <figure class="way-vector">
      <figcaption>
        {name}
        <small>
          {of > values.length ? `the first ${values.length} of ${of} numbers` : `${of} numbers`}
          {`: ${values
            .slice(0, 4)
            .map((value) => pointed(value.toPrecision(2)))
            .join(", ")}, …`}
          {norm !== undefined && <span data-norm={norm}>; length of all: {figures(norm)}</span>}
        </small>
      </figcaption>
      <div
        class={`way-bars ${role}`}
        role={choose ? "group" : "img"}
        aria-label={`${name}: ${values.map(figures).join(", ")}`}
        {...(choose && { onKeyDown: walk })}
      >
        {values.map((value, i) => {
          const bar = (
            <i
              style={{ height: `${(Math.abs(value) / highest) * 50}%`, [value < 0 ? "top" : "bottom"]: "50%" }}
              class={value < 0 ? "below" : ""}
            />
          );
          const title = `${name} ${numbered(i)}: ${pointed(value.toPrecision(4))}`;
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
              tabIndex={i === flight.number.value ? 0 : -1}
              title={title}
              aria-label={title}
              aria-pressed={i === flight.number.value}
              data-number={value}
              onClick={() => flight.choose(i)}
            >
              {bar}
            </button>
          );
        })}
      </div>
    </figure>
  );
}

/** What the token's three rows became: its query was used once, its key and value are in the cache. */
function Made({ view }: { view: WayView }) {
  const own = view.position === view.reader;
  const turns = view.plain.length > 0;
  const before = turns ? ", not turned yet" : "";
  return (
    <>
      {own ? (
        <Vector
          name={`q: asks now, then it is thrown away${before}`}
          role="generated"
          values={turns ? view.plain_query : view.query}
        />
      ) : (
        <p class="way-gone">q asked once, when the token was the newest, and was thrown away</p>
      )}
      <Vector
        name={`k: by which it is found, kept${turns ? ", once it is turned" : ""}`}
        role="kept"
        values={turns ? view.plain : view.key}
      />
      <Vector name="v: what is read from it, kept" role="kept" values={view.value} />
    </>
  );
}

/** One product, their sum, and the score. */
function Product({ view, at }: { view: WayView; at: number }) {
  const size = view.products.length;
  const [q, k, product] = [view.query[at] ?? 0, view.key[at] ?? 0, view.products[at] ?? 0];
  return (
    <dl class="way-sums">
      <dt title="one number of the query times the same one of the key">
        q{numbered(at)} × k{numbered(at)}
      </dt>
      <dd>
        {pointed(q.toPrecision(4))} × {pointed(k.toPrecision(4))} ={" "}
        <b data-product={product}>{pointed(product.toPrecision(4))}</b>
      </dd>
      <dt>q · k, all {size} of them</dt>
      <dd>
        <Told name="way_dot" value={view.dot} about={WAY_VIEW.dot} />
      </dd>
      <dt>scale{Math.abs(view.scale * Math.sqrt(size) - 1) < 1e-4 && `, 1/√${size}`}</dt>
      <dd data-stat="way_scale" data-value={view.scale} data-src="derived" title={WAY_VIEW.scale?.meaning}>
        {pointed(view.scale.toPrecision(5))}
      </dd>
      <dt>score</dt>
      <dd>
        <Told name="way_score" value={view.score} about={WAY_VIEW.score} />
      </dd>
    </dl>
  );
}
