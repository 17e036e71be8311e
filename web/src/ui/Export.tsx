// The Export menu of the top bar: files that hold the shown run. Keys as in menus: arrows, Home, End, Escape.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { savePage, savePerfetto, savePicture, saveTrace, unserved } from "../exports";
import { alone, link, run } from "../store";
import { Icon } from "./icons";

interface Entry {
  name: string;
  does: string;
  run(): Promise<void>;
  lacking(): string; // why it cannot be made now; "": it can
}

const ENTRIES: readonly Entry[] = [
  { name: "Picture", does: "PNG: the stage, its legend and the figures of this step", run: savePicture, lacking: () => "" },
  {
    name: "Page",
    does: "HTML: one file that plays this run, without a server",
    run: savePage,
    lacking: () => (alone.value ? "this is that file" : link.value === "broken" ? "the server does not answer" : ""),
  },
  { name: "Trace", does: "JSON: every number of the run; Open trace reads it", run: saveTrace, lacking: () => "" },
  {
    name: "Perfetto",
    does: "JSON: the times of all steps, for ui.perfetto.dev",
    run: savePerfetto,
    lacking: unserved,
  },
];

export function Export() {
  const open = useSignal(false);
  const place = useRef<HTMLDivElement>(null);
  const items = () => [...(place.current?.querySelectorAll<HTMLButtonElement>("[role=menuitem]") ?? [])];
  useEffect(() => {
    if (!open.value) return;
    items()[0]?.focus();
    const outside = (event: Event) => {
      if (!place.current?.contains(event.target as Node)) open.value = false;
    };
    addEventListener("pointerdown", outside);
    return () => removeEventListener("pointerdown", outside);
  }, [open.value]);
  const close = () => {
    open.value = false;
    place.current?.querySelector("button")?.focus();
  };
  const move = (event: KeyboardEvent) => {
    if (!open.value) return;
    const all = items();
    const at = all.indexOf(document.activeElement as HTMLButtonElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Escape") close();
    else if (to !== undefined) all[to % all.length]?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="export" ref={place} onKeyDown={move}>
      <button
        type="button"
        class="tool"
        aria-label="Export"
        aria-haspopup="menu"
        aria-expanded={open.value}
        disabled={(run.value?.count.value ?? 0) === 0}
        onClick={() => (open.value = !open.value)}
        title="Save this run: as a picture, a page, a trace, or for Perfetto"
      >
        <Icon name="save" />
        <span class="tool-word">Export</span>
      </button>
      {open.value && (
        <div class="export-menu" role="menu" aria-label="Export">
          {ENTRIES.map((entry) => (
            <Choice key={entry.name} entry={entry} close={close} />
          ))}
        </div>
      )}
    </div>
  );
}

function Choice({ entry, close }: { entry: Entry; close(): void }) {
  const lacking = entry.lacking();
  return (
    <button
      type="button"
      role="menuitem"
      aria-disabled={lacking !== ""}
      onClick={() => {
        if (lacking !== "") return;
        close();
        void entry.run();
      }}
    >
      <b>{entry.name}</b>
      <span>{lacking === "" ? entry.does : `Not now: ${lacking}`}</span>
    </button>
  );
}
