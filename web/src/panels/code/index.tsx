// The code beside the stage: the line that runs now is lit in step with it, and what it works on stands under it.

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import { moment } from "../../visit/clock";
import { cache, frame, run } from "../../visit/store";
import { stop } from "../../stage/flight/flight";
import { quoted } from "../../ui/text";
import { LISTINGS, type Line, type Today } from "./listings";
import "../../style/panels/code.css";

export default function Code() {
  return (
    <>
      <p class="panel-lead">
        What the stage shows, as code. The lit line is the one that runs now, or that a flight has stopped at; under a
        line stands what it works on in this step.
      </p>
      <Listings all />
    </>
  );
}

/** The listings, of which the one of the shown step's way is open, until another one is chosen. `all`: the engine's too. */
export function Listings({ all = false }: { all?: boolean }) {
  const way = useComputed(() => ((frame.value?.cache ?? cache.value) ? "with" : "without"));
  const chosen = useSignal<string | null>(null);
  useSignalEffect(() => {
    void way.value; // to switch the cache is to ask for its listing
    chosen.value = null;
  });
  const id = chosen.value ?? way.value;
  const offered = LISTINGS.filter((one) => all || one.id === "with" || one.id === "without");
  const listing = offered.find((one) => one.id === id) ?? offered[0]!;
  const now = today();
  return (
    <div class="code-listings">
      <div class="code-tabs" role="group" aria-label="Listing">
        {offered.map((one) => (
          <button type="button" key={one.id} aria-pressed={one === listing} onClick={() => (chosen.value = one.id)}>
            {one.name}
          </button>
        ))}
      </div>
      <p class="code-about">{listing.about}</p>
      <ol class="code-lines" data-listing={listing.id} tabIndex={0} aria-label={`Code: ${listing.name}`}>
        {listing.lines.map((line) => (
          <Row key={line.text} line={line} now={now} />
        ))}
      </ol>
    </div>
  );
}

function Row({ line, now }: { line: Line; now: Today | null }) {
  const at = stop.value;
  const lit = now !== null && (at === null ? line.runs?.includes(moment.value) : line.stops?.includes(at));
  const indent = line.text.length - line.text.trimStart().length;
  return (
    <li class={lit ? "lit" : ""} aria-current={lit ? "step" : undefined}>
      <code>{line.text}</code>
      {now !== null && line.beside && <small style={{ marginLeft: `${indent}ch` }}>{line.beside(now)}</small>}
    </li>
  );
}

/** The shown step; null: there is none yet. */
function today(): Today | null {
  const [current, step] = [run.value, frame.value];
  if (current === null || step === null) return null;
  const written =
    step.token === null ? "none yet: the prompt is read in parts" : quoted(current.named(step.token).text);
  return { model: current.model, step, written };
}
