// The pictures of the way into a cell, one for each stop. The next one grows out of the place that was clicked, and the wall
// behind it comes nearer: words and camera move together.

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { count, numbered, percent, plural } from "../ui/format";
import { selected } from "../run/answers/attention-row";
import { card, frame, length, run } from "../visit/store";
import { quoted } from "../ui/text";
import * as drillDown from "./drill-down";
import { Icon } from "../ui/icons";
import { Candidates, Layers, Product, Reads, Stages, Vector } from "./DrillDownPictures";

const FLIGHT = 520; // ms

export function Way() {
  const stop = drillDown.stop.value;
  const place = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    const box = drillDown.from.peek();
    if (stop !== null && place.current !== null) fly(place.current, box);
  }, [stop, drillDown.cell.value]);
  if (stop === null || run.value === null) return null;
  const last = drillDown.stops.value.at(-1) === stop;
  return (
    <section class="way" ref={place} aria-label="The way into a cell" data-stop={stop}>
      <nav class="way-path" aria-label="Where">
        <button type="button" onClick={() => drillDown.go(null)}>
          wall
        </button>
        {drillDown.stops.value.slice(0, drillDown.stops.value.indexOf(stop) + 1).map((one) => (
          <button
            type="button"
            key={one}
            aria-current={one === stop ? "step" : undefined}
            onClick={() => drillDown.go(one)}
          >
            {nameOf(one)}
          </button>
        ))}
        <span class="fill" />
        <button type="button" onClick={() => drillDown.move(-1)} title="Out (Esc)">
          Out
        </button>
        <button type="button" class="bright" disabled={last} onClick={() => drillDown.move(1, inner(place.current))}>
          Next
        </button>
        <button type="button" class="quiet" aria-label="Back to the wall" onClick={() => drillDown.go(null)}>
          <Icon name="close" />
        </button>
      </nav>
      <p class="way-words" aria-live="polite">
        {wordsOf(stop)}
      </p>
      <div class="way-picture" tabIndex={0}>
        {pictureOf(stop)}
      </div>
    </section>
  );
}

/** The picture grows from a box; from none it comes back from nearer. */
function fly(place: HTMLElement, box: drillDown.Box | null): void {
  const { width, height } = place.getBoundingClientRect();
  const flight = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : FLIGHT;
  const start = box
    ? `translate(${box.x}px, ${box.y}px) scale(${box.width / width}, ${box.height / height})`
    : "scale(1.25)";
  const steps = [
    { transform: start, transformOrigin: box ? "0 0" : "50% 50%", opacity: 0.2 },
    { transform: "none", transformOrigin: box ? "0 0" : "50% 50%", opacity: 1 },
  ];
  place.animate(steps, { duration: flight, easing: "cubic-bezier(0.2, 0.7, 0.2, 1)" });
}

/** Where the picture has what the next stop looks into. */
function inner(place: HTMLElement | null): drillDown.Box | null {
  const target = place?.querySelector("[data-into]");
  return place && target ? boxIn(place, target) : null;
}

export function boxIn(place: Element, target: Element): drillDown.Box {
  const [outer, own] = [place.getBoundingClientRect(), target.getBoundingClientRect()];
  return { x: own.x - outer.x, y: own.y - outer.y, width: own.width, height: own.height };
}

const token = (position: number): string => quoted(run.value?.tokens[position]?.text ?? "");

function nameOf(stop: drillDown.Stop): string {
  const { position, layer } = drillDown.cell.value;
  const names: Record<drillDown.Stop, string> = {
    column: token(position),
    cell: `layer ${layer}`,
    head: `head ${selected.value.head}`,
    product: `number ${numbered(drillDown.number.value)}`,
    softmax: "softmax",
    value: "V",
    mlp: "MLP",
    logits: "logits",
  };
  return names[stop];
}

/** A cell in a sentence: its size, the step that wrote it, and how often it was read. */
export function cellWords(position: number, layer: number): string {
  const model = card.value;
  if (model === null) return "";
  if (model.windows[layer] === 0)
    return "no key and no value: this layer keeps one state of the text, which each token rewrites";
  const { written, reads } = drillDown.history(position, layer);
  const size = `${model.kv_heads} × ${model.head_size}`;
  const parts = model.latent > 0 ? `one row of ${model.latent} numbers for K and V` : `K ${size}, V ${size}`;
  if (written === null) return `${parts}, kept nowhere: the next step computes them`;
  return `${parts}, written in step ${numbered(written)}, read ${reads === 1 ? "once" : `${count(reads)} times`}`;
}

function wordsOf(stop: drillDown.Stop): ComponentChildren {
  const { position, layer } = drillDown.cell.value;
  const model = card.value;
  const view = drillDown.view.value;
  const { head } = selected.value;
  if (model === null) return "";
  if (drillDown.refusal.value !== "" && stop !== "column") return drillDown.refusal.value;
  const [word, asks] = [token(position), token(drillDown.reader.value)];
  switch (stop) {
    case "column":
      return `${word} went through ${plural(model.layers, "layer")}. Each of them made a key K and a value V of it: its column of the cache.`;
    case "cell":
      return `${word} in layer ${layer}: ${cellWords(position, layer)}. ${plural(model.heads, "head")} read it, ${plural(model.heads / model.kv_heads, "head")} for each row of K.`;
    case "head":
      return `Head ${head} asks with the query of ${asks} (above), and meets the key of ${word} (below). Number by number they are multiplied.`;
    case "product":
      return "One product. All of them together are one number, the score: how well the key answers the query.";
    case "softmax":
      return (
        view &&
        `Each token that is read has a score. The softmax makes weights of them, which sum to 1: ${word} gets ${percent(view.weight)}.`
      );
    case "value":
      return `So much of the value of ${word} goes on. The values of all tokens, each times its weight, are what head ${head} has read.`;
    case "mlp":
      return `What all heads have read is added to the stream of ${asks}. The MLP then works on that token alone, and adds its result too.`;
    case "logits":
      return `After the last layer the stream becomes a number for each possible token, and these become probabilities. One of them is drawn.`;
  }
}

function pictureOf(stop: drillDown.Stop): ComponentChildren {
  const view = drillDown.view.value;
  if (stop === "column" || stop === "cell") return <Layers stop={stop} />;
  if (stop === "mlp") return drillDown.block.value && <Stages stages={drillDown.block.value.stages} />;
  if (stop === "logits") return frame.value && <Candidates step={frame.value} />;
  if (view === null) return null;
  if (stop === "head")
    return (
      <>
        <Vector name="q" role="generated" values={view.query} />
        <Vector name="k" role="kept" values={view.key} />
        <Vector name="q × k" role="beam" values={view.products} choose />
      </>
    );
  if (stop === "product") return <Product view={view} at={drillDown.number.value} />;
  if (stop === "softmax") return <Reads view={view} />;
  return (
    <>
      <Vector name="v" role="kept" values={view.value} />
      <p class="way-formula">
        × {percent(view.weight)}, + the same of {plural(Math.max(0, length.value - 2), "other token")}
      </p>
      <Vector name="o = Σ w v" role="beam" values={view.mixed} />
    </>
  );
}
