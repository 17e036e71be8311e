// The Share menu of the top bar: a link to the shown run, files that hold it, and a file to open. Keys as in menus: arrows,
// Home, End, Escape.

import { signal, useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { chooseTrace } from "../visit/actions";
import { linkable, nearby, share } from "../visit/address";
import { savePage, savePerfetto, savePicture, saveTrace, unserved } from "../run/exports";
import { chooseModel, giveBack } from "../visit/own-model";
import { engineHere } from "../visit/server";
import { alone, link, model, run, site } from "../visit/store";
import { Icon } from "./icons";

interface Entry {
  name: string;
  does: string;
  run(): Promise<void>;
  lacking(): string; // why it cannot be made now; "": it can
}

const ENTRIES: readonly Entry[] = [
  {
    name: "Picture",
    does: "PNG: the stage, its legend and the figures of this step",
    run: savePicture,
    lacking: () => "",
  },
  {
    name: "Page",
    does: "HTML: one file that plays this run with the cache and without, and needs no server",
    run: savePage,
    lacking: () =>
      alone.value && site.value === null
        ? "this is that file"
        : link.value === "broken"
          ? "the server does not answer"
          : "",
  },
  { name: "Trace", does: "JSON: every number of the run; Open trace reads it", run: saveTrace, lacking: () => "" },
  {
    name: "Perfetto",
    does: "JSON: the times of all steps, for ui.perfetto.dev",
    run: savePerfetto,
    lacking: unserved,
  },
];

/** Whether the menu is open. */
export const shareOpen = signal(false);

export function Share() {
  const open = shareOpen;
  const place = useRef<HTMLDivElement>(null);
  const items = () => [...(place.current?.querySelectorAll<HTMLButtonElement>("[role=menuitem]") ?? [])];
  useLayoutEffect(() => {
    if (!open.value) return;
    items()[0]?.focus(); // at once: keys are the menu's as soon as it is there
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
        aria-label="Share"
        aria-haspopup="menu"
        aria-expanded={open.value}
        onClick={() => (open.value = !open.value)}
        title="A link to this run, or a file: a picture, a page, a trace"
      >
        <Icon name="save" />
        <span class="tool-word">Share</span>
      </button>
      {open.value && (
        <div class="export-menu" role="menu" aria-label="Share">
          {(!alone.value || site.value !== null) && <CopyLink />}
          {ENTRIES.map((entry) => (
            <Choice key={entry.name} entry={entry} close={close} />
          ))}
          <button
            type="button"
            role="menuitem"
            onClick={() => {
              close();
              chooseTrace();
            }}
          >
            <b>Open a trace</b>
            <span>A trace.json; dropping it on the page does the same</span>
          </button>
          {engineHere() && (
            <button
              type="button"
              role="menuitem"
              onClick={() => {
                close();
                if (model.value?.name === "stories") chooseModel();
                else void giveBack();
              }}
            >
              <b>{model.value?.name === "stories" ? "Open a model" : "Back to the small model"}</b>
              <span>
                {model.value?.name === "stories" ? "A GGUF file; it stays in this browser" : "Yours is removed"}
              </span>
            </button>
          )}
        </div>
      )}
    </div>
  );
}

function Choice({ entry, close }: { entry: Entry; close(): void }) {
  const busy = useSignal(false); // the engine may compute for it
  const lacking = (run.value?.count.value ?? 0) === 0 ? "there is no step yet" : entry.lacking();
  return (
    <button
      type="button"
      role="menuitem"
      aria-disabled={lacking !== ""}
      onClick={() => {
        if (lacking !== "" || busy.value) return;
        busy.value = true;
        void entry.run().finally(() => {
          busy.value = false;
          close();
        });
      }}
    >
      <b>{entry.name}</b>
      <span>{busy.value ? "In work" : lacking === "" ? entry.does : `Not now: ${lacking}`}</span>
    </button>
  );
}

/** A link to the run. Where the browser does not let the page write to the clipboard, a field to copy it by hand from. */
function CopyLink() {
  const copied = useSignal(false);
  const byHand = useSignal("");
  const copy = async () => {
    const link = share();
    try {
      await navigator.clipboard.writeText(link); // over plain http there is no clipboard
    } catch {
      byHand.value = link;
      return;
    }
    copied.value = true;
    setTimeout(() => (copied.value = false), 1600);
  };
  if (byHand.value !== "") return <LinkField link={byHand.value} close={() => (byHand.value = "")} />;
  const can = linkable();
  return (
    <button type="button" role="menuitem" aria-disabled={!can} onClick={() => can && void copy()}>
      <b>{copied.value ? "Copied" : "Copy link"}</b>
      <span>
        {can || run.value?.origin !== "live"
          ? site.value !== null
            ? "It opens this run at this step"
            : nearby
              ? "It works on this machine only; for others, save the page below"
              : "It runs this prompt again, with the same seed"
          : run.value.card.parent !== null
            ? "A link has the prompt and the seed, which do not make this branch; save the trace instead"
            : "This prompt is too long for a link, or came from the chat; save the trace instead"}
      </span>
    </button>
  );
}

/** A link to copy by hand: selected, until the field is left. */
function LinkField({ link, close }: { link: string; close(): void }) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.select(), []);
  return (
    <input
      ref={field}
      class="link-field"
      aria-label="Link, to copy by hand"
      title="The browser does not let this page write to the clipboard: copy the link with Ctrl+C"
      readOnly
      value={link}
      onBlur={close}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        close();
      }}
    />
  );
}
