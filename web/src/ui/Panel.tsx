// The panel that is open in the rail's place, and the row of buttons that opens one.

import { effect, signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { PANELS, type Panel } from "../panels";
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

const FIRST_ROW = 4; // panels, beside the figures

/** Two rows of about the same length. */
export function PanelButtons() {
  return (
    <nav class="panel-buttons" aria-label="Panels">
      <div class="panel-row">
        <button type="button" aria-pressed={panel.value === null} onClick={() => (panel.value = null)}>
          Figures
        </button>
        {PANELS.slice(0, FIRST_ROW).map(button)}
      </div>
      <div class="panel-row">{PANELS.slice(FIRST_ROW).map(button)}</div>
    </nav>
  );
}

const button = ({ id, name, title }: Panel) => (
  <button
    type="button"
    key={id}
    title={title}
    aria-pressed={panel.value === id}
    onClick={() => (panel.value = panel.value === id ? null : id)}
  >
    {name}
  </button>
);

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
