// The panel that is open in the rail's place, and the row of buttons that opens one.

import { effect, signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { PANELS } from "../panels";
import { panel } from "../store";

const open = signal<{ id: string; View: ComponentType } | null>(null);
const failed = signal("");

effect(() => {
  const wanted = PANELS.find(({ id }) => id === panel.value);
  failed.value = "";
  if (wanted === undefined) open.value = null;
  else
    wanted.load().then(
      ({ default: View }) => {
        if (panel.value === wanted.id) open.value = { id: wanted.id, View };
      },
      () => (failed.value = `${wanted.name} could not be loaded. Is the engine still running? Reload the page.`),
    );
});

export function PanelButtons() {
  if (PANELS.length === 0) return null;
  return (
    <nav class="panel-buttons" aria-label="Panels">
      <button type="button" aria-pressed={panel.value === null} onClick={() => (panel.value = null)}>
        Figures
      </button>
      {PANELS.map(({ id, name, title }) => (
        <button
          type="button"
          key={id}
          title={title}
          aria-pressed={panel.value === id}
          onClick={() => (panel.value = panel.value === id ? null : id)}
        >
          {name}
        </button>
      ))}
    </nav>
  );
}

export function PanelPlace() {
  const shown = open.value;
  if (panel.value === null) return null;
  return (
    <section class="panel" aria-label={PANELS.find(({ id }) => id === panel.value)?.name} data-panel={panel.value}>
      {failed.value !== "" && <p class="panel-failed">{failed.value}</p>}
      {shown !== null && shown.id === panel.value && <shown.View />}
    </section>
  );
}
