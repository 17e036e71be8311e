// The help sheet: what the page shows in a few sentences, and every key.

import { useEffect, useRef } from "preact/hooks";
import { keys as usable } from "../visit/keys";
import { card, helpOpen, renderer } from "../visit/store";
import { Icon } from "./icons";

export function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  const open = helpOpen.value;
  useEffect(() => {
    if (open) dialog.current?.showModal();
    else dialog.current?.close();
  }, [open]);
  const close = () => (helpOpen.value = false);
  return (
    <dialog
      ref={dialog}
      class="help"
      aria-labelledby="help-title"
      onClose={close}
      onClick={(event) => event.target === dialog.current && close()}
      onKeyDown={(event) => event.key === "?" && close()}
    >
      <div class="help-sheet">
        <header>
          <h2 id="help-title">What you see</h2>
          <button type="button" class="tool square" onClick={close} aria-label="Close">
            <Icon name="close" />
          </button>
        </header>
        <p>
          A model writes one token at a time. Each token is a tile. Under it is its column of the wall, with one cell
          for each layer{card.value ? ` (${card.value.layers} here)` : ""}: the key K, by which later tokens find it,
          and the value V, which they take from it. The write head stands at the newest token, whose column the next
          step fills. The arcs show how much one head of one layer read of each earlier token.
        </p>
        <p>
          With the <b>KV cache</b> a step sends one token through the layers and reads the others. <b>No cache</b> sends
          all of them, every time, and gets the same text. Switch between them while it runs, and watch how many cells a
          step computes.
        </p>
        <p>
          No number is simulated. In <b>Numbers</b> each has a badge: <span class="badge measured">M</span> measured by
          the engine’s clock, <span class="badge counted">C</span> counted where the work is done,{" "}
          <span class="badge derived">D</span> derived by a formula, which the tooltip names,{" "}
          <span class="badge read">R</span> read out of the model.
        </p>
        <h3>Keys</h3>
        <dl class="keys">
          {usable().map(({ keys, does }) => (
            <div key={keys}>
              <dt>
                <kbd>{keys}</kbd>
              </dt>
              <dd>{typeof does === "string" ? does : does()}</dd>
            </div>
          ))}
        </dl>
        <p class="under">
          {renderer.value === "2d"
            ? "On the stage: drag moves, the wheel zooms, a click goes into a cell. With the stage focused by Tab, arrow keys move it."
            : "On the stage: drag turns, Shift and drag moves, the wheel zooms, a click goes into a cell. With the stage focused by Tab, arrow keys turn it."}
          {card.value ? ` Tokenwright ${card.value.version}.` : ""}
        </p>
      </div>
    </dialog>
  );
}
