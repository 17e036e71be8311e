// The settings behind the gear: what the next run is asked for, which layer and head are watched, how the stage is seen,
// and the tokens of the prompt as the model will read them.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import * as nextRun from "../run/next-run";
import { alone, card, model, run } from "../visit/store";
import { glyphs, marked } from "./text";
import { modelName, plural } from "./format";
import { Icon } from "./icons";
import { verbatim } from "../language/language";
import { Language, Theme } from "./Theme";
import { Cameras, Selectors } from "../stage/View";

const SHOWN = 400; // chips; a long prompt is counted, not listed to its end

export function Settings() {
  const open = useSignal(false);
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!open.value) return;
    const outside = (event: Event) => {
      if (!place.current?.contains(event.target as Node)) open.value = false;
    };
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [open.value]);
  const onKey = (event: KeyboardEvent) => {
    if (event.key !== "Escape" || !open.value) return;
    event.stopPropagation();
    open.value = false;
    place.current?.querySelector("button")?.focus();
  };
  return (
    <div class="gear" ref={place} onKeyDown={onKey}>
      <button
        type="button"
        class="tool square"
        aria-label="Settings"
        aria-expanded={open.value}
        title="Tokens, sampling, layer and head, camera"
        onClick={() => (open.value = !open.value)}
      >
        <Icon name="dials" />
      </button>
      <div class="settings" hidden={!open.value} role="group" aria-label="Settings">
        {!alone.value && <Dials />}
        <Selectors />
        <div class="settings-view">
          <Cameras />
          <Theme />
          <Language />
        </div>
        {!alone.value && <Chips />}
        <Facts />
      </div>
    </div>
  );
}

/** What runs here. */
function Facts() {
  const shownCard = card.value;
  const id = run.value?.origin === "live" ? run.value.id.value : "";
  return (
    <p class="facts">
      {shownCard && (
        <>
          <span title={`model: ${shownCard.name}`}>{modelName(shownCard.name)}</span>
          <span title="device">{shownCard.device}</span>
          <span title="number format">{shownCard.dtype}</span>
        </>
      )}
      {id !== "" && <span title={`Run ${verbatim(id)}`}>run {verbatim(id.slice(0, 6))}</span>}
    </p>
  );
}

function Dials() {
  return (
    <div class="dials">
      <Dial
        label="max tokens"
        value={String(nextRun.maxTokens.value)}
        min={1}
        max={model.value?.context ?? 100_000}
        step={1}
        onValue={(value) => value !== null && value >= 1 && (nextRun.maxTokens.value = Math.floor(value))}
      />
      <Dial
        label="temperature"
        value={String(Number(nextRun.usedTemperature.value.toFixed(3)))}
        min={0}
        max={5}
        step={0.05}
        onValue={(value) => (nextRun.temperature.value = value === null ? null : Math.max(0, Math.min(10, value)))}
      />
      <Dial
        label="seed"
        value={nextRun.seed.value === null ? "" : String(nextRun.seed.value)}
        placeholder="fresh"
        min={0}
        step={1}
        onValue={(value) =>
          (nextRun.seed.value =
            value === null ? null : Math.min(Number.MAX_SAFE_INTEGER, Math.max(0, Math.floor(value))))
        }
      />
      <label class="dial" title="The run ends where the model writes this text, which is left out">
        <span>stop at</span>
        <input
          type="text"
          class="dial-text"
          maxLength={200}
          value={nextRun.stop.value}
          onChange={(event) => (nextRun.stop.value = event.currentTarget.value)}
        />
      </label>
      <Brought />
    </div>
  );
}

/** Settings of the sampler that came with a link, which have no dial here. */
function Brought() {
  const brought = Object.entries(nextRun.sampler.value);
  if (brought.length === 0) return null;
  return (
    <button
      type="button"
      class="dial-open"
      title="From the link, for the next run too. Click to remove them; the model's own then apply"
      onClick={() => (nextRun.sampler.value = {})}
    >
      {brought
        .map(([name, value]) => `${name.replace("_", "-").replace("repetition-", "repetition ")} ${value}`)
        .join(", ")}{" "}
      ×
    </button>
  );
}

interface DialProps {
  label: string;
  value: string;
  placeholder?: string;
  min: number;
  max?: number;
  step: number;
  onValue(value: number | null): void;
}

function Dial({ label, value, onValue, ...rest }: DialProps) {
  return (
    <label class="dial">
      <span>{label}</span>
      <input
        type="number"
        inputMode="decimal"
        value={value}
        {...rest}
        onChange={(event) => {
          const text = event.currentTarget.value;
          const number = text === "" ? null : Number(text);
          onValue(number !== null && Number.isFinite(number) ? number : null);
        }}
      />
    </label>
  );
}

function Chips() {
  const found = nextRun.tokens.value;
  const cards = found?.cards ?? [];
  const stale = found !== null && found.text !== nextRun.prompt.value;
  return (
    <div class={`chips ${stale ? "stale" : ""}`}>
      <span id="chips-count" class="chips-count">
        {found !== null && plural(cards.length, "token")}
      </span>
      <ul aria-label="Tokens of the prompt" tabIndex={0}>
        {glyphs(found?.text ?? "", cards.slice(0, SHOWN)).map(({ text, bytes, tokens }, i) => (
          <li
            key={i}
            class={`chip ${tokens[0]?.special ? "special" : ""} ${bytes.length > 0 ? "cut" : ""}`}
            title={`id ${tokens.map(({ id }) => id).join(", ")}`}
          >
            {marked(text)}
            {bytes.length > 0 && <small>{bytes.join(" ")}</small>}
          </li>
        ))}
        {cards.length > SHOWN && <li class="chip more">and {cards.length - SHOWN} more</li>}
      </ul>
    </div>
  );
}
