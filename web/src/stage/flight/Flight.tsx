// A flight on the stage: the words of its stop, where the narration else stands, and the picture of the stop, which opens
// out of the place of the wall that the camera has flown to.

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { count, exactPercent, figures, numbered, plural, pointed } from "../../ui/format";
import { selected } from "../../run/answers/attention-row";
import { card, frame, run } from "../../visit/store";
import { quoted } from "../../ui/text";
import * as flight from "./flight";
import { focus } from "./focus";
import { Icon } from "../../ui/icons";

const pictures = signal<typeof import("./Pictures") | null>(null); // fetched with the first flight
const OPENS = 900; // ms, about as long as the camera flies

const NAMES: Record<flight.Stop, string> = {
  word: "word",
  embedding: "embedding",
  norm: "norm",
  qkv: "Q, K, V",
  position: "position",
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
  useLayoutEffect(() => {
    if (stop !== null) void import("./Pictures").then((found) => (pictures.value = found));
  }, [stop !== null]);
  const shown = pictures.value;
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
        <button type="button" title="The stop before (Esc)" onClick={() => flight.move(-1)}>
          Back
        </button>
        <button type="button" class="bright" title="On (I)" onClick={() => flight.move(1)}>
          {at === all.length - 1 ? "Back to the wall" : "Next"}
        </button>
        {at < all.length - 1 && (
          <button type="button" class="quiet" aria-label="Back to the wall" onClick={() => flight.go(null)}>
            <Icon name="close" />
          </button>
        )}
      </nav>
      <div class="way-picture" ref={place} tabIndex={0}>
        {shown && <shown.Flown stop={stop} />}
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

/** A cell in a sentence: its size, the step that wrote it and read it first, and how many read it later. */
export function cellWords(position: number, layer: number): string {
  const model = card.value;
  if (model === null) return "";
  if (model.windows[layer] === 0)
    return "no key and no value: this layer keeps one state of the text, which each token rewrites";
  const { written, reads } = flight.history(position, layer);
  const size = `${model.kv_heads} × ${model.head_size}`;
  const parts = model.latent > 0 ? `one row of ${model.latent} numbers for K and V` : `K ${size}, V ${size}`;
  if (written === null) return `${parts}, kept nowhere: the next step computes them`;
  return `${parts}, written and read in step ${numbered(written)}${reads > 0 ? `, read again in ${plural(reads, "later step")}` : ""}`;
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
      return `A model computes with numbers. ${word}${run.value?.tokens[position]?.text.startsWith(" ") ? ", with the space before it, " : " "}has the id ${count(run.value?.tokens[position]?.id ?? 0)} among the ${count(model.vocab_size)} tokens that it knows.`;
    case "embedding":
      return `The id names a row of a learned table: ${count(model.width)} numbers for ${word}, whatever the text. They are its residual stream, to which each layer adds.`;
    case "position":
      return view?.angles.length === 0
        ? `Where ${word} stands, this layer does not say by a rotation of pairs: its positions come another way, such as a learned row that is added.`
        : `Each pair of numbers of k, and of q, is turned by an angle that grows with the position of ${word}: here layer ${layer}, head ${head}. So turned, k is kept.`;
    case "norm": {
      const scaled = `to length √${model.width} = ${figures(Math.sqrt(model.width))}, and each number by a learned gain: from ${long("input")} to ${long("norm")}`;
      return layer > 0
        ? `After ${plural(layer, "layer")} like it, layer ${layer} scales ${word} ${scaled}.`
        : `Layer ${layer} scales ${word} ${scaled}.`;
    }
    case "qkv":
      return `Three matrices make a query, a key and a value of it, here those of head ${head}. Only K and V of layer ${layer} stay, in this cell: ${cellWords(position, layer)}.`;
    case "score":
      return `Now ${asks} asks: its query, in head ${head}, meets the key of ${word}. Number by number they are multiplied; the sum, scaled, is the score.`;
    case "mask":
      return `${asks} gets a score with each of the ${plural(flight.block.value?.context ?? 0, "token")} that it may read. ${(frame.value?.length ?? 1) > 1 ? "The tokens before it, read in the same step, do not see what comes after them: that is masked." : "No later one exists yet, so none is masked; when the prompt was read, those after each token were."}`;
    case "softmax":
      return (
        view &&
        `The softmax makes weights of the scores, which sum to 1: ${asks} gives ${word} ${exactPercent(view.weight)}, in layer ${layer}, head ${head}.`
      );
    case "value":
      return (
        view &&
        `${exactPercent(view.weight)} of the value of ${word} goes on. Summed over all tokens, this is what head ${head} has read. All ${plural(model.heads, "head")} are joined and multiplied by W_O.`
      );
    case "mlp":
      return `The MLP works on ${asks} alone and reads no other token: ${count(model.width)} numbers become ${count(stages.get("hidden")?.shape[0] ?? 0)}${flight.gated.value ? ", each a product of two (one a gate)" : ""}, and ${count(model.width)} again.`;
    case "residual":
      return `Nothing is replaced: what attention has read and what the MLP has made are added to the residual stream of ${asks}, number by number.`;
    case "next":
      return layer + 1 < model.layers
        ? `Layer ${layer + 1} does the same with the new residual stream. In each of the ${plural(model.layers, "layer")} ${asks} leaves a key and a value: its column of the cache.`
        : `That was the last of ${plural(model.layers, "layer")}. In each of them ${asks} has left a key and a value: its column of the cache.`;
    case "logits":
      return `After the last layer a norm and a matrix make of the residual stream a number for each of the ${count(model.vocab_size)} tokens, its logit. A softmax makes probabilities p of them.`;
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
  return `A random number, ${pointed(uniform.toFixed(4))}, falls into the part of ${text}: it is drawn, and with it all of this begins again.`;
}
