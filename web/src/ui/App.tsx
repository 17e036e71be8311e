// The page: one grid of named places. On a narrow screen three tabs share the room; what is not on the open tab stays
// in the document, so that nothing is built again when tabs change.

import { moment, written } from "../clock";
import { alone, embedded, panel, tab } from "../store";
import { announcement } from "../words";
import { Attention } from "./Attention";
import { Help } from "./Help";
import { BadgeKey, Compute, Details, KvCache, SeqLen } from "./Instruments";
import { NextToken } from "./NextToken";
import { PanelButtons, PanelPlace } from "./Panel";
import { Prompt } from "./Prompt";
import { Stage } from "./Stage";
import { Text } from "./Text";
import { Top } from "./Top";
import { Transport } from "./Transport";

const TABS = [
  ["stage", "Stage"],
  ["numbers", "Numbers"],
  ["next", "Next token"],
] as const;

export function App() {
  if (embedded.value) return <Embedded />;
  return (
    <div
      class="page"
      data-tab={tab.value}
      data-moment={moment.value}
      data-written={written.value}
      data-panel={panel.value !== null}
    >
      <Top />
      {!alone.value && <Prompt />}
      <Stage />
      <Text />
      <Transport />
      <aside class="rail" aria-label="Instruments">
        {!alone.value && <PanelButtons />}
        <PanelPlace />
        <BadgeKey />
        <div class="rail-numbers">
          <Compute />
          <KvCache />
          <SeqLen />
        </div>
        <div class="rail-next">
          <NextToken />
          <Attention />
        </div>
        <Details />
      </aside>
      <nav class="tabs" aria-label="Parts of the page">
        {TABS.map(([id, name]) => (
          <button type="button" key={id} aria-pressed={tab.value === id} onClick={() => (tab.value = id)}>
            {name}
          </button>
        ))}
      </nav>
      <p class="sr" role="status" aria-live="polite">
        {announcement.value}
      </p>
      <Help />
    </div>
  );
}

/** In a frame of another page: the stage, the text and the transport. */
function Embedded() {
  return (
    <div class="page embedded" data-tab="stage" data-moment={moment.value} data-written={written.value} data-panel={false}>
      <Stage />
      <Text />
      <Transport />
      <p class="sr" role="status" aria-live="polite">
        {announcement.value}
      </p>
      <Help />
    </div>
  );
}
