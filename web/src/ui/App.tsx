// The page: one grid of named places. The order in the document is that of use: the stage with its switch comes first, and
// a link before it leads to the button that plays.

import { moment, written } from "../visit/clock";
import { lanes } from "../stage/lanes";
import { badges, embedded, panel } from "../visit/store";
import { announcement } from "../visit/messages";
import { Drawer } from "./Drawer";
import { Help } from "./Help";
import { Prompt } from "./Prompt";
import { Stage } from "../stage/Stage";
import { Text } from "../run/text/Text";
import { Top } from "./Top";
import { Transport } from "../run/play/Transport";

export function App() {
  const whole = !embedded.value; // in a frame of another page: the stage, the text and the transport
  return (
    <div
      class={whole ? "page" : "page embedded"}
      data-moment={moment.value}
      data-written={written.value}
      data-panel={whole && panel.value !== null}
      data-learning={whole && ["learn", "code"].includes(panel.value ?? "")}
      data-guide={whole && panel.value === "guide"}
      data-racing={whole && lanes.value !== null}
      data-badges={badges.value}
    >
      {whole && <Skip />}
      <Stage />
      <Transport />
      <Text />
      {whole && (
        <>
          <Top />
          <Prompt />
          <Drawer />
        </>
      )}
      <p class="sr" role="status" aria-live="polite">
        {announcement.value}
      </p>
      <Help />
    </div>
  );
}

/** For the keyboard: past the stage. It is seen while it has the focus. */
function Skip() {
  const go = (event: Event) => {
    event.preventDefault(); // the address has a run in it
    document.querySelector<HTMLElement>(".play")?.focus();
  };
  return (
    <a class="skip" href="#play" onClick={go}>
      Skip to play
    </a>
  );
}
