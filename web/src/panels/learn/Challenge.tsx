// One challenge: its task and target, the form of an answer, and what the engine says of it. The form is made from the
// fields that the server names; nothing is checked here.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { sentence } from "../../ui/format";
import { head, layer } from "../../visit/store";
import type { ChallengeCard, Checked, Field } from "../../schema/learn";
import { Facts } from "./Facts";
import { done, solved } from "./progress";
import * as server from "./server";

const SENTENCE = 60; // characters from which a label is a sentence, with a row of its own

type Values = Record<string, number | string>;

/** `number`: as they come, card by card. */
export function Challenge({ of, number }: { of: ChallengeCard; number: number }) {
  const values = useSignal<Values>(Object.fromEntries(of.fields.map(({ name, start }) => [name, start])));
  const checked = useSignal<Checked | null>(null);
  const failure = useSignal("");
  const under = useRef<AbortController | null>(null); // the check under way
  const busy = useSignal(false);
  useEffect(() => () => under.current?.abort(), []);
  const set = (name: string, value: number | string) => (values.value = { ...values.value, [name]: value });

  const submit = async (event: Event) => {
    event.preventDefault();
    if (busy.value) return under.current?.abort();
    const control = (under.current = new AbortController());
    busy.value = true;
    failure.value = "";
    checked.value = null;
    try {
      const found = await server.check(of.id, values.value, control.signal);
      checked.value = found;
      if (found.passed) solved(of.id);
      if ("streak" in values.value) set("streak", found.passed ? 0 : found.streak);
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      failure.value = control.signal.aborted ? "Stopped." : sentence(why);
    } finally {
      busy.value = false;
    }
  };

  const met = done.value.includes(of.id);
  const opened = useSignal(!met); // once: what was just solved stays open
  const answer = checked.value;
  return (
    <details class="learn-challenge" data-challenge={of.id} data-met={met} open={opened.value}>
      <summary>
        <h4>
          Challenge {number}: {of.title}
        </h4>
        <span class={met ? "learn-met" : "hint"}>{met ? "✓ solved" : "open"}</span>
      </summary>
      <p class="learn-task">{of.task}</p>
      <p class="learn-target">
        <b>Target</b> {of.target}.
      </p>
      <form onSubmit={(event) => void submit(event)} noValidate>
        <div class="learn-fields">
          {of.fields
            .filter(({ kind }) => kind !== "streak")
            .map((field) => (
              <Entry
                key={field.name}
                id={`${of.id}-${field.name}`}
                field={field}
                value={values.value[field.name] ?? ""}
                set={(value) => set(field.name, value)}
              />
            ))}
        </div>
        <button type="submit" class={busy.value ? "" : "bright"}>
          {busy.value ? "Stop the check" : "Check with the engine"}
        </button>
        {busy.value && <span class="hint"> the engine computes</span>}
      </form>
      <div role="status">
        {failure.value !== "" && <p class="learn-verdict wrong">{failure.value}</p>}
        {answer !== null && (
          <p class={`learn-verdict ${answer.passed ? "right" : "wrong"}`} data-passed={answer.passed}>
            <b>{answer.passed ? "✓ Solved." : answer.streak > 0 ? `${answer.streak} right.` : "Not yet."}</b>{" "}
            {answer.message}
          </p>
        )}
      </div>
      {answer !== null && answer.facts.length > 0 && <Facts of={answer.facts} prefix={`check_${of.id}`} />}
    </details>
  );
}

interface EntryProps {
  id: string;
  field: Field;
  value: number | string;
  set: (value: number | string) => void;
}

function Entry({ id, field, value, set }: EntryProps) {
  const typed = (event: Event) => (event.currentTarget as HTMLInputElement | HTMLSelectElement).value;
  return (
    <div class={`learn-field learn-${field.kind} ${field.label.length > SENTENCE ? "learn-sentence" : ""}`}>
      <label for={id}>{field.label}</label>
      {field.kind === "choice" ? (
        <select id={id} value={value} onChange={(event) => set(typed(event))}>
          {field.start === "" && <option value="">choose</option>}
          {field.options.map((option) => (
            <option key={option} value={option}>
              {option}
            </option>
          ))}
        </select>
      ) : field.kind === "whole" || field.kind === "number" ? (
        <input
          id={id}
          type="number"
          step="any"
          value={value}
          onInput={(event) => {
            const text = typed(event);
            set(text.trim() === "" ? "" : Number(text));
          }}
        />
      ) : (
        <input id={id} type="text" value={value} autocomplete="off" onInput={(event) => set(typed(event))} />
      )}
      {field.kind === "head" && (
        <button
          type="button"
          title={`Layer ${layer.value}, head ${head.value}: the one that the stage shows`}
          onClick={() => set(`${layer.value}.${head.value}`)}
        >
          take {layer.value}.{head.value}
        </button>
      )}
    </div>
  );
}
