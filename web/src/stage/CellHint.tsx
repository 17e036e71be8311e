// Beside the pointer, what the cell under it is. A click goes into it.

import { hoveredCell } from "./cell-pointer";
import { stop } from "./flight/flight";
import { run } from "../visit/store";
import { quoted } from "../ui/text";
import { cellWords } from "./flight/Flight";

const WIDE = 330; // CSS pixels, at most

export function CellHint() {
  const cell = hoveredCell.value;
  if (cell === null || stop.value !== null || run.value === null) return null;
  const word = quoted(run.value.tokens[cell.position]?.text ?? "");
  const left = Math.min(cell.x + 14, Math.max(0, innerWidth - WIDE));
  return (
    <p class="cell-hint" style={{ left: `${left}px`, top: `${cell.y + 16}px` }}>
      <b>
        {word}, layer {cell.layer}
      </b>
      : {cellWords(cell.position, cell.layer)}. Click to go in.
    </p>
  );
}
