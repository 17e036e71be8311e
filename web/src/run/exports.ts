// Files to take home of a run: the trace, the same trace with a page around it that plays by itself, a Chrome trace for
// Perfetto, and a picture of the stage. A prompt of any length goes into these files; a link has room for a short one.

import { ask } from "../visit/server";
import { numbered } from "../ui/format";
import { link, problem, run } from "../visit/store";
import { writeTrace } from "./trace";

const SLOT = '<script type="application/json" id="trace">'; // of `alone.html`; see `alone.config.ts`

/** Why the server cannot be asked for the whole run; "": it can. */
export function unserved(): string {
  const current = run.value;
  if (current?.origin !== "live" || link.value !== "open") return "the engine no longer has this run";
  return current.rebuilt ? `the engine has this run from step ${numbered(current.since.value)} on` : "";
}

/** The run as trace.json: the server's own, which lacks nothing, or what the page holds. `both`: the server computes the
 * steps of the other way too. */
async function trace(both: boolean): Promise<string> {
  const current = run.value;
  if (current === null) return "";
  const path = `runs/${current.id.value}/trace.json${both ? "?halves=true" : ""}`;
  const answer = unserved() === "" ? await ask(path).catch(() => null) : null;
  return answer?.ok ? answer.text() : writeTrace(current);
}

export async function saveTrace(): Promise<void> {
  if (run.value !== null) save(new Blob([await trace(false)], { type: "application/json" }), "trace.json");
}

/** One HTML file: page and trace with both ways of the switch, no server, no network. */
export async function savePage(): Promise<void> {
  if (run.value === null) return;
  const page = await text("alone.html");
  if (page === null) return;
  const safe = (await trace(true)).replaceAll("<", "\\u003c"); // nothing in it can end the element
  save(new Blob([page.replace(SLOT, () => SLOT + safe)], { type: "text/html" }), "run.html");
}

export async function savePerfetto(): Promise<void> {
  const found = run.value === null ? null : await text(`runs/${run.value.id.value}/perfetto.json`);
  if (found !== null) save(new Blob([found], { type: "application/json" }), "perfetto.json");
}

export async function savePicture(): Promise<void> {
  const { picture } = await import("../stage/picture");
  const found = await picture();
  if (found === null) problem.value = { kind: "export", message: "There is no picture: the stage shows nothing yet." };
  else save(found, "run.png");
}

async function text(path: string): Promise<string | null> {
  const answer = await ask(path).catch(() => null);
  if (answer?.ok) return answer.text();
  problem.value = {
    kind: "export",
    message: "The server does not answer, so this file cannot be made. Save the trace instead.",
  };
  return null;
}

export function save(content: Blob, name: string): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(content);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}
