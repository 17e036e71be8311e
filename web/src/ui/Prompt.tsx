// The prompt row: the text, its tokens as the model will read them, the dials, and Run. Problems with a run that was
// asked for are said here, beside what would mend them.

import { useSignal } from "@preact/signals";
import { dismiss } from "../actions";
import { start } from "../session";
import * as form from "../form";
import { type Problem, model, pageState, problem, result } from "../store";
import { align, glyphs, marked } from "../text";
import { plural, sentence } from "../format";
import { Icon } from "./icons";

const SHOWN = 400; // chips; a long prompt is counted, not listed to its end

export function Prompt() {
  const busy = pageState.value === "tokenizing";
  const ready = model.value !== null && form.prompt.value !== "" && !busy;
  const run = (event: Event) => {
    event.preventDefault();
    void start();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
    if (event.key === "Escape") (event.currentTarget as HTMLElement).blur();
  };
  const lines = Math.min(4, form.prompt.value.split("\n").length);
  const open = useSignal(false); // the options, on a narrow screen
  return (
    <form class={open.value ? "prompt-row open" : "prompt-row"} onSubmit={run} aria-label="Prompt">
      <div class="prompt-line">
        <label class="sr" for="prompt">
          Prompt
        </label>
        <textarea
          id="prompt"
          rows={lines}
          spellcheck={false}
          value={form.prompt.value}
          placeholder="Write the beginning of a text"
          onInput={(event) => (form.prompt.value = event.currentTarget.value)}
          onKeyDown={onKey}
          aria-describedby="chips-count"
        />
        <div class="presets" role="group" aria-label="Ready prompts">
          {form.PROMPTS.map(({ name, text }) => (
            <button
              type="button"
              key={name}
              aria-pressed={form.prompt.value === text}
              title={text}
              onClick={() => (form.prompt.value = text)}
            >
              {name}
            </button>
          ))}
        </div>
        <button
          type="button"
          class="more"
          aria-expanded={open.value}
          onClick={() => (open.value = !open.value)}
          aria-label="Options of the run"
        >
          <Icon name={open.value ? "minus" : "plus"} />
        </button>
        <button type="submit" class={result.value === null ? "run" : "run calm"} disabled={!ready} title="Run this prompt (Ctrl Enter in the box)">
          <Icon name="play" />
          Run
        </button>
      </div>
      <div class="prompt-line">
        <Chips />
        <div class="dials">
          <Stop />
          <Brought />
          <Dial
            label="max tokens"
            value={String(form.maxTokens.value)}
            min={1}
            max={model.value?.context ?? 100_000}
            step={1}
            onValue={(value) => value !== null && value >= 1 && (form.maxTokens.value = Math.floor(value))}
          />
          <Dial
            label="temperature"
            value={String(Number(form.usedTemperature.value.toFixed(3)))}
            min={0}
            max={5}
            step={0.05}
            onValue={(value) => (form.temperature.value = value === null ? null : Math.max(0, Math.min(10, value)))}
          />
          <Dial
            label="seed"
            value={form.seed.value === null ? "" : String(form.seed.value)}
            placeholder="fresh"
            min={0}
            step={1}
            onValue={(value) =>
              (form.seed.value =
                value === null ? null : Math.min(Number.MAX_SAFE_INTEGER, Math.max(0, Math.floor(value))))
            }
          />
        </div>
      </div>
      <Trouble />
    </form>
  );
}

/** Settings of the sampler that came with a link, which have no dial here. */
function Brought() {
  const brought = Object.entries(form.sampler.value);
  if (brought.length === 0) return null;
  return (
    <button
      type="button"
      class="dial-open"
      title="From the link, for the next run too. Click to remove them; the model's own then apply"
      onClick={() => (form.sampler.value = {})}
    >
      {brought.map(([name, value]) => `${name.replace("_", "-").replace("repetition-", "repetition ")} ${value}`).join(", ")} ×
    </button>
  );
}

/** The text that ends the run: a button until somebody wants one, so that the tokens have the room. */
function Stop() {
  const open = useSignal(false);
  const title = "The run ends where the model writes this text, which is left out";
  if (!open.value && form.stop.value === "")
    return (
      <button type="button" class="dial-open" title={title} onClick={() => (open.value = true)}>
        stop at…
      </button>
    );
  return (
    <label class="dial" title={title}>
      <span>stop at</span>
      <input
        type="text"
        class="dial-text"
        maxLength={200}
        value={form.stop.value}
        ref={(input) => void (form.stop.value === "" && input?.focus())}
        onChange={(event) => (form.stop.value = event.currentTarget.value)}
      />
    </label>
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
  const found = form.tokens.value;
  const cards = found?.cards ?? [];
  const stale = found !== null && found.text !== form.prompt.value;
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

/** What is wrong with what was asked for, and one way out of it. */
function Trouble() {
  const trouble = problem.value;
  if (trouble === null || trouble.kind === "trace") return null;
  return (
    <div class="trouble" role="alert">
      <p>{sentence(trouble.message)}</p>
      {trouble.again && <Fix kind={trouble.kind} message={trouble.message} again={trouble.again} />}
      <button type="button" class="quiet" onClick={dismiss} aria-label="Dismiss">
        <Icon name="close" />
      </button>
    </div>
  );
}

/** For a run that did not start: what would mend it, or another attempt. */
function Fix({ kind, message, again }: Required<Problem>) {
  if (kind === "bad_request") return null; // the sentence says what to change
  const cards = form.tokens.value?.text === form.prompt.value ? form.tokens.value.cards : null;
  const over = Number(/shorten it by (\d+)/.exec(message)?.[1] ?? NaN);
  if (kind === "context_overflow" && over > 0 && cards !== null) {
    // The beginning goes: what is nearest to the end says most about how it goes on.
    const pieces = align(form.prompt.value, cards);
    const begins = cards.filter((card) => card.special).length;
    const shorter = pieces.slice(over + begins).join("");
    return (
      <button type="button" onClick={() => (form.prompt.value = shorter)}>
        Drop the first {plural(over, "token")}
      </button>
    );
  }
  if (kind === "capacity" && form.maxTokens.value > 32) {
    const fewer = Math.max(32, form.maxTokens.value >> 1);
    return (
      <button type="button" onClick={() => (form.maxTokens.value = fewer)}>
        Use {fewer} max tokens
      </button>
    );
  }
  return (
    <button type="button" onClick={again}>
      Try again
    </button>
  );
}
