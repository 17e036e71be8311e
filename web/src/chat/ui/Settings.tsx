// The options of the next answer. An empty field means what the checkpoint suggests, which stands in it dimly.

import { count } from "../../ui/format";
import { Language } from "../../ui/Theme";
import { engineHere, hasGpu, onGpu } from "../../visit/server";
import { model, options, setOptions, suggested } from "../store";
import type { Options } from "../keep";

type Numbers = "temperature" | "top_k" | "top_p" | "max_tokens" | "seed";

interface Dial {
  name: Numbers;
  label: string;
  title: string;
  min: number;
  max: number;
  whole: boolean;
}

const DIALS: readonly Dial[] = [
  {
    name: "temperature",
    label: "temperature",
    title: "0 takes the most probable token each time",
    min: 0,
    max: 2,
    whole: false,
  },
  {
    name: "top_p",
    label: "top-p",
    title: "draw from the most probable tokens that together have this share",
    min: 0.01,
    max: 1,
    whole: false,
  },
  {
    name: "top_k",
    label: "top-k",
    title: "draw from so many tokens at most; 0: from all",
    min: 0,
    max: 2 ** 20,
    whole: true,
  },
  { name: "max_tokens", label: "max tokens", title: "of one answer", min: 1, max: 2 ** 20, whole: true },
  {
    name: "seed",
    label: "seed",
    title: "the same seed gives the same answer; empty: a fresh one each time",
    min: 0,
    max: 2 ** 32 - 1,
    whole: true,
  },
];

export function Settings() {
  const card = model.value;
  return (
    <aside class="options" aria-label="Options">
      {card?.template !== false && (
        <label class="field">
          system prompt
          <textarea
            rows={5}
            value={options.value.system}
            placeholder="What the model is told before the conversation"
            onInput={(event) => setOptions({ system: event.currentTarget.value })}
          />
        </label>
      )}
      <div class="dials">
        {DIALS.map((dial) => (
          <Field key={dial.name} dial={dial} />
        ))}
        <label class="field" title="the answer ends before this text">
          stop at
          <input
            type="text"
            value={options.value.stop}
            maxLength={1000}
            onInput={(event) => setOptions({ stop: event.currentTarget.value })}
          />
        </label>
      </div>
      <p class="under">
        The next answer uses these settings. The context has {(card && count(card.context)) ?? "–"} tokens.
      </p>
      {engineHere() && (onGpu() || hasGpu()) && (
        <p class="under">
          {onGpu() ? "Your GPU computes (WebGPU). " : "Your processor computes. "}
          <a href={onGpu() ? "chat/" : "chat/?device=gpu"}>{onGpu() ? "Use the processor" : "Use the GPU"}</a>
        </p>
      )}
      <Language />
    </aside>
  );
}

function Field({ dial }: { dial: Dial }) {
  const card = model.value;
  const usual: Partial<Record<Numbers, number>> = card ? suggested(card) : {};
  const unset = usual[dial.name];
  const set = (text: string) => {
    const value = Number(text);
    const fits = text !== "" && value >= dial.min && value <= dial.max && (!dial.whole || Number.isInteger(value));
    if (fits) setOptions({ [dial.name]: value } as Partial<Options>);
    else if (text === "" && dial.name !== "max_tokens") setOptions({ [dial.name]: null } as Partial<Options>);
  };
  return (
    <label class="field" title={dial.title}>
      {dial.label}
      <input
        type="number"
        min={dial.min}
        max={dial.max}
        step={dial.whole ? 1 : "any"}
        value={options.value[dial.name] ?? ""}
        placeholder={unset === undefined ? (dial.name === "seed" ? "random" : "") : String(unset)}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
}
