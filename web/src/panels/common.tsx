// Shared by several panels: asking the server again when the shown step rests, errors as sentences, and small parts.

import { signal, type Signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError } from "../visit/api";
import { sentence } from "../ui/format";
import { obtainable, unasked } from "../run/answers/attention-row";
import { Figure } from "../ui/Stat";
import { frame, live, run } from "../visit/store";
import { runIt } from "./usable";
import type { About } from "../schema";
import "../style/panels/panel-parts.css";

const PATIENCE = 350; // ms that a step must stay shown

/** An answer of the server: what was asked last, whether an answer is awaited, and why there is none. */
export interface Asked<T> {
  readonly value: Signal<T | null>;
  readonly busy: Signal<boolean>;
  readonly failed: Signal<string>;
  ask(request: (stop: AbortSignal) => Promise<T>): Promise<void>;
  clear(): void;
}

export function asked<T>(): Asked<T> {
  const value = signal<T | null>(null);
  const busy = signal(false);
  const failed = signal("");
  let turn: AbortController | null = null;
  return {
    value,
    busy,
    failed,
    async ask(request) {
      turn?.abort();
      const own = (turn = new AbortController());
      busy.value = true;
      try {
        const found = await request(own.signal);
        if (turn !== own) return;
        value.value = found;
        failed.value = "";
      } catch (error) {
        if (turn !== own) return;
        value.value = null; // it is the answer to an earlier request
        failed.value = words(error);
      } finally {
        if (turn === own) busy.value = false;
      }
    },
    clear() {
      turn?.abort();
      turn = null;
      busy.value = false;
      value.value = null;
      failed.value = "";
    },
  };
}

export function words(error: unknown): string {
  return sentence(error instanceof ApiError || error instanceof Error ? error.message : String(error));
}

/** The live run's id and the step that is shown, where the engine can be asked about it; else null. */
export function asking(): { id: string; step: number } | null {
  const current = run.value;
  const step = frame.value;
  if (current === null || step === null || step.token === null || !obtainable.value) return null;
  return { id: current.id.value, step: step.step };
}

/** Calls `ask` once the shown step has rested, and again whenever one of `also` changes. */
export function useRested(ask: (id: string, step: number) => void, ...also: unknown[]): void {
  const now = asking();
  useEffect(() => {
    if (now === null) return;
    const timer = setTimeout(() => ask(now.id, now.step), PATIENCE);
    return () => clearTimeout(timer);
  }, [now?.id, now?.step, ...also]);
}

/** Whether the shown step is one that the engine has. */
export const present = (): boolean => live.value && frame.value !== null && unasked.value === "";

/** Why there is nothing to see. */
export function Nothing() {
  const current = run.value;
  if (unasked.value !== "") return <p class="panel-note">{unasked.value}</p>;
  if (current !== null && current.origin !== "live")
    return <p class="panel-note">This is a recording, and this panel needs the engine.{runIt()}</p>;
  return <p class="panel-note">There is no step yet.{runIt()}</p>;
}

export function Failed({ of }: { of: Asked<unknown> }) {
  return of.failed.value === "" ? null : (
    <p class="panel-error" role="alert">
      {of.failed.value}
    </p>
  );
}

/** A number of a panel's message, by the table of what each is. `name`: in the document. */
export function Datum({
  of,
  table,
  field,
  name,
  label = true,
}: {
  of: object;
  table: Record<string, About>;
  field: string;
  name?: string;
  label?: boolean;
}) {
  const about = table[field];
  if (about === undefined) return null;
  const value = (of as Record<string, number | null>)[field] ?? null;
  const figure = (
    <Figure {...(name ? { name } : {})} value={value} source={about.source} unit={about.unit} meaning={about.meaning} />
  );
  if (!label) return figure;
  return (
    <div>
      <dt title={about.meaning}>{about.label}</dt>
      <dd>{figure}</dd>
    </div>
  );
}

interface Field {
  name: string;
  least: number;
  most?: number;
  placeholder: string;
}

/** A whole number that may be left out. */
export function Whole({ name, value, least, most, placeholder }: Field & { value: Signal<number | null> }) {
  return (
    <label>
      {name}
      <input
        type="number"
        inputMode="numeric"
        min={least}
        {...(most === undefined ? {} : { max: most })}
        step={1}
        placeholder={placeholder}
        value={value.value ?? ""}
        onInput={(event) => {
          const number = event.currentTarget.valueAsNumber;
          value.value = Number.isInteger(number) && number >= least ? number : null;
        }}
      />
    </label>
  );
}

/** One of several. */
export function Choice({
  name,
  value,
  options,
  say = (option) => option,
}: {
  name: string;
  value: Signal<string>;
  options: readonly string[];
  say?: (option: string) => string;
}) {
  return (
    <label>
      {name}
      <select aria-label={name} value={value.value} onChange={(event) => (value.value = event.currentTarget.value)}>
        {options.map((option) => (
          <option key={option} value={option}>
            {say(option)}
          </option>
        ))}
      </select>
    </label>
  );
}
