// A number on the page: what is shown is short, what is in the DOM is exact. Each says where it comes from with a
// badge: M measured by the engine's clock, C counted where the work is done, D derived by a formula, R read out of the
// model.

import { plural, shown } from "./format";
import { NUMBERS, type About, type Source, type StepFrame } from "../schema";
import { frame } from "../visit/store";

const WORDS: Record<Source, string> = {
  measured: "Measured by the engine's clock",
  counted: "Counted by the engine where the work is done",
  derived: "Derived by a formula",
  read: "Read out of the model",
  given: "Given",
};

export function Badge({ source, meaning }: { source: Source; meaning: string }) {
  if (source === "given") return null;
  return (
    <span class={`badge ${source}`} title={`${WORDS[source]}: ${meaning}`}>
      <span aria-hidden="true">{source[0]?.toUpperCase()}</span>
      <span class="sr"> {source}</span>
    </span>
  );
}

const SHARES: readonly (keyof StepFrame)[] = ["sampled", "uniform"]; // between 0 and 1

type Value = number | bigint | boolean | null;

interface NumberProps {
  name?: string; // of the statistic, for programs that read the DOM
  value: Value;
  source: Source;
  unit: string;
  meaning: string;
  class?: string;
}

export function Figure({ name, value, source, unit, meaning, class: look = "" }: NumberProps) {
  const [text, suffix] = shown(value, unit);
  const exact =
    name === undefined
      ? {}
      : { "data-stat": name, "data-value": value === null ? "" : String(value), "data-src": source };
  return (
    <span class={`figure ${look}`}>
      <span class="value" title={meaning} {...exact}>
        {text}
        {suffix !== "" && <span class="unit"> {suffix}</span>}
      </span>
      <Badge source={source} meaning={meaning} />
    </span>
  );
}

interface ToldProps {
  name: string;
  value: Value;
  about: About | undefined;
  class?: string;
}

/** A number of a message whose table says what it is. `name` is the statistic's, for whoever reads the DOM. */
export function Told({ name, value, about, class: look = "" }: ToldProps) {
  if (!about) return null;
  return (
    <Figure name={name} value={value} source={about.source} unit={about.unit} meaning={about.meaning} class={look} />
  );
}

/** A number of the shown step (or of another one), by its name in the frame. */
export function Stat({
  name,
  class: look = "",
  bare = false,
  of = frame.value,
}: {
  name: keyof StepFrame;
  class?: string;
  bare?: boolean;
  of?: StepFrame | null;
}) {
  const entry = NUMBERS[name];
  if (!entry) return null;
  const value = (of?.[name] ?? null) as Value;
  const unit = bare ? "" : SHARES.includes(name) ? "share" : entry.unit;
  return <Figure name={name} value={value} source={entry.source} unit={unit} meaning={entry.meaning} class={look} />;
}

const LAYER_TOKEN = "a layer-token: one token through one layer, which is a cell of the wall";

/** The unit of the work after its number, with what the number is the product of. */
export function LayerTokens({ of, layers }: { of: number; layers: number }) {
  return (
    <span class="layer-tokens" title={LAYER_TOKEN}>
      <span class="unit">layer-tokens</span> = {plural(of, "token")} × {plural(layers, "layer")}
    </span>
  );
}
