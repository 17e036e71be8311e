// The drawer beside the stage: the panels in five groups. Numbers and Next token stay in the document while it is closed or
// shows another panel, so that every number of the shown step is there for programs that read the page.

import { effect, signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { GROUPS, PANELS } from "../panels";
import { usable } from "../panels/usable";
import { badges, panel } from "../visit/store";
import { Attention } from "../panels/Attention";
import { Icon } from "./icons";
import { Compute, Details, KvCache, SeqLen } from "../panels/Instruments";
import { Minimap } from "../stage/Minimap";
import { NextToken } from "../panels/NextToken";
import { Sums } from "../run/text/Result";
import { Times } from "../run/play/Scrubber";

const open = signal<{ id: string; View: ComponentType } | null>(null);
const failed = signal("");

effect(() => {
  const wanted = PANELS.find(({ id }) => id === panel.value);
  failed.value = "";
  if (wanted?.load === undefined) open.value = null;
  else
    wanted.load().then(
      ({ default: View }) => {
        if (panel.value === wanted.id) open.value = { id: wanted.id, View };
      },
      () => (failed.value = `${wanted.name} could not be loaded. Is the engine still running? Reload the page.`),
    );
});

export function Drawer() {
  const id = panel.value;
  return (
    <aside class="rail" aria-label="Drawer" hidden={id === null}>
      <Buttons />
      <PanelPlace />
      <div class="rail-numbers" hidden={id !== "numbers"}>
        <Compute />
        <Origins />
        <Sums />
        <KvCache />
        <SeqLen />
        <Minimap />
        <Times />
        <Details />
      </div>
      <div class="rail-next" hidden={id !== "next"}>
        <NextToken />
        <Attention />
      </div>
    </aside>
  );
}

function Buttons() {
  const now = PANELS.find(({ id }) => id === panel.value);
  const beside = usable().filter(({ group }) => group === now?.group);
  return (
    <nav class="panel-buttons" aria-label="Panels">
      <div class="panel-row groups">
        {now?.group === "Guide" && <h2 class="guide-name">{now.name}</h2>}
        {(now?.group === "Guide" ? [] : GROUPS).map((group) => {
          const first = usable().find((one) => one.group === group);
          return first === undefined ? null : (
            <button
              type="button"
              key={group}
              aria-pressed={group === now?.group}
              title={first.group === first.name ? first.title : undefined}
              onClick={() => (panel.value = first.id)}
            >
              {group}
            </button>
          );
        })}
        <button type="button" class="drawer-close" aria-label="Close the drawer" onClick={() => (panel.value = null)}>
          <Icon name="close" />
        </button>
      </div>
      {now?.group !== "Guide" && beside.some(({ name, group }) => name !== group) && (
        <div class="panel-row">
          {beside.map(({ id, name, title }) => (
            <button
              type="button"
              key={id}
              title={title}
              aria-pressed={id === now?.id}
              onClick={() => (panel.value = id)}
            >
              {name}
            </button>
          ))}
        </div>
      )}
    </nav>
  );
}

/** Where the numbers come from: on every number, or on the one under the pointer. */
function Origins() {
  return (
    <div class="origins">
      <button type="button" aria-pressed={badges.value} onClick={() => (badges.value = !badges.value)}>
        Where do the numbers come from?
      </button>
      {badges.value && (
        <p class="badge-key">
          <span class="badge measured">M</span> measured · <span class="badge counted">C</span> counted ·{" "}
          <span class="badge derived">D</span> derived by formula · <span class="badge read">R</span> read out of the
          model
        </p>
      )}
    </div>
  );
}

function PanelPlace() {
  const shown = open.value;
  const now = PANELS.find(({ id }) => id === panel.value);
  if (now?.load === undefined) return null;
  return (
    <section class="panel" aria-label={now.name} data-panel={now.id}>
      {failed.value !== "" && <p class="panel-failed">{failed.value}</p>}
      {shown !== null && shown.id === now.id && <shown.View />}
    </section>
  );
}
