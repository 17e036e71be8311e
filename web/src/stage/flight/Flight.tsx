// A flight on the stage: the words of its stop, where the narration else stands, and the picture of the stop, which opens
// out of the place of the wall that the camera has flown to.

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { count, figures, numbered, percent, plural } from "../../ui/format";
import { selected } from "../../run/answers/attention-row";
import { card, frame, run } from "../../visit/store";
import { quoted } from "../../ui/text";
import * as flight from "./flight";
import { focus } from "./focus";
import { Icon } from "../../ui/icons";
import { Flown } from "./Pictures";

const OPENS = 900; // ms, about as long as the camera flies

const NAMES: Record<flight.Stop, string> = {
  word: "word",
  embedding: "embedding",
  position: "position",
  norm: "norm",
  qkv: "Q, K, V",
  score: "score",
  mask: "mask",
  softmax: "softmax",
  value: "sum of V",
  mlp: "MLP",
  residual: "residual",
  next: "next layer",
  logits: "logits",
  draw: "draw",
};

const OF_BLOCK: ReadonlySet<flight.Stop> = new Set(["norm", "mask", "mlp"]); // stops whose sentence has its numbers

export function Flight() {
  const stop = flight.stop.value;
  const place = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (stop !== null && place.current !== null) open(place.current);
  }, [stop, flight.cell.value]);
  if (stop === null || run.value === null) return null;
  const all = flight.stops.value;
  const at = all.indexOf(stop);
  const to = focus.value;
  return (
    <section class="way" aria-label="A flight through the model" data-stop={stop}>
      <div
        class="way-cone"
        aria-hidden="true"
        key={`${stop}/${flight.subject.value}`}
        style={{ "--x": `${100 * (to?.x ?? 0)}%`, "--y": `${100 * (to?.y ?? 0)}%` }}
      />
      <nav class="way-path" aria-label="Stops of the flight">
        <ol>
          {all.map((one, i) => (
            <li key={one} class={i < at ? "past" : ""}>
              <button type="button" aria-current={one === stop ? "step" : undefined} onClick={() => flight.go(one)}>
                {NAMES[one]}
              </button>
            </li>
          ))}
        </ol>
        <button type="button" title="Back (Esc)" onClick={() => flight.move(-1)}>
          Out
        </button>
        <button type="button" class="bright" title="On (I)" onClick={() => flight.move(1)}>
          {at === all.length - 1 ? "To the wall" : "Next"}
        </button>
        <button type="button" class="quiet" aria-label="Back to the wall" onClick={() => flight.go(null)}>
          <Icon name="close" />
        </button>
      </nav>
      <div class="way-picture" ref={place} tabIndex={0}>
        <Flown stop={stop} />
      </div>
    </section>
  );
}

/** The picture grows out of the place that the camera looks at. */
function open(place: HTMLElement): void {
  const view = place.closest(".view");
  const [to, still] = [focus.peek(), matchMedia("(prefers-reduced-motion: reduce)").matches];
  if (view === null || to === null || still) return;
  const [outer, own] = [view.getBoundingClientRect(), place.getBoundingClientRect()];
  const transformOrigin = `${outer.x + to.x * outer.width - own.x}px ${outer.y + to.y * outer.height - own.y}px`;
  place.animate(
    [
      { transform: "scale(0.02)", opacity: 0, transformOrigin },
      { transform: "scale(0.1)", opacity: 0, offset: 0.4, transformOrigin },
      { transform: "none", opacity: 1, transformOrigin },
    ],
    { duration: OPENS, easing: "cubic-bezier(0.3, 0, 0.2, 1)" },
  );
}

const token = (position: number): string => run.value?.called(position) ?? "";

/** A cell in a sentence: its size, the step that wrote it, and how often it was read. */
export function cellWords(position: number, layer: number): string {
  const model = card.value;
  if (model === null) return "";
  if (model.windows[layer] === 0)
    return "no key and no value: this layer keeps one state of the text, which each token rewrites";
  const { written, reads } = flight.history(position, layer);
  const size = `${model.kv_heads} × ${model.head_size}`;
  const parts = model.latent > 0 ? `one row of ${model.latent} numbers for K and V` : `K ${size}, V ${size}`;
  if (written === null) return `${parts}, kept nowhere: the next step computes them`;
  return `${parts}, written in step ${numbered(written)}, read ${reads === 1 ? "once" : `${count(reads)} times`}`;
}

/** What stands in place of the narration while a flight is on. */
export function FlightWords() {
  const stop = flight.stop.value;
  return stop === null ? null : (
    <div class="story">
      <p class="way-at">
        {flight.stops.value.indexOf(stop) + 1} of {flight.stops.value.length}: {NAMES[stop]}
      </p>
      <p class="way-words story-line" aria-live="polite">
        {wordsOf(stop)}
      </p>
    </div>
  );
}

function wordsOf(stop: flight.Stop): ComponentChildren {
  const { position, layer } = flight.cell.value;
  const model = card.value;
  const view = flight.view.value;
  const { head } = selected.value;
  if (model === null) return "";
  if (flight.refusal.value !== "") return flight.refusal.value;
  const [word, asks] = [token(position), token(flight.reader.value)];
  if (OF_BLOCK.has(stop) && !flight.block.value) return "The engine computes these numbers.";
  const stages = new Map(flight.block.value?.stages.map((stage) => [stage.name, stage]));
  const long = (name: string): string => figures(stages.get(name)?.norm ?? 0);
  switch (stop) {
    case "word":
      return `A model computes with numbers. ${word} is token ${count(run.value?.tokens[position]?.id ?? 0)} of the ${count(model.vocab_size)} that it knows.`;
    case "embedding":
      return `That number is a row of a learned table: ${count(model.width)} numbers for ${word}, whatever the text. With them its way through the layers begins.`;
    case "position":
      return view?.angles.length === 0
        ? `Where ${word} stands, this layer does not say by a rotation of pairs: its positions come another way, such as a learned row that is added.`
        : `Where ${word} stands, its key says by its direction: in each layer each pair of its numbers is turned, by an angle that grows with the position.`;
    case "norm":
      return `Layer ${layer} first brings ${word} to an even size: a vector of length ${long("input")} becomes one of length ${long("norm")}.`;
    case "qkv":
      return `Three matrices make a query, a key and a value of it. Only two of them stay, in this cell: ${cellWords(position, layer)}.`;
    case "score":
      return `Now ${asks} asks: its query, in head ${head}, meets the key of ${word}. Number by number they are multiplied; the sum, scaled, is the score.`;
    case "mask":
      return `${asks} gets a score with each of the ${plural(flight.block.value?.context ?? 0, "token")} that it may read. What comes after it is masked: no token looks ahead.`;
    case "softmax":
      return (
        view &&
        `The softmax makes weights of the scores, which sum to 1: ${word} gets ${percent(view.weight)} of what head ${head} reads.`
      );
    case "value":
      return `So much of the value of ${word} goes on. The values of all tokens, each times its weight, are what head ${head} has read.`;
    case "mlp":
      return `The MLP works on ${asks} alone and reads no other token: ${count(model.width)} numbers become ${count(stages.get("hidden")?.shape[0] ?? 0)}, and ${count(model.width)} again.`;
    case "residual":
      return `Nothing is replaced: what attention has read and what the MLP has made are added to the stream of ${asks}, number by number.`;
    case "next":
      return layer + 1 < model.layers
        ? `Layer ${layer + 1} does the same with the new stream. In each of the ${plural(model.layers, "layer")} ${asks} leaves a key and a value: its column of the cache.`
        : `That was the last of ${plural(model.layers, "layer")}. In each of them ${asks} has left a key and a value: its column of the cache.`;
    case "logits":
      return `After the last layer the stream becomes a number for each of the ${count(model.vocab_size)} tokens, its logit. A softmax makes probabilities of them.`;
    case "draw":
      return drawn();
  }
}

function drawn(): string {
  const step = frame.value;
  const text = quoted(step?.token == null ? "" : (run.value?.named(step.token).text ?? ""));
  const uniform = flight.draw.value?.uniform;
  if (uniform == null)
    return `One of them is taken: ${text}. It is the next word, and with it all of this begins again.`;
  return `A random number, ${figures(uniform)}, falls into the part of ${text}: it is drawn, and with it all of this begins again.`;
}
